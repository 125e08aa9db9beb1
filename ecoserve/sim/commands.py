"""`ecoserve sim ...`: the command line of the simulator.

Everything heavy is imported inside the commands, so that other commands start fast.
"""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ecoserve import numbers
from ecoserve.sim.console import (
    draw_bars,
    draw_curves,
    drawing,
    err,
    out,
    run_cells,
    show,
    title_of,
    told,
    write_markdown,
    write_rows,
)
from ecoserve.sim.options import (
    CsvFile,
    Fresh,
    Jobs,
    JsonFile,
    MarkdownFile,
    Minutes,
    Mixing,
    One,
    Overlap,
    Percentile,
    Plain,
    Plot,
    Price,
    Published,
    Rate,
    Requests,
    ResultsFile,
    Scenario,
    Seed,
    Seeds,
    Systems,
    Warmup,
    to_draw,
    to_write,
    with_scenario,
)

if TYPE_CHECKING:
    from ecoserve.sim.experiment import Cell

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Simulate serving on real hardware's costs: this system and those it is measured against.",
)


@app.command()
@with_scenario
def run(
    scenario: Scenario,
    rate: Rate = None,
    system: Systems = ["default"],  # noqa: B006 (typer copies it)
    requests: Requests = 5000,
    warmup: Warmup = 150.0,
    seed: Seed = 11,
    price: Price = None,
    json_file: JsonFile = None,
) -> None:
    """Play a workload at one rate and show what came of it."""
    with told():
        from ecoserve.sim.evaluate import play, prepare
        from ecoserve.sim.measure import cost_per_request
        from ecoserve.sim.report import dollars, number, summary_table

        experiment = scenario.experiment(
            systems=system, requests=requests, warmup=warmup, seeds=[seed], price=price
        )
        cells = list(experiment.cells())
        bound = max(one.bound.alike for one in prepare(cells[0]))
        used = rate if rate is not None else 0.8 * bound
        rows = []
        for cell in cells:
            with err.status(f"{cell.system.name} at {number(used)} requests/s"):
                _, summary = play(cell, used, seed)
            cost = cost_per_request(used, cell.gpus, cell.hourly)
            rows.append((cell.system.name, summary, {"$ for 1000 requests": dollars(cost)}))
        first = cells[0]
        title = (
            f"{first.model} on {first.gpus} {first.gpu} ({first.layout}), {first.data} at "
            f"{number(used)} requests/s, fluid bound {number(bound)}, seed {seed}"
        )
        show(summary_table(rows, title))
        if json_file is not None:
            from ecoserve.sim.results import row

            lines = [
                row(c, {"rate": used, "bound": bound, **dataclasses.asdict(s)}, 0.0)
                for c, (_, s, _) in zip(cells, rows, strict=True)
            ]
            json_file.write_text(json.dumps(lines, indent=1) + "\n", encoding="utf-8")


@app.command()
@with_scenario
def goodput(
    scenario: Scenario,
    system: Systems = ["default"],  # noqa: B006
    percentile: Percentile = 90,
    published: Published = False,
    requests: Requests = 5000,
    warmup: Warmup = 150.0,
    seeds: Seeds = 2,
    price: Price = None,
    jobs: Jobs = None,
    results: ResultsFile = None,
    fresh: Fresh = False,
    json_file: JsonFile = None,
    csv_file: CsvFile = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            "--plot",
            metavar="FILE",
            help="Draw attainment against rate (needs [bench]).",
            callback=to_draw,
        ),
    ] = None,
) -> None:
    """Find the highest rate at which a system keeps its SLOs."""
    with told():
        from ecoserve.sim.report import goodput_table, number, rate

        experiment = scenario.experiment(
            systems=system,
            percentile=percentile,
            published=published,
            requests=requests,
            warmup=warmup,
            seeds=list(range(11, 11 + seeds)),
            price=price,
        )
        cells = list(experiment.cells())
        pairs = run_cells(cells, results, jobs, fresh)
        first = cells[0]
        show(goodput_table(pairs, f"Goodput, requests/s: {title_of(first)}, P{percentile:g}"))
        for cell, found in pairs:
            value = rate(found)
            if found is not None and value is not None:
                figures = found["figures"]
                spread = f" ({number(figures['low'])} to {number(figures['high'])})"
                chosen = f", {figures['chosen']['name']} {figures['chosen']['layout']}"
                out.print(
                    f"{cell.system.name}: {number(value)}{spread}, {figures['share']:.0%} of the "
                    f"bound{chosen}",
                    markup=False,
                )
        write_rows(pairs, json_file, csv_file)
        if plot is not None:
            draw_curves(cells, pairs, plot, jobs)


