"""The protocol's streamed mode, as other gateways use it."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.gateway.test_calls import FIVE_MB, is_openai_error
from tests.gateway.world import World, until, world

pytestmark = [pytest.mark.envoy, pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    directory = tmp_path_factory.mktemp("duplex")
    async with world(directory, body_mode="full_duplex", picker_timeout_s=0.3) as it:
        yield it


async def test_the_pick_is_obeyed(three: World) -> None:
    for worker in three.workers:
        answer = await three.ask(pick=worker.address)
        assert answer.json()["worker"] == worker.address


async def test_large_bodies_pass_and_are_sent_again(three: World) -> None:
    failing, good, _ = three.workers
    failing.behaviour = "retryable"
    answer = await three.ask(pick=f"{failing.address},{good.address}", content=FIVE_MB)
    assert answer.json() == {"worker": good.address, "size": len(FIVE_MB)}
    assert failing.calls[0].body == good.calls[0].body == FIVE_MB


async def test_a_call_waits_without_asking_for_time(three: World) -> None:
    worker = three.workers[1]
    answer = await three.ask(pick=worker.address, mode="late:0.9:0")
    assert answer.json()["worker"] == worker.address


@pytest.mark.parametrize("status", [429, 503])
async def test_the_pickers_own_answers_pass_as_they_are(three: World, status: int) -> None:
    answer = await three.ask(mode=f"deny:{status}", content=FIVE_MB)
    assert answer.status_code == status
    assert answer.headers["retry-after"] == "7"
    assert answer.json() == {"error": {"message": "the picker's own"}}


async def test_a_body_over_the_limit(three: World) -> None:
    answer = await three.ask(content=b"x" * (16 * 2**20 + 1))
    is_openai_error(answer, 413, "request_too_large")


@pytest.mark.parametrize("mode", ["die", "die-early"])
async def test_a_dead_picker_gives_a_clear_error(three: World, mode: str) -> None:
    answer = await three.ask(mode=mode, content=FIVE_MB)
    message = is_openai_error(answer, 503, "scheduler_unavailable")
    assert "Try again" in message
    assert answer.headers["retry-after"] == "1"
    # And so it stays while it is away, except where it has no say.
    is_openai_error(await three.ask(), 503, "scheduler_unavailable")
    assert (await three.client.get("/v1/models")).status_code == 200
    three.end_picker()


async def test_a_hung_picker_gives_a_clear_error(three: World) -> None:
    worker = three.workers[0]
    worker.behaviour = "stream"
    running = await three.stream(pick=worker.address)
    lines = running.aiter_lines()
    await anext(lines)
    three.signal_picker(signal.SIGSTOP)
    is_openai_error(await three.ask(), 503, "scheduler_unavailable")
    worker.gate.set()
    assert [line async for line in lines if line][-1] == "data: [DONE]"
    three.signal_picker(signal.SIGCONT)
    worker.behaviour = "answer"

    async def back() -> bool:
        return (await three.ask(pick=worker.address)).status_code == 200

    await until("the picker is asked again", back)
