"""The highest rate at which a system keeps its promises, by bisection."""

from __future__ import annotations

import math
from collections import deque
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

_Unit = Callable[[int], Sequence[Arrival]]

# Student's t for 95 %, two-sided, by degrees of freedom; the last stands for all above, for which
# it is too wide rather than too narrow.
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
    near: float | None = None,
    least: float = 0.0,
    seeds: Sequence[int] = (1, 2, 3),
    seconds: float = 600.0,
    warmup: float = 150.0,
    resolution: float = 0.01,
    published: bool = False,
    options: Options = DEFAULTS,
    progress: Callable[[int, float, bool], None] | None = None,
) -> Goodput:
    """The highest rate with attainment >= ``target`` and a stable queue.

    Searches around ``guess`` (the fluid bound is a good one), or from ``near``, a rate found for
    much the same, to a relative ``resolution``; 0 where not even ``least`` or a hundredth of the
    guess is kept, or only rates at which no request arrives in the measured time.
    Each run's arrivals span ``warmup`` + ``seconds`` and those of the warm-up do not count. Every
    rate of a seed plays the same requests closer together or further apart (common random numbers),
    so systems are compared on the same requests. ``published``: attainment by the paper's
    definitions. ``progress`` is told of each run: seed, rate, passed.
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
        unit = _unit(workload, seed)

        def passes(rate: float, seed: int = seed, unit: _Unit = unit) -> bool:
            kept = _keeps(
                system,
                cluster,
                _at_rate(unit, rate, warmup + seconds),
                slo,
                target,
                warmup,
                published,
                replace(options, seed=seed),
            )
            if progress is not None:
                progress(seed, rate, kept)
            return kept

        known = [rate for rate in rates if rate > 0] or ([near] if near else [])
        start, stride = (mean(known), 1 + 2 * resolution) if known else (guess, 1.15)
        lowest = max(least, _LEAST * guess)
        rates.append(_highest(passes, start, stride, resolution, lowest))
    middle = mean(rates)
    spread = 0.0
    if len(rates) > 1:
        t = _T[min(len(rates) - 2, len(_T) - 1)]
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
            if rate <= least:
                return 0.0
            rate = max(rate / stride, least)
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


def _unit(workload: Workload, seed: int) -> _Unit:
    """The workload's first arrivals, drawn anew only when there are to be more than before."""
    drawn: Sequence[Arrival] = ()

    def first(count: int) -> Sequence[Arrival]:
        nonlocal drawn
        if len(drawn) < count:
            drawn = workload(seed, count)
        return drawn[:count]

    return first


def _at_rate(unit: _Unit, rate: float, seconds: float) -> list[Arrival]:
    arrivals = unit(math.ceil(rate * seconds))
    return [Arrival(a.at / rate, a.prompt, a.output, a.blocks) for a in arrivals]


class _Judge:
    """Watches a run and ends it as soon as its verdict is certain, which it does not change.

    It has failed once more than ``allowed`` of the measured requests have missed. One has missed
    its TTFT when that has passed without a first token, however long the token then takes: past
    capacity the many that wait are so counted long before they are served. It has passed when all
    have come and have their first token, or were shed, and no more than are still allowed decode.
    """

    def __init__(self, arrivals: int, measured: int, allowed: int, warmup: float, published: bool):
        self.missed = 0
        self._coming = arrivals
        self._open = measured
        self._allowed = allowed
        self._warmup = warmup
        self._published = published
        self._unbegun: deque[Outcome] = deque()
        self._awaited: deque[Outcome] = deque()  # measured, within their TTFT or not looked at yet

    def __call__(self, now: float, outcome: Outcome) -> bool:
        """Whether the run may end; told when a request has come and when it is done."""
        measured = outcome.arrival.at >= self._warmup
        if outcome.shed or not math.isnan(outcome.end):
            if measured:
                self._open -= 1
                kept = outcome.met_as_published if self._published else outcome.met
                # A late first token is counted when its time is up.
                self.missed += outcome.ttft <= outcome.slo.ttft and not kept
        else:
            self._coming -= 1
            self._unbegun.append(outcome)
            if measured:
                self._awaited.append(outcome)
        self._count_late(now)
        return self.missed > self._allowed or self._certain()

    def end(self) -> None:
        """Nothing happens any more."""
        self._count_late(math.inf)

    def _count_late(self, now: float) -> None:
        awaited = self._awaited
        while awaited and now - awaited[0].arrival.at > awaited[0].slo.ttft:
            one = awaited.popleft()
            self.missed += not one.ttft <= one.slo.ttft

    def _certain(self) -> bool:
        if self._coming or self._awaited or self.missed + self._open > self._allowed:
            return False
        unbegun = self._unbegun
        while unbegun and (unbegun[0].shed or not math.isnan(unbegun[0].first)):
            unbegun.popleft()
        return not unbegun


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
    """Whether the system keeps its promises; the run ends as soon as that is certain."""
    counted = sum(arrival.at >= warmup for arrival in arrivals)
    if not counted:  # so low a rate that the run shows nothing
        return False
    allowed = math.floor((1 - target) * counted + 1e-9)
    judge = _Judge(len(arrivals), counted, allowed, warmup, published)
    result = simulate(system, cluster, arrivals, slo, options, judge)
    judge.end()
    return judge.missed <= allowed and stable(result.outcomes, warmup)
