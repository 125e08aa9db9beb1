"""A cell's figures: settings searched on tuning seeds, goodput and latencies found on others."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ecoserve.sim import variants
from ecoserve.sim.bound import Bound, fluid_bound
from ecoserve.sim.engine import simulate
from ecoserve.sim.experiment import Cell, Layout
from ecoserve.sim.goodput import Goodput, goodput
from ecoserve.sim.measure import Summary, cost_per_request, summarise
from ecoserve.sim.records import Arrival, Cluster, Result
from ecoserve.sim.systems import DistServe, MoonCake, System
from ecoserve.sim.workload import Workload

Progress = Callable[[str], None]

# A search gives up what reaches less than this part of the best so far,
_GIVEN_UP = 0.8
# without a run where even this multiple of its fluid bound is less.
_PASSED = 1.25


@dataclass(frozen=True, slots=True)
class Candidate:
    """A system in a layout."""

    layout: Layout
    cluster: Cluster
    bound: Bound
    system: System

    @property
    def guess(self) -> float:
        """Where the search for goodput begins: the fluid bound."""
        if not isinstance(self.system, DistServe | MoonCake):
            return self.bound.alike
        prefills = self.system.prefills(self.cluster)
        return min(self.bound.any, self.bound.split(prefills, self.cluster.instances - prefills))

    def seconds(self, cell: Cell) -> float:
        """How long its runs measure: the same for every system, as shorter runs flatter, and
        whatever mixed steps cost."""
        return seconds(cell, self.bound.separate)


def evaluate(cell: Cell, progress: Progress = lambda _: None) -> dict[str, Any]:
    """The cell's figures as JSON holds them: rates in requests/s, times in seconds.

    ``goodput`` with the confidence interval ``low`` to ``high`` and one rate a seed; ``bound``, the
    fluid bound for instances alike, and ``share`` of it; at the goodput's rate percentiles of TTFT
    (``ttft_with_switch_wait``: as published) and TPOT, and ``cost``, dollars a request. ``chosen``
    is the setting; if it was searched, ``tried`` says what reached what on the tuning seeds.

    Raises ``ValueError`` for a cell that cannot be simulated.
    """
    figures = measured(cell, progress)
    return figures | limits(cell, figures)


def limits(cell: Cell, figures: Mapping[str, Any]) -> dict[str, float]:
    """The fluid bound of what was chosen for the cell, and the goodput as a share of it."""
    layout = _layout(cell, figures)
    bound = fluid_bound(cell.cluster(layout), _sample(cell), cell.workload().slo, cell.options())
    share = figures["goodput"] / bound.alike if bound.alike > 0 else 0.0
    return {"bound": bound.alike, "bound_any": bound.any, "share": share}


def measured(cell: Cell, progress: Progress = lambda _: None) -> dict[str, Any]:
    """What ``evaluate`` says, but for the ``limits``; the same for all that are ``Cell.played``
    alike."""
    cell = cell.played
    work = cell.workload()
    candidates = prepare(cell)
    tried: list[dict[str, Any]] = []
    best, near = candidates[0], None
    if len(candidates) > 1:
        best, near = _search(cell, work, candidates, tried, progress)
    progress(f"{cell.system.name}: measuring {best.system.name} {best.layout}")
    found = _goodput(cell, work, best, cell.seeds, cell.resolution, 1.0, near)
    figures: dict[str, Any] = {
        "goodput": found.rate,
        "low": found.low,
        "high": found.high,
        "rates": list(found.rates),
        "instances": best.cluster.instances,
        "chosen": _chosen(best),
    }
    if tried:
        figures["tried"] = tried
    if found.rate > 0:
        figures |= _latencies(cell, best, found.rate)
        figures["cost"] = cost_per_request(found.rate, cell.gpus, cell.hourly)
    return figures


def seconds(cell: Cell, rate: float) -> float:
    """How long a run measures at about ``rate``."""
    return max(cell.min_seconds, cell.requests / rate)


def play(cell: Cell, rate: float, seed: int, *, keep_steps: bool = False) -> tuple[Result, Summary]:
    """One run of the cell at ``rate``: its result and summary.

    ``requests`` are measured, after those of the warm-up. Raises ``ValueError`` for a cell that
    has something to search.
    """
    candidates = prepare(cell)
    if len(candidates) > 1:
        raise ValueError(f"system {cell.system.name}: a single run needs one setting, not a search")
    one = candidates[0]
    return _play(cell, one.cluster, one.system, rate, seed, cell.requests, keep_steps)


def attainment(cell: Cell, rate: float, figures: Mapping[str, Any]) -> float:
    """Share of requests within both SLOs at ``rate``, the mean over the seeds, for what
    ``evaluate`` chose."""
    system = variants.load(figures["chosen"]["system"])
    return _attainment(cell, cell.cluster(_layout(cell, figures)), system, rate)[0]


def _layout(cell: Cell, figures: Mapping[str, Any]) -> Layout:
    """The layout that was chosen."""
    return next(one for one in cell.layouts() if str(one) == figures["chosen"]["layout"])


def holds(cell: Cell, rate: float) -> bool:
    """Whether any of the cell's settings keeps the SLOs at ``rate`` with a queue that is stable."""
    for one in prepare(cell):
        share, stable = _attainment(cell, one.cluster, one.system, rate)
        if stable and share >= cell.target:
            return True
    return False


