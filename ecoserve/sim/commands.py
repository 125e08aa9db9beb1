"""`ecoserve sim ...`: the command line of the simulator.

Everything heavy is imported inside the commands, so that other commands start fast.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from ecoserve.sim.options import (
    Bus,
    CsvFile,
    Cv,
    Data,
    Fresh,
    GpuName,
    Gpus,
    Jobs,
    JsonFile,
    Minutes,
    Mixing,
    ModelName,
    One,
    Overlap,
    Percentile,
    Plain,
    Plot,
    Pp,
    Price,
    Published,
    Requests,
    ResultsFile,
    Seed,
    Seeds,
    Systems,
    Tp,
    Tpot,
    Ttft,
    Warmup,
)

if TYPE_CHECKING:
    from ecoserve.sim.experiment import Cell, Experiment
    from ecoserve.sim.report import Pairs
    from ecoserve.sim.results import Results, Row

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Simulate serving on real hardware's costs: this system and those it is measured against.",
)

out = Console(highlight=False, soft_wrap=False)
err = Console(stderr=True, highlight=False)


@contextlib.contextmanager
def told() -> Iterator[None]:
    """What is wrong with the input is told in a line, not as a traceback."""
    try:
        yield
    except ValueError as error:
        err.print(f"error: {error}", style="red", markup=False, soft_wrap=True)
        raise typer.Exit(1) from error
    except KeyboardInterrupt:
        err.print("stopped; what was finished is kept", markup=False)
        raise typer.Exit(130) from None


@app.command()
def run(
    rate: Annotated[
        float | None,
        typer.Option("--rate", "-r", help="Requests a second; else 0.8 of the fluid bound."),
    ] = None,
    system: Systems = ["default"],  # noqa: B006 (typer copies it)
    model: ModelName = "CodeLlama-34B",
    gpu: GpuName = "L20",
    gpus: Gpus = 32,
    tp: Tp = None,
    pp: Pp = 1,
    data: Data = "sharegpt",
    ttft_slo: Ttft = None,
    tpot_slo: Tpot = None,
    cv: Cv = None,
    mixing: Mixing = 0.0,
    overlap: Overlap = 0.0,
    bus: Bus = None,
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

        cells = list(
            described(
                locals(), systems=system, requests=requests, warmup=warmup, seeds=[seed]
            ).cells()
        )
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
def goodput(
    system: Systems = ["default"],  # noqa: B006
    model: ModelName = "CodeLlama-34B",
    gpu: GpuName = "L20",
    gpus: Gpus = 32,
    tp: Tp = None,
    pp: Pp = 1,
    data: Data = "sharegpt",
    ttft_slo: Ttft = None,
    tpot_slo: Tpot = None,
    cv: Cv = None,
    mixing: Mixing = 0.0,
    overlap: Overlap = 0.0,
    bus: Bus = None,
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
            "--plot", metavar="FILE", help="Draw attainment against rate (needs [bench])."
        ),
    ] = None,
) -> None:
    """Find the highest rate at which a system keeps its SLOs."""
    with told():
        from ecoserve.sim.report import goodput_table, number, rate

        experiment = described(
            locals(),
            systems=system,
            percentile=percentile,
            published=published,
            requests=requests,
            warmup=warmup,
            seeds=list(range(11, 11 + seeds)),
        )
        cells = list(experiment.cells())
        pairs = _run(cells, results, jobs, fresh)
        first = cells[0]
        show(goodput_table(pairs, f"Goodput, requests/s: {_title(first)}, P{percentile:g}"))
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
        _write(pairs, json_file, csv_file)
        if plot is not None:
            _curves(cells, pairs, plot, jobs)


@app.command()
def compare(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Experiments, YAML.")],
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
        pairs = _run(cells, kept, jobs, fresh, minutes)
        drawn = []
        start = 0
        for one in experiments:
            own = pairs[start : start + len(list(one.cells()))]
            start += len(own)
            show(goodput_table(own, f"{one.name}: goodput, requests/s"))
            drawn.append(sweeps(own, one.name))
        _write(pairs, json_file, csv_file)
        if plot is not None and all(drawn):
            _plots().sweeps(drawn, plot, title=_title(cells[0]))
            out.print(f"drawn: {plot}", markup=False)
        elif plot is not None:
            _bars(pairs, plot, ", ".join(dict.fromkeys(one.name for one in experiments)))


@app.command()
def table(
    searched: Annotated[
        bool, typer.Option("--searched", help="Search the four systems' settings.")
    ] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Short runs, for orientation.")] = False,
    scaling: Annotated[
        Path | None,
        typer.Option("--scaling", metavar="FILE", help="Also run 16 to 128 GPUs, and draw them."),
    ] = None,
    plain: Plain = False,
    mixing: Mixing = 0.0,
    price: Price = None,
    jobs: Jobs = None,
    results: ResultsFile = None,
    fresh: Fresh = False,
    json_file: JsonFile = None,
    csv_file: CsvFile = None,
) -> None:
    """Throughput, TTFT, TPOT and cost of all five systems on 4 nodes x 8 L20, claimed and found."""
    with told():
        from ecoserve.sim import table as tables

        main, scale = tables.experiments(
            searched=searched, quick=quick, published=not plain, mixing=mixing, price=price
        )
        cells = list(main.cells())
        scaled = list(scale.cells()) if scaling is not None else []
        pairs = _run(cells + scaled, results, jobs, fresh)
        main_pairs, scale_pairs = pairs[: len(cells)], pairs[len(cells) :]
        kind = "settings searched" if searched else "usual settings"
        note = ", QUICK: short runs, one seed" if quick else ""
        for model in tables.MODELS:
            title = (
                f"{model}, ShareGPT, 4 nodes x 8 L20 (TP4), P90, mixed steps +{mixing:.0%}, "
                f"{kind}{note}"
            )
            show(tables.main_table(main_pairs, model, title))
        out.print(
            "Claimed: 12.4 / 15.7 / 18.2 / 20.1 / 36.8 requests/s, of which model is not said. "
            "TTFT and TPOT are at each system's own goodput; prices are indicative. "
            + ("" if plain else "The wait for decode counts to TTFT, not to TPOT, as published."),
            markup=False,
            soft_wrap=True,
        )
        _write(pairs, json_file, csv_file)
        if scaling is not None:
            title = f"Goodput of CodeLlama-34B on L20, ShareGPT, P90{note}"
            show(tables.scaling_table(scale_pairs, title))
            _plots().scaling(tables.curves(scale_pairs), scaling, title=title)
            out.print(f"drawn: {scaling}", markup=False)


@app.command()
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
        ordered = matrices.order(cells, quick=quick)
        kept = results or Path(f"{name}.results.jsonl")
        done = {cell.key: found for cell, found in _run(ordered, kept, jobs, fresh, limit)}
        pairs = [(cell, done[cell.key]) for cell in cells]
        note = (
            "  QUICK: short runs, one seed, coarse searches; for orientation only" if quick else ""
        )
        show(matrices.rates_table(pairs, f"Goodput, requests/s{note}"))
        show(matrices.ratios_table(pairs, f"The default policy against the others{note}"))
        for line in matrices.verdicts(pairs):
            out.print(line, markup=False)
        _write(pairs, json_file, csv_file)


@app.command()
def trace(
    output: Annotated[
        Path, typer.Option("--out", "-o", help="Chrome trace (chrome://tracing, ui.perfetto.dev).")
    ] = Path("trace.json"),
    phases: Annotated[
        Path | None,
        typer.Option(
            "--phases", metavar="FILE", help="Draw the instances' phases (needs [bench])."
        ),
    ] = None,
    shown: Annotated[float, typer.Option("--shown", help="Seconds that --phases draws.")] = 20.0,
    rate: Annotated[
        float | None,
        typer.Option("--rate", "-r", help="Requests a second; else 0.8 of the fluid bound."),
    ] = None,
    system: One = "default",
    model: ModelName = "CodeLlama-34B",
    gpu: GpuName = "L20",
    gpus: Gpus = 32,
    tp: Tp = None,
    pp: Pp = 1,
    data: Data = "sharegpt",
    ttft_slo: Ttft = None,
    tpot_slo: Tpot = None,
    cv: Cv = None,
    mixing: Mixing = 0.0,
    overlap: Overlap = 0.0,
    bus: Bus = None,
    requests: Requests = 500,
    warmup: Annotated[
        float, typer.Option("--warmup", help="Seconds before the requests counted.")
    ] = 30.0,
    seed: Seed = 11,
) -> None:
    """Record every step and request of a short run, for a trace viewer."""
    with told():
        from ecoserve.sim.evaluate import play, prepare
        from ecoserve.sim.report import number
        from ecoserve.sim.trace import write

        experiment = described(
            locals(), systems=[system], requests=requests, warmup=warmup, seeds=[seed]
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
            title = f"{cell.system.name}: {_title(cell)} at {number(used)} requests/s"
            _plots().phases(result.steps, phases, title=title, start=warmup, seconds=shown)
            out.print(f"drawn: {phases}", markup=False)


def described(options: dict[str, Any], **fields: Any) -> Experiment:
    """The experiment that a command's options describe; errors name fields as options do."""
    from ecoserve.sim.experiment import parse

    names = ("model", "gpu", "gpus", "data", "cv", "mixing", "overlap", "bus", "price")
    document = {name: options[name] for name in names if options.get(name) is not None}
    if options["tp"] is not None:
        document["layout"] = {"tp": options["tp"], "pp": options["pp"]}
    elif options["pp"] > 1:
        raise ValueError("--pp needs --tp")
    ttft, tpot = options["ttft_slo"], options["tpot_slo"]
    if ttft is not None or tpot is not None:
        from ecoserve.sim.workload import DATASETS

        known = DATASETS.get(options["data"])
        if ttft is None and known is None:
            raise ValueError("--ttft-slo must be given for a trace")
        document["slo"] = {
            "ttft": ttft if ttft is not None else known and known.slo.ttft,
            "tpot": tpot if tpot is not None else 0.1,
        }
    # Shorter runs flatter: what has not finished when the last request comes costs nothing.
    document["min_seconds"] = 120
    document |= {name: value for name, value in fields.items() if value is not None}
    return parse(document, "options")


