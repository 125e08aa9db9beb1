"""What mixing costs on the real engine: one step that holds B decodes and a chunk of c prompt
tokens, against the prefill step and the decode step that it replaces.

One engine in this process, stepped by hand by a policy that does as it is told. In each cell of the
grid the two ways alternate; medians are kept, and the ratio's 95 % bootstrap interval.

    ratio   = mixed / (prefill + decode); mixing is cheaper below 1
    penalty = mixed / (prefill + decode - a) - 1, the latency model's ``mixing``, where a is the
              fixed cost of a prefill step

The figure that the worker's own fit learns online from the same steps is printed beside it.

    python bench/mixing.py --out docs/results/mixing.json
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

# One process: the engine is stepped by hand. Set before vLLM is imported.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("GOMP_SPINCOUNT", "2000")

import numpy as np
import peers
from ecoserve_worker.messages import Settings, engine_config
from ecoserve_worker.vllm_plugin import SCHEDULER
from vllm import LLM, SamplingParams

from ecoserve.policy.base import ADMITTED, Verdict
from ecoserve.policy.state import EngineView, InstanceView, MacroView, Request, StepKind, StepPlan

CHUNKS = (32, 64, 128, 256, 512)
BATCHES = (1, 4, 8, 16)
CONTEXTS = (128, 512)
VOCABULARY = 40_000


@dataclass
class Told:
    """A policy that takes the step that it was told to."""

    kind: StepKind = "decode"
    name: ClassVar[str] = "told"

    def step(self, view: EngineView) -> StepPlan:
        kind: StepKind = "prefill" if not view.decodes.count else self.kind
        tokens = 0 if kind == "decode" else view.step_budget
        return StepPlan(kind, tokens, "told")

    def check(self, request: Request, instance: InstanceView, now: float) -> Verdict:
        return ADMITTED

    def order(self, request: Request, view: MacroView) -> Iterable[InstanceView]:
        return view.instances


@dataclass
class Cell:
    """Seconds of steps by kind."""

    times: dict[str, list[float]] = field(
        default_factory=lambda: {"mixed": [], "prefill": [], "decode": []}
    )


class Bench:
    def __init__(self, directory: Path) -> None:
        self.log = directory / "steps.jsonl"
        self.log.touch()
        self.read = 0
        self.random = np.random.default_rng(0)
        self.count = 0
        of = peers.engines(peers.small_model(), 1)
        for name, value in of.environments[0].items():
            os.environ.setdefault(name, value)
        settings = Settings("paced", {}, 1e3, 1e3, debug=False)
        self.llm = LLM(
            model=str(peers.small_model().path),
            dtype="bfloat16" if "bfloat16" in of.arguments else "float32",
            enforce_eager=True,
            max_model_len=2048,
            enable_prefix_caching=False,
            disable_log_stats=True,
            scheduler_cls=SCHEDULER,
            additional_config={"ecoserve": engine_config(settings, step_log=str(self.log))},
        )
        self.engine = self.llm.llm_engine
        self.eco = self.engine.engine_core.engine_core.scheduler._eco
        self.told = Told()
        self.eco.policy = self.told

    def add(self, prompt: int, output: int) -> str:
        self.count += 1
        tokens = [int(t) for t in self.random.integers(100, VOCABULARY, prompt)]
        parameters = SamplingParams(max_tokens=output, ignore_eos=True, detokenize=False)
        id = f"r{self.count}"
        self.engine.add_request(id, {"prompt_token_ids": tokens}, parameters)
        return id

    def step(self, kind: StepKind) -> dict[str, Any]:
        """Runs one step of that kind; its line of the step log."""
        self.told.kind = kind
        self.engine.step()
        lines = self.log.read_text().splitlines()
        (line,) = lines[self.read :]
        self.read = len(lines)
        found: dict[str, Any] = json.loads(line)
        return found

    def cell(self, batch: int, context: int, chunk: int, repeats: int) -> Cell:
        running = [self.add(context, 2048 - context - 1) for _ in range(batch)]
        while self.step("prefill")["prompt_tokens"]:
            if len(self.eco.sequences) == batch and all(
                s.generated for s in self.eco.sequences.values()
            ):
                break
        cell = Cell()
        for index in range(2 * repeats + 2):
            self.add(chunk, 1)
            mixed = index % 2 == 0
            kinds: tuple[StepKind, ...] = ("mixed",) if mixed else ("prefill", "decode")
            for kind in kinds:
                line = self.step(kind)
                want = (chunk if kind != "decode" else 0, batch if kind != "prefill" else 0)
                got = (line["prompt_tokens"], line["decodes"])
                if got != want:
                    raise RuntimeError(f"a {kind} step held {got}, not {want}")
                if index > 1:  # the first of each is not like the others
                    cell.times[kind].append(line["seconds"])
        self.engine.abort_request(running)
        self.llm.llm_engine.step()
        self.read = len(self.log.read_text().splitlines())
        return cell


def interval(times: dict[str, list[float]], random: np.random.Generator) -> tuple[float, float]:
    """The 95 % bootstrap interval of mixed / (prefill + decode), medians; all three are drawn."""
    drawn = {
        kind: np.median(random.choice(values, (1000, len(values))), axis=1)
        for kind, values in times.items()
    }
    low, high = np.percentile(drawn["mixed"] / (drawn["prefill"] + drawn["decode"]), (2.5, 97.5))
    return float(low), float(high)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=15, help="of each way in each cell")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="ecoserve-bench-") as directory:
        bench = Bench(Path(directory))
        cells: dict[tuple[int, int, int], Cell] = {}
        for context in CONTEXTS:
            for batch in BATCHES:
                for chunk in CHUNKS:
                    key = (context, batch, chunk)
                    cells[key] = bench.cell(batch, context, chunk, options.repeats)
        learnt = bench.eco.fit.model
    fixed = intercept(cells)
    random = np.random.default_rng(1)
    for (context, batch, chunk), cell in cells.items():
        medians = {kind: float(np.median(times)) for kind, times in cell.times.items()}
        mixed, separate = medians["mixed"], medians["prefill"] + medians["decode"]
        rows.append(
            {
                "context": context,
                "decodes": batch,
                "chunk": chunk,
                **{f"{kind}_ms": round(1e3 * m, 2) for kind, m in medians.items()},
                "ratio": round(mixed / separate, 3),
                "ratio_interval": [round(end, 3) for end in interval(cell.times, random)],
                "penalty": round(mixed / (separate - fixed) - 1, 3),
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    ratios = [row["ratio"] for row in rows]
    found = {
        "fixed_ms": round(1e3 * fixed, 2),
        "median_ratio": round(float(np.median(ratios)), 3),
        "cheaper_mixed": sum(r < 1 for r in ratios),
        "cells": len(ratios),
        "median_penalty": round(float(np.median([row["penalty"] for row in rows])), 3),
        "learnt_penalty": round(learnt.mixing, 3),
        "rows": rows,
    }
    print(json.dumps({k: v for k, v in found.items() if k != "rows"}))
    if options.out:
        options.out.write_text(json.dumps(found, indent=1) + "\n")


def intercept(cells: dict[tuple[int, int, int], Cell]) -> float:
    """The fixed seconds of a prefill step: what a line through the smallest chunks leaves at 0."""
    low, high = CHUNKS[0], CHUNKS[2]
    at = {
        chunk: float(
            np.median([t for k, c in cells.items() if k[2] == chunk for t in c.times["prefill"]])
        )
        for chunk in (low, high)
    }
    return max(at[low] - low * (at[high] - at[low]) / (high - low), 0.0)


if __name__ == "__main__":
    main()