def _attainment(cell: Cell, cluster: Cluster, system: System, rate: float) -> tuple[float, bool]:
    count = math.ceil(rate * seconds(cell, rate))
    summaries = [_play(cell, cluster, system, rate, seed, count)[1] for seed in cell.seeds]
    shares = [s.attainment_as_published if cell.published else s.attainment for s in summaries]
    return sum(shares) / len(shares), all(s.stable for s in summaries)


def _play(
    cell: Cell,
    cluster: Cluster,
    system: System,
    rate: float,
    seed: int,
    count: int,
    keep_steps: bool = False,
) -> tuple[Result, Summary]:
    work = cell.workload()
    arrivals = work.arrivals(rate, math.ceil(cell.warmup * rate) + count, seed)
    options = cell.options(seed=seed, keep_steps=keep_steps)
    result = simulate(system, cluster, arrivals, work.slo, options)
    return result, summarise(result.outcomes, cell.warmup)


def prepare(cell: Cell) -> list[Candidate]:
    """All that the cell has to choose from: one if nothing is to be searched.

    Raises ``ValueError`` if nothing of it can be built.
    """
    work = cell.workload()
    sample = _sample(cell)
    found: list[Candidate] = []
    problems = []
    for layout in cell.layouts():
        try:
            cluster = cell.cluster(layout)
            systems = cell.systems(cluster)
        except ValueError as error:
            problems.append(error)
            continue
        bound = fluid_bound(cluster, sample, work.slo, cell.options())
        found += [Candidate(layout, cluster, bound, system) for system in systems]
    if not found:
        raise problems[0]
    return found


def _sample(cell: Cell) -> list[Arrival]:
    """The requests whose lengths the fluid bound is of."""
    work = cell.workload()
    return [a for seed in cell.seeds for a in work.arrivals(1.0, cell.requests, seed)]


def _search(
    cell: Cell,
    work: Workload,
    candidates: Sequence[Candidate],
    tried: list[dict[str, Any]],
    progress: Progress,
) -> tuple[Candidate, float]:
    """Successive halving: short runs weed out, the last three meet in whole ones. The best, and
    what it reached. What is clearly below the best is given up: its rate counts as 0."""
    seeds = cell.tune_seeds
    near: float | None = None  # of the best so far

    def rank(field: Sequence[Candidate], part: float, resolution: float) -> list[Candidate]:
        nonlocal near
        scored: list[tuple[float, Candidate]] = []
        for number, one in enumerate(field, 1):
            progress(f"{cell.system.name}: trying {one.system.name} {number}/{len(field)}")
            used = seeds if part == 1 else seeds[:1]
            fine = max(resolution, cell.resolution)
            least = _GIVEN_UP * max((rate for rate, _ in scored), default=0.0)
            rate = _goodput(cell, work, one, used, fine, part, near, least).rate
            scored.append((rate, one))
            near = max(rate for rate, _ in scored)
            tried.append({**_chosen(one), "part": part, "rate": rate})
        scored.sort(key=lambda pair: pair[0], reverse=True)
        return [one for _, one in scored]

    field = sorted(candidates, key=lambda one: one.guess, reverse=True)
    for part, resolution in ((0.25, 0.05), (0.5, 0.02)):
        if len(field) > 3:
            field = rank(field, part, resolution)[: max(3, math.ceil(len(field) / 4))]
    field = field[:3]
    finer = variants.between(field[0].system, cell.chunks)
    field += [dataclasses.replace(field[0], system=system) for system in finer]
    best = rank(field, 1.0, cell.resolution)[0]
    assert near is not None
    return best, near


def _goodput(
    cell: Cell,
    work: Workload,
    one: Candidate,
    seeds: Sequence[int],
    resolution: float,
    part: float,
    near: float | None,
    least: float = 0.0,
) -> Goodput:
    # Not even alone does a request keep the SLOs; or the bound, which short runs may pass, says it.
    if one.guess <= 0 or _PASSED * one.guess < least:
        return Goodput(0.0, 0.0, 0.0, (0.0,) * len(seeds))

    def unit(seed: int, count: int) -> Sequence[Arrival]:
        return work.arrivals(1.0, count, seed)

    return goodput(
        one.system,
        one.cluster,
        unit,
        work.slo,
        target=cell.target,
        guess=one.guess,
        near=near,
        least=least,
        seeds=seeds,
        seconds=part * one.seconds(cell),
        warmup=cell.warmup,
        resolution=resolution,
        published=cell.published,
        options=cell.options(),
    )


def _latencies(cell: Cell, one: Candidate, rate: float) -> dict[str, Any]:
    count = math.ceil(rate * one.seconds(cell))
    _, summary = _play(cell, one.cluster, one.system, rate, cell.seeds[0], count)
    return {
        "attainment": summary.attainment,
        "attainment_as_published": summary.attainment_as_published,
        "ttft": _named(summary.ttft),
        "ttft_with_switch_wait": _named(summary.ttft_with_switch_wait),
        "tpot": _named(summary.tpot),
        "tpot_as_published": _named(summary.tpot_as_published),
        "late": summary.late,
        "shed": summary.shed,
        "preemptions": summary.preemptions,
        "stable": summary.stable,
        "requests": summary.requests,
    }


def _named(percentiles: dict[int, float]) -> dict[str, float]:
    return {f"p{percent}": value for percent, value in percentiles.items()}


def _chosen(one: Candidate) -> dict[str, Any]:
    system = variants.dump(one.system)
    return {"layout": str(one.layout), "name": one.system.name, "system": system}
