"""`ecoserve sim scale`: a load that rises in steps, on a cluster that grows with it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Column, Table

from ecoserve import numbers
from ecoserve.sim import limits
from ecoserve.sim.console import drawing, err, out, told
from ecoserve.sim.options import (
    Cv,
    Data,
    GpuName,
    JsonFile,
    Mixing,
    ModelName,
    Seed,
    Tpot,
    Ttft,
    promise,
    to_draw,
)

if TYPE_CHECKING:
    from ecoserve.sim.scale import Run, Stage

VARIANTS = {
    "mitosis": "grows, with mitosis",
    "predictive": "the same, predictive",
    "one": "grows, as one macro instance",
    "fixed": "no growth",
}
"""Names, with what a plot calls them."""


def scale(
    variant: Annotated[
        list[str],
        typer.Option(
            "--variant", "-v", metavar="NAME", help=f"{', '.join(VARIANTS)}; repeat; all else."
        ),
    ] = list(VARIANTS),  # noqa: B006 (typer copies it)
    rate: Annotated[
        list[float],
        typer.Option(
            "--rate",
            "-r",
            metavar="RATE",
            help="Requests a second of a step; repeat.",
            callback=limits.RATE.option,
        ),
    ] = [20, 25, 30, 35, 40, 45, 50],  # noqa: B006
    minutes: Annotated[
        float,
        typer.Option(
            "--minutes",
            help="Length of a step.",
            callback=limits.MINUTES.option,
        ),
    ] = 2.0,
    start: Annotated[
        int, typer.Option("--from", help="Instances at first.", callback=limits.INSTANCES.option)
    ] = 8,
    most: Annotated[
        int, typer.Option("--to", help="The most instances.", callback=limits.INSTANCES.option)
    ] = 16,
    lower: Annotated[
        int, typer.Option("--lower", help="N_l.", callback=limits.INSTANCES.option)
    ] = 6,
    upper: Annotated[
        int, typer.Option("--upper", help="N_u.", callback=limits.INSTANCES.option)
    ] = 11,
    startup: Annotated[
        float,
        typer.Option(
            "--startup",
            help="Seconds until an instance takes requests.",
            callback=numbers.WAIT.option,
        ),
    ] = 30.0,
    model: ModelName = "CodeLlama-34B",
    gpu: GpuName = "L20",
    tp: Annotated[
        int, typer.Option("--tp", help="Tensor parallelism.", callback=limits.PARALLEL.option)
    ] = 4,
    data: Data = "sharegpt",
    ttft_slo: Ttft = None,
    tpot_slo: Tpot = None,
    cv: Cv = None,
    mixing: Mixing = 0.0,
    seed: Seed = 11,
    json_file: JsonFile = None,
    plot: Annotated[
        Path | None,
        typer.Option("--plot", metavar="FILE", help="Draw it (needs [bench]).", callback=to_draw),
    ] = None,
) -> None:
    """Play a load that rises in steps on a cluster that grows with it.

    mitosis: macro instances are split; predictive: the same, growing by the arrival rate; one: as
    one macro instance; fixed: no growth.
    """
    with told():
        from ecoserve.sim import scale as steps
        from ecoserve.sim import workload
        from ecoserve.sim.experiment import Layout, make_cluster

        if unknown := [name for name in variant if name not in VARIANTS]:
            raise ValueError(f"--variant must be one of {', '.join(VARIANTS)}, not {unknown[0]!r}")
        if start > most:
            raise ValueError(f"--from must be at most --to {most}, not {start}")
        cluster = make_cluster(model, gpu, most * tp, Layout(tp=tp), mixing=mixing)
        work = workload.load(data, slo=promise(data, ttft_slo, tpot_slo), cv=cv)
        plan = steps.stages(rate, 60 * minutes)
        known = steps.variants(start, most, lower, upper, startup)
        runs = []
        for name in dict.fromkeys(variant):
            with err.status(f"{name}: {sum(s.seconds for s in plan) / 60:g} simulated minutes"):
                runs.append(steps.play(name, known[name], cluster, work, plan, seed))
        _show(runs, plan)
        if json_file is not None:
            given = {"model": model, "gpu": gpu, "tp": tp, "data": data, "mixing": mixing}
            given |= {"seed": seed, "startup": startup, "lower": lower, "upper": upper}
            document = {
                **given,
                "stages": [dataclasses.asdict(stage) for stage in plan],
                "window_s": steps.WINDOW_S,
                "runs": [dataclasses.asdict(run) for run in runs],
            }
            json_file.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        if plot is not None:
            title = f"{model} TP{tp} on {gpu}, {data}: {start} to {most} instances"
            draw(runs, plan, plot, title)
            out.print(f"drawn: {plot}", markup=False)


def _show(runs: Sequence[Run], plan: Sequence[Stage]) -> None:
    table = Table(Column("variant", no_wrap=True), *(f"{stage.rate:g}/s" for stage in plan), "all")
    table.add_column("hours")
    for run in runs:
        each = ["–" if value is None else f"{100 * value:.1f}" for value in run.by_stage]
        table.add_row(run.name, *each, f"{100 * run.overall:.1f}", f"{run.hours:.2f}")
    out.print("requests within both SLOs, %, by the rate at which they came; instance-hours wanted")
    out.print(table)
    for run in runs:
        for moment in run.moments:
            if moment.done:
                sizes = " + ".join(map(str, moment.sizes))
                text = f"{run.name}, {moment.at:.0f} s: {moment.done}; now {sizes}"
                out.print(text, markup=False)


def draw(runs: Sequence[Run], plan: Sequence[Stage], path: Path, title: str) -> None:
    """Attainment, and below it the instances and the load, over time."""
    drawing().over_time(
        {VARIANTS[run.name]: run.curve for run in runs},
        {VARIANTS[run.name]: [(m.at / 60, m.wanted) for m in run.moments] for run in runs},
        [(s.rate, s.seconds / 60) for s in plan],
        path,
        title=title,
    )
