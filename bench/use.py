"""Shows that *use* rises evenly from idle to goodput.

Finds the goodput (the Poisson rate at which --attainment of the calls meet both SLOs, pooled over
--seeds) by bisection, then plays 1, 25, 50, 75 and 100 % of it. While it is steady (after --warm
seconds, until the last call is due) it reads the use and the busy share that the instances report,
and counts the tokens that they generate: use is compared with what was served, because a short
Poisson run brings more or fewer calls than its rate says.

    python bench/use.py --scheduler http://127.0.0.1:PORT --out docs/results/use.json
"""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from endpoint import arguments, idle, instances, only_cluster, poisson, slo

from ecoserve.bench.load import Call, Outcome, attainment, chat, percentile, play, words
from ecoserve.policy.state import SLO

SHARES = (0.01, 0.25, 0.5, 0.75, 1.0)


async def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="of each run")
    parser.add_argument("--warm", type=float, default=15.0, help="of these, before it is steady")
    parser.add_argument("--seeds", type=int, default=2, help="runs at each rate")
    parser.add_argument("--prompt", type=int, default=200)
    parser.add_argument("--output", type=int, default=64)
    parser.add_argument("--attainment", type=float, default=0.9)
    parser.add_argument("--highest", type=float, default=8.0, help="rate that surely fails")
    parser.add_argument("--steps", type=int, default=5, help="of the bisection")
    parser.add_argument("--goodput", type=float, help="skips the search")
    parser.add_argument("--shares", type=float, nargs="+", default=SHARES, help="of the goodput")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    cluster = await only_cluster(options.scheduler)
    promise = slo(cluster)
    goodput = options.goodput
    if goodput is None:
        low, high = 0.0, options.highest
        for step in range(options.steps):
            rate = (low + high) / 2
            runs = [
                await run(options, cluster["model"], rate, seed=10 * step + i)
                for i in range(options.seeds)
            ]
            met = attainment([o for r in runs for o in r.outcomes], promise)
            print(f"rate {rate:.3f}/s: joint attainment {met:.1%}", flush=True)
            low, high = (rate, high) if met >= options.attainment else (low, rate)
        goodput = low
    rows = []
    for number, share in enumerate(options.shares):
        runs = [
            # New prompts each time: those of the last run are in the prefix caches.
            await run(options, cluster["model"], share * goodput, seed=1000 + 10 * number + i)
            for i in range(options.seeds)
        ]
        rows.append(row(share, share * goodput, runs, promise, options.output))
        print(json.dumps(rows[-1]), flush=True)
    found = {
        "policy": cluster["policy"],
        "slo": cluster["slo"],
        "instances": len(instances(cluster)),
        "goodput": round(goodput, 3),
        "rows": rows,
    }
    if options.out:
        options.out.write_text(json.dumps(found, indent=2) + "\n")


@dataclass(slots=True)
class Run:
    """Outcomes, what the instances reported while it was steady, and what they served then."""

    outcomes: list[Outcome] = field(default_factory=list)
    samples: list[dict[str, Any]] = field(default_factory=list)
    tokens: float = 0.0
    seconds: float = 0.0


def row(share: float, rate: float, runs: list[Run], promise: SLO, output: int) -> dict[str, Any]:
    """One line of the result: means over the runs."""
    outcomes = [o for r in runs for o in r.outcomes]
    whole = [o for o in outcomes if o.ok]
    samples = [s for r in runs for s in r.samples]
    served = sum(r.tokens for r in runs) / sum(r.seconds for r in runs) / output
    use = float(np.mean([s["use"] for s in samples]))
    latency = {
        name: float(f"{np.median([s['latency'][name] for s in samples]):.3g}")
        for name in samples[0]["latency"]
    }
    return {
        "share": share,
        "rate": round(rate, 3),
        "calls": len(outcomes),
        "served_per_s": round(served, 3),
        "attainment": round(attainment(outcomes, promise), 3),
        "use": round(use, 3),
        "use_per_served": round(use / served, 3) if served else None,
        "busy": round(float(np.mean([s["busy"] for s in samples])), 3),
        "running": round(float(np.mean([s["running"] for s in samples])), 1),
        "ttft_p50": round(percentile([o.ttft for o in whole], 50), 3),
        "tpot_p50": round(percentile([o.tpot for o in whole], 50), 4),
        "latency": latency,
    }


async def generated(cluster: dict[str, Any]) -> float:
    """Tokens that the workers have generated so far, by vLLM's own counter."""
    total = 0.0
    async with httpx.AsyncClient(trust_env=False, timeout=10) as client:
        for instance in instances(cluster):
            text = (await client.get(f"http://{instance['address']}/metrics")).text
            for line in text.splitlines():
                if line.startswith("vllm:generation_tokens_total"):
                    total += float(line.rsplit(" ", 1)[1])
    return total


async def run(options: Any, model: str, rate: float, seed: int) -> Run:
    """Plays one rate and watches it while it is steady."""
    await idle(options.scheduler)
    times = poisson(rate, options.seconds, seed) or [options.warm + 1.0]
    calls = [
        Call(due, chat(model, words(options.prompt, 10_000 * seed + i), options.output))
        for i, due in enumerate(times)
    ]
    found = Run()

    async def watch() -> None:
        await asyncio.sleep(options.warm)
        cluster = await only_cluster(options.scheduler)
        began, before = time.perf_counter(), await generated(cluster)
        while time.perf_counter() < began + options.seconds - options.warm:
            found.samples += instances(await only_cluster(options.scheduler))
            await asyncio.sleep(0.5)
        found.tokens = await generated(cluster) - before
        found.seconds = time.perf_counter() - began

    watching = asyncio.create_task(watch())
    found.outcomes = await play(options.url, calls)
    await watching
    return found


if __name__ == "__main__":
    asyncio.run(main())
