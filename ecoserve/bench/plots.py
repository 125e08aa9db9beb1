"""Pictures of a bench: attainment and latencies against load."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt

from ecoserve.bench.judge import Spread
from ecoserve.bench.plan import Kind
from ecoserve.bench.runner import Found, Step

_AXES: dict[Kind, str] = {"rate": "requests/s", "concurrency": "concurrent requests"}
_BLUE, _ORANGE, _GREEN, _GREY = "#1f6fb2", "#d95f02", "#2b8a57", "#777777"


def draw(found: Found, folder: Path) -> list[Path]:
    """One picture for each kind of load that was played: ``rate.png``, ``concurrency.png``."""
    drawn = []
    for kind in _AXES:
        # What was ended early has the figures of a run cut short: it shows where it failed only.
        steps = sorted(
            (s for s in found.steps if s.kind == kind and s.summary.calls), key=lambda s: s.load
        )
        if steps:
            path = folder / f"{kind}.png"
            _draw(found, kind, steps, path)
            drawn.append(path)
    return drawn


def _draw(found: Found, kind: Kind, steps: Sequence[Step], path: Path) -> None:
    figure, grid = plt.subplots(2, 2, figsize=(11, 7), layout="constrained", sharex=True)
    whole = [step for step in steps if not step.decided_early]
    _attainment(grid[0][0], found, steps)
    ttft, tpot = (found.slo.ttft, found.slo.tpot) if found.slo is not None else (None, None)
    _latency(grid[0][1], whole, "TTFT, s", lambda s: s.summary.ttft, ttft)
    _latency(grid[1][1], whole, "TPOT, ms", lambda s: s.summary.tpot, tpot, 1000)
    _throughput(grid[1][0], whole)
    for axes in grid[1]:
        axes.set_xlabel(_AXES[kind])
    for axes in grid.flat:
        axes.grid(alpha=0.3)
    if kind == "concurrency":
        grid[0][0].set_xscale("log", base=2)
        grid[0][0].xaxis.set_major_formatter("{x:g}")
    goodput = found.search.low if found.search else 0.0
    if kind == "rate" and goodput:
        for axes in grid.flat:
            axes.axvline(goodput, color=_GREEN, linewidth=1)
        grid[0][0].set_title(f"goodput {goodput:.3g} requests/s", color=_GREEN, fontsize=10)
    model = found.model.name if found.model else ""
    figure.suptitle(f"{model} at {found.plan.url}", fontsize=11)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _attainment(axes: Any, found: Found, steps: Sequence[Step]) -> None:
    lines: tuple[tuple[str, str, Callable[[Step], float | None]], ...] = (
        ("both SLOs", _BLUE, lambda s: s.summary.attained),
        ("TTFT", _ORANGE, lambda s: s.summary.ttft_attained),
        ("TPOT", _GREY, lambda s: s.summary.tpot_attained),
    )
    whole = [step for step in steps if not step.decided_early]
    for label, colour, figure in lines:
        values = [(s.load, 100 * (figure(s) or 0.0)) for s in whole]
        style = "o-" if label == "both SLOs" else ".--"
        axes.plot(*zip(*values, strict=True), style, color=colour, label=label) if values else None
    failed = [s.load for s in steps if s.decided_early]
    if failed:
        axes.plot(failed, [2] * len(failed), "x", color=_BLUE, label="ended early: fails")
    asked = 100 * found.plan.attainment
    axes.axhline(asked, color=_GREEN, linewidth=1, linestyle=":", label=f"asked for: {asked:g} %")
    axes.set_ylim(0, 103)
    axes.set_ylabel("requests in time, %")
    axes.legend(fontsize=8)


def _latency(
    axes: Any,
    steps: Sequence[Step],
    name: str,
    spread: Callable[[Step], Spread],
    promise: float | None,
    scale: float = 1,
) -> None:
    loads = [step.load for step in steps]
    for label, colour in (("p50", _BLUE), ("p90", _ORANGE), ("p99", _GREY)):
        values = [scale * getattr(spread(step), label) for step in steps]
        axes.plot(loads, values, "o-", color=colour, label=label, markersize=4)
    if promise:
        axes.axhline(scale * promise, color=_GREEN, linewidth=1, linestyle=":", label="SLO")
    axes.set_ylim(bottom=0)
    axes.set_ylabel(name)
    axes.legend(fontsize=8)


def _throughput(axes: Any, steps: Sequence[Step]) -> None:
    loads = [step.load for step in steps]
    axes.plot(loads, [s.summary.output_tokens_per_s for s in steps], "o-", color=_BLUE)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("output tokens/s", color=_BLUE)
    other = axes.twinx()
    other.plot(loads, [s.summary.requests_per_s for s in steps], "o--", color=_ORANGE)
    other.set_ylim(bottom=0)
    other.set_ylabel("requests/s served", color=_ORANGE)
