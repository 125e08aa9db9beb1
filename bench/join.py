"""Shows that an instance that joins brings no spike of TTFT.

Under a steady Poisson load one worker is killed; the launcher restarts it, it is warmed and its
share rises. TTFTs are compared over three spans: before the kill, without the worker, and in the
--span seconds from its acceptance on. With --cold it is not warmed and gets its full share at once,
for comparison; --plot draws the TTFTs about the moment of joining from the files of such runs.

    python bench/join.py --scheduler http://127.0.0.1:PORT --out warm.json
    python bench/join.py --scheduler http://127.0.0.1:PORT --out cold.json --cold
    python bench/join.py --plot join.png warm.json cold.json
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

import grpc
import matplotlib.pyplot as plt
import numpy as np
import psutil
from endpoint import arguments, get, instances, only_cluster, poisson

from ecoserve.bench.load import Call, chat, percentile, play, words
from ecoserve.proto.v1 import admin_pb2
from ecoserve.proto.v1.admin_pb2_grpc import AdminStub

SYSTEM = words(160, 7)


def front_end(instance: dict[str, Any]) -> psutil.Process:
    """The front end of the instance, found by its port: other clusters on this machine have workers
    of the same name. Raises ``SystemExit`` when there is none."""
    port = instance["address"].rpartition(":")[2]
    for process in psutil.process_iter(["pid", "cmdline"]):
        line = process.info["cmdline"] or []
        if (
            "ecoserve_worker" in line
            and "--port" in line
            and line[line.index("--port") + 1] == port
        ):
            return process
    raise SystemExit(f"no worker {instance['name']} at port {port} runs here")


async def declare_cold(options: Any) -> None:
    """Declares the cluster anew, as it is but for the way in which instances join."""
    line = front_end(await find(options)).cmdline()
    async with grpc.aio.insecure_channel(line[line.index("--scheduler") + 1]) as channel:
        admin = AdminStub(channel)  # type: ignore[no-untyped-call]
        (name,) = (await get(f"{options.scheduler}/state"))["clusters"]
        state = await admin.Get(admin_pb2.GetRequest(name=name))
        state.cluster.cold_joins = options.cold
        await admin.Apply(admin_pb2.ApplyRequest(cluster=state.cluster))


def plot(picture: Path, files: list[Path]) -> None:
    """TTFT of each call over the seconds since the instance joined, a line of medians for each."""
    figure, axes = plt.subplots(figsize=(8, 4))
    for file in files:
        found = json.loads(file.read_text())
        after, ttft = np.array(found["calls"]).T
        name = "neither warmed nor ramped" if found["cold"] else "warmed, share ramps"
        points = axes.scatter(after, ttft, s=8, alpha=0.6)
        bins = [(b, ttft[(after >= b) & (after < b + 5)]) for b in range(-40, 60, 5)]
        middles = [(b + 2.5, np.median(some)) for b, some in bins if len(some)]
        axes.plot(*zip(*middles, strict=True), color=points.get_facecolor()[0], label=name)
    axes.axvline(0, color="grey", linewidth=0.8)
    axes.set(
        xlabel="seconds since the instance joined", ylabel="TTFT, s", xlim=(-40, 60), ylim=(0, None)
    )
    axes.legend()
    figure.tight_layout()
    figure.savefig(picture, dpi=110)


async def main(options: Any) -> None:
    await declare_cold(options)
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
        front_end(old).kill()
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
    if "accepted" not in events:
        raise SystemExit(f"{options.kill} was not back within {options.longest:g} s")
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
        "cold": options.cold,
        "failed_at_s": [round(o.call.due - joined, 1) for o in outcomes if not o.ok],
        "calls": [[round(o.call.due - joined, 2), round(o.ttft, 3)] for o in outcomes if o.ok],
    }
    for name, (low, high) in spans.items():
        ttft = [o.ttft for o in outcomes if o.ok and low <= o.call.due < high]
        found[name] = {
            "calls": len(ttft),
            **{f"ttft_p{q}": round(percentile(ttft, q), 3) for q in (50, 90, 100)},
        }
    print(json.dumps({k: v for k, v in found.items() if k != "calls"}, indent=2))
    if options.out:
        options.out.write_text(json.dumps(found, indent=2) + "\n")


async def find(options: Any) -> dict[str, Any]:
    """The state of the instance that is killed."""
    cluster = await only_cluster(options.scheduler)
    return next(i for i in instances(cluster) if i["name"] == options.kill)


if __name__ == "__main__":
    if "--plot" in sys.argv:
        _, _, _picture, *_files = sys.argv
        plot(Path(_picture), [Path(file) for file in _files])
        sys.exit()
    parser = arguments(__doc__)
    parser.add_argument("--kill", default="worker-1")
    parser.add_argument("--rate", type=float, default=1.0)
    parser.add_argument("--before", type=float, default=40.0, help="seconds before the kill")
    parser.add_argument("--span", type=float, default=40.0, help="seconds after it is back")
    parser.add_argument("--longest", type=float, default=180.0, help="seconds of the whole run")
    parser.add_argument("--output", type=int, default=32)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--cold", action="store_true", help="no warm-up and no ramp")
    asyncio.run(main(parser.parse_args()))
