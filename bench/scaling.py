"""A load that rises and falls on a real cluster of one machine that a real Prometheus scales.

Starts `ecoserve up --instances 1` and a Prometheus that scrapes its scheduler, plays --rate for as
long as --seconds, each in turn, and notes the workers of each macro instance. Needs `prometheus`
(Debian's) and the bench extra.

    python bench/scaling.py --out scaling-real.json --plot scaling-real.png
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shlex
import shutil
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from ecoserve.bench.load import Call, Outcome, chat, play, words
from ecoserve.local.machine import free_ports
from ecoserve.policy.state import SLO

MODEL = "SmolLM2-135M-Instruct"
SCRAPE_S = 5
# As usual, but faster: a load of minutes, not of hours.
SCALING = {
    **dict.fromkeys(("violations_for", "use_for", "ttft_for", "waiting_for"), 30),
    **{"cooldown": 60, "max_step": 1},
}
SHRINKING = {"use_for": 60, "idle_for": 60, "cooldown": 60}


async def start(
    port: int, prometheus: int, folder: Path, options: argparse.Namespace
) -> tuple[Any, dict[str, str]]:
    """`ecoserve up`, and what its greeting says by name."""
    command = [sys.executable, "-m", "ecoserve", "up", "--port", str(port)]
    command += ["--instances", "1", "--max", str(options.max), "--macro", options.macro]
    command += ["--run-dir", str(folder)]
    command += ["--prometheus", f"http://127.0.0.1:{prometheus}"]
    for part, given in (("expand", SCALING), ("contract", SHRINKING)):
        for name, value in given.items():
            command += ["--scaling", f"{part}.{name}={value}"]
    command += shlex.split(options.up)
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    assert process.stdout is not None
    named: dict[str, str] = {}
    async for line in process.stdout:
        text = line.decode().rstrip()
        print(text, flush=True)
        key, _, shown = text.strip().partition("  ")
        named[key.strip()] = shown.strip()
        if text.startswith("Ctrl-C stops"):
            return process, named
    raise SystemExit("it did not start")


async def follow(process: Any, began: float, events: list[tuple[float, str]]) -> None:
    async for line in process.stdout:
        text = line.decode().rstrip()
        print(text, flush=True)
        events.append((time.monotonic() - began, text.lstrip("! ")))


async def watch(
    state: str, began: float, moments: list[tuple[float, list[int], int]], seconds: float
) -> None:
    """Notes the sizes of the macro instances and how many workers take requests."""
    async with httpx.AsyncClient(timeout=10, trust_env=False) as client:
        while time.monotonic() - began < seconds:
            macros = (await client.get(state)).json()["clusters"]["local"]["macro_instances"]
            sizes = [len(macro["instances"]) for macro in macros.values()]
            taking = sum(i["state"] == "accepted" for m in macros.values() for i in m["instances"])
            moments.append((time.monotonic() - began, sizes, taking))
            await asyncio.sleep(2)


def calls(rates: list[float], seconds: list[float], output: int) -> list[Call]:
    """Poisson arrivals at each rate in turn."""
    rng, begin = np.random.default_rng(3), 0.0
    found: list[Call] = []
    for rate, lasting in zip(rates, seconds, strict=True):
        at = begin + rng.exponential(1 / rate)
        while at < begin + lasting:
            prompt = words(int(rng.integers(30, 120)), (7, len(found)))
            found.append(Call(at, chat(MODEL, prompt, output)))
            at += rng.exponential(1 / rate)
        begin += lasting
    return found


def draw(document: dict[str, Any], path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, (above, below) = plt.subplots(
        2, sharex=True, figsize=(8, 5.5), layout="constrained", height_ratios=[3, 2]
    )
    times, shares = zip(*document["attainment"], strict=True)
    above.plot([t / 60 for t in times], [100 * s for s in shares], marker="o", ms=4)
    above.set(ylabel="requests within both SLOs, %", ylim=(0, 102), title=document["title"])
    moments = document["moments"]
    minutes = [at / 60 for at, _, _ in moments]
    below.step(minutes, [sum(sizes) for _, sizes, _ in moments], where="post", label="workers")
    below.step(minutes, [n for _, _, n in moments], where="post", ls="--", label="taking requests")
    below.step(minutes, [len(s) for _, s, _ in moments], where="post", label="macro instances")
    begin = 0.0
    for rate, lasting in zip(document["rates"], document["seconds"], strict=True):
        for axes in (above, below):
            axes.axvline(begin / 60, color="black", lw=0.5, alpha=0.3)
        above.text(begin / 60, 1, f" {rate:g}/s", fontsize=8, va="bottom")
        begin += lasting
    below.set(xlabel="minutes", ylim=(0, None))
    below.legend(loc="upper right", fontsize=8)
    for axes in (above, below):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=110)


def by_window(outcomes: list[Outcome], slo: SLO, width: float = 30.0) -> list[tuple[float, float]]:
    windows: dict[int, list[bool]] = {}
    for outcome in outcomes:
        windows.setdefault(int(outcome.call.due / width), []).append(outcome.meets(slo))
    return [((n + 0.5) * width, sum(met) / len(met)) for n, met in sorted(windows.items())]


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", type=float, action="append")
    parser.add_argument("--seconds", type=float, action="append")
    parser.add_argument("--max", type=int, default=3)
    parser.add_argument("--macro", default="1:2", metavar="N_l:N_u")
    parser.add_argument("--up", default="", help="further arguments of `ecoserve up`")
    parser.add_argument("--output", type=int, default=64)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    rates = options.rate or [0.2, 1.5, 0.2]
    seconds = options.seconds or [60.0, 240.0, 420.0]
    binary = shutil.which("prometheus")
    if binary is None:
        raise SystemExit("prometheus is not installed; on Debian: apt-get install prometheus")
    port, prometheus = free_ports(2)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        process, named = await start(port, prometheus, folder / "run", options)
        target = named["Metrics"].removeprefix("http://").removesuffix("/metrics")
        job = {"job_name": "scheduler", "honor_labels": True}
        job |= {"static_configs": [{"targets": [target]}]}
        config = {"global": {"scrape_interval": f"{SCRAPE_S}s"}, "scrape_configs": [job]}
        (folder / "prometheus.yml").write_text(json.dumps(config))
        scraper = await asyncio.create_subprocess_exec(
            *(binary, f"--config.file={folder / 'prometheus.yml'}"),
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{prometheus}",
            stderr=asyncio.subprocess.DEVNULL,
        )
        try:
            began = time.monotonic()
            events: list[tuple[float, str]] = []
            moments: list[tuple[float, list[int], int]] = []
            reading = asyncio.create_task(follow(process, began, events))
            watching = asyncio.create_task(watch(named["State"], began, moments, sum(seconds)))
            outcomes = await play(f"http://127.0.0.1:{port}", calls(rates, seconds, options.output))
            await watching
        finally:
            for child in (process, scraper):
                if child.returncode is None:
                    child.terminate()
                    await child.wait()
        reading.cancel()
    slo = SLO(_seconds(named["TTFT SLO"]), _seconds(named["TPOT SLO"]))
    changes = [now for before, now in pairwise(moments) if before[1:] != now[1:]]
    document = {
        "title": f"{MODEL}, 1 to {options.max} workers, N_l:N_u {options.macro}, by Prometheus",
        "rates": rates,
        "seconds": seconds,
        "slo": {"ttft": slo.ttft, "tpot": slo.tpot},
        "requests": len(outcomes),
        "failed": sum(not outcome.ok for outcome in outcomes),
        "attainment": by_window(list(outcomes), slo),
        "moments": [moments[0], *changes, moments[-1]],
        "events": [event for event in events if "worker" in event[1] or "macro" in event[1]],
    }
    print(json.dumps({k: v for k, v in document.items() if k != "moments"}, indent=1))
    if options.out:
        options.out.write_text(json.dumps(document, indent=1) + "\n")
    if options.plot:
        draw(document, options.plot)


def _seconds(text: str) -> float:
    value, unit = text.split()[:2]
    return float(value) / (1000 if unit == "ms" else 1)


if __name__ == "__main__":
    asyncio.run(main())
