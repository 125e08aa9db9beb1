"""What the simulator's commands show at a terminal, and the files that they write."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

if TYPE_CHECKING:
    from ecoserve.sim.experiment import Cell
    from ecoserve.sim.report import Pairs
    from ecoserve.sim.results import Results, Row

out = Console(highlight=False, soft_wrap=False)
err = Console(stderr=True, highlight=False)


@contextlib.contextmanager
def told() -> Iterator[None]:
    """What is wrong with the input is told in a line, not as a traceback."""
    try:
        yield
    except (ValueError, OSError) as error:
        err.print(f"error: {error}", style="red", markup=False, soft_wrap=True)
        raise typer.Exit(1) from error
    except KeyboardInterrupt:
        err.print("stopped", markup=False)
        raise typer.Exit(130) from None


def run_cells(
    cells: Sequence[Cell],
    path: Path | None,
    jobs: int | None,
    fresh: bool,
    minutes: float | None = None,
) -> list[tuple[Cell, Row | None]]:
    """Runs what the results file lacks, under a progress bar; the cells with their rows, None for
    what was not run in time. Raises ``ValueError`` if there is no cell that can be run."""
    from ecoserve.sim import parallel
    from ecoserve.sim.report import number, rate, reasons
    from ecoserve.sim.results import Results

    try:
        results = Results(path)
    except UnicodeDecodeError as error:
        raise ValueError(f"--results: {path} cannot be read: {error}") from error
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
        try:
            parallel.run(cells, results, jobs=jobs or parallel.cores(), done=done, seconds=limit)
        except KeyboardInterrupt:
            if path is not None:
                err.print(f"what was finished is kept in {path}", markup=False)
            raise
    pairs = results.of(cells)
    lines = reasons(pairs)
    if all(found is not None and "error" in found["figures"] for _, found in pairs):
        raise ValueError(f"nothing can be run: {'; '.join(lines)}")
    for line in lines:
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
        disable=not err.is_terminal,
    )


def show(table: Table) -> None:
    """Prints a table at its natural width: figures that are cut off to fit are of no use, and a
    title that is broken to fit is hard to read."""
    title, table.title = table.title, None
    console = Console(highlight=False, width=max(out.width, 250))
    console.print(title, style="italic", markup=False, soft_wrap=True)
    console.print(table)
    table.title = title


def title_of(cell: Cell) -> str:
    """What a cell is about, but for its system."""
    layout = f" ({cell.layout})" if cell.layout else ""
    return f"{cell.model} on {cell.gpus} {cell.gpu}{layout}, {cell.data}"


def write_rows(pairs: Pairs, json_file: Path | None, csv_file: Path | None) -> None:
    """Writes the rows of what was run."""
    from ecoserve.sim.results import write_csv, write_json

    rows = {found["key"]: found for _, found in pairs if found is not None}.values()
    if json_file is not None:
        write_json(json_file, rows)
    if csv_file is not None:
        write_csv(csv_file, rows)


def write_markdown(tables: Sequence[Table], path: Path | None, after: str = "") -> None:
    """Writes tables and the text that comes after them."""
    from ecoserve.sim.report import markdown

    if path is not None:
        path.write_text("\n".join((*map(markdown, tables), after)), encoding="utf-8")


def drawing() -> Any:
    """The module that draws. Raises ``ValueError`` if what it needs is not installed."""
    try:
        from ecoserve.sim import plots
    except ImportError as error:
        raise ValueError(f"plots need the bench extra (ecoserve[bench]): {error}") from error
    return plots


def draw_bars(pairs: Pairs, path: Path, title: str) -> None:
    """Goodputs as bars, a group a case."""
    from ecoserve.sim.report import pivot, rate

    _, cases = pivot(pairs)
    groups = {
        "\n".join(case): {name: rate(row) for name, row in rows.items()}
        for case, rows in cases.items()
    }
    drawing().bars(groups, path, title=f"{title}: goodput")
    out.print(f"drawn: {path}", markup=False)


def draw_curves(cells: Sequence[Cell], pairs: Pairs, path: Path, jobs: int | None) -> None:
    """Attainment against rate, a line a system."""
    from ecoserve.sim.parallel import attainments, cores

    plots = drawing()
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
    plots.attainment(ordered, path, target=first.target, title=title_of(first))
    out.print(f"drawn: {path}", markup=False)
