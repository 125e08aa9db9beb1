"""Shows that *use* rises evenly from idle to goodput.

Finds the goodput (the Poisson rate at which --attainment of the calls meet both SLOs) by bisection,
then plays 1, 25, 50 and 100 % of it and reads the use and the busy share that the instances report.

    python bench/use.py --scheduler http://127.0.0.1:PORT --out docs/use.json
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
from endpoint import arguments, idle, instances, only_cluster, slo

from ecoserve.bench.load import Call, attainment, chat, percentile, play, poisson, words

SHARES = (0.01, 0.25, 0.5, 0.75, 1.0)


async def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--seconds", type=float, default=40.0, help="of each run")
    parser.add_argument("--prompt", type=int, default=200)
    parser.add_argument("--output", type=int, default=64)
    parser.add_argument("--attainment", type=float, default=0.9)
    parser.add_argument("--highest", type=float, default=8.0, help="rate that surely fails")
    parser.add_argument("--steps", type=int, default=5, help="of the bisection")
    parser.add_argument("--goodput", type=float, help="skips the search")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    cluster = await only_cluster(options.scheduler)
    promise = slo(cluster)
    goodput = options.goodput
    if goodput is None:
        low, high = 0.0, options.highest
        for step in range(options.steps):
            rate = (low + high) / 2
            outcomes, _ = await run(options, cluster["model"], rate, seed=step)
            met = attainment(outcomes, promise)
            print(f"rate {rate:.3f}/s: joint attainment {met:.1%}", flush=True)
            low, high = (rate, high) if met >= options.attainment else (low, rate)
        goodput = low
    rows = []
    for number, share in enumerate(SHARES):
        rate = share * goodput
        # New prompts each time: those of the last run are in the prefix caches.
        outcomes, samples = await run(options, cluster["model"], rate, seed=100 + number)
        rows.append(
            {
                "share": share,
                "rate": round(rate, 3),
                "calls": len(outcomes),
                "attainment": round(attainment(outcomes, promise), 3),
                "use": round(float(np.mean([s[0] for s in samples])), 3),
                "busy": round(float(np.mean([s[1] for s in samples])), 3),
                "ttft_p50": round(percentile([o.ttft for o in outcomes if o.ok], 50), 3),
                "tpot_p50": round(percentile([o.tpot for o in outcomes if o.ok], 50), 4),
            }
        )
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


async def run(options: Any, model: str, rate: float, seed: int) -> tuple[list[Any], list[Any]]:
    """Plays one rate; outcomes, and means of (use, busy) over the instances while it is steady."""
    await idle(options.scheduler)
    times = poisson(rate, options.seconds, seed) or [0.0]
    calls = [
        Call(due, chat(model, words(options.prompt, 10_000 * seed + i), options.output))
        for i, due in enumerate(times)
    ]
    samples: list[tuple[float, float]] = []

    async def watch() -> None:
        # Use looks back over a window of ten seconds; before that is full it is not steady.
        await asyncio.sleep(min(10.0, options.seconds / 2))
        while True:
            found = instances(await only_cluster(options.scheduler))
            samples.append(
                (np.mean([i["use"] for i in found]), np.mean([i["busy"] for i in found]))
            )
            await asyncio.sleep(0.5)

    watching = asyncio.create_task(watch())
    asyncio.get_running_loop().call_later(options.seconds, watching.cancel)
    outcomes = await play(options.url, calls)
    await asyncio.wait([watching])
    return outcomes, samples


if __name__ == "__main__":
    asyncio.run(main())
