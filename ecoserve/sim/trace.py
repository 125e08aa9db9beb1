"""Chrome trace of a simulation: open it in chrome://tracing or ui.perfetto.dev.

One process an instance with a row of steps; its requests are spans that overlap, each cut into what
it went through. Requests that reached no instance are under "no instance".
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ecoserve.sim.records import Outcome, Result

Event = dict[str, Any]
NOWHERE = "no instance"


def chrome(result: Result) -> dict[str, Any]:
    """The trace as the JSON object format has it; times in microseconds.

    Steps are in it only if the simulation kept them.
    """
    names = sorted(
        {s.instance for s in result.steps} | {o.instance for o in result.outcomes if o.instance}
    )
    if any(not o.instance for o in result.outcomes):
        names.append(NOWHERE)
    process = {name: number for number, name in enumerate(names)}
    events: list[Event] = [
        {"ph": "M", "name": "process_name", "pid": number, "tid": 0, "args": {"name": name}}
        for name, number in process.items()
    ]
    for step in result.steps:
        arguments: Event = {"tokens": step.tokens, "batch": step.batch}
        if step.reason:
            arguments["reason"] = step.reason
        events.append(
            {
                "ph": "X",
                "cat": "step",
                "name": step.kind,
                "pid": process[step.instance],
                "tid": 0,
                "ts": _us(step.start),
                "dur": _us(step.end - step.start),
                "args": arguments,
            }
        )
    for number, outcome in enumerate(result.outcomes):
        events.extend(_spans(outcome, number, process[outcome.instance or NOWHERE], result.seconds))
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def write(result: Result, path: Path) -> None:
    """Writes the Chrome trace of a result."""
    path.write_text(json.dumps(chrome(result), separators=(",", ":")), encoding="utf-8")


def _spans(outcome: Outcome, number: int, process: int, horizon: float) -> Iterator[Event]:
    """Begin and end of the request and of its parts; what never ended ends with the simulation."""
    marks = [
        ("pending", outcome.arrival.at),
        ("prefill", outcome.routed),
        ("wait for decode", outcome.first),
        ("decode", outcome.decoding),
    ]
    last = outcome.end if not math.isnan(outcome.end) else max(horizon, outcome.arrival.at)
    known = [(name, at) for name, at in marks if not math.isnan(at)]
    ends = [at for _, at in known[1:]] + [last]
    whole: Event = {
        "prompt": outcome.arrival.prompt,
        "output": outcome.arrival.output,
        "met": outcome.met,
        "late": outcome.late,
        "shed": outcome.shed,
        "preemptions": outcome.preemptions,
    }
    spans = [(f"request {number}", outcome.arrival.at, last, whole)]
    spans += [(name, at, end, {}) for (name, at), end in zip(known, ends, strict=True) if end > at]
    for name, start, end, arguments in spans:
        common: Event = {
            "cat": "request",
            "name": name,
            "id": number,
            "pid": process,
            "tid": 0,
        }
        yield {"ph": "b", "ts": _us(start), "args": arguments, **common}
        yield {"ph": "e", "ts": _us(end), **common}


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)
