"""Two instances behind our Envoy and scheduler against two stock vLLM servers behind vllm-router.

The same trace, lengths and SLOs for all; every worker has the same fixed CPU quota, and all of them
together leave the rest of the machine to gateways and load generator. SLOs are multiples, set
beforehand, of what stock takes for calls of the trace one by one. For each system the rate that it
sustains at 90 % joint attainment is searched, several times, the systems taking turns.

    stock           vLLM's own server as it comes (its processes, threads, compiled model)
    stock-layout    the same in our process layout, threads, dtype, eager mode and KV size
    ecoserve        our workers

    python bench/goodput.py --router PATH/TO/vllm-router --out docs/results/goodput.json
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import sys
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peers
import quota

from e2e.harness import descendants
from ecoserve.bench.endpoint import Promise
from ecoserve.bench.plan import Plan
from ecoserve.bench.runner import Bench, Found, Step
from ecoserve.local.machine import free_ports
from ecoserve.policy.state import SLO

WORKERS = 2
TRACES: dict[str, dict[str, Any]] = {
    "single-turn": {"prompt": "120:200", "output": "40:60", "turns": 1},
    "multi-turn": {"prompt": "80:120", "output": "40:60", "turns": 4, "think": 2.0},
}
TTFT, TPOT = 8.0, 3.0


class Quiet:
    """Watches a bench and says one line a step."""

    def __init__(self, name: str) -> None:
        self.name = name

    def known(self, found: Found) -> None: ...
    def began(self, kind: str, load: float, calls: int | None, seconds: float) -> None: ...
    def ended(self, outcome: object) -> None: ...
    def stepped(self, step: Step) -> None:
        met = step.summary.attained
        print(f"  {self.name}: {step.load:.2f}/s met {met:.1%}", flush=True)


class UntilKnown(Quiet):
    """Ends its bench once the endpoint's unloaded figures are known."""

    bench: Bench

    def known(self, found: Found) -> None:
        self.bench.stop()


@dataclass(frozen=True, slots=True)
class Setting:
    """What all runs share."""

    model: Any
    engine: Any
    directory: Path
    router: Path
    cores: float
    slo: SLO


@contextlib.asynccontextmanager
async def behind_router(at: Setting, kind: str, policy: str) -> AsyncIterator[str]:
    """Two stock servers behind vllm-router; its URL."""
    async with contextlib.AsyncExitStack() as stack:
        urls = []
        for number in range(WORKERS):
            folder = stack.enter_context(quota.group(f"{kind}-{number}", at.cores))
            server = (
                peers.stock(at.engine)
                if kind == "stock"
                else peers.worker(at.engine, at.directory, "--stock", name="stock-layout")
            )
            log = at.directory / f"{kind}-{number}.log"
            await stack.enter_async_context(peers.running(server, log, group=folder))
            urls.append(server.url)
        (port, metrics) = free_ports(2)
        command = (
            str(at.router),
            *("--host", "127.0.0.1", "--port", str(port)),
            *("--prometheus-port", str(metrics), "--policy", policy),
            *("--worker-urls", *urls),
        )
        router = peers.Server("vllm-router", port, command, {})
        await stack.enter_async_context(peers.running(router, at.directory / "router.log"))
        yield router.url


@contextlib.asynccontextmanager
async def ecoserve(at: Setting) -> AsyncIterator[str]:
    """`ecoserve up` with its workers under the quota; its URL."""
    (port,) = free_ports(1)
    command: tuple[str, ...] = (sys.executable, "-m", "ecoserve", "up", "--port", str(port))
    command += ("--workers", str(WORKERS), "--run-dir", str(at.directory / "run"))
    command += ("--ttft-slo", str(at.slo.ttft), "--tpot-slo", str(at.slo.tpot))
    server = peers.Server("ecoserve", port, command, {})
    async with contextlib.AsyncExitStack() as stack:
        folders = [
            stack.enter_context(quota.group(f"ecoserve-{number}", at.cores))
            for number in range(WORKERS)
        ]
        await stack.enter_async_context(peers.running(server, at.directory / "up.log"))
        workers = [
            [pid, *descendants(pid)]
            for pid, line in descendants(os.getpid()).items()
            if "-m ecoserve_worker" in line and "--instance" in line and descendants(pid)
        ]
        for folder, pids in zip(folders, workers, strict=True):
            for pid in pids:
                quota.move(folder, pid)
        yield server.url


