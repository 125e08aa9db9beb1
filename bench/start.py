"""How long a worker takes from its start to its first token, beside stock vLLM.

One worker alone, alternating with stock's server with the same engine arguments; the page cache is
warm (one start of each is not counted) and the worker's calibration is kept from its first start,
as it is for a worker that restarts. ``--fresh`` has it calibrate each time.

    python bench/start.py --out docs/results/start.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
from pathlib import Path

import peers


async def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--fresh", action="store_true", help="calibrate at each start")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    of = peers.engines(peers.small_model(), 1)
    found: dict[str, list[float]] = {"ecoserve": [], "stock": []}
    with tempfile.TemporaryDirectory(prefix="ecoserve-bench-") as directory:
        kept = Path(directory)
        for run in range(options.runs + 1):
            state = kept / f"state-{run}" if options.fresh else kept / "state"
            servers = (peers.worker(of, state, name="ecoserve"), peers.stock(of))
            for server in servers if run % 2 == 0 else servers[::-1]:
                async with peers.running(server, kept / f"{server.name}.log") as seconds:
                    pass
                if run:  # the first start of each only warms the page cache
                    found[server.name].append(round(seconds, 2))
                    print(f"run {run}: {server.name} {seconds:.2f} s", flush=True)
    median = {name: round(statistics.median(times), 2) for name, times in found.items()}
    result = {
        "arguments": list(of.arguments[2:]),
        "fresh": options.fresh,
        "seconds": found,
        "median": median,
        "ratio": round(median["ecoserve"] / median["stock"], 3),
    }
    print(json.dumps(result["median"]), "ratio", result["ratio"])
    if options.out:
        options.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    asyncio.run(main())
