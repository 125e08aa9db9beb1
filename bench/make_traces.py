"""Generates the small traces of docs/experiments/traces, always the same.

``bursty.csv``: lengths as ShareGPT's, gaps from a Gamma distribution of variation 3.
``conversations.jsonl.gz``: conversations of several turns over one of eight system prompts; each
turn's prompt begins with all that was said before, so that a prefix cache helps.

    python bench/make_traces.py docs/experiments/traces
"""

from __future__ import annotations

import sys
from itertools import count
from pathlib import Path

import numpy as np

from ecoserve.sim.records import BLOCK, Arrival
from ecoserve.sim.tracefile import write_csv, write_jsonl
from ecoserve.sim.workload import DATASETS, load

SYSTEM_PROMPTS = 8
SYSTEM_TOKENS = 2 * BLOCK
TURNS = 4.0  # mean
THINKING = 20.0  # seconds, mean
SESSIONS_A_SECOND = 0.6
LONGEST = 12_000


def conversations(sessions: int, seed: int) -> list[Arrival]:
    """Requests of that many conversations in order of arrival."""
    rng = np.random.default_rng(seed)
    text, answer = DATASETS["sharegpt"].prompt, DATASETS["sharegpt"].output
    blocks = count(SYSTEM_PROMPTS * SYSTEM_TOKENS // BLOCK)
    found = []
    start = 0.0
    for _ in range(sessions):
        start += rng.exponential(1 / SESSIONS_A_SECOND)
        system = int(rng.integers(SYSTEM_PROMPTS)) * SYSTEM_TOKENS // BLOCK
        mine = list(range(system, system + SYSTEM_TOKENS // BLOCK))
        at, said = start, SYSTEM_TOKENS
        for _ in range(rng.geometric(1 / TURNS)):
            said += int(text.draw(rng, 1)[0])
            if said > LONGEST:
                break
            while len(mine) < said // BLOCK:
                mine.append(next(blocks))
            written = int(answer.draw(rng, 1)[0])
            found.append(Arrival(round(at, 3), said, written, tuple(mine[: said // BLOCK])))
            said += written
            at += 0.05 * written + rng.exponential(THINKING)
    return sorted(found, key=lambda a: a.at)


def write(folder: Path) -> None:
    """Writes both traces."""
    folder.mkdir(parents=True, exist_ok=True)
    write_csv(folder / "bursty.csv", load("sharegpt", cv=3.0).arrivals(5.0, 1000, seed=7))
    write_jsonl(folder / "conversations.jsonl.gz", conversations(400, seed=7))


if __name__ == "__main__":
    write(Path(sys.argv[1]))
