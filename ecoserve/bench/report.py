"""What a bench has found as JSON, as CSV and as pictures."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ecoserve import __version__
from ecoserve.bench.judge import Spread, failure
from ecoserve.bench.runner import Found, Step


def document(found: Found) -> dict[str, Any]:
    """All figures, ready for JSON; times in seconds, rates per second."""
    plan, search = found.plan, found.search
    settings = asdict(plan)
    # A key is no figure, and no one else's business.
    del settings["api_key"]
    settings["out"] = str(plan.out) if plan.out else None
    return {
        "ecoserve": __version__,
        "settings": settings,
        "model": found.model.name if found.model else None,
        "body": dict(found.writer.extra) if found.writer else None,
        "unloaded": asdict(found.alone) if found.alone else None,
        "slo": {"ttft": found.slo.ttft, "tpot": found.slo.tpot} if found.slo else None,
        "steps": [_step(step) for step in found.steps],
        "goodput": None
        if search is None
        else {
            "requests_per_s": search.low,
            "fails_at": search.high if search.bracketed else None,
            "bracketed": search.bracketed,
            "attainment": plan.attainment,
            "rates_tried": [{"rate": r, "attained": ok} for r, ok in search.tried],
        },
        "interrupted": found.interrupted,
    }


def _step(step: Step) -> dict[str, Any]:
    return {
        "kind": step.kind,
        "load": step.load,
        "seeds": [run.seed for run in step.runs],
        "decided_early": step.decided_early,
        "interrupted": step.interrupted,
        **asdict(step.summary),
    }


def write(found: Found, folder: Path) -> list[Path]:
    """Writes ``bench.json``, ``steps.csv``, ``requests.csv`` and the pictures into ``folder``;
    what was written. Raises ``OSError``."""
    from ecoserve.bench import plots

    folder.mkdir(parents=True, exist_ok=True)
    written = [folder / "bench.json", folder / "steps.csv", folder / "requests.csv"]
    written[0].write_text(json.dumps(document(found), indent=1) + "\n")
    _csv(written[1], (_flat(step) for step in found.steps))
    _csv(written[2], _requests(found))
    return [*written, *plots.draw(found, folder)]


def _csv(path: Path, rows: Iterator[dict[str, Any]]) -> None:
    first = next(rows, None)
    with path.open("w", newline="") as file:
        if first is not None:
            writer = csv.DictWriter(file, list(first), lineterminator="\n")
            writer.writeheader()
            writer.writerow(first)
            writer.writerows(rows)


def _flat(step: Step) -> dict[str, Any]:
    row: dict[str, Any] = {"kind": step.kind, "load": step.load, "runs": len(step.runs)}
    for name in step.summary.__slots__:
        value = getattr(step.summary, name)
        if isinstance(value, Spread):
            row |= {f"{name}_{figure}": f"{v:.6g}" for figure, v in asdict(value).items()}
        elif name != "errors":
            row[name] = value
    return row | {"decided_early": step.decided_early, "interrupted": step.interrupted}


def _requests(found: Found) -> Iterator[dict[str, Any]]:
    for number, step in enumerate(found.steps):
        for run in step.runs:
            for outcome in run.outcomes:
                yield {
                    "step": number,
                    "kind": step.kind,
                    "load": step.load,
                    "seed": run.seed,
                    "due": f"{outcome.call.due:.6f}",
                    "sent": f"{outcome.sent:.6f}",
                    "judged": bool(run.window.judged([outcome])),
                    "ok": outcome.ok,
                    "ttft": f"{outcome.ttft:.6f}" if outcome.ok else "",
                    "tpot": f"{outcome.tpot:.6f}" if outcome.ok else "",
                    "e2e": f"{outcome.e2e:.6f}" if outcome.ok else "",
                    "prompt_tokens": outcome.prompt_tokens,
                    "output_tokens": outcome.tokens,
                    "error": "" if outcome.ok else failure(outcome),
                }
