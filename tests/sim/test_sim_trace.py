"""The Chrome trace holds every step and request where and when it was."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ecoserve.policy.state import SLO
from ecoserve.sim.records import Arrival, Outcome, Result, StepRecord
from ecoserve.sim.trace import NOWHERE, chrome, write

SERVED = Outcome(
    Arrival(1.0, 100, 11), SLO(1.0, 0.13), "i0", routed=1.1, first=1.5, decoding=1.7, end=2.7
)
WAITING = Outcome(Arrival(2.0, 50, 5), SLO(1.0, 0.1))
RESULT = Result(
    [SERVED, WAITING],
    [
        StepRecord("i0", 1.1, 1.5, "prefill", 100, 0, "a prompt waits"),
        StepRecord("i0", 1.7, 1.8, "decode", 0, 1),
    ],
    seconds=3.0,
)


def spans(events: list[dict[str, Any]], number: int) -> dict[str, tuple[float, float]]:
    begun = {e["name"]: e["ts"] for e in events if e["ph"] == "b" and e["id"] == number}
    ended = {e["name"]: e["ts"] for e in events if e["ph"] == "e" and e["id"] == number}
    assert begun.keys() == ended.keys()
    return {name: (begun[name], ended[name]) for name in begun}


def test_steps_are_in_microseconds_with_what_they_held() -> None:
    events = chrome(RESULT)["traceEvents"]
    first, second = (e for e in events if e["ph"] == "X")
    assert (first["name"], first["ts"], first["dur"]) == ("prefill", 1.1e6, 0.4e6)
    assert first["args"] == {"tokens": 100, "batch": 0, "reason": "a prompt waits"}
    assert second["name"] == "decode"
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names[first["pid"]] == "i0"


def test_a_request_is_cut_into_what_it_went_through() -> None:
    events = chrome(RESULT)["traceEvents"]
    assert spans(events, 0) == {
        "request 0": (1.0e6, 2.7e6),
        "pending": (1.0e6, 1.1e6),
        "prefill": (1.1e6, 1.5e6),
        "wait for decode": (1.5e6, 1.7e6),
        "decode": (1.7e6, 2.7e6),
    }
    (whole,) = (e for e in events if e["ph"] == "b" and e["name"] == "request 0")
    assert whole["args"]["met"] is True


def test_what_never_reached_an_instance_is_shown_apart() -> None:
    events = chrome(RESULT)["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert spans(events, 1) == {"request 1": (2e6, 3e6), "pending": (2e6, 3e6)}
    assert {names[e["pid"]] for e in events if e.get("id") == 1} == {NOWHERE}


def test_the_file_is_json_without_nan(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    write(RESULT, path)

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    assert json.loads(path.read_text(), parse_constant=refuse) == chrome(RESULT)