def _run(
    cells: Sequence[Cell],
    path: Path | None,
    jobs: int | None,
    fresh: bool,
    minutes: float | None = None,
) -> list[tuple[Cell, Row | None]]:
    """Runs what the results file lacks, under a progress bar."""
    from ecoserve.sim.parallel import cores
    from ecoserve.sim.parallel import run as run_cells
    from ecoserve.sim.report import number, rate
    from ecoserve.sim.results import Results

    results = Results(path)
    if fresh:
        results.forget(cells)
    _notice(results, cells, path)
    with _bar() as bar:
        task = bar.add_task("", total=len(cells))
        bar.update(task, completed=sum(results.get(cell) is not None for cell in cells))

        def done(cell: Cell, found: Row) -> None:
            value = rate(found)
            text = "n/a" if value is None else f"{number(value)}/s"
            bar.update(task, advance=1, description=f"{cell.system.name}, {cell.data}: {text}")

        limit = float("inf") if minutes is None else 60 * minutes
        run_cells(cells, results, jobs=jobs or cores(), done=done, seconds=limit)
    pairs = results.of(cells)
    from ecoserve.sim.report import reasons

    for line in reasons(pairs):
        err.print(line, markup=False, soft_wrap=True)
    return pairs


def _notice(results: Results, cells: Sequence[Cell], path: Path | None) -> None:
    kept = sum(results.get(cell) is not None for cell in cells)
    if not kept:
        return
    err.print(f"{kept} of {len(cells)} cells are in {path}", markup=False)
    stale = results.stale(cells)
    if stale:
        err.print(
            f"{stale} of them were run by other code than this; --fresh runs them again",
            style="yellow",
            markup=False,
        )


