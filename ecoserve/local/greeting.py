"""What `ecoserve up` tells the user once it is up: where it is, what it promises, how to ask."""

from __future__ import annotations

import json
import shlex
from typing import Any

from ecoserve.local.display import Display
from ecoserve.local.engine import Model
from ecoserve.local.options import Options
from ecoserve.local.slo import Derived

_QUESTION = "What is the capital of Japan?"


def question(model: str, path: str) -> dict[str, Any]:
    """The body of a call of ``path`` (chat/completions or completions).

    The most likely answer is asked for: a small model's less likely ones make a poor first sight.
    """
    if path == "completions":
        return {"model": model, "prompt": _QUESTION, "max_tokens": 64, "temperature": 0}
    messages = [{"role": "user", "content": _QUESTION}]
    return {"model": model, "messages": messages, "temperature": 0}


def text(answer: dict[str, Any]) -> str:
    """The text of the answer to such a call."""
    choice = answer["choices"][0]
    return str(choice["message"]["content"] if "message" in choice else choice["text"]).strip()


def _workers(options: Options) -> str:
    if options.most > options.workers:
        return f"{options.workers} to {options.most} workers"
    return f"{options.workers} workers" if options.workers > 1 else "1 worker"


def curl(options: Options, body: dict[str, Any], path: str) -> str:
    """A command line that can be pasted into a shell."""
    words = ["curl", *(["-N"] if body.get("stream") else []), f"{options.url}/{path}"]
    words += ["-H", "Content-Type: application/json"]
    if options.api_keys:
        words += ["-H", f"Authorization: Bearer {options.api_keys[0]}"]
    return shlex.join([*words, "-d", json.dumps(body, ensure_ascii=False)])


def show(
    display: Display, options: Options, model: Model, derived: Derived, path: str, http: str
) -> None:
    """Prints it all; the command lines are never broken."""
    body = question(model.served_name, path)
    rows = {
        "URL": options.url,
        "Model": f"{model.served_name} on {_workers(options)}",
        "Policy": " ".join(
            [options.policy, *(f"{k}={v:g}" for k, v in options.policy_settings.items())]
        ),
        "TTFT SLO": f"{derived.slo.ttft:g} s ({derived.ttft_reason})",
        "TPOT SLO": f"{1000 * derived.slo.tpot:g} ms ({derived.tpot_reason})",
        "State": f"http://{http}/state",
        "Phases": f"http://{http}/timeline",
        "Metrics": f"http://{http}/metrics",
    }
    display.plain()
    for name, value in rows.items():
        display.plain(f"  {name:<9} {value}")
    display.plain("\nAsk:\n")
    display.plain(f"  {curl(options, body, path)}")
    display.plain("\nAsk for a stream:\n")
    display.plain(f"  {curl(options, {**body, 'stream': True}, path)}")
    display.plain("\nCtrl-C stops everything.")
