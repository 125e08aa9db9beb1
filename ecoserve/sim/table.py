"""The table of all five systems on 4 nodes x 8 L20, and how they scale from 16 to 128 GPUs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.table import Table

from ecoserve.sim.experiment import Cell, Experiment
from ecoserve.sim.report import Pairs, dollars, number, rate
from ecoserve.sim.results import Row

if TYPE_CHECKING:
    from ecoserve.sim.plots import Curve  # which needs matplotlib

SYSTEMS = {
    "vLLM": "vllm",
    "Sarathi": "sarathi-512",
    "DistServe": "distserve-1:1",
    "MoonCake": "mooncake-1:1",
    "EcoServe": "default",
}
SEARCHED = SYSTEMS | {
    "vLLM": "vllm-best",
    "Sarathi": "sarathi-best",
    "DistServe": "distserve-best",
    "MoonCake": "mooncake-best",
}
CLAIMED = {"vLLM": 12.4, "Sarathi": 15.7, "DistServe": 18.2, "MoonCake": 20.1, "EcoServe": 36.8}
"""Claimed throughput in requests/s; it is not said for which of the models."""
CLAIMED_FOR = "sharegpt"

MODELS = ("Llama-30B", "CodeLlama-34B")
DATA = (CLAIMED_FOR, "longbench", "alpaca")
GPUS = 32
SCALE = (16, 32, 64, 128)

QUICK = {"requests": 1500, "min_seconds": 90, "warmup": 60, "resolution": 0.03, "seeds": [11]}


def experiments(
    *,
    searched: bool = False,
    quick: bool = False,
    published: bool = True,
    mixing: float = 0.0,
    price: float | None = None,
) -> tuple[Experiment, Experiment]:
    """The table's experiment and the scaling's; ``published`` as in ``matrix.experiments``."""
    names = SEARCHED if searched else SYSTEMS
    common = {
        "gpu": "L20",
        "percentile": 90,
        "mixing": mixing,
        "published": published,
        "price": price,
        "systems": [{"system": system, "label": name} for name, system in names.items()],
        **(QUICK if quick else {"seeds": [11, 12]}),
    }
    table = {"name": "table", "model": list(MODELS), "gpus": GPUS, "data": list(DATA), **common}
    scaling = {
        "name": "scaling",
        "model": "CodeLlama-34B",
        "gpus": list(SCALE),
        "data": CLAIMED_FOR,
        **common,
    }
    return Experiment.model_validate(table), Experiment.model_validate(scaling)


def in_order(cells: Sequence[Cell]) -> list[Cell]:
    """The cells as they are run: ShareGPT first, the scaling's with it."""
    return sorted(cells, key=lambda cell: cell.data != CLAIMED_FOR)


def main_table(pairs: Pairs, model: str, title: str) -> Table:
    """All five systems for one model on each data set, on the first with what is claimed."""
    table = Table(title=title, title_justify="left")
    table.add_column("data")
    table.add_column("system")
    for head in (
        "claimed\nreq/s",
        "EcoServe's\nlead claimed",
        "goodput\nreq/s",
        "EcoServe's\nlead found",
        "of\nbound",
        "TTFT s\nP50/P90",
        "TPOT ms\nP50/P90",
        "$ for 1000\nrequests",
    ):
        table.add_column(head, justify="right", no_wrap=True)
    rows: dict[tuple[str, str], Row | None] = {
        (cell.system.name, cell.data): row for cell, row in pairs if cell.model == model
    }
    published = pairs[0][0].published
    ttft = "ttft_with_switch_wait" if published else "ttft"
    tpot = "tpot_as_published" if published else "tpot"
    for data in DATA:
        table.add_section()
        ours = rate(rows.get(("EcoServe", data)))
        for name in SYSTEMS:
            row = rows.get((name, data))
            found = rate(row)
            figures = row["figures"] if row else {}
            claimed = (f"{CLAIMED[name]:.1f}", f"{CLAIMED['EcoServe'] / CLAIMED[name]:.2f}")
            table.add_row(
                data,
                _named(name, figures),
                *(claimed if data == CLAIMED_FOR else ("–", "–")),
                _interval(row),
                f"{ours / found:.2f}" if ours and found else "–",
                f"{figures['share']:.2f}" if found else "–",
                _pair(figures.get(ttft), 1, 2),
                _pair(figures.get(tpot), 1000, 0),
                dollars(figures.get("cost")),
            )
    return table


def _named(name: str, figures: Mapping[str, Any]) -> str:
    """The system's name, with its setting where one was searched."""
    return f"{name} ({figures['chosen']['name']})" if "tried" in figures else name


def _interval(row: Row | None) -> str:
    found = rate(row)
    if row is None or found is None:
        return "not run" if row is None else "n/a"
    figures = row["figures"]
    half = (figures["high"] - figures["low"]) / 2
    spread = len(figures["rates"]) > 1
    return f"{number(found)} ± {half:.2g}" if spread else number(found)


def _pair(values: Mapping[str, float] | None, factor: float, digits: int) -> str:
    if values is None:
        return "–"
    return "/".join(f"{factor * values[p]:.{digits}f}" for p in ("p50", "p90"))


def curves(pairs: Pairs) -> dict[str, Curve]:
    """Goodput against GPUs of every system that was run."""
    found: dict[str, list[tuple[float, float]]] = {}
    for cell, row in pairs:
        value = rate(row)
        if value is not None:
            found.setdefault(cell.system.name, []).append((cell.gpus, value))
    return dict(found)


def scaling_table(pairs: Pairs, title: str) -> Table:
    """Goodput for 16 to 128 GPUs."""
    table = Table(title=title, title_justify="left")
    table.add_column("system")
    rows = {(cell.system.name, cell.gpus): row for cell, row in pairs}
    for gpus in SCALE:
        table.add_column(f"{gpus} GPUs\nreq/s", justify="right")
    for name in SYSTEMS:
        table.add_row(name, *(_interval(rows.get((name, gpus))) for gpus in SCALE))
    return table
