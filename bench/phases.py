"""Draws the phases of all instances over time, from the scheduler's own record.

Plays Poisson arrivals of chat calls at --rate for --seconds, then reads /timeline. Below the phases
it draws where each call's prefill went, so that both sides of rolling activation can be seen:
prefill phases that follow each other from instance to instance, and the calls that went there.

    ecoserve up --workers 3 --policy padg --debug_mode
    python bench/phases.py --scheduler http://127.0.0.1:PORT --rate 1.5 --out docs/phases.png
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
from endpoint import arguments, get, instances, only_cluster, poisson, slo

from ecoserve.bench.load import Call, attainment, chat, play, words

COLOURS = {"prefill": "#d95f02", "decode": "#7fb3d5"}
LABELS = {"prefill": "prefill", "decode": "decode, or no work"}


async def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--rate", type=float, default=1.5, help="calls a second")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--prompt", type=int, default=300, help="mean prompt tokens")
    parser.add_argument("--output", type=int, default=48, help="tokens of an answer")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--shown", type=float, default=30.0, help="seconds drawn, the last ones")
    parser.add_argument("--out", type=Path, default=Path("phases.png"))
    options = parser.parse_args()
    cluster = await only_cluster(options.scheduler)
    rng = np.random.default_rng(options.seed)
    calls = []
    for i, due in enumerate(poisson(options.rate, options.seconds, options.seed)):
        size = int(np.clip(rng.lognormal(np.log(options.prompt), 0.6), 16, 1200))
        body = chat(cluster["model"], words(size, 1000 * options.seed + i), options.output)
        calls.append(Call(due, body))
    began = time.monotonic()
    outcomes = await play(options.url, calls)
    ended = time.monotonic()
    record = (await get(f"{options.scheduler}/timeline")).popitem()[1]
    met = attainment(outcomes, slo(cluster))
    figures = {
        "policy": cluster["policy"],
        "rate": options.rate,
        "calls": len(calls),
        "failed": sum(not o.ok for o in outcomes),
        "attainment": round(met, 3),
        "seconds": round(ended - began, 1),
        "switches": {n: len(_spans(r, options.shown)) for n, r in record.items()},
        "at_least_one_in_prefill": round(_covered(record, options.shown), 3),
    }
    print(json.dumps(figures, indent=2))
    names = [i["name"] for i in instances(cluster)]
    draw({n: _spans(record[n], options.shown) for n in names}, options, figures)
    print(f"drawn: {options.out}", file=sys.stderr)


def _spans(record: dict[str, Any], shown: float) -> list[tuple[float, float, str, str]]:
    """(start, end, phase, reason) of the last ``shown`` seconds, from 0."""
    marks = [(shown - s["age"], s["phase"], s["reason"]) for s in record["switches"]]
    spans = []
    for i, (start, phase, reason) in enumerate(marks):
        end = marks[i + 1][0] if i + 1 < len(marks) else shown
        if end > 0:
            spans.append((max(start, 0.0), end, phase, reason))
    return spans


def _covered(record: dict[str, dict[str, Any]], shown: float) -> float:
    """Share of the time drawn in which at least one instance was in its prefill phase."""
    grid = np.linspace(0, shown, 3000)
    any_prefill = np.zeros_like(grid, dtype=bool)
    for one in record.values():
        for start, end, phase, _ in _spans(one, shown):
            if phase == "prefill":
                any_prefill |= (grid >= start) & (grid < end)
    return float(any_prefill.mean())


def draw(spans: dict[str, list[tuple[float, float, str, str]]], options: Any, figures: Any) -> None:
    """One row an instance, a bar a phase."""
    fig, axes = plt.subplots(figsize=(12, 0.8 * len(spans) + 1.6), layout="constrained")
    for row, (_, parts) in enumerate(spans.items()):
        for phase, colour in COLOURS.items():
            bars = [(start, end - start) for start, end, kind, _ in parts if kind == phase]
            label = None if row else LABELS[phase]
            axes.broken_barh(bars, (row - 0.4, 0.8), facecolors=colour, label=label)
    axes.set_yticks(range(len(spans)), list(spans))
    axes.invert_yaxis()
    axes.set_xlim(0, options.shown)
    axes.set_xlabel("seconds")
    axes.set_title(
        f"Phases under {figures['policy']}, {options.rate:g} requests/s: "
        f"joint attainment {figures['attainment']:.0%}"
    )
    fig.legend(loc="outside upper right", ncols=2)
    fig.savefig(options.out, dpi=110)


if __name__ == "__main__":
    asyncio.run(main())
