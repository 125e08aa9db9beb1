"""What dies or hangs under load, and what the clients see of it."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator, Sequence

import pytest

from e2e.harness import NAME, Running, accepted, at_rest, engine_core, only, routed, until
from ecoserve import headers
from ecoserve.bench.load import Call, Outcome, chat, play, words

pytestmark = [pytest.mark.engine, pytest.mark.envoy, pytest.mark.timeout(400)]


@pytest.fixture(autouse=True)
def healthy(up: Running) -> Iterator[None]:
    """Each test begins and ends with a cluster that has nothing to do."""
    until(lambda: at_rest(up), 120)
    yield
    until(lambda: at_rest(up), 180)


def load(seconds: float, rate: float, tokens: int, seed: int) -> list[Call]:
    """Calls at an even rate, every third of them not streamed."""
    return [
        Call(i / rate, chat(NAME, words(40, 1000 * seed + i), tokens, stream=i % 3 != 0))
        for i in range(int(seconds * rate))
    ]


def whole(outcomes: Sequence[Outcome], tokens: int) -> None:
    """Every answer came, and whole."""
    assert [o.error for o in outcomes if not o.ok] == []
    assert {o.tokens for o in outcomes} == {tokens}


async def picks_again(up: Running, within: float) -> float:
    """Seconds until the scheduler routes a call again; fails after ``within``."""
    began = time.monotonic()
    before = await asyncio.to_thread(routed, up)
    calls = [Call(0.2 * i, chat(NAME, "Hi", 1)) for i in range(int(within / 0.2))]
    playing = asyncio.create_task(play(up.url.removesuffix("/v1"), calls))
    while await asyncio.to_thread(routed, up) <= before:
        assert time.monotonic() - began < within, "the scheduler does not route"
    took = time.monotonic() - began
    whole(await playing, 1)
    return took


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_scheduler_that_dies_or_hangs_costs_no_answer(
    up: Running, number: signal.Signals
) -> None:
    url = up.url.removesuffix("/v1")
    tokens = 48
    # Long answers on both instances; with a TPOT that no running decode allows, one more waits.
    busy = [Call(0.2 * i, chat(NAME, words(30, i), 300)) for i in range(8)]
    impossible = {headers.TPOT_SLO: "0.0001", headers.TTFT_SLO: "300"}
    waiting = [Call(3.0, chat(NAME, "Wait.", 8), headers=impossible)]
    playing = asyncio.create_task(play(url, [*busy, *waiting, *load(16, 1.0, tokens, int(number))]))
    await asyncio.to_thread(until, lambda: _waits(up), 60)
    scheduler = only(up, "-m ecoserve.scheduler ")
    os.kill(scheduler, number)
    if number == signal.SIGSTOP:
        await asyncio.sleep(5)  # long enough that calls come while it hangs
        os.kill(scheduler, signal.SIGCONT)
    else:
        await asyncio.to_thread(until, lambda: accepted(up), 60)
    took = await picks_again(up, 2.0)
    outcomes = await playing
    print(f"{number.name}: routing again {took:.2f} s after the return")
    whole(outcomes[: len(busy)], 300)
    (waited,) = outcomes[len(busy) : len(busy) + 1]
    whole([waited], 8)
    # Envoy's extension is a minute; a picker found dead or hung ends the wait well before.
    assert waited.ttft < 70
    whole(outcomes[len(busy) + 1 :], tokens)


def _waits(up: Running) -> bool:
    state = up.state()
    return bool(state and state["clusters"]["local"]["waiting"])


@pytest.mark.parametrize("victim", ["front end", "EngineCore"])
async def test_a_worker_that_dies_loses_no_answer_that_had_not_begun(
    up: Running, victim: str
) -> None:
    tokens = 60
    before = up.instances()["worker-1"]["incarnation"]
    calls = load(10, 2.0, tokens, 7 + len(victim))
    playing = asyncio.create_task(play(up.url.removesuffix("/v1"), calls))
    await asyncio.to_thread(until, lambda: up.instances()["worker-1"].get("running", 0) >= 2, 60)
    pid = only(up, "--instance worker-1 ") if victim == "front end" else engine_core(up, "worker-1")
    os.kill(pid, signal.SIGKILL)
    outcomes = await playing
    lost = [o for o in outcomes if not o.ok]
    print(f"{victim}: {len(lost)} of {len(outcomes)} answers broke off, all of them begun")
    for outcome in outcomes:
        if outcome.ok:
            assert outcome.tokens == tokens, "an answer that broke off looks whole"
        else:
            assert outcome.first > 0, f"lost before it had begun: {outcome.status} {outcome.error}"
            assert outcome.call.body["stream"], "an answer that is not streamed has not begun"
    assert lost, "nothing was running there"

    def back() -> bool:
        found = up.instances().get("worker-1", {})
        return accepted(up) and found.get("incarnation") != before

    await asyncio.to_thread(until, back, 120)


async def test_clients_that_leave_take_everything_with_them(up: Running) -> None:
    calls = [
        Call(0.1 * i, chat(NAME, words(60, 50 + i), 400), cancel_after=0.5 + 0.3 * (i % 5))
        for i in range(20)
    ]
    outcomes = await play(up.url.removesuffix("/v1"), calls)
    assert all(o.cancelled for o in outcomes)
    await asyncio.to_thread(until, lambda: at_rest(up), 60)
    capacity = {i["limits"]["kv_tokens"] for i in up.instances().values()}
    assert {i["kv_free_reported"] for i in up.instances().values()} <= {
        c - d
        for c in capacity
        for d in (0, 128)  # vLLM keeps one block to itself
    }


async def test_a_late_request_is_served_all_the_same(up: Running) -> None:
    hopeless = {headers.TTFT_SLO: "0.0001"}
    calls = [Call(0.0, chat(NAME, words(30, i), 8), headers=hopeless) for i in range(4)]
    whole(await play(up.url.removesuffix("/v1"), calls), 8)