@app.command(short_help="Run experiment files and compare the systems' goodput.")
def compare(
    files: Annotated[list[Path], typer.Argument(metavar="FILE", help="Experiments, YAML.")],
    jobs: Jobs = None,
    results: ResultsFile = None,
    fresh: Fresh = False,
    minutes: Minutes = None,
    json_file: JsonFile = None,
    csv_file: CsvFile = None,
    plot: Plot = None,
) -> None:
    """Run the experiments of YAML files and compare the systems' goodput.

    Finished cells are kept in FILE.results.jsonl where the command runs; the same command goes on.
    """
    with told():
        from ecoserve.sim.experiment import load
        from ecoserve.sim.report import goodput_table, sweeps

        experiments = [one for file in files for one in load(file)]
        kept = results or Path(f"{files[0].stem}.results.jsonl")
        cells = [cell for one in experiments for cell in one.cells()]
        pairs = run_cells(cells, kept, jobs, fresh, minutes)
        drawn = []
        start = 0
        for one in experiments:
            own = pairs[start : start + len(list(one.cells()))]
            start += len(own)
            show(goodput_table(own, f"{one.name}: goodput, requests/s"))
            drawn.append(sweeps(own, one.name))
        write_rows(pairs, json_file, csv_file)
        if plot is not None and all(drawn):
            drawing().sweeps(drawn, plot, title=title_of(cells[0]))
            out.print(f"drawn: {plot}", markup=False)
        elif plot is not None:
            draw_bars(pairs, plot, ", ".join(dict.fromkeys(one.name for one in experiments)))


@app.command(short_help="The five systems on 4 nodes x 8 L20, claimed and found.")
def table(
    searched: Annotated[
        bool, typer.Option("--searched", help="Search the four systems' settings.")
    ] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Short runs, for orientation.")] = False,
    scaling: Annotated[
        Path | None,
        typer.Option(
            "--scaling",
            metavar="FILE",
            help="Also run 16 to 128 GPUs, and draw them (needs [bench]).",
            callback=to_draw,
        ),
    ] = None,
    plain: Plain = False,
    mixing: Mixing = 0.0,
    price: Price = None,
    jobs: Jobs = None,
    results: ResultsFile = None,
    fresh: Fresh = False,
    minutes: Minutes = None,
    json_file: JsonFile = None,
    csv_file: CsvFile = None,
    markdown_file: MarkdownFile = None,
) -> None:
    """Throughput, TTFT, TPOT and cost of all five systems on 4 nodes x 8 L20, claimed and found.

    At full length it takes hours; it may be stopped and goes on from its results file.
    """
    with told():
        from ecoserve.sim import table as tables

        main, scale = tables.experiments(
            searched=searched, quick=quick, published=not plain, mixing=mixing, price=price
        )
        cells = list(main.cells())
        scaled = list(scale.cells()) if scaling is not None else []
        ordered = tables.in_order(cells + scaled)
        kept = results or Path("table-quick.results.jsonl" if quick else "table.results.jsonl")
        done = {c.key: found for c, found in run_cells(ordered, kept, jobs, fresh, minutes)}
        main_pairs, scale_pairs = ([(c, done[c.key]) for c in some] for some in (cells, scaled))
        kind = "settings searched" if searched else "usual settings"
        note = ", QUICK: short runs, one seed" if quick else ""
        what = f"4 nodes x 8 L20 (TP4), P90, mixed steps +{mixing:.0%}, {kind}{note}"
        mains = [tables.main_table(main_pairs, m, f"{m}, {what}") for m in tables.MODELS]
        for one in mains:
            show(one)
        write_markdown(mains, markdown_file)
        out.print(
            "Claimed: 12.4 / 15.7 / 18.2 / 20.1 / 36.8 requests/s, of which model is not said. "
            "TTFT and TPOT are at each system's own goodput; prices are indicative. "
            + ("" if plain else "The wait for decode counts to TTFT, not to TPOT, as published."),
            markup=False,
            soft_wrap=True,
        )
        write_rows(main_pairs + scale_pairs, json_file, csv_file)
        if scaling is not None:
            title = f"Goodput of CodeLlama-34B on L20, ShareGPT, P90{note}"
            show(tables.scaling_table(scale_pairs, title))
            curves = tables.curves(scale_pairs)
            if not curves:
                raise ValueError("nothing to draw: nothing of the scaling was run")
            drawing().scaling(curves, scaling, title=title)
            out.print(f"drawn: {scaling}", markup=False)


