"""Measures how often a conversation finds its prefix in the cache, beside round-robin.

--conversations of --turns turns each run side by side; a turn carries all turns before it. First
through the gateway, then with each turn sent straight to the next worker in turn. The hit rate is
vLLM's own counter: cached prompt tokens over prompt tokens asked.

    python bench/affinity.py --scheduler http://127.0.0.1:PORT
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import httpx
from endpoint import arguments, idle, instances, only_cluster
from prometheus_client.parser import text_string_to_metric_families

from ecoserve.bench.load import chat, percentile, words

COUNTERS = ("vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total")


async def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--conversations", type=int, default=8)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--prompt", type=int, default=120, help="tokens of a turn's question")
    parser.add_argument("--output", type=int, default=24)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    cluster = await only_cluster(options.scheduler)
    workers = [f"http://{i['address']}" for i in instances(cluster)]
    found = {}
    for number, (name, targets) in enumerate(
        {
            f"ecoserve ({cluster['policy']})": itertools.repeat(options.url),
            "round-robin": itertools.cycle(workers),
        }.items()
    ):
        await idle(options.scheduler)
        before = await counters(workers)
        latencies = await converse(options, cluster["model"], targets, seed=1 + number)
        after = await counters(workers)
        queries, hits = (after[c] - before[c] for c in COUNTERS)
        found[name] = {
            "hit_rate": round(hits / queries, 3),
            "prompt_tokens": int(queries),
            "later_turns_ttft_p50_s": round(percentile(latencies, 50), 3),
        }
        print(name, json.dumps(found[name]), flush=True)
    if options.out:
        options.out.write_text(json.dumps(found, indent=2) + "\n")


async def counters(workers: list[str]) -> dict[str, float]:
    """vLLM's prefix-cache counters, summed over the workers."""
    total = dict.fromkeys(COUNTERS, 0.0)
    async with httpx.AsyncClient(trust_env=False, timeout=10) as client:
        for worker in workers:
            text = (await client.get(f"{worker}/metrics")).text
            for family in text_string_to_metric_families(text):
                for sample in family.samples:
                    if sample.name in total:
                        total[sample.name] += sample.value
    return total


async def converse(options: Any, model: str, targets: Iterator[str], seed: int) -> list[float]:
    """Plays all conversations; TTFTs of the turns after the first."""
    latencies: list[float] = []

    async def one(http: aiohttp.ClientSession, number: int) -> None:
        messages: list[dict[str, str]] = []
        for turn in range(options.turns):
            text = words(options.prompt, 100_000 * seed + 1000 * number + turn)
            messages.append({"role": "user", "content": text})
            body = chat(model, "", options.output) | {"messages": messages}
            loop = asyncio.get_running_loop()
            start, first, answer = loop.time(), 0.0, []
            url = f"{next(targets)}/v1/chat/completions"
            async with http.post(url, json=body) as response:
                response.raise_for_status()
                async for line in response.content:
                    if not line.startswith(b"data: {"):
                        continue
                    first = first or loop.time()
                    choices = json.loads(line[6:])["choices"]
                    answer += [c["delta"].get("content") or "" for c in choices]
            if turn:
                latencies.append(first - start)
            messages.append({"role": "assistant", "content": "".join(answer)})

    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(timeout=timeout) as http:
        await asyncio.gather(*(one(http, n) for n in range(options.conversations)))
    return latencies


if __name__ == "__main__":
    asyncio.run(main())
