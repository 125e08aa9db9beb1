"""`ecoserve plan`: the size of a cluster, by simulation."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from ecoserve.sim import limits
from ecoserve.sim.console import err, out, show, told
from ecoserve.sim.options import (
    JsonFile,
    Percentile,
    Price,
    Requests,
    Scenario,
    Seeds,
    Systems,
    Warmup,
    with_scenario,
)

if TYPE_CHECKING:
    from ecoserve.sim.experiment import Cell
    from ecoserve.sim.plan import Plan

# Disaggregation is pointed to when its bound is so much above.
_APART = 1.1


@with_scenario
def plan(
    scenario: Scenario,
    rate: Annotated[
        float | None,
        typer.Option(
            "--rate",
            "-r",
            help="Requests a second to serve; finds the GPUs.",
            callback=limits.RATE.option,
        ),
    ] = None,
    gpus: Annotated[
        int | None,
        typer.Option(
            "--gpus",
            help="GPUs to use; finds the rate. With --rate, the most.",
            callback=limits.GPUS.option,
        ),
    ] = None,
    tp: Annotated[
        int | None,
        typer.Option(
            "--tp",
            help="Tensor parallelism; else searched.",
            callback=limits.PARALLEL.option,
        ),
    ] = None,
    system: Systems = ["default"],  # noqa: B006
    percentile: Percentile = 90,
    requests: Requests = 2000,
    warmup: Warmup = 100.0,
    seeds: Seeds = 1,
    price: Price = None,
    json_file: JsonFile = None,
) -> None:
    """Size a cluster by simulation: instances, TP and PP, macro instances, goodput and cost.

    With several systems the best of all: "-s default -s distserve-best" also looks at prefill and
    decode on instances of their own, which EcoServe does not run.
    """
    with told():
        from ecoserve.sim.plan import best as best_plans
        from ecoserve.sim.report import plans_table

        if rate is None and gpus is None:
            raise ValueError("either --rate or --gpus must be given")
        scenario = dataclasses.replace(scenario, gpus=gpus or 128, tp=tp)
        experiment = scenario.experiment(
            systems=system,
            layout=None if tp is not None else "best",
            percentile=percentile,
            requests=requests,
            warmup=warmup,
            resolution=0.02,
            seeds=list(range(11, 11 + seeds)),
            price=price,
        )
        cells = list(experiment.cells())
        cell = cells[0]
        with err.status("planning") as status:
            plans = best_plans(cells, rate, status.update)
        asked = f"{rate:g} requests/s" if rate is not None else f"{gpus} GPUs"
        title = f"{cell.model} on {cell.gpu}, {cell.data}, P{percentile:g}, for {asked}"
        show(plans_table(plans, title))
        for line in advice(cell, plans):
            out.print(line, markup=False, soft_wrap=True)
        if json_file is not None:
            lines = [
                {
                    **dataclasses.asdict(p),
                    "layout": p.layout.model_dump(),
                    "cost": p.cost,
                    "capacity": p.capacity,
                }
                for p in plans
            ]
            settings = cell.model_dump(
                mode="json", exclude={"chunks", "routings", "gpus", "layout", "system"}
            )
            answer = {"asked": {"rate": rate, "gpus": gpus}, "settings": settings, "plans": lines}
            json_file.write_text(json.dumps(answer, indent=1) + "\n", encoding="utf-8")


def advice(cell: Cell, plans: Sequence[Plan]) -> Iterator[str]:
    """What to take: the best plan that EcoServe runs, and what it is behind."""
    best = plans[0]
    ours = next((one for one in plans if one.ours), None)
    if ours is not None:
        yield (
            f"Take {_several(ours.instances, 'instance')} of {ours.layout} on {ours.gpus} "
            f"{cell.gpu}, macro instances of {ours.lower} to {ours.upper}: "
            f"{ours.goodput:.3g} requests/s, ${ours.hourly:.2f} an hour "
            f"(spec.autoscaling.capacity: {ours.capacity:.3g} requests/s an instance)."
        )
    if not best.ours:
        yield (
            f"{best.system} does better, which EcoServe does not run: {best.instances} x "
            f"{best.layout} on {best.gpus} {cell.gpu}, {best.goodput:.3g} requests/s."
        )
    elif best.apart > _APART * best.bound and len({one.system for one in plans}) == 1:
        yield (
            "Prefill and decode on instances of their own have a bound "
            f"{best.apart / best.bound - 1:.0%} above this layout's; compare them with "
            "-s default -s distserve-best."
        )


def _several(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"
