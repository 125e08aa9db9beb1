"""The picker dies or hangs: calls go on, and routing is back with it. Body buffered."""

from __future__ import annotations

import asyncio
import signal

import pytest

from tests.gateway.world import World, until

pytestmark = [pytest.mark.envoy, pytest.mark.asyncio(loop_scope="module")]

FAIL = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}


@pytest.mark.parametrize("how", ["killed", "stopped"])
async def test_everything_goes_on_without_the_picker(three: World, how: str) -> None:
    one, two, _ = three.workers
    one.behaviour = "stream"
    running = await three.stream(pick=one.address)
    lines = running.aiter_lines()
    await anext(lines)
    waiting = asyncio.create_task(three.ask(pick=two.address, mode="never:50"))
    await until("the call waits", lambda: len(three.picked()) == 2)

    three.signal_picker(FAIL[how])
    # What is known of the workers stays known: calls come through, streams and large ones too.
    one.behaviour = "answer"
    answers = await asyncio.gather(*(three.ask() for _ in range(10)))
    assert {a.status_code for a in answers} == {200}
    large = await three.ask(content=b"x" * (5 * 2**20))
    assert large.json()["size"] == 5 * 2**20
    assert len(await three.hosts()) == 3
    # What waited goes on long before the 50 s that it was given.
    assert (await waiting).status_code == 200
    # What runs is not touched.
    one.gate.set()
    assert [line async for line in lines if line] == ["data: more", "data: [DONE]"]

    if how == "stopped":
        three.signal_picker(signal.SIGCONT)
    else:
        three.end_picker()
    await three.until_picked()


async def test_a_picker_that_dies_with_the_body(three: World) -> None:
    answer = await three.ask(mode="die", content=b"y" * 100_000)
    assert answer.json()["size"] == 100_000
    three.end_picker()


async def test_a_picker_that_dies_with_the_headers(three: World) -> None:
    assert (await three.ask(mode="die-early")).status_code == 200
    three.end_picker()


async def test_failing_workers_are_left_out_without_the_picker(three: World) -> None:
    three.end_picker()
    dead = three.workers[0]
    await dead.kill()
    answers = await asyncio.gather(*(three.ask() for _ in range(20)))
    assert {a.status_code for a in answers} == {200}
    await three.until_hosts(three.workers[1:])
