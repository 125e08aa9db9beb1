"""How many instances of what layout serve a workload within its SLOs, by simulation."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ecoserve.policy.mitosis import default_sizes
from ecoserve.sim.evaluate import evaluate, holds, prepare
from ecoserve.sim.experiment import Cell, Layout, fitting
from ecoserve.sim.systems import DistServe, EcoServe, MoonCake

Progress = Callable[[str], None]

# Layouts that the fluid bound ranks below these are not simulated.
_SIMULATED = 3


@dataclass(frozen=True, slots=True)
class Plan:
    """A layout that was simulated. Rates in requests/s, ``hourly`` in dollars for all its GPUs.

    ``lower`` and ``upper`` are N_l and N_u, the sizes of a macro instance. ``bound`` is the fluid
    bound of the system's kind, ``apart`` that of prefill and decode on instances of their own.
    ``share`` is goodput over the bound; ``cost`` dollars for a request at goodput. ``ours`` says
    whether EcoServe runs it.
    """

    system: str
    layout: Layout
    instances: int
    gpus: int
    lower: int
    upper: int
    goodput: float
    bound: float
    apart: float
    ours: bool
    hourly: float
    ttft_p50: float
    ttft_p90: float
    tpot_p50: float
    tpot_p90: float

    @property
    def share(self) -> float:
        return self.goodput / self.bound

    @property
    def cost(self) -> float:
        return self.hourly / 3600 / self.goodput

    @property
    def capacity(self) -> float:
        """Requests a second that one instance serves: ``spec.autoscaling.capacity``."""
        return self.goodput / self.instances


def best(
    cells: Sequence[Cell], rate: float | None = None, progress: Progress = lambda _: None
) -> list[Plan]:
    """The plans of all the cells, which differ in the system: for their GPUs those that serve most
    first, for a ``rate`` the cheapest.

    Raises ``ValueError`` if there is none for any of them.
    """
    plans: list[Plan] = []
    problems: list[ValueError] = []
    for cell in cells:
        try:
            found = for_gpus(cell, progress) if rate is None else for_rate(cell, rate, progress)
        except ValueError as error:
            problems.append(error)
        else:
            plans += found
    if not plans:
        raise problems[0]
    if rate is None:
        return sorted(plans, key=lambda plan: -plan.goodput)
    return sorted(plans, key=lambda plan: (plan.gpus, -plan.goodput))


def for_gpus(cell: Cell, progress: Progress = lambda _: None) -> list[Plan]:
    """What ``cell.gpus`` GPUs serve in the most promising layouts, the best first.

    Raises ``ValueError`` if the model fits in no layout or no layout keeps the SLOs.
    """
    layouts = [cell.layout] if cell.layout else fitting(cell.model, cell.gpu, cell.gpus)
    bounds: dict[Layout, float] = {}
    for layout in layouts:
        try:
            bounds[layout] = _bound(_in(cell, layout))
        except ValueError:  # too few instances of it for the system
            if len(layouts) == 1:
                raise
    ranked = sorted(bounds, key=bounds.__getitem__, reverse=True)
    plans: list[Plan] = []
    for layout in ranked[:_SIMULATED]:
        tried = _in(cell, layout)
        if any(plan.goodput >= bounds[layout] for plan in plans):
            break  # it cannot do better, nor can those after it
        progress(f"{layout}: goodput of {cell.gpus} {cell.gpu}")
        plans += _plan(tried)
    return _kept(sorted(plans, key=lambda plan: plan.goodput, reverse=True), cell)


def for_rate(cell: Cell, rate: float, progress: Progress = lambda _: None) -> list[Plan]:
    """The fewest GPUs that serve ``rate`` in the most promising layouts, the cheapest first.

    ``cell.gpus`` is the most that may be used. Raises ``ValueError`` if that is not enough.
    """
    if not 0 < rate < math.inf:
        raise ValueError(f"rate must be a positive number of requests a second, not {rate!r}")
    ranked: list[tuple[int, float, Layout]] = []
    for layout in _any_layouts(cell):
        # Two instances, as some systems need no fewer.
        each = _bound(_in(cell, layout, 2 * layout.gpus)) / 2
        if each <= 0:
            continue
        ranked.append((math.ceil(rate / each) * layout.gpus, -each, layout))
    ranked.sort(key=lambda entry: entry[:2])
    plans: list[Plan] = []
    for least, _, layout in ranked[:_SIMULATED]:
        for gpus in range(least, cell.gpus + 1, layout.gpus):
            # More than what another layout does with is of no use.
            if plans and gpus > min(plan.gpus for plan in plans):
                break
            progress(f"{layout}: {rate:g} requests/s on {gpus} {cell.gpu}")
            tried = _in(cell, layout, gpus)
            try:
                enough = holds(tried, rate)
            except ValueError:  # too few instances for the system
                continue
            if enough:
                plans += _plan(tried)
                break
    if not ranked:
        return _kept([], cell)
    if not plans:
        raise ValueError(
            f"{rate:g} requests/s of {cell.data} need more than {cell.gpus} {cell.gpu}; "
            "allow more GPUs or looser SLOs"
        )
    return _kept(sorted(plans, key=lambda plan: (plan.gpus, -plan.goodput)), cell)


def _any_layouts(cell: Cell) -> list[Layout]:
    if cell.layout:
        return [cell.layout]
    # Whole nodes hold every layout.
    return fitting(cell.model, cell.gpu, 64)


def _in(cell: Cell, layout: Layout, gpus: int | None = None) -> Cell:
    return cell.model_copy(update={"layout": layout, "gpus": gpus or cell.gpus})


def _bound(cell: Cell) -> float:
    return max(one.guess for one in prepare(cell))


def _plan(cell: Cell) -> Iterator[Plan]:
    """The cell's plan; nothing if no rate is within the SLOs."""
    figures = evaluate(cell)
    if not figures["goodput"]:
        return
    assert cell.layout is not None
    lower, upper = default_sizes(cell.gpus)
    ours = figures["chosen"]["system"]["kind"] == EcoServe.__name__
    split = figures["chosen"]["system"]["kind"] in (DistServe.__name__, MoonCake.__name__)
    yield Plan(
        system=figures["chosen"]["name"],
        layout=cell.layout,
        instances=figures["instances"],
        gpus=cell.gpus,
        lower=lower,
        upper=upper,
        goodput=figures["goodput"],
        bound=figures["bound_any"] if split else figures["bound"],
        apart=figures["bound_any"],
        ours=ours,
        hourly=cell.gpus * cell.hourly,
        ttft_p50=figures["ttft"]["p50"],
        ttft_p90=figures["ttft"]["p90"],
        tpot_p50=figures["tpot"]["p50"],
        tpot_p90=figures["tpot"]["p90"],
    )


def _kept(plans: list[Plan], cell: Cell) -> list[Plan]:
    if not plans:
        raise ValueError(
            f"no layout of {cell.model} on {cell.gpu} keeps these SLOs for {cell.percentile:g} % "
            f"of {cell.data} at any rate; loosen them or take a faster GPU"
        )
    return plans