def _bar() -> Progress:
    return Progress(
        BarColumn(30),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}", markup=False),
        console=err,
        transient=True,
    )


def show(table: Table) -> None:
    """Prints a table at its natural width: figures that are cut off to fit are of no use."""
    Console(highlight=False, width=max(out.width, 250)).print(table)


def _title(cell: Cell) -> str:
    layout = f" ({cell.layout})" if cell.layout else ""
    return f"{cell.model} on {cell.gpus} {cell.gpu}{layout}, {cell.data}"


def _matches(cell: Cell, words: str) -> bool:
    from ecoserve.sim.report import written

    fields = (cell.model, cell.gpu, cell.data, written(cell, "percentile"), cell.system.name)
    known = {field.lower() for field in (*fields, f"mixing={cell.mixing:g}")}
    return all(word.lower() in known for word in re.split(r"[\s,]+", words) if word)


def _write(pairs: Pairs, json_file: Path | None, csv_file: Path | None) -> None:
    from ecoserve.sim.results import write_csv, write_json

    rows = [found for _, found in pairs if found is not None]
    if json_file is not None:
        write_json(json_file, rows)
    if csv_file is not None:
        write_csv(csv_file, rows)


def _plots() -> Any:
    try:
        from ecoserve.sim import plots
    except ImportError as error:
        raise ValueError(f"plots need the bench extra (ecoserve[bench]): {error}") from error
    return plots


def _bars(pairs: Pairs, path: Path, title: str) -> None:
    from ecoserve.sim.report import pivot, rate

    _, cases = pivot(pairs)
    groups = {
        "\n".join(case): {name: rate(row) for name, row in rows.items()}
        for case, rows in cases.items()
    }
    _plots().bars(groups, path, title=f"{title}: goodput")
    out.print(f"drawn: {path}", markup=False)


def _curves(cells: Sequence[Cell], pairs: Pairs, path: Path, jobs: int | None) -> None:
    from ecoserve.sim.parallel import attainments, cores

    plots = _plots()
    rows = [(cell, found) for cell, found in pairs if found is not None]
    with _bar() as bar:
        task = bar.add_task("attainment against rate", total=None)
        found: dict[str, list[tuple[float, float]]] = {}

        def done(cell: Cell, rate: float, share: float) -> None:
            found.setdefault(cell.system.name, []).append((rate, share))
            bar.update(task, advance=1)

        attainments(rows, jobs=jobs or cores(), done=done)
    if not found:
        raise ValueError("nothing to draw: no system reached a goodput")
    ordered = {
        cell.system.name: found[cell.system.name] for cell in cells if cell.system.name in found
    }
    first = cells[0]
    plots.attainment(ordered, path, target=first.target, title=_title(first))
    out.print(f"drawn: {path}", markup=False)


def register(root: typer.Typer) -> None:
    """Adds the commands to the `ecoserve` command."""
    from ecoserve.sim.plan_command import plan
    from ecoserve.sim.scale_command import scale

    app.command()(scale)
    root.add_typer(app, name="sim")
    root.command()(plan)
