"""The simulator beside the two real engines that it stands for: the same trace, the same policy.

Five times over, `ecoserve up` is started afresh with two workers. Once they are warm, calls one by
one show what gateway and server add; then at each rate a load of other prompts lets the engines'
own latency models settle, and the trace is played. The prompts are the same in every run. Each
engine process is under a fixed quota of one CPU that the engines share; what stands before them has
the others, as it has all CPUs where the engine is a GPU. So a step takes the same time whatever the
other engine does and however many streams are being answered.

The simulator is given what was measured before the trace was played, the mean over engines and
runs: the latency model that the engines report, its error as the noise of step times, what a call
alone takes beyond the model of then (to the first token, and for each further one), the engines' KV
size and limits. It is then asked for the same arrivals with the same numbers of tokens.

A figure is *shown* if no real run is off their median by more than a tenth; it *fits* if the
simulator's is not either. The machine must be quiet: what else runs shows as a spread of the runs.

    python bench/fidelity.py --out docs/results/fidelity.json
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import re
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import goodput
import peers
from endpoint import idle, instances, only_cluster

from ecoserve.bench.endpoint import discover, writer
from ecoserve.bench.judge import attainment, percentile
from ecoserve.bench.load import Client, Outcome
from ecoserve.bench.play import Run
from ecoserve.bench.prompts import Writer
from ecoserve.bench.workload import Conversation, Workload, source
from ecoserve.policy.latency import LatencyModel
from ecoserve.policy.state import SLO
from ecoserve.sim.cost import FittedCost
from ecoserve.sim.engine import simulate
from ecoserve.sim.records import Arrival, Cluster, Options
from ecoserve.sim.systems import EcoServe

TRACE = "single-turn"
TOLERANCE = 0.1
# Figures that a simulation gives are medians over so many seeds of its noise.
NOISE_SEEDS = 5


@dataclass(frozen=True, slots=True)
class Played:
    """Calls in order of when they were due, and a latency model of each engine: of just before they
    were played, or of just after calls that were alone."""

    calls: list[Outcome]
    latencies: list[LatencyModel]


@dataclass(frozen=True, slots=True)
class Measured:
    """A real run: the engines' limits, calls alone, and the trace at each rate."""

    limits: dict[str, int]
    alone: Played
    traces: dict[float, Played]


@dataclass(frozen=True, slots=True)
class Overheads:
    """Seconds that a call takes beyond the steps of the latency model: until its first token, and
    for each further one."""

    first: float
    step: float


def load(rate: float, count: int, seed: int) -> list[Conversation]:
    """``count`` calls at ``rate`` a second."""
    shape = goodput.TRACES[TRACE]
    given = source(data=None, prompt=shape["prompt"], output=shape["output"], cv=None)
    return Workload(given).conversations(rate, count, seed)


async def play(client: Client, by: Writer, salt: int, calls: Sequence[Conversation]) -> Any:
    """Plays the calls at their times; outcomes in that order. RuntimeError if one fails."""
    run = Run(client, replace(by, salt=salt))
    await run.open_loop(calls)
    failed = [o for o in run.outcomes if not o.ok]
    if failed:
        raise RuntimeError(f"{len(failed)} calls failed, such as: {failed[0].error[:300]}")
    return sorted(run.outcomes, key=lambda o: o.call.due)


async def measure(url: str, scheduler: str, o: Any) -> Measured:
    """One real run, on a cluster that has served nothing yet."""
    salts = itertools.count(1)  # no prompt is in the caches of what was played before

    async def engines() -> list[dict[str, Any]]:
        await idle(scheduler)
        return instances(await only_cluster(scheduler))

    async with Client(url) as client:
        model = await discover(client, None)
        by = await writer(client, model.name, "chat")

        async def settle(rate: float) -> list[LatencyModel]:
            await play(client, by, next(salts), load(rate, o.settling, seed=o.seed + 1))
            return [LatencyModel(**one["latency"]) for one in await engines()]

        await settle(max(o.rates))
        alone = []
        for call in load(1.0, o.alone, seed=o.seed + 2):
            turn = replace(call.turns[0], at=0.0)
            alone += await play(client, by, next(salts), [replace(call, turns=(turn,))])
        told = await engines()
        of_alone = Played(alone, [LatencyModel(**one["latency"]) for one in told])
        traces = {}
        for rate in o.rates:
            latencies = await settle(rate)
            calls = load(rate, o.calls, seed=o.seed)
            traces[rate] = Played(await play(client, by, next(salts), calls), latencies)
        return Measured(told[0]["limits"], of_alone, traces)


def mean_model(models: Sequence[LatencyModel]) -> LatencyModel:
    """The model whose predictions are the mean of the models' (but for ``mixing``)."""
    names = [field.name for field in fields(LatencyModel)]
    return LatencyModel(**{n: statistics.mean(getattr(m, n) for m in models) for n in names})


