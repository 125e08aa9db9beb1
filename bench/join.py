"""Shows that an instance that joins brings no spike of TTFT (F9).

Under a steady Poisson load one worker is killed; the launcher restarts it, it is warmed and its
share rises. TTFTs are compared over three spans: before the kill, without the worker, and in the
--span seconds from its acceptance on.

    python bench/join.py --scheduler http://127.0.0.1:PORT --kill worker-1 --rate 1
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from endpoint import arguments, instances, only_cluster, poisson

from ecoserve.bench.load import Call, chat, percentile, play, words

SYSTEM = words(160, 7)


def front_end(name: str) -> int:
    """PID of the worker's front end; raises ``SystemExit`` when there is none."""
    for process in psutil.process_iter(["pid", "cmdline"]):
        line = process.info["cmdline"] or []
        if "ecoserve_worker" in line and name in line:
            return int(process.info["pid"])
    raise SystemExit(f"no worker {name} runs here")


async def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--kill", default="worker-1")
    parser.add_argument("--rate", type=float, default=1.0)
    parser.add_argument("--before", type=float, default=40.0, help="seconds before the kill")
    parser.add_argument("--span", type=float, default=40.0, help="seconds after it is back")
    parser.add_argument("--longest", type=float, default=180.0, help="seconds of the whole run")
    parser.add_argument("--output", type=int, default=32)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    cluster = await only_cluster(options.scheduler)
    rng = np.random.default_rng(5)
    calls = [
        Call(
            due,
            chat(
                cluster["model"],
                words(int(rng.integers(50, 300)), i),
                options.output,
                system=SYSTEM,
            ),
        )
        for i, due in enumerate(poisson(options.rate, options.longest, 3))
    ]
    events: dict[str, float] = {}
    weights: list[tuple[float, float]] = []

    async def disturb(start: float) -> None:
        await asyncio.sleep(options.before)
        old = await find(options)
        os.kill(front_end(options.kill), signal.SIGKILL)
        events["killed"] = time.monotonic() - start
        while True:
            now = await find(options)
            fresh = now.get("incarnation") != old["incarnation"]
            if fresh and now["state"] == "accepted":
                events.setdefault("accepted", time.monotonic() - start)
                weights.append((time.monotonic() - start, now["weight"]))
            await asyncio.sleep(0.25)

    start = time.monotonic()
    disturbing = asyncio.create_task(disturb(start))
    outcomes = await play(options.url, calls)
    disturbing.cancel()
    joined = events["accepted"]
    spans = {
        "before": (10.0, events["killed"]),
        "without": (events["killed"] + 5, joined),
        "after_join": (joined, joined + options.span),
    }
    found: dict[str, Any] = {
        "killed_s": round(events["killed"], 1),
        "accepted_s": round(joined, 1),
        "full_share_s": round(next((t for t, w in weights if w >= 1), float("nan")) - joined, 1),
        "failed": sum(not o.ok for o in outcomes),
    }
    for name, (low, high) in spans.items():
        ttft = [o.ttft for o in outcomes if o.ok and low <= o.call.due < high]
        found[name] = {
            "calls": len(ttft),
            **{f"ttft_p{q}": round(percentile(ttft, q), 3) for q in (50, 90, 100)},
        }
    print(json.dumps(found, indent=2))
    if options.out:
        options.out.write_text(json.dumps(found, indent=2) + "\n")


async def find(options: Any) -> dict[str, Any]:
    """The state of the instance that is killed."""
    cluster = await only_cluster(options.scheduler)
    return next(i for i in instances(cluster) if i["name"] == options.kill)


if __name__ == "__main__":
    asyncio.run(main())
