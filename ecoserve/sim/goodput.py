"""The highest rate at which a system keeps its promises, by bisection."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import mean, stdev

from ecoserve.policy.state import SLO
from ecoserve.sim.engine import simulate
from ecoserve.sim.measure import stable
from ecoserve.sim.records import DEFAULTS, Arrival, Cluster, Options, Outcome
from ecoserve.sim.systems import System

Workload = Callable[[int, int], Sequence[Arrival]]
"""(seed, count) -> that many arrivals in order of time, one a second on average. A longer list
begins with the shorter ones of its seed."""

# Student's t for 95 %, two-sided, by degrees of freedom.
_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
# Below this part of the guess a system counts as unable to keep its promises at any rate.
_LEAST = 1 / 256


@dataclass(frozen=True, slots=True)
class Goodput:
    """Requests a second; the mean over seeds with its 95 % confidence interval (Student's t; of no
    width for one seed)."""

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

    Searches around ``guess`` (the fluid bound is a good one) to a relative ``resolution``; 0 where
    not even a hundredth of it is kept. Each run's arrivals span ``warmup`` + ``seconds`` and those
    of the warm-up do not count. Every rate of a seed plays the same requests closer together or
    further apart (common random numbers), so systems are compared on the same requests.
    ``published``: attainment by the paper's definitions. ``progress`` is told of each run: seed,
    rate, passed.
    """
    if not 0 < target <= 1:
        raise ValueError(f"target must be above 0 and at most 1, not {target}")
    if not 0 < resolution < 1:
        raise ValueError(f"resolution must be between 0 and 1, not {resolution}")
    if not 0 < guess < math.inf:
        raise ValueError(f"guess must be a positive rate, not {guess}")
    if not seeds:
        raise ValueError("seeds must not be empty")
    rates: list[float] = []
    for seed in seeds:

        def passes(rate: float, seed: int = seed) -> bool:
            kept = _keeps(
                system,
                cluster,
                _at_rate(workload, seed, rate, warmup + seconds),
                slo,
                target,
                warmup,
                published,
                replace(options, seed=seed),
            )
            if progress is not None:
                progress(seed, rate, kept)
            return kept

        known = [rate for rate in rates if rate > 0]
        start, stride = (mean(known), 1 + 2 * resolution) if known else (guess, 1.15)
        rates.append(_highest(passes, start, stride, resolution, _LEAST * guess))
    middle = mean(rates)
    spread = 0.0
    if len(rates) > 1:
        t = _T[len(rates) - 2] if len(rates) - 2 < len(_T) else 1.96
        spread = t * stdev(rates) / math.sqrt(len(rates))
    return Goodput(middle, max(middle - spread, 0.0), middle + spread, tuple(rates))


def _highest(
    passes: Callable[[float], bool], start: float, stride: float, resolution: float, least: float
) -> float:
    """Brackets from ``start`` in growing strides, then bisects; the highest rate seen to pass."""
    good, bad = 0.0, math.inf
    rate = start
    while not good or bad == math.inf:
        if passes(rate):
            good = rate
            rate *= stride
        else:
            bad = rate
            rate /= stride
            if rate < least:
                return 0.0
        if good and bad < math.inf:
            break
        stride = min(stride**1.5, 4.0)
    while bad - good > resolution * good:
        rate = (good + bad) / 2
        if passes(rate):
            good = rate
        else:
            bad = rate
    return good


def _at_rate(workload: Workload, seed: int, rate: float, seconds: float) -> list[Arrival]:
    arrivals = workload(seed, math.ceil(rate * seconds))
    return [replace(arrival, at=arrival.at / rate) for arrival in arrivals]


def _keeps(
    system: System,
    cluster: Cluster,
    arrivals: list[Arrival],
    slo: SLO,
    target: float,
    warmup: float,
    published: bool,
    options: Options,
) -> bool:
    """Whether the system keeps its promises; the run ends as soon as it cannot any more."""
    counted = sum(arrival.at >= warmup for arrival in arrivals)
    if not counted:
        raise ValueError("seconds: no request arrives after the warm-up")
    allowed = math.floor((1 - target) * counted + 1e-9)
    missed = 0

    def stop(outcome: Outcome) -> bool:
        nonlocal missed
        kept = outcome.met_as_published if published else outcome.met
        missed += outcome.arrival.at >= warmup and not kept
        return missed > allowed

    result = simulate(system, cluster, arrivals, slo, options, stop)
    return missed <= allowed and stable(result.outcomes, warmup)
