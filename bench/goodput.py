"""Two instances behind our Envoy and scheduler against two stock vLLM servers behind vllm-router.

The same traces, lengths and SLOs for all; every worker has the same fixed CPU quota, and all of
them together leave the rest of the machine to gateways and load generator. SLOs are multiples, set
beforehand, of what stock takes for calls one by one. Each system is played rising rates until it
clearly fails, several times, the systems taking turns; in the same run all have the same trace, and
a later run begins at the rate that was sustained before. The rate that a system sustains is where
its attainment, made to fall with the rate (isotonic regression), crosses 90 %: of each run, and of
all runs together. (In a bisection a few long prompts of one short step would decide.) Goes on from
what --out holds.

    stock:POLICY           vLLM's own server as it comes (its processes, threads, compiled model)
    stock-layout:POLICY    the same in our process layout, threads, dtype, eager mode and KV size
    ecoserve               our workers

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
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import peers
import quota
from scipy.optimize import isotonic_regression

from e2e.harness import descendants
from ecoserve.bench.endpoint import Promise
from ecoserve.bench.plan import Plan
from ecoserve.bench.runner import Bench, Step
from ecoserve.bench.runner import Found as Seen
from ecoserve.local.machine import free_ports
from ecoserve.policy.state import SLO

WORKERS = 2
TRACES: dict[str, dict[str, Any]] = {
    "single-turn": {"prompt": "150:190", "output": "40:50", "turns": 1},
    "multi-turn": {"prompt": "90:120", "output": "40:50", "turns": 4, "think": 2.0},
}
# Requests a second; every system meets its promises at them.
FIRST = {"single-turn": 2.0, "multi-turn": 3.125}
# Of what a call of the single-turn trace takes alone.
TTFT, TPOT = 8.0, 3.0
TARGET, FAILED = 0.9, 0.85
GROWTH = 1.25


class Quiet:
    """Watches a bench in silence."""

    def known(self, found: Seen) -> None: ...
    def began(self, kind: str, load: float, calls: int | None, seconds: float) -> None: ...
    def ended(self, outcome: object) -> None: ...
    def stepped(self, step: Step) -> None: ...


class UntilKnown(Quiet):
    """Ends its bench once the endpoint's unloaded figures are known."""

    bench: Bench

    def known(self, found: Seen) -> None:
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
async def ecoserve(at: Setting, *, engines_only: bool = False) -> AsyncIterator[str]:
    """`ecoserve up` with its workers under the quota; its URL.

    ``engines_only``: only their engine processes are. They share the first CPU and all else has the
    others: CPUs may be halves of one core, whose engines would slow each other, the more the busier
    they are.
    """
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
            list(descendants(pid)) if engines_only else [pid, *descendants(pid)]
            for pid, line in descendants(os.getpid()).items()
            if "-m ecoserve_worker" in line and "--instance" in line and descendants(pid)
        ]
        for folder, pids in zip(folders, workers, strict=True):
            for pid in pids:
                quota.move(folder, pid)
        first, *others = sorted(os.sched_getaffinity(0))
        if engines_only and others:
            engines = {pid for pids in workers for pid in pids}
            for pid in descendants(os.getpid()):
                quota.pin(pid, {first} if pid in engines else set(others))
        yield server.url


@dataclass(frozen=True, slots=True)
class Point:
    """A rate that was played, requests a second: how many calls counted, how many met both SLOs."""

    rate: float
    calls: int
    met: int


async def climb(
    url: str, trace: str, slo: SLO, options: Any, run: int, before: list[list[Point]]
) -> list[Point]:
    """Rising rates until the endpoint clearly fails, from the lowest on, or from the highest that
    it sustained in the runs ``before``; lower ones too if it does not now."""
    rates = [FIRST[trace] * GROWTH**number for number in range(options.rates)]
    kept = [p.rate for p in pooled(before) if p.met >= TARGET * p.calls]
    first = rates.index(max(kept)) if kept else 0
    points: list[Point] = []
    for number in range(first, options.rates):
        points.append(await played(url, trace, slo, options.seconds, run, rates[number]))
        if points[-1].met < FAILED * points[-1].calls:
            break
    while first > 0 and points[0].met < TARGET * points[0].calls:
        first -= 1
        points.insert(0, await played(url, trace, slo, options.seconds, run, rates[first]))
    return points


async def played(url: str, trace: str, slo: SLO, seconds: float, run: int, rate: float) -> Point:
    """What came of a rate."""
    plan = Plan(
        url,
        rates=(rate,),
        search=False,
        ttft=Promise(slo.ttft, multiple=False),
        tpot=Promise(slo.tpot, multiple=False),
        seconds=seconds,
        warmup=seconds / 5,
        repeats=1,
        unloaded_calls=1,
        seed=1 + run,
        **TRACES[trace],
    )
    bench = Bench(plan, Quiet())
    await bench.play()
    (step,) = bench.found.steps
    summary = step.summary
    assert summary.attained is not None
    return Point(rate, summary.calls, round(summary.attained * summary.calls))


def pooled(runs: list[list[Point]]) -> list[Point]:
    """All runs' calls at each rate. A run that has failed counts as at its last rate from there."""
    found = []
    for rate in sorted({point.rate for points in runs for point in points}):
        same = [
            next((p for p in points if p.rate == rate), points[-1])
            for points in runs
            if points[0].rate <= rate
        ]
        found.append(Point(rate, sum(p.calls for p in same), sum(p.met for p in same)))
    return found


