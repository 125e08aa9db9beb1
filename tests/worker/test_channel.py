"""Engine and front end over a real socket."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from ecoserve_worker.channel import EngineEnd, FrontEnd
from ecoserve_worker.messages import (
    DecodeState,
    Forget,
    FromEngine,
    Meta,
    SequenceDone,
    Settings,
    State,
    eco_id,
)


@pytest.fixture
def received() -> list[FromEngine]:
    return []


@pytest.fixture
async def ends(tmp_path: Path, received: list[FromEngine]):  # type: ignore[no-untyped-def]
    front = FrontEnd(tmp_path / "channel", received.append)
    engine = EngineEnd(str(front.path))
    front.start()
    await _until(lambda: front._sock is not None)
    yield engine, front
    engine.close()
    front.close()


async def _until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - an engine's end has no event loop
            await asyncio.sleep(0.001)


def _state(running: int = 1) -> State:
    decodes = [DecodeState(f"eco-{i:016x}", 9, 1, 0.1, 0.1, False) for i in range(running)]
    return State(0, "decode", 0, [], decodes, 9, 0, 0, "decode", 0, 8, *(0 for _ in range(3)))


def _done(number: int) -> SequenceDone:
    return SequenceDone(f"eco-{number:016x}", 1, 0, 1, 0.1, 0.0, 1.0, 0.1, False)


def test_ids_are_found_in_what_the_engine_makes_of_them() -> None:
    id = "eco-0123456789abcdef"
    for decorated in (f"chatcmpl-{id}-3f2a", f"0_cmpl-{id}-0", f"resp_{id}", id):
        assert eco_id(decorated) == id
    assert eco_id("cmpl-77") == "cmpl-77"


async def test_commands_come_in_order(ends: tuple[EngineEnd, FrontEnd]) -> None:
    engine, front = ends
    settings = Settings("paper", {"alpha": 1.0}, 1.0, 0.1, True, latency=(1.0,) * 8)
    sent = [Meta("a", 1.0, None, 0.5), settings, Forget("a")]
    for command in sent:
        front.tell(command)
    assert engine.commands() == sent
    assert engine.commands() == []


async def test_commands_told_before_the_engine_connects_are_kept(
    tmp_path: Path, received: list[FromEngine]
) -> None:
    front = FrontEnd(tmp_path / "early", received.append)
    front.tell(Forget("a"))
    engine = EngineEnd(str(front.path))
    front.start()
    await _until(lambda: engine.commands() == [Forget("a")])
    engine.close()
    front.close()


async def test_a_full_socket_blocks_nobody_and_loses_no_command(
    ends: tuple[EngineEnd, FrontEnd],
) -> None:
    engine, front = ends
    for number in range(5000):
        front.tell(Forget(str(number)))
    got: list[object] = []
    await _until(lambda: got.extend(engine.commands()) or len(got) == 5000)
    assert got == [Forget(str(number)) for number in range(5000)]


async def test_a_slow_reader_costs_states_but_no_events(
    ends: tuple[EngineEnd, FrontEnd], received: list[FromEngine]
) -> None:
    engine, _ = ends
    for number in range(3000):  # the front end's loop does not run meanwhile
        engine.done(_done(number))
        engine.send(_state(50))
    await _until(lambda: received)

    def all_there() -> bool:
        engine.send(_state())
        return sum(len(message.done) for message in received) == 3000

    await _until(all_there)
    ids = [done.id for message in received for done in message.done]
    assert ids == [f"eco-{number:016x}" for number in range(3000)]


async def test_a_state_of_any_size_goes_through(
    ends: tuple[EngineEnd, FrontEnd], received: list[FromEngine]
) -> None:
    engine, _ = ends
    engine.send(_state(20000))
    await _until(lambda: received)
    assert received[0].state is not None
    assert len(received[0].state.running) > 1000


async def test_a_lost_front_end_does_not_stop_the_engine(
    ends: tuple[EngineEnd, FrontEnd],
) -> None:
    engine, front = ends
    front.close()
    engine.send(_state())
    assert engine.commands() == []
    assert not engine.connected
    engine.send(_state())
