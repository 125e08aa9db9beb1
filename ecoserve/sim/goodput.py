"""The highest rate at which a system keeps its promises, by bisection."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ecoserve.policy.state import SLO
from ecoserve.sim.records import DEFAULTS, Arrival, Cluster, Options
from ecoserve.sim.systems import System

Workload = Callable[[int, int], Sequence[Arrival]]
"""(seed, count) -> that many arrivals in order of time, one a second on average."""


@dataclass(frozen=True, slots=True)
class Goodput:
    """Requests a second; the mean over seeds with its 95 % confidence interval."""

    rate: float
    low: float
    high: float
    rates: tuple[float, ...]


def goodput(
    system: System,
    cluster: Cluster,
    workload: Workload,
    slo: SLO,
    *,
    target: float = 0.9,
    guess: float,
    seeds: Sequence[int] = (1, 2, 3),
    seconds: float = 600.0,
    warmup: float = 150.0,
    resolution: float = 0.01,
    published: bool = False,
    options: Options = DEFAULTS,
    progress: Callable[[int, float, bool], None] | None = None,
) -> Goodput:
    """The highest rate with attainment >= ``target`` and a stable queue.

    Searches around ``guess`` (the fluid bound is a good one) to a relative ``resolution``. Each
    run's arrivals span ``warmup`` + ``seconds`` and those of the warm-up do not count. Every rate
    of a seed plays the same requests closer together or further apart (common random numbers), so
    systems are compared on the same requests. ``published``: attainment by the paper's
    definitions. ``progress`` is told of each run: seed, rate, passed.
    """
    raise NotImplementedError
