"""Results as tables for people: a line a case, a column a system."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table
from rich.text import Text

from ecoserve.sim.experiment import Cell, Layout
from ecoserve.sim.measure import Summary
from ecoserve.sim.plan import Plan
from ecoserve.sim.results import Row

NOT_RUN = "not run"

# Fields of a cell that tell cases apart, with how a table heads and writes them.
_CASE: Mapping[str, tuple[str, str]] = {
    "model": ("model", "{}"),
    "gpu": ("GPU", "{}"),
    "gpus": ("GPUs", "{}"),
    "layout": ("layout", "{}"),
    "data": ("data", "{}"),
    "percentile": ("P", "P{:g}"),
    "mixing": ("mixing", "{:.0%}"),
    "overlap": ("overlap", "{:.0%}"),
    "bus": ("bus GB/s", "{:g}"),
    "cv": ("CV", "{:g}"),
    "noise": ("noise", "{:.0%}"),
    "report_delay": ("stale s", "{:g}"),
    "output_error": ("length error", "{:g}"),
}

# The same as axes of a plot, where there is room for more.
_AXES = {
    "percentile": "per cent of requests that keep both SLOs",
    "mixing": "how much longer a mixed step takes",
    "overlap": "share of the all-reduce that is hidden",
    "bus": "all-reduce bus, GB/s",
    "cv": "CV of the gaps between arrivals",
    "noise": "spread of step times",
    "report_delay": "age of the state that routing sees, s",
    "output_error": "error of predicted output lengths (–: none predicted)",
}

Case = tuple[str, ...]
Pairs = Sequence[tuple[Cell, Row | None]]


def written(cell: Cell, field: str) -> str:
    """A field of a cell as tables and plots write it."""
    value = getattr(cell, field)
    if value is None:
        return {"layout": "best", "bus": "own", "cv": "1", "output_error": "–"}.get(field, "–")
    return _CASE[field][1].format(str(value) if isinstance(value, Layout) else value)


def varying(cells: Sequence[Cell]) -> list[str]:
    """The fields in which the cells differ, the data set always among them."""
    return [
        field
        for field in _CASE
        if field == "data" or len({written(cell, field) for cell in cells}) > 1
    ]


def heads(fields: Sequence[str]) -> list[str]:
    return [_CASE[field][0] for field in fields]


def pivot(pairs: Pairs) -> tuple[list[str], dict[Case, dict[str, Row | None]]]:
    """Fields that vary, and for each case the row of each system; None where it was not run."""
    fields = varying([cell for cell, _ in pairs])
    cases: dict[Case, dict[str, Row | None]] = {}
    for cell, found in pairs:
        case = tuple(written(cell, field) for field in fields)
        cases.setdefault(case, {})[cell.system.name] = found
    return fields, cases


def rate(found: Row | None) -> float | None:
    """Goodput of a row; None where it was not run or cannot be."""
    return None if found is None else found["figures"].get("goodput")


def shown(found: Row | None) -> str:
    """Goodput as a table shows it."""
    if found is None:
        return f"[dim]{NOT_RUN}[/]"
    value = rate(found)
    return "[dim]n/a[/]" if value is None else number(value)


def number(value: float) -> str:
    """Three digits."""
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def bound(rows: Mapping[str, Row | None]) -> float | None:
    """The fluid bound of a case, instances alike; the highest where layouts were searched."""
    bounds = [r["figures"]["bound"] for r in rows.values() if r and "bound" in r["figures"]]
    return max(bounds, default=None)


def markdown(table: Table) -> str:
    """The same table in Markdown, under its title."""

    def line(cells: Iterable[object]) -> str:
        plain = (Text.from_markup(str(cell)).plain.replace("\n", " ") for cell in cells)
        return f"| {' | '.join(plain)} |"

    columns = table.columns
    marks = ("--:" if column.justify == "right" else "---" for column in columns)
    return "\n".join(
        [
            f"**{table.title}**",
            "",
            line(column.header for column in columns),
            f"|{'|'.join(marks)}|",
            *map(line, zip(*(column.cells for column in columns), strict=True)),
            "",
        ]
    )


def goodput_table(pairs: Pairs, title: str) -> Table:
    """Goodput in requests/s of every system in every case, the best in bold."""
    fields, cases = pivot(pairs)
    systems = list(dict.fromkeys(cell.system.name for cell, _ in pairs))
    table = Table(title=title, title_justify="left")
    for head in heads(fields):
        table.add_column(head, no_wrap=True)
    for head in ("bound", *systems):
        table.add_column(head, justify="right")
    for case, rows in cases.items():
        best = max((r for r in map(rate, rows.values()) if r is not None), default=None)
        cells = []
        for system in systems:
            found = rows.get(system)
            text = shown(found)
            cells.append(f"[bold]{text}[/]" if best and rate(found) == best else text)
        limit = bound(rows)
        table.add_row(*case, "–" if limit is None else number(limit), *cells)
    return table


@dataclass(frozen=True, slots=True)
class Sweep:
    """Goodputs of each system over the ``values`` of one ``setting``; None: not run, or cannot."""

    title: str
    setting: str
    values: list[str]
    lines: dict[str, list[float | None]]


def sweeps(pairs: Pairs, title: str) -> list[Sweep]:
    """A sweep for each data set; none unless exactly one other field varies."""
    cells = [cell for cell, _ in pairs]
    fields = [field for field in varying(cells) if field != "data"]
    if len(fields) != 1:
        return []
    setting = _AXES.get(fields[0], _CASE[fields[0]][0])
    values = list(dict.fromkeys(written(cell, fields[0]) for cell in cells))
    found: list[Sweep] = []
    for data in dict.fromkeys(cell.data for cell in cells):
        lines: dict[str, list[float | None]] = {}
        for cell, row in pairs:
            if cell.data == data:
                line = lines.setdefault(cell.system.name, [None] * len(values))
                line[values.index(written(cell, fields[0]))] = rate(row)
        found.append(Sweep(f"{title}, {data}", setting, values, lines))
    return found


def reasons(pairs: Pairs) -> list[str]:
    """Why cells have no figure, a line a reason."""
    told: dict[str, list[str]] = {}
    for cell, found in pairs:
        if found is not None and "error" in found["figures"]:
            told.setdefault(found["figures"]["error"], []).append(cell.system.name)
    return [f"n/a, {', '.join(dict.fromkeys(who))}: {why}" for why, who in told.items()]


def dollars(value: float | None) -> str:
    """Cost of a request, in dollars for a thousand of them."""
    return "–" if value is None else f"{1000 * value:.3g}"


def summary_table(rows: Sequence[tuple[str, Summary, dict[str, Any]]], title: str) -> Table:
    """A run a column: name, summary, and what else is to be shown of it."""
    table = Table(title=title, title_justify="left")
    table.add_column("", no_wrap=True)
    for name, _, _ in rows:
        table.add_column(name, justify="right")
    lines: dict[str, list[str]] = {}
    for _, s, more in rows:
        values = {
            "requests measured": str(s.requests),
            "within both SLOs": f"{s.attainment:.1%}",
            "  as published": f"{s.attainment_as_published:.1%}",
            "within TTFT SLO": f"{s.ttft_attainment:.1%}",
            "within TPOT SLO": f"{s.tpot_attainment:.1%}",
            **{f"TTFT P{p}, s": f"{v:.3f}" for p, v in s.ttft.items()},
            **{f"TTFT and switch P{p}, s": f"{v:.3f}" for p, v in s.ttft_with_switch_wait.items()},
            **{f"TPOT P{p}, ms": f"{1000 * v:.1f}" for p, v in s.tpot.items()},
            **{
                f"TPOT without switch P{p}, ms": f"{1000 * v:.1f}"
                for p, v in s.tpot_as_published.items()
            },
            "ended": f"{s.ended:.1%}",
            "late": f"{s.late:.1%}",
            "shed": f"{s.shed:.1%}",
            "preemptions": str(s.preemptions),
            "requests/s": f"{s.throughput:.3g}",
            "output tokens/s": f"{s.output_tokens:.0f}",
            "queue stable": "yes" if s.stable else "no",
            **{name: str(value) for name, value in more.items()},
        }
        for name, value in values.items():
            lines.setdefault(name, []).append(value)
    for name, shown_values in lines.items():
        table.add_row(name, *shown_values)
    return table


def plans_table(plans: Sequence[Plan], title: str) -> Table:
    """Layouts that were simulated for a plan, the recommended one in bold."""
    table = Table(title=title, title_justify="left")
    several = len({plan.system for plan in plans}) > 1
    for head in (
        *(["system"] if several else []),
        "layout",
        "instances",
        "GPUs",
        "N_l to N_u",
        "goodput\nreq/s",
        "of\nbound",
        "TTFT s\nP50/P90",
        "TPOT ms\nP50/P90",
        "$ an\nhour",
        "$ for 1000\nrequests",
    ):
        table.add_column(
            head, justify="left" if head in ("system", "layout") else "right", no_wrap=True
        )
    for place, plan in enumerate(plans):
        table.add_row(
            *([plan.system] if several else []),
            str(plan.layout),
            str(plan.instances),
            str(plan.gpus),
            f"{plan.lower} to {plan.upper}" if plan.ours else "–",
            number(plan.goodput),
            f"{plan.share:.2f}",
            f"{plan.ttft_p50:.2f}/{plan.ttft_p90:.2f}",
            f"{1000 * plan.tpot_p50:.0f}/{1000 * plan.tpot_p90:.0f}",
            f"{plan.hourly:.2f}",
            dollars(plan.cost),
            style=None if place else "bold",
        )
    return table