def plan(url: str, trace: str, slo: SLO, options: Any, seed: int, rate: float) -> Plan:
    """The search of one run."""
    return Plan(
        url,
        rates=(rate,),
        ttft=Promise(slo.ttft, multiple=False),
        tpot=Promise(slo.tpot, multiple=False),
        seconds=options.seconds,
        warmup=options.seconds / 5,
        repeats=1,
        unloaded_calls=2,
        precision=0.06,
        most_rates=options.rates,
        seed=seed,
        **TRACES[trace],
    )


async def search(name: str, url: str, trace: str, at: Setting, options: Any, run: int) -> Found:
    bench = Bench(plan(url, trace, at.slo, options, 1 + run, options.first), Quiet(name))
    await bench.play()
    return bench.found


async def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--router", type=Path, required=True, help="the vllm-router to run")
    parser.add_argument("--policies", default="round_robin,cache_aware", help="of vllm-router")
    parser.add_argument("--systems", default="stock,stock-layout,ecoserve")
    parser.add_argument("--traces", default=",".join(TRACES))
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=40.0, help="of each rate")
    parser.add_argument("--rates", type=int, default=5, help="most rates of a search")
    parser.add_argument("--first", type=float, default=2.0, help="rate to begin with")
    parser.add_argument("--cores", type=float, default=0.75, help="quota of each worker")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    systems: list[tuple[str, str]] = []
    for system in options.systems.split(","):
        policies = [""] if system == "ecoserve" else options.policies.split(",")
        systems += [(system, policy) for policy in policies]
    cpus = len(os.sched_getaffinity(0))
    print(f"{WORKERS} workers of {options.cores} cores on {cpus}", flush=True)
    model = peers.small_model()
    found: dict[str, dict[str, list[float]]] = {trace: {} for trace in options.traces.split(",")}
    written: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="ecoserve-bench-") as temporary:
        directory = Path(temporary)
        engine = peers.engines(model, WORKERS)
        slos = {t: await unloaded(model, engine, directory, t, options) for t in found}
        for run in range(options.runs):
            for system, policy in systems if run % 2 == 0 else systems[::-1]:
                for trace in found:
                    at = Setting(
                        model, engine, directory, options.router, options.cores, slos[trace]
                    )
                    name = f"{system} {policy}".strip()
                    serving = ecoserve(at) if not policy else behind_router(at, system, policy)
                    async with serving as url:
                        result = await search(name, url, trace, at, options, run)
                    assert result.search is not None
                    found[trace].setdefault(name, []).append(round(result.search.low, 3))
                    print(f"run {run} {trace} {name}: {result.search.low:.2f}/s", flush=True)
            written = results(found, slos, options, cpus)
            if options.out:  # after each run: a search of hours that is cut short keeps what it has
                options.out.write_text(json.dumps(written, indent=1) + "\n")
    print(json.dumps(written["found"], indent=1))


def results(
    found: dict[str, dict[str, list[float]]], slos: dict[str, SLO], options: Any, cpus: int
) -> dict[str, Any]:
    """What was found so far, as it is written down."""
    rows = {
        trace: {
            "slo": {"ttft_s": round(slos[trace].ttft, 3), "tpot_s": round(slos[trace].tpot, 4)},
            "goodput_per_s": {
                name: {"median": statistics.median(rates), "runs": rates}
                for name, rates in systems_found.items()
            },
        }
        for trace, systems_found in found.items()
    }
    return {
        "cores_each": options.cores,
        "cpus": cpus,
        "seconds_a_rate": options.seconds,
        "traces": TRACES,
        "found": rows,
    }


async def unloaded(model: Any, engine: Any, directory: Path, trace: str, options: Any) -> SLO:
    """The SLO of a trace: multiples of one stock server's unloaded figures under the quota."""
    with quota.group("alone", options.cores) as folder:
        server = peers.worker(engine, directory, "--stock", name="stock-layout")
        async with peers.running(server, directory / "alone.log", group=folder):
            given = Plan(server.url, unloaded_calls=8, rates=(0.1,), search=False, **TRACES[trace])
            watcher = UntilKnown("alone")
            watcher.bench = Bench(given, watcher)
            await watcher.bench.play()
            known = watcher.bench.found
    assert known.alone is not None
    slo = SLO(TTFT * known.alone.ttft, TPOT * known.alone.tpot)
    print(f"{trace}: TTFT SLO {slo.ttft:.2f} s, TPOT SLO {1e3 * slo.tpot:.0f} ms", flush=True)
    return slo


if __name__ == "__main__":
    asyncio.run(main())