def overheads(alone: Sequence[Outcome], latency: LatencyModel) -> Overheads:
    """Medians over calls that were alone."""
    step = statistics.median(
        o.tpot - latency.decode(1, o.prompt_tokens + o.tokens // 2) for o in alone if o.tokens > 1
    )
    first = statistics.median(o.ttft - latency.prefill(o.prompt_tokens) for o in alone)
    return Overheads(first, step)


def simulated(
    played: Sequence[Outcome],
    slo: SLO,
    latency: LatencyModel,
    extra: Overheads,
    limits: dict[str, int],
    workers: int,
) -> dict[str, float]:
    """The figures that the simulator gives for the calls that were played."""
    # The engine's own time between steps lengthens every step, the gateway's and server's do not.
    between = max(extra.step, 0.0)
    slower = replace(
        latency,
        prefill_fixed=latency.prefill_fixed + between,
        decode_fixed=latency.decode_fixed + between,
    )
    cluster = Cluster(FittedCost(slower, limits["kv_tokens"]), workers)
    arrivals = [Arrival(o.call.due, o.prompt_tokens, o.tokens) for o in played]
    runs = []
    for seed in range(NOISE_SEEDS):
        options = Options(
            seed=seed,
            noise=latency.error,
            max_num_seqs=limits["max_num_seqs"],
            step_budget=limits["step_budget"],
            block=limits["block_tokens"],
        )
        outcomes = simulate(EcoServe(), cluster, arrivals, slo, options).outcomes
        ttft = [o.ttft + extra.first - between for o in outcomes]
        tpot = [o.tpot for o in outcomes]
        runs.append(figures(ttft, tpot, slo))
    return {name: statistics.median(run[name] for run in runs) for name in runs[0]}


def figures(ttft: Sequence[float], tpot: Sequence[float], slo: SLO) -> dict[str, float]:
    met = [t <= slo.ttft and p <= slo.tpot for t, p in zip(ttft, tpot, strict=True)]
    return {
        "ttft_p50_s": percentile(ttft, 50),
        "ttft_p90_s": percentile(ttft, 90),
        "tpot_p50_s": percentile(tpot, 50),
        "tpot_p90_s": percentile(tpot, 90),
        "attainment": sum(met) / len(met),
    }


def real(played: Sequence[Outcome], slo: SLO) -> dict[str, float]:
    found = figures([o.ttft for o in played], [o.tpot for o in played], slo)
    assert found["attainment"] == attainment(played, slo)
    return found


def judged(runs: Sequence[float], found: float) -> dict[str, Any]:
    """One figure: of the real runs and of the simulator."""
    median = statistics.median(runs)
    spread = max(abs(run / median - 1) for run in runs)
    ratio = found / median
    return {
        "runs": list(runs),
        "median": median,
        "spread": spread,
        "simulated": found,
        "ratio": ratio,
        "shown": spread <= TOLERANCE,
        "fits": abs(ratio - 1) <= TOLERANCE,
    }


def compared(runs: Sequence[Measured], slo: SLO) -> dict[str, Any]:
    """All that is found of the runs."""
    alone = mean_model([model for run in runs for model in run.alone.latencies])
    extra = overheads([call for run in runs for call in run.alone.calls], alone)
    limits = runs[0].limits
    workers = len(runs[0].alone.latencies)
    rates = {}
    for rate in runs[0].traces:
        traces = [run.traces[rate] for run in runs]
        latency = mean_model([model for trace in traces for model in trace.latencies])
        found = simulated(traces[0].calls, slo, latency, extra, limits, workers)
        of_runs = [real(trace.calls, slo) for trace in traces]
        judgements = {n: judged([run[n] for run in of_runs], v) for n, v in found.items()}
        rates[str(rate)] = {"latency": asdict(latency), "figures": judgements}
    return {
        "slo": asdict(slo),
        "alone": {"latency": asdict(alone), "overheads": asdict(extra)},
        "limits": limits,
        "rates": rates,
    }


def show(found: dict[str, Any]) -> None:
    for rate, its in found["rates"].items():
        print(f"\n{rate} calls/s{'':>9} {'real, median':>13} {'spread':>7} {'simulated':>10} ratio")
        for name, row in its["figures"].items():
            word = "not shown" if not row["shown"] else "fits" if row["fits"] else "off"
            print(
                f"  {name:<18} {row['median']:>13.4f} {row['spread']:>7.1%}"
                f" {row['simulated']:>10.4f} {row['ratio']:.3f} {word}"
            )


def scheduler_of(log: Path) -> str:
    """The scheduler's HTTP address, which `ecoserve up` prints once all is ready."""
    deadline = time.monotonic() + 60
    while (found := re.search(r"State +(http://\S+)/state", log.read_text())) is None:
        if time.monotonic() > deadline:
            raise RuntimeError(f"`ecoserve up` does not get ready: see {log}")
        time.sleep(0.1)
    return found[1]


async def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--rates", type=float, nargs="+", default=[0.7, 1.2], help="calls a second")
    parser.add_argument("--calls", type=int, default=80, help="of the trace, at each rate")
    parser.add_argument("--settling", type=int, default=40, help="calls before each trace")
    parser.add_argument("--alone", type=int, default=8, help="calls one by one")
    parser.add_argument("--cores", type=float, default=0.45, help="quota of each engine")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path)
    o = parser.parse_args()
    cpus = len(os.sched_getaffinity(0))
    print(f"{goodput.WORKERS} engines of {o.cores} cores on {cpus}", flush=True)
    model = peers.small_model()
    engine = peers.engines(model, goodput.WORKERS)
    runs = []
    with tempfile.TemporaryDirectory(prefix="ecoserve-bench-") as temporary:
        directory = Path(temporary)
        slo = await goodput.unloaded(engine, directory, o)
        at = goodput.Setting(model, engine, directory, Path(), o.cores, slo)
        for number in range(o.runs):
            async with goodput.ecoserve(at, engines_only=True) as url:
                runs.append(await measure(url, scheduler_of(directory / "up.log"), o))
            for rate, trace in runs[-1].traces.items():
                print(f"run {number}, {rate}/s: {json.dumps(real(trace.calls, slo))}", flush=True)
    found = {"cores_each": o.cores, "cpus": cpus, "trace": goodput.TRACES[TRACE], "calls": o.calls}
    found |= compared(runs, slo)
    show(found)
    if o.out:
        o.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    asyncio.run(main())
