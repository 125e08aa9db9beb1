"""What routing costs: our Envoy and scheduler beside vllm-router, workers that answer at once.

For bodies of each size it measures, in rounds that alternate between the two and a worker itself:

- the latency at one connection, and what is added to the worker's own (medians);
- the capacity at 32 connections, and the latency at a fixed rate of half of our capacity;
- the scheduler's picks per second of CPU time, from /proc, and Envoy's;
- the same picks while 100 workers report 20 times a second each.

    python -m venv ROUTER && ROUTER/bin/pip install vllm-router
    python bench/router.py --vllm-router ROUTER/bin/vllm-router --out docs/results/router.json
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import httpx
import instant
import numpy as np
import uvloop
from wire import Pool, request

from ecoserve import gateway
from ecoserve.bench.prompts import chat, words
from ecoserve.proto.v1 import admin_pb2, admin_pb2_grpc, session_pb2

PATH = "/v1/chat/completions"
CONNECTIONS = 32
# Bodies that are sent in turn: conversations differ, and some come back.
BODIES = 64
_TICK = os.sysconf("SC_CLK_TCK")


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


@dataclass
class Processes:
    """What runs, by name; all is ended at the end."""

    folder: Path
    running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(self, name: str, *command: str) -> None:
        log = (self.folder / f"{name}.log").open("wb")
        self.running[name] = subprocess.Popen(command, stdout=log, stderr=log)

    def cpu(self, name: str) -> float:
        """CPU seconds that a process has used, all its threads."""
        stat = Path(f"/proc/{self.running[name].pid}/stat").read_text().rpartition(")")[2].split()
        return (int(stat[11]) + int(stat[12])) / _TICK

    def end(self) -> None:
        for process in self.running.values():
            process.kill()
            process.wait()
        self.running.clear()


@contextlib.contextmanager
def processes() -> Iterator[Processes]:
    with tempfile.TemporaryDirectory() as folder:
        them = Processes(Path(folder))
        try:
            yield them
        except BaseException:
            for log in Path(folder).glob("*.log"):
                print(f"--- {log.name}\n{log.read_text()[-2000:]}", file=sys.stderr)
            raise
        finally:
            them.end()


async def until(what: str, check: Any, seconds: float = 20.0) -> None:
    for _ in range(int(seconds / 0.05)):
        with contextlib.suppress(httpx.HTTPError, grpc.aio.AioRpcError, OSError):
            if await check():
                return
        await asyncio.sleep(0.05)
    raise SystemExit(f"not within {seconds:g} s: {what}")


@contextlib.asynccontextmanager
async def world(options: Any, workers: int, router: str | None) -> AsyncIterator[Any]:
    """Workers, our scheduler and Envoy, and vllm-router if its path is given; where they listen."""
    backend, scheduler, http, ours, admin, theirs = (free_port() for _ in range(6))
    with processes() as them:
        them.start(
            "scheduler", sys.executable, "-m", "ecoserve.scheduler",
            "--grpc", f"127.0.0.1:{scheduler}", "--http", f"127.0.0.1:{http}",
        )  # fmt: skip
        async with grpc.aio.insecure_channel(f"127.0.0.1:{scheduler}") as channel:
            stub = admin_pb2_grpc.AdminStub(channel)  # type: ignore[no-untyped-call]
            names = [f"w{i}" for i in range(workers)]
            declared = admin_pb2.Cluster(
                name="c",
                model="m",
                slo=session_pb2.SLO(ttft_s=5.0, tpot_s=0.5),
                policy=options.policy,
                macro_instances=[
                    admin_pb2.MacroInstance(name=f"m{i}", instances=names[i : i + options.upper])
                    for i in range(0, workers, options.upper)
                ],
            )
            await until("the scheduler is up", lambda: _apply(stub, declared))
            script = Path(__file__).with_name("instant.py")
            them.start(
                "workers", sys.executable, str(script), str(backend),
                f"127.0.0.1:{scheduler}", str(workers), "20",
            )  # fmt: skip
            await until("the workers are accepted", lambda: _accepted(stub, workers))
        config = gateway.GatewayConfig(
            listen=f"127.0.0.1:{ours}",
            admin=f"127.0.0.1:{admin}",
            scheduler=f"127.0.0.1:{scheduler}",
            cluster="c",
            body_mode=options.body_mode,
        )
        bootstrap = them.folder / "envoy.json"
        bootstrap.write_text(gateway.dump(config))
        them.start("envoy", *gateway.command(config, bootstrap, threads=options.threads))
        places = {
            "worker": f"{instant.address(0)}:{backend}",
            "ecoserve": f"127.0.0.1:{ours}",
        }
        if router is not None:
            places["vllm-router"] = f"127.0.0.1:{theirs}"
            them.start(
                "vllm-router", router, "--host", "127.0.0.1", "--port", str(theirs),
                "--prometheus-port", str(free_port()),
                *(["--policy", options.router_policy] if options.router_policy else []),
                "--worker-urls",
                *(f"http://{instant.address(i)}:{backend}" for i in range(workers)),
            )  # fmt: skip
        for name, place in places.items():
            await until(f"{name} answers", lambda place=place: _answers(place))
        yield them, places


async def _apply(stub: Any, declared: admin_pb2.Cluster) -> bool:
    await stub.Apply(admin_pb2.ApplyRequest(cluster=declared))
    return True


async def _accepted(stub: Any, count: int) -> bool:
    state = await stub.Get(admin_pb2.GetRequest(name="c"))
    return bool(sum(i.state == "accepted" for i in state.instances) == count)


async def _answers(place: str) -> bool:
    async with httpx.AsyncClient(trust_env=False) as client:
        body = chat("m", "hello", 8)
        return (await client.post(f"http://{place}{PATH}", json=body)).status_code == 200


def requests(size: int) -> list[bytes]:
    """Requests with bodies of about ``size`` bytes, each of another conversation."""
    made = []
    for i in range(BODIES):
        text = words(size // 5, i)
        bare = len(json.dumps(chat("m", "", 8)))
        made.append(request(PATH, json.dumps(chat("m", text[: size - bare], 8)).encode()))
    return made


def milliseconds(latencies: list[float]) -> dict[str, float]:
    p50, p90, p99 = np.percentile(latencies, (50, 90, 99)) * 1e3
    return {"p50_ms": round(p50, 3), "p90_ms": round(p90, 3), "p99_ms": round(p99, 3)}


async def rounds(
    options: Any, places: dict[str, str], connections: int, made: list[bytes], rate: float | None
) -> dict[str, list[list[float]]]:
    """Latencies of each place, round by round; a closed loop, or an open one at ``rate``."""
    found: dict[str, list[list[float]]] = {name: [] for name in places}
    for _ in range(options.rounds):
        for name, place in places.items():
            pool = await Pool.open(place, connections, made)
            # Connections and caches are warm after a few.
            await pool.closed_loop(0.3)
            play = pool.closed_loop if rate is None else lambda s, p=pool: p.open_loop(rate, s)
            found[name].append(await play(options.seconds))
            pool.close()
    return found


async def compare(options: Any, them: Processes, places: dict[str, str], size: int) -> Any:
    made = requests(size)
    found: dict[str, Any] = {}
    single = await rounds(options, places, 1, made, None)
    own = statistics.median(float(np.median(r)) for r in single["worker"])
    for name, runs in single.items():
        found[name] = {"one_connection": milliseconds([x for r in runs for x in r])}
        if name != "worker":
            added = [float(np.median(r) - own) * 1e3 for r in runs]
            found[name]["added_p50_ms"] = round(statistics.median(added), 3)
            found[name]["added_p50_ms_rounds"] = [round(a, 3) for a in added]
    full = await rounds(options, places, CONNECTIONS, made, None)
    for name, runs in full.items():
        found[name]["capacity_per_s"] = round(
            statistics.median(len(r) for r in runs) / options.seconds, 1
        )
    rate = found["ecoserve"]["capacity_per_s"] / 2
    half = await rounds(options, places, CONNECTIONS, made, rate)
    for name, runs in half.items():
        found[name][f"at_{rate:.0f}_per_s"] = milliseconds([x for r in runs for x in r])
    found["ecoserve"] |= await picks(options, them, places["ecoserve"], made)
    return found


async def picks(options: Any, them: Processes, place: str, made: list[bytes]) -> dict[str, Any]:
    """CPU time that picks cost, with what reports cost alone taken off."""
    before = {name: them.cpu(name) for name in them.running}
    await asyncio.sleep(options.seconds)
    idle = {name: (them.cpu(name) - before[name]) / options.seconds for name in them.running}
    pool = await Pool.open(place, CONNECTIONS, made)
    await pool.closed_loop(0.3)
    before = {name: them.cpu(name) for name in them.running}
    count = len(await pool.closed_loop(options.seconds))
    used = {name: them.cpu(name) - before[name] for name in them.running}
    pool.close()
    own = used["scheduler"] - idle["scheduler"] * options.seconds
    return {
        "picks_per_cpu_s": round(count / own),
        "reports_cpu_share": round(idle["scheduler"], 3),
        # What one core does beside the reports.
        "picks_per_core_s": round(count / own * (1 - idle["scheduler"])),
        "envoy_cpu_us_per_call": round(used["envoy"] / count * 1e6),
        "scheduler_cpu_us_per_call": round(own / count * 1e6),
        "calls_per_s": round(count / options.seconds, 1),
    }


async def main(options: Any) -> None:
    found: dict[str, Any] = {
        "policy": options.policy,
        "cores": os.cpu_count(),
        "seconds": options.seconds,
        "rounds": options.rounds,
    }
    sizes = [int(s) for s in options.sizes.split(",")]
    async with world(options, 2, options.vllm_router) as (them, places):
        for size in sizes:
            if options.picks_only:
                told = await picks(options, them, places["ecoserve"], requests(size))
            else:
                told = await compare(options, them, places, size)
            found[f"{size}_bytes"] = told
            print(json.dumps({size: told}, indent=1), flush=True)
    async with world(options, options.many, None) as (them, places):
        for size in sizes:
            told = await picks(options, them, places["ecoserve"], requests(size))
            found[f"{size}_bytes"][f"{options.many}_sessions"] = told
            print(json.dumps({f"{options.many} sessions, {size}": told}, indent=1), flush=True)
    if options.out:
        options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vllm-router", help="path of the program; without it ours runs alone")
    parser.add_argument("--router-policy", help="of vllm-router; else its default")
    parser.add_argument("--policy", default="paced", help="ours")
    parser.add_argument("--upper", type=int, default=8, help="most instances of a macro instance")
    parser.add_argument("--body-mode", default="buffered", choices=("buffered", "full_duplex"))
    parser.add_argument("--threads", type=int, default=2, help="of Envoy")
    parser.add_argument("--sizes", default="1000,200000", help="bytes of a body")
    parser.add_argument("--many", type=int, default=100, help="sessions that report")
    parser.add_argument("--seconds", type=float, default=4.0, help="of each run")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--picks-only", action="store_true", help="no latencies, no comparison")
    parser.add_argument("--out", type=Path)
    uvloop.run(main(parser.parse_args()))
