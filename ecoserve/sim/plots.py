"""Pictures of simulations, as PNG or whatever matplotlib makes of the path's suffix.

Needs the ``bench`` extra.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.colors import to_rgb
from matplotlib.ticker import MaxNLocator

from ecoserve.sim.records import StepRecord
from ecoserve.sim.report import Sweep

Curve = Sequence[tuple[float, float]]

KINDS = {"prefill": "#d95f02", "mixed": "#b8a1d9", "decode": "#7fb3d5"}

# The four systems in muted colours, our policies in strong ones; the same in every picture.
_COLOURS = {
    "vllm": "#8da0cb",
    "sarathi": "#a6761d",
    "distserve": "#66a61e",
    "mooncake": "#999999",
    "paper": "#f4a582",
    "padg": "#e7298a",
    "window": "#1b9e77",
    "paced": "#d7301f",
    "default": "#d7301f",
}
_SPARE = ("#4c72b0", "#dd8452", "#55a868", "#8172b3", "#937860", "#da8bc3", "#8c8c8c", "#ccb974")
_MARKERS = "osD^vPX*<>"


def attainment(curves: Mapping[str, Curve], path: Path, *, target: float, title: str) -> None:
    """Joint attainment (0 to 1) against rate (requests a second), a line a system.

    ``target`` is the attainment that goodput asks for.
    """
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    colours = _colours(curves)
    for i, (name, points) in enumerate(curves.items()):
        rates, shares = zip(*sorted(points), strict=True)
        shown = [100 * share for share in shares]
        marker = _MARKERS[i % len(_MARKERS)]
        axes.plot(rates, shown, marker=marker, ms=4, color=colours[name], label=name)
    axes.axhline(100 * target, color="black", lw=0.8, ls="--")
    axes.set(xlabel="requests/s", ylabel="requests within both SLOs, %", title=title, ylim=(0, 102))
    axes.set_xlim(left=0)
    axes.grid(alpha=0.3)
    axes.legend()
    _save(figure, path)


def phases(
    steps: Sequence[StepRecord],
    path: Path,
    *,
    title: str,
    start: float = 0.0,
    seconds: float = 30.0,
) -> None:
    """What each instance ran over time, a row an instance, from ``start`` for ``seconds``."""
    shown = [s for s in steps if s.end > start and s.start < start + seconds]
    names = sorted({s.instance for s in shown}, key=lambda name: (len(name), name))
    height = 0.5 * len(names) + 1.6
    figure, axes = plt.subplots(figsize=(12, height), layout="constrained")
    for row, name in enumerate(names):
        for kind, colour in KINDS.items():
            bars = [
                (s.start, s.end - s.start) for s in shown if s.instance == name and s.kind == kind
            ]
            axes.broken_barh(bars, (row - 0.4, 0.8), facecolors=colour, lw=0)
    for kind, colour in KINDS.items():
        axes.broken_barh([], (0, 0), facecolors=colour, label=kind)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.set_xlim(start, start + seconds)
    axes.set(xlabel="seconds", title=title)
    figure.legend(loc="outside upper right", ncols=len(KINDS))
    _save(figure, path)


def bars(
    groups: Mapping[str, Mapping[str, float | None]],
    path: Path,
    *,
    title: str,
    ylabel: str = "goodput, requests/s",
) -> None:
    """A group of bars for each key, a bar a system; None is a cell that was not run."""
    systems = list(dict.fromkeys(name for group in groups.values() for name in group))
    width = 0.84 / max(len(systems), 1)
    figure, axes = plt.subplots(
        figsize=(max(6.0, 1.2 + 0.35 * len(groups) * len(systems)), 4.5), layout="constrained"
    )
    colours = _colours(systems)
    for i, system in enumerate(systems):
        places = [g + (i - (len(systems) - 1) / 2) * width for g in range(len(groups))]
        values = [group.get(system) for group in groups.values()]
        drawn = axes.bar(
            places,
            [value or 0.0 for value in values],
            width,
            color=colours[system],
            label=system,
        )
        labels = ["–" if value is None else f"{value:.3g}" for value in values]
        axes.bar_label(drawn, labels, fontsize=7, padding=1)
    axes.set_xticks(range(len(groups)), list(groups))
    axes.set(ylabel=ylabel, title=title)
    axes.margins(y=0.12)
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    axes.legend(ncols=min(len(systems), 5), fontsize=8)
    _save(figure, path)


def sweeps(rows: Sequence[Sequence[Sweep]], path: Path, *, title: str) -> None:
    """Goodput against one setting a panel, a line a system; None is a cell that was not run.

    A row of panels an experiment; experiments of one panel stand two in a row.
    """
    columns = max(map(len, rows))
    if columns == 1 and len(rows) > 2:
        flat = [sweep for row in rows for sweep in row]
        rows, columns = [flat[i : i + 2] for i in range(0, len(flat), 2)], 2
    figure, grid = plt.subplots(
        len(rows),
        columns,
        figsize=(5.2 * columns, 3.0 * len(rows) + 0.8),
        layout="constrained",
        squeeze=False,
    )
    legend = {}
    names = list(dict.fromkeys(name for row in rows for sweep in row for name in sweep.lines))
    colours = _colours(names)
    for places, row in zip(grid, rows, strict=True):
        for axes in places[len(row) :]:
            axes.axis("off")
        for axes, sweep in zip(places, row, strict=False):
            for name, values in sweep.lines.items():
                run = [i for i, value in enumerate(values) if value is not None]
                (legend[name],) = axes.plot(
                    run,
                    [values[i] for i in run],
                    marker=_MARKERS[names.index(name) % len(_MARKERS)],
                    ms=4,
                    color=colours[name],
                )
            highest = max((v for vs in sweep.lines.values() for v in vs if v), default=1.0)
            axes.set_xticks(range(len(sweep.values)), sweep.values)
            axes.set(xlabel=sweep.setting, title=sweep.title, ylim=(0, 1.1 * highest))
            axes.grid(alpha=0.3)
        places[0].set_ylabel("goodput, requests/s")
    figure.suptitle(title)
    figure.legend(
        list(legend.values()),
        list(legend),
        loc="outside lower center",
        ncols=min(len(legend), 6),
        fontsize=8,
    )
    _save(figure, path)


def scaling(curves: Mapping[str, Curve], path: Path, *, title: str) -> None:
    """Goodput against GPUs, a line a system; dotted: proportional to the system's smallest."""
    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    colours = _colours(curves)
    sizes = sorted({gpus for points in curves.values() for gpus, _ in points})
    for i, (name, points) in enumerate(curves.items()):
        gpus, rates = zip(*sorted(points), strict=True)
        colour, marker = colours[name], _MARKERS[i % len(_MARKERS)]
        axes.plot(gpus, rates, marker=marker, ms=5, color=colour, label=name)
        ideal = [rates[0] * g / gpus[0] for g in gpus]
        axes.plot(gpus, ideal, color=colour, lw=0.8, ls=":")
    axes.set_xticks(sizes, [f"{size:g}" for size in sizes])
    axes.set(xlabel="GPUs", ylabel="goodput, requests/s", title=title, ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend()
    _save(figure, path)


def over_time(
    curves: Mapping[str, Curve],
    counts: Mapping[str, Curve],
    stages: Sequence[tuple[float, float]],
    path: Path,
    *,
    title: str,
) -> None:
    """Attainment (0 to 1) over minutes, a line a variant; below it, its instances, and the load.

    ``stages`` are rates (requests a second) with how many minutes they last.
    """
    figure, (above, below) = plt.subplots(
        2, sharex=True, figsize=(8, 6), layout="constrained", height_ratios=[3, 2]
    )
    colours = _colours(curves)
    for i, (name, points) in enumerate(curves.items()):
        times, shares = zip(*points, strict=True)
        shown = [100 * share for share in shares]
        marker = _MARKERS[i % len(_MARKERS)]
        above.plot(times, shown, marker=marker, ms=4, color=colours[name], label=name)
        times, sizes = zip(*counts[name], strict=True)
        below.step(times, sizes, where="post", color=colours[name])
    edges = list(itertools.accumulate((minutes for _, minutes in stages), initial=0.0))
    for (rate, _), begin in zip(stages, edges, strict=False):
        for axes in (above, below):
            axes.axvline(begin, color="black", lw=0.5, alpha=0.3)
        above.text(begin, 1, f" {rate:g}/s", fontsize=8, va="bottom")
    above.set(ylabel="requests within both SLOs, %", title=title, ylim=(0, 102))
    below.set(xlabel="minutes", ylabel="instances wanted", ylim=(0, None), xlim=(0, edges[-1]))
    below.yaxis.set_major_locator(MaxNLocator(integer=True))
    for axes in (above, below):
        axes.grid(alpha=0.3)
    above.legend(loc="center left")
    _save(figure, path)


def _colours(names: Iterable[str]) -> dict[str, tuple[float, float, float]]:
    """A colour a name: the system's own, paler for each further setting of the same system."""
    found: dict[str, tuple[float, float, float]] = {}
    used: Counter[str] = Counter()
    for i, name in enumerate(names):
        kind = name.lower().replace("ecoserve", "default").split()[0].split("-")[0]
        base = to_rgb(_COLOURS.get(kind, _SPARE[i % len(_SPARE)]))
        pale = min(0.25 * used[kind], 0.75)
        used[kind] += 1
        red, green, blue = (part + (1 - part) * pale for part in base)
        found[name] = (red, green, blue)
    return found


def _save(figure: plt.Figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)
