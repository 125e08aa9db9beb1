"""A load that rises in steps on a cluster that grows with it: attainment over time.

The published experiment: CodeLlama-34B TP4 on ShareGPT, 20 to 50 requests a second in steps of two
minutes, 8 to 16 instances, N_l 6, N_u 11, attainment every 30 seconds.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ecoserve.policy import mitosis
from ecoserve.policy.signals import Expand, Settings
from ecoserve.sim.dynamic import Dynamic, Moment
from ecoserve.sim.engine import simulate
from ecoserve.sim.measure import summarise
from ecoserve.sim.records import Arrival, Cluster, Options, Outcome
from ecoserve.sim.workload import Workload

WINDOW_S = 30.0

QUICK = Settings(
    Expand(violations_for=30.0, use_for=30.0, waiting_for=30.0, ttft_for=30.0, cooldown=30.0)
)
"""For a load that rises by a quarter every two minutes; the default windows are for slower ones."""


@dataclass(frozen=True, slots=True)
class Stage:
    """``rate`` requests a second for ``seconds``."""

    rate: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Run:
    """A variant played: ``moments`` in order, joint attainment (0 to 1; None of no request) of what
    arrived in each ``WINDOW_S``, at each stage, and in all; requests shed; instance-hours."""

    name: str
    moments: tuple[Moment, ...]
    attainment: tuple[float | None, ...]
    by_stage: tuple[float | None, ...]
    overall: float
    shed: int
    hours: float

    @property
    def curve(self) -> list[tuple[float, float]]:
        """Minutes in the middle of each window, and its attainment."""
        return [
            ((n + 0.5) * WINDOW_S / 60, value)
            for n, value in enumerate(self.attainment)
            if value is not None
        ]


def stages(rates: Sequence[float], seconds: float) -> list[Stage]:
    """Steps of equal length. Raises ``ValueError`` for a rate or a length that is not positive."""
    if not rates or min(rates) <= 0 or seconds <= 0:
        raise ValueError(f"rates and seconds must be positive, not {list(rates)} and {seconds}")
    return [Stage(rate, seconds) for rate in rates]


def arrivals(workload: Workload, plan: Sequence[Stage], seed: int) -> list[Arrival]:
    """The workload's requests, closer together or further apart as the stages say."""
    edges = list(itertools.accumulate((s.rate * s.seconds for s in plan), initial=0.0))
    starts = list(itertools.accumulate((s.seconds for s in plan), initial=0.0))
    count = int(edges[-1] * 1.2) + 100
    found: list[Arrival] = []
    stage = 0
    for arrival in workload.arrivals(1.0, count, seed):
        while stage < len(plan) and arrival.at >= edges[stage + 1]:
            stage += 1
        if stage == len(plan):
            break
        at = starts[stage] + (arrival.at - edges[stage]) / plan[stage].rate
        found.append(replace(arrival, at=at))
    return found


def variants(
    start: int, most: int, lower: int, upper: int, startup: float = 30.0, scaling: Settings = QUICK
) -> dict[str, Dynamic]:
    """With mitosis; the same by the arrival rate; growing as one macro instance; not growing."""
    bounds, alone = mitosis.Bounds(lower, upper), mitosis.Bounds(1, most)
    ahead = replace(scaling, strategy="predictive")
    return {
        "mitosis": Dynamic(start, bounds, scaling, startup),
        "predictive": Dynamic(start, bounds, ahead, startup),
        "one": Dynamic(start, alone, scaling, startup),
        "fixed": Dynamic(start, alone),
    }


def play(
    name: str,
    system: Dynamic,
    cluster: Cluster,
    workload: Workload,
    plan: Sequence[Stage],
    seed: int,
) -> Run:
    """Plays the load on a variant."""
    moments: list[Moment] = []
    seconds = sum(stage.seconds for stage in plan)
    result = simulate(
        replace(system, moments=moments),
        cluster,
        arrivals(workload, plan, seed),
        workload.slo,
        Options(seed=seed),
    )
    summary = summarise(result.outcomes)
    used = 0.0
    for one, following in itertools.pairwise([*moments, replace(moments[-1], at=seconds)]):
        used += one.wanted * max(min(following.at, seconds) - min(one.at, seconds), 0.0)
    return Run(
        name,
        tuple(moments),
        tuple(_by_window(result.outcomes, seconds)),
        tuple(_by_stage(result.outcomes, plan)),
        summary.attainment,
        sum(outcome.shed for outcome in result.outcomes),
        used / 3600,
    )


def _by_window(outcomes: Sequence[Outcome], seconds: float) -> list[float | None]:
    windows: Mapping[int, list[bool]] = {n: [] for n in range(int(seconds / WINDOW_S))}
    for outcome in outcomes:
        window = int(outcome.arrival.at / WINDOW_S)
        if window in windows:
            windows[window].append(outcome.met)
    return [sum(met) / len(met) if met else None for met in windows.values()]


def _by_stage(outcomes: Sequence[Outcome], plan: Sequence[Stage]) -> list[float | None]:
    begin, shares = 0.0, []
    for stage in plan:
        met = [o.met for o in outcomes if begin <= o.arrival.at < begin + stage.seconds]
        shares.append(sum(met) / len(met) if met else None)
        begin += stage.seconds
    return shares