@app.command(short_help="All models, data sets and GPUs against all systems.")
def matrix(
    quick: Annotated[
        bool,
        typer.Option("--quick", help="Short runs and coarse searches within half an hour."),
    ] = False,
    layouts: Annotated[
        bool, typer.Option("--layouts", help="Search TP and PP for every system.")
    ] = False,
    overlap: Overlap = 0.0,
    plain: Plain = False,
    only: Annotated[
        str,
        typer.Option(
            "--only", metavar="WORDS", help="Cells that match all, such as 'L20 P99 sharegpt'."
        ),
    ] = "",
    jobs: Jobs = None,
    results: ResultsFile = None,
    fresh: Fresh = False,
    minutes: Minutes = None,
    json_file: JsonFile = None,
    csv_file: CsvFile = None,
    markdown_file: MarkdownFile = None,
) -> None:
    """All models, data sets, GPUs and percentiles against all systems; resumable.

    The full form takes many hours; it may be stopped and goes on from its results file.
    """
    with told():
        from ecoserve.sim import matrix as matrices

        experiments = matrices.experiments(
            quick=quick, layouts=layouts, overlap=overlap, published=not plain
        )
        cells = [cell for one in experiments for cell in one.cells()]
        cells = [cell for cell in cells if _matches(cell, only)]
        if not cells:
            raise ValueError(f"--only: nothing in the matrix matches {only!r}")
        name = "matrix-quick" if quick else "matrix"
        limit = minutes if minutes is not None else 28 if quick else None
        ordered = matrices.order(cells)
        kept = results or Path(f"{name}.results.jsonl")
        done = {cell.key: found for cell, found in run_cells(ordered, kept, jobs, fresh, limit)}
        pairs = [(cell, done[cell.key]) for cell in cells]
        note = (
            "  QUICK: short runs, one seed, coarse searches; for orientation only" if quick else ""
        )
        rates = matrices.rates_table(pairs, f"Goodput, requests/s{note}")
        ratios = matrices.ratios_table(pairs, f"The default policy against the others{note}")
        verdicts = list(matrices.verdicts(pairs))
        show(rates)
        show(ratios)
        for line in verdicts:
            out.print(line, markup=False)
        write_rows(pairs, json_file, csv_file)
        write_markdown([rates, ratios], markdown_file, "".join(f"- {line}\n" for line in verdicts))


@app.command()
@with_scenario
def trace(
    scenario: Scenario,
    output: Annotated[
        Path,
        typer.Option(
            "--out",
            "-o",
            metavar="FILE",
            help="Chrome trace (chrome://tracing, ui.perfetto.dev).",
            callback=to_write,
        ),
    ] = Path("trace.json"),
    phases: Annotated[
        Path | None,
        typer.Option(
            "--phases",
            metavar="FILE",
            help="Draw the instances' phases (needs [bench]).",
            callback=to_draw,
        ),
    ] = None,
    shown: Annotated[
        float,
        typer.Option(
            "--shown", help="Seconds that --phases draws.", callback=numbers.SECONDS.option
        ),
    ] = 20.0,
    rate: Rate = None,
    system: One = "default",
    requests: Requests = 500,
    warmup: Annotated[
        float,
        typer.Option(
            "--warmup", help="Seconds before the requests counted.", callback=numbers.WAIT.option
        ),
    ] = 30.0,
    seed: Seed = 11,
) -> None:
    """Record every step and request of a short run, for a trace viewer."""
    with told():
        from ecoserve.sim.evaluate import play, prepare
        from ecoserve.sim.report import number
        from ecoserve.sim.trace import write

        experiment = scenario.experiment(
            systems=[system], requests=requests, warmup=warmup, seeds=[seed]
        )
        [cell] = experiment.cells()
        used = rate if rate is not None else 0.8 * max(one.guess for one in prepare(cell))
        with err.status(f"{cell.system.name} at {number(used)} requests/s"):
            result, summary = play(cell, used, seed, keep_steps=True)
        write(result, output)
        out.print(
            f"{len(result.steps)} steps and {len(result.outcomes)} requests in {output}; "
            f"{summary.attainment:.1%} within both SLOs",
            markup=False,
        )
        if phases is not None:
            title = f"{cell.system.name}: {title_of(cell)} at {number(used)} requests/s"
            drawing().phases(result.steps, phases, title=title, start=warmup, seconds=shown)
            out.print(f"drawn: {phases}", markup=False)


def _matches(cell: Cell, words: str) -> bool:
    from ecoserve.sim.report import written

    fields = (cell.model, cell.gpu, cell.data, written(cell, "percentile"), cell.system.name)
    known = {field.lower() for field in (*fields, f"mixing={cell.mixing:g}")}
    return all(word.lower() in known for word in re.split(r"[\s,]+", words) if word)


def register(root: typer.Typer) -> None:
    """Adds the commands to the `ecoserve` command."""
    from ecoserve.sim.plan_command import plan
    from ecoserve.sim.scale_command import scale

    app.command()(scale)
    root.add_typer(app, name="sim", short_help="Simulate serving on GPUs that need not be there.")
    root.command(short_help="Size a cluster of GPUs, by simulation.")(plan)
