"""A worker killed at random moments under load: what has not begun is not lost, and streams that
ask for the relay do not even notice.

`make soak` alone runs it, and kills fifty times.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e.harness import NAME, Running, at_rest, engine_core, only, started, until
from ecoserve import headers
from ecoserve.bench.load import Call, Outcome, chat, play, words

KILLS = 50

pytestmark = [
    pytest.mark.engine,
    pytest.mark.envoy,
    pytest.mark.soak,
    pytest.mark.timeout(5400),
]

ON = {headers.RELAY: "on"}
STREAMS, WITHIN = 18, 4.0


@pytest.fixture(scope="module")
def relayed(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A cluster with a relay. It computes in float32, so that an answer is the same to the letter
    however its tokens are batched."""
    options = ("--relay", "--engine-args", "--dtype float32")
    with started(tmp_path_factory.mktemp("run"), *options) as running:
        yield running


def calls() -> list[Call]:
    """Of each three one stream through the relay, one past it, and one answer without a stream.

    The same in each round, so that their answers must be, too.
    """
    return [
        Call(
            WITHIN * i / STREAMS,
            chat(NAME, words(20 + 3 * i, 7000 + i), 40 + 2 * i, stream=i % 3 != 2),
            headers=ON if i % 3 == 0 else {},
        )
        for i in range(STREAMS)
    ]


def continued(up: Running) -> int:
    """How often the relay has had a stream go on on another worker."""
    return sum("an answer goes on after" in line for line in up.log("relay"))


async def test_a_worker_killed_at_random_moments(relayed: Running) -> None:
    up = relayed
    rng = random.Random(11)
    url = up.url.removesuffix("/v1")
    await asyncio.to_thread(until, lambda: at_rest(up), 120)
    reference = await play(url, calls())
    assert [o.error for o in reference if not o.ok] == []
    texts, took = [o.text for o in reference], max(o.end for o in reference)
    assert len(set(texts)) == STREAMS
    counts: Counter[str] = Counter()
    before = continued(up)
    for kill in range(KILLS):
        name = rng.choice(("worker-0", "worker-1"))
        victim = rng.choice((only(up, f"--instance {name} "), engine_core(up, name)))
        incarnation = up.instances()[name]["incarnation"]
        playing = asyncio.create_task(play(url, calls()))
        await asyncio.sleep(rng.uniform(0.05, 0.9) * took)
        os.kill(victim, signal.SIGKILL)
        for number, outcome in enumerate(await playing):
            counts[_judge(outcome, texts[number])] += 1

        def back(name: str = name, old: str = incarnation) -> bool:
            return at_rest(up) and up.instances().get(name, {}).get("incarnation") != old

        counts["continued"] = continued(up) - before
        print(f"{kill + 1} of {KILLS} kills: {dict(counts)}")
        if kill + 1 < KILLS:
            await asyncio.to_thread(until, back, 180)
    assert counts["continued"], "no kill met a stream of the relay"


def _judge(outcome: Outcome, text: str) -> str:
    body = outcome.call.body
    if outcome.ok:
        assert outcome.tokens == body["max_tokens"]
        # To the letter: the engines compute in float32.
        assert outcome.text == text, f"{outcome.text!r}\nis not\n{text!r}"
        return "whole"
    assert outcome.call.headers != ON, f"the relay lost a stream: {outcome}"
    assert body["stream"], f"an answer that is not streamed has not begun: {outcome}"
    assert outcome.first > 0, f"lost before it had begun: {outcome}"
    return "cut off"
