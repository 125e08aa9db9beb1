"""Running decodes and a burst of long prompts: stock vLLM beside our policies, one engine each.

Every system is one server on this machine with the same engine arguments, process layout, threads
and KV size; stock runs with its default token budget a step and with smaller ones (its chunk). The
load is the same for all: decodes that have begun, then long prompts at once. The SLOs are
multiples, set beforehand, of what stock takes for one such call with nothing else running (TTFT of
the long prompt, TPOT of the decode); our workers are told them, stock knows none. Runs alternate.

    python bench/interference.py --out docs/results/interference.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import peers

from ecoserve.bench.load import Call, Outcome, attainment, chat, percentile, play, words
from ecoserve.policy import POLICIES
from ecoserve.policy.state import SLO

CHUNKS = (128, 256, 512)
# (TTFT, TPOT) as multiples of stock's unloaded ones.
SETTINGS = {"loose": (12.0, 4.0), "tight": (8.0, 2.0)}
DECODES, DECODE_PROMPT, DECODE_OUTPUT = 8, 100, 200
PROMPTS, PROMPT, PROMPT_OUTPUT = 6, 1000, 32
BURST_AT = 2.5


def load(model: str, seed: int) -> list[Call]:
    """The decodes, then the burst."""
    calls = [
        Call(0.05 * i, chat(model, words(DECODE_PROMPT, (seed, 0, i)), DECODE_OUTPUT))
        for i in range(DECODES)
    ]
    return calls + [
        Call(BURST_AT, chat(model, words(PROMPT, (seed, 1, i)), PROMPT_OUTPUT))
        for i in range(PROMPTS)
    ]


async def unloaded(of: Any, model: str, directory: Path) -> SLO:
    """Stock's TTFT of a long prompt and TPOT of a decode, alone; medians of three."""
    server = peers.worker(of, directory, "--stock", name="stock")
    async with peers.running(server, directory / "unloaded.log"):
        ttft, tpot = [], []
        for seed in range(4):
            (first,) = await play(server.url, [Call(0, chat(model, words(PROMPT, (9, seed)), 2))])
            (second,) = await play(
                server.url, [Call(0, chat(model, words(DECODE_PROMPT, (8, seed)), 64))]
            )
            if seed:  # the first warms up
                ttft.append(first.ttft)
                tpot.append(second.tpot)
    return SLO(float(np.median(ttft)), float(np.median(tpot)))


def servers(of: Any, directory: Path, slos: dict[str, SLO]) -> list[tuple[peers.Server, list[str]]]:
    """Every system, with the settings that it is judged at."""
    found = [(peers.worker(of, directory, "--stock", name="stock"), list(slos))]
    for chunk in CHUNKS:
        budget = ("--max-num-batched-tokens", str(chunk))
        name = f"stock-{chunk}"
        found.append((peers.worker(of, directory, "--stock", name=name, engine=budget), list(slos)))
    for policy in POLICIES:
        for setting, slo in slos.items():
            own = ("--policy", policy, "--ttft-slo", str(slo.ttft), "--tpot-slo", str(slo.tpot))
            found.append((peers.worker(of, directory, *own, name=policy), [setting]))
    return found


def row(outcomes: list[Outcome], slo: SLO) -> dict[str, Any]:
    """What is told of all runs of a system at one setting."""
    decodes = [o for o in outcomes if o.call.due < BURST_AT]
    burst = [o for o in outcomes if o.call.due >= BURST_AT]
    gaps = [g for o in decodes for g in o.gaps]
    return {
        "both": round(attainment(outcomes, slo), 3),
        "decodes_met": round(attainment(decodes, slo), 3),
        "burst_met": round(attainment(burst, slo), 3),
        "failed": sum(not o.ok for o in outcomes),
        "burst_ttft_p50": round(percentile([o.ttft for o in burst], 50), 2),
        "burst_ttft_max": round(percentile([o.ttft for o in burst], 100), 2),
        "decode_tpot_p50_ms": round(1e3 * percentile([o.tpot for o in decodes], 50), 1),
        "decode_tpot_max_ms": round(1e3 * percentile([o.tpot for o in decodes], 100), 1),
        "burst_tpot_max_ms": round(1e3 * percentile([o.tpot for o in burst], 100), 1),
        "itl_p50_ms": round(1e3 * percentile(gaps, 50), 1),
        "itl_p99_ms": round(1e3 * percentile(gaps, 99), 1),
        "makespan_s": round(max(o.end for o in outcomes), 1),
    }


async def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=3, help="starts of each system")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    model = peers.small_model()
    of = peers.engines(model, 1)
    outcomes: dict[tuple[str, str], list[Outcome]] = {}
    with tempfile.TemporaryDirectory(prefix="ecoserve-bench-") as temporary:
        directory = Path(temporary)
        alone = await unloaded(of, model.served_name, directory)
        slos = {
            name: SLO(ttft * alone.ttft, tpot * alone.tpot)
            for name, (ttft, tpot) in SETTINGS.items()
        }
        print(f"unloaded: TTFT {alone.ttft:.3f} s, TPOT {1e3 * alone.tpot:.1f} ms", flush=True)
        for run in range(options.runs):
            order = servers(of, directory, slos)
            for server, settings in order if run % 2 == 0 else order[::-1]:
                async with peers.running(server, directory / f"{server.name}.log"):
                    # A load of another seed first: the fit and the caches are then in use.
                    await play(server.url, load(model.served_name, 1000))
                    found = await play(server.url, load(model.served_name, run))
                for setting in settings:
                    outcomes.setdefault((setting, server.name), []).extend(found)
                    print(run, setting, server.name, row(found, slos[setting]), flush=True)
    rows = [
        {"setting": setting, "system": system, **row(found, slos[setting])}
        for (setting, system), found in sorted(outcomes.items())
    ]
    result = {
        "unloaded": {"ttft_s": round(alone.ttft, 4), "tpot_s": round(alone.tpot, 5)},
        "slos": {
            n: {"ttft_s": round(s.ttft, 3), "tpot_s": round(s.tpot, 4)} for n, s in slos.items()
        },
        "decodes": f"{DECODES} x {DECODE_PROMPT}+{DECODE_OUTPUT} tokens",
        "burst": f"{PROMPTS} x {PROMPT}+{PROMPT_OUTPUT} tokens",
        "runs": options.runs,
        "rows": rows,
    }
    for one in rows:
        print(json.dumps(one))
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    asyncio.run(main())