def sustained(points: list[Point]) -> float:
    """The rate, requests a second, at which attainment crosses the target; the lowest or the
    highest rate played if it is crossed at none."""
    calls = [p.calls for p in points]
    fitted = isotonic_regression(
        [p.met / p.calls for p in points], weights=calls, increasing=False
    ).x
    rate = points[0].rate
    for (low, high), (before, after) in zip(
        pairwise(p.rate for p in points), pairwise(fitted), strict=True
    ):
        if before < TARGET:
            break
        share = 1.0 if after >= TARGET else (before - TARGET) / (before - after)
        rate = low + share * (high - low)
    return float(rate)


@dataclass(slots=True)
class Found:
    """What was found so far: for each trace and system the points of each run."""

    slo: SLO
    points: dict[str, dict[str, list[list[Point]]]]

    def run(self, system: str) -> int:
        """The run that the system is to play next."""
        return min(len(systems.get(system, ())) for systems in self.points.values())

    def save(self, path: Path, setting: dict[str, Any]) -> None:
        """Writes it down, with what it was found with."""
        rates = {
            trace: {
                system: {
                    "sustained_per_s": round(sustained(pooled(runs)), 3),
                    "runs_per_s": [round(sustained(points), 3) for points in runs],
                    "points": [[asdict(p) for p in points] for points in runs],
                }
                for system, runs in systems.items()
            }
            for trace, systems in self.points.items()
        }
        told = {"setting": setting, "slo": asdict(self.slo), "found": rates}
        path.write_text(json.dumps(told, indent=1) + "\n")

    @classmethod
    def load(cls, path: Path, setting: dict[str, Any]) -> Found:
        """What was written down. Exits if that was found with another setting."""
        told = json.loads(path.read_text())
        if told["setting"] != setting:
            raise SystemExit(f"{path} was found with {told['setting']}, not with {setting}")
        points = {
            trace: {
                system: [[Point(**p) for p in points] for points in found["points"]]
                for system, found in systems.items()
            }
            for trace, systems in told["found"].items()
        }
        return cls(SLO(**told["slo"]), points)


async def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--router", type=Path, required=True, help="the vllm-router to run")
    parser.add_argument(
        "--systems",
        default="stock:cache_aware,stock-layout:cache_aware,stock-layout:round_robin,ecoserve",
    )
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each rate")
    parser.add_argument("--rates", type=int, default=8, help="most rates of a run")
    parser.add_argument("--cores", type=float, default=0.75, help="quota of each worker")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    systems = options.systems.split(",")
    setting = {
        "workers": WORKERS,
        "cores_each": options.cores,
        "cpus": len(os.sched_getaffinity(0)),
        "seconds_a_rate": options.seconds,
        "traces": TRACES,
    }
    print(json.dumps(setting), flush=True)
    model = peers.small_model()
    with tempfile.TemporaryDirectory(prefix="ecoserve-bench-") as temporary:
        directory = Path(temporary)
        engine = peers.engines(model, WORKERS)
        if options.out.exists():
            found = Found.load(options.out, setting)
        else:
            slo = await unloaded(engine, directory, options)
            found = Found(slo, {trace: {} for trace in TRACES})
        at = Setting(model, engine, directory, options.router, options.cores, found.slo)
        for run in range(options.runs):
            for system in systems if run % 2 == 0 else systems[::-1]:
                if found.run(system) > run:
                    continue
                kind, _, policy = system.partition(":")
                serving = ecoserve(at) if kind == "ecoserve" else behind_router(at, kind, policy)
                async with serving as url:
                    for trace, of_trace in found.points.items():
                        runs = of_trace.setdefault(system, [])
                        points = await climb(url, trace, found.slo, options, run, runs)
                        runs.append(points)
                        said = ", ".join(f"{p.rate:.2f}: {p.met}/{p.calls}" for p in points)
                        rate = sustained(points)
                        print(f"run {run} {trace} {system}: {rate:.2f}/s ({said})", flush=True)
                found.save(options.out, setting)
    for trace, of_trace in found.points.items():
        for system, runs in of_trace.items():
            median = statistics.median(sustained(points) for points in runs)
            print(f"{trace} {system}: {sustained(pooled(runs)):.2f}/s, median {median:.2f}")


async def unloaded(engine: Any, directory: Path, options: Any) -> SLO:
    """Multiples of one stock server's unloaded figures under the quota."""
    with quota.group("alone", options.cores) as folder:
        server = peers.worker(engine, directory, "--stock", name="stock-layout")
        async with peers.running(server, directory / "alone.log", group=folder):
            trace = TRACES["single-turn"]
            given = Plan(server.url, unloaded_calls=16, rates=(0.1,), search=False, **trace)
            watcher = UntilKnown()
            watcher.bench = Bench(given, watcher)
            await watcher.bench.play()
            known = watcher.bench.found
    assert known.alone is not None
    slo = SLO(TTFT * known.alone.ttft, TPOT * known.alone.tpot)
    print(f"TTFT SLO {slo.ttft:.2f} s, TPOT SLO {1e3 * slo.tpot:.0f} ms", flush=True)
    return slo


if __name__ == "__main__":
    asyncio.run(main())
