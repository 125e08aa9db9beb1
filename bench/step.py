"""What the plug-in costs per engine step: its scheduler against vLLM's own, same prompts.

Each run is a process of its own with one engine, stepped by hand through decodes of several batch
sizes: the shortest steps, of which any cost is the largest share. Runs of the two alternate. For
each batch it prints

- the share of a stock step that the plug-in's scheduling takes beyond vLLM's own, from the time
  spent in ``schedule`` and ``update_from_output`` alone: these are short, so the noise of the
  model's own time does not hide them;
- the ratio of the medians of whole steps, which holds that noise.

The plug-in tells its state to this process as it tells a worker's front end.

    python bench/step.py --out docs/results/step.json
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

BATCHES = (1, 8, 32)
PROMPT = 64
KINDS = ("stock", "ecoserve")


def child(kind: str, policy: str, steps: int, front: str) -> dict[str, Any]:
    """Medians of one run, seconds, by batch."""
    # One process: the engine is stepped by hand. Set before vLLM is imported.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("GOMP_SPINCOUNT", "2000")
    import numpy as np
    import peers
    from ecoserve_worker.messages import Settings, engine_config
    from ecoserve_worker.vllm_plugin import SCHEDULER
    from vllm import LLM, SamplingParams

    of = peers.engines(peers.small_model(), 1)
    for name, value in of.environments[0].items():
        os.environ.setdefault(name, value)
    ours: dict[str, Any] = {}
    if kind == "ecoserve":
        settings = Settings(policy, {}, 1e3, 1e3, debug=False)
        ours = {
            "scheduler_cls": SCHEDULER,
            "additional_config": {"ecoserve": engine_config(settings, socket=front)},
        }
    llm = LLM(
        model=str(peers.small_model().path),
        dtype="bfloat16" if "bfloat16" in of.arguments else "float32",
        enforce_eager=True,
        max_model_len=2048,
        enable_prefix_caching=False,
        disable_log_stats=True,
        **ours,
    )
    engine = llm.llm_engine
    scheduler = engine.engine_core.engine_core.scheduler
    spent = 0.0

    def timed(name: str) -> None:
        call = getattr(scheduler, name)

        def wrapper(*arguments: Any, **named: Any) -> Any:
            nonlocal spent
            start = time.perf_counter()
            try:
                return call(*arguments, **named)
            finally:
                spent += time.perf_counter() - start

        setattr(scheduler, name, wrapper)

    timed("schedule")
    timed("update_from_output")
    random = np.random.default_rng(0)
    found: dict[str, Any] = {}
    for batch in BATCHES:
        for i in range(batch):
            tokens = [int(t) for t in random.integers(100, 40_000, PROMPT)]
            parameters = SamplingParams(
                max_tokens=steps + 40, ignore_eos=True, detokenize=False, temperature=0
            )
            engine.add_request(f"{batch}-{i}", {"prompt_token_ids": tokens}, parameters)
        for _ in range(20):  # prompts, and the first decodes
            engine.step()
        whole, own = [], []
        for _ in range(steps):
            spent = 0.0
            start = time.perf_counter()
            engine.step()
            whole.append(time.perf_counter() - start)
            own.append(spent)
        while engine.has_unfinished_requests():
            engine.step()
        found[str(batch)] = {
            "step_s": statistics.median(whole),
            "scheduling_s": statistics.median(own),
        }
    return found


def front_end(folder: str) -> str:
    """Listens as a worker's front end, and takes whatever comes; where."""
    path = str(Path(folder) / "front")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(path)
    listener.listen()

    def take() -> None:
        while True:
            engine, _ = listener.accept()
            with engine, contextlib.suppress(ConnectionError):
                while engine.recv(1 << 20):
                    pass

    threading.Thread(target=take, daemon=True).start()
    return path


def main(options: argparse.Namespace) -> None:
    runs: dict[str, list[Any]] = {kind: [] for kind in KINDS}
    folder = tempfile.TemporaryDirectory()
    front = front_end(folder.name)
    for _ in range(options.rounds):
        for kind in KINDS:
            command = [sys.executable, __file__, "--child", kind, "--policy", options.policy]
            command += ["--steps", str(options.steps), "--front", front]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            runs[kind].append(json.loads(done.stdout.splitlines()[-1]))
    print(
        f"{'batch':>5} {'stock step':>11} {'scheduling':>11} {'ours':>9} {'added':>7} {'ratio':>7}"
    )
    folder.cleanup()
    rows = []
    for batch in map(str, BATCHES):
        step, own = (
            {k: statistics.median(r[batch][name] for r in them) for k, them in runs.items()}
            for name in ("step_s", "scheduling_s")
        )
        added = (own["ecoserve"] - own["stock"]) / step["stock"]
        ratio = step["ecoserve"] / step["stock"]
        rows.append(
            {
                "batch": int(batch),
                "stock_step_ms": round(step["stock"] * 1e3, 3),
                "stock_scheduling_us": round(own["stock"] * 1e6, 1),
                "scheduling_us": round(own["ecoserve"] * 1e6, 1),
                "added_share": round(added, 5),
                "step_ratio": round(ratio, 4),
            }
        )
        print(
            f"{batch:>5} {step['stock'] * 1e3:>8.2f} ms {own['stock'] * 1e6:>8.0f} us"
            f" {own['ecoserve'] * 1e6:>6.0f} us {added:>7.2%} {ratio:>7.3f}"
        )
    if options.out:
        told = {"policy": options.policy, "rows": rows, "runs": runs}
        options.out.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--child", choices=KINDS, help=argparse.SUPPRESS)
    parser.add_argument("--front", help=argparse.SUPPRESS)
    parser.add_argument("--policy", default="paced")
    parser.add_argument("--steps", type=int, default=200, help="of each batch and run")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each")
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    if chosen.child:
        print(json.dumps(child(chosen.child, chosen.policy, chosen.steps, chosen.front)))
    else:
        main(chosen)
