"""Envoy and the real scheduler, in both of the protocol's body modes; the workers are played."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import pytest_asyncio

from ecoserve import headers
from ecoserve.proto.v1 import admin_pb2, admin_pb2_grpc, session_pb2
from tests.gateway.workers import Worker as Engine
from tests.gateway.world import World, free_port, until
from tests.scheduler.fakes import Worker, cluster

pytestmark = [pytest.mark.envoy, pytest.mark.asyncio(loop_scope="module")]

NAMES = ("a", "b")
TTFT = 600.0
MAX_WAIT = 12.0
LARGE = b'{"model": "m", "prompt": "' + b"x" * 3_000_000 + b'"}'


class Agent(Worker):
    """Says the same again every second, as one that says nothing is given nothing."""

    def __init__(self, *given: Any, **hello: Any) -> None:
        super().__init__(*given, **hello)
        self._last: dict[str, Any] | None = None
        self._again = asyncio.create_task(self._repeat())

    def report(self, **fields: Any) -> int:
        self._last = fields
        return super().report(**fields)

    async def _repeat(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            if self._last is not None:
                super().report(**self._last)

    async def close(self) -> None:
        self._again.cancel()
        await super().close()


class Cluster(World):
    """Envoy in front of a scheduler process, and two workers that report what a test wants."""

    def __init__(self, directory: Path, engines: list[Engine], settings: dict[str, Any]) -> None:
        super().__init__(directory, engines, settings)
        self.http = f"http://127.0.0.1:{free_port()}"
        self.agents: list[Agent] = []

    def start_picker(self) -> None:
        command = [sys.executable, "-m", "ecoserve.scheduler", "--grpc", self.config.scheduler]
        command += ["--http", self.http.removeprefix("http://"), "--debug_mode"]
        with (self.directory / "scheduler.log").open("ab") as log:
            self.picker = subprocess.Popen(command, stdout=log, stderr=log)

    async def apply(self, **fields: Any) -> None:
        """Declares the cluster, as soon as the scheduler listens."""
        declared = cluster(*NAMES, **fields)
        declared.slo.CopyFrom(session_pb2.SLO(ttft_s=TTFT, tpot_s=0.5))
        async with grpc.aio.insecure_channel(self.config.scheduler) as channel:
            await admin_pb2_grpc.AdminStub(channel).Apply(
                admin_pb2.ApplyRequest(cluster=declared), wait_for_ready=True, timeout=30
            )

    async def connect(self) -> None:
        """The workers' sessions begin, and both are accepted and idle."""
        await self.disconnect()
        port = int(self.config.scheduler.rpartition(":")[2])
        self.agents = [
            Agent(port, name, address=engine.address)
            for name, engine in zip(NAMES, self.workers, strict=True)
        ]
        await asyncio.gather(*(agent.ready() for agent in self.agents))

    async def disconnect(self) -> None:
        for agent in self.agents:
            await agent.close()

    async def idle(self, *names: str) -> None:
        """These can take requests at once, the others not in this test's time."""
        for agent in self.agents:
            number = agent.report() if agent.name in names else agent.busy(2 * TTFT)
            await agent.acked(number)

    async def state(self) -> dict[str, Any]:
        async with httpx.AsyncClient() as client:
            found = (await client.get(f"{self.http}/state")).json()
        return dict(found["clusters"].get("c", {}))

    async def waiting(self, count: int) -> None:
        async def so_many() -> bool:
            return len((await self.state())["waiting"]) == count

        await until(f"{count} calls wait", so_many)

    async def nothing_held(self) -> None:
        """No call waits and nothing is reserved."""

        async def so() -> bool:
            found = await self.state()
            instances = found["macro_instances"]["m0"]["instances"]
            return not found["waiting"] and not any(i["reservations"] for i in instances)

        await until("nothing waits or is reserved", so)

    @property
    def duplex(self) -> bool:
        return self.config.body_mode == "full_duplex"


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["buffered", "full_duplex"])
async def shared(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Cluster]:
    engines = [Engine() for _ in NAMES]
    for engine in engines:
        await engine.start()
    settings = {"cluster": "c", "body_mode": request.param, "picker_max_wait_s": MAX_WAIT}
    it = Cluster(tmp_path_factory.mktemp(request.param), engines, settings)
    try:
        it.start_picker()
        it.start_envoy()
        yield it
    finally:
        await it.disconnect()
        it.end_picker()
        assert it.envoy is not None
        it.envoy.kill()
        it.envoy.wait()
        await it.client.aclose()
        await it.admin.aclose()
        for engine in engines:
            await engine.kill()


@pytest_asyncio.fixture(loop_scope="module")
async def it(shared: Cluster) -> AsyncIterator[Cluster]:
    """Scheduler and workers are there, idle, and nothing is left of the test before."""
    if shared.picker is None:
        shared.start_picker()
    for engine in shared.workers:
        engine.reset()
        if not engine.listening:
            await engine.start(int(engine.address.rpartition(":")[2]))
    await shared.apply()
    await shared.connect()
    await shared.until_hosts(shared.workers)
    yield shared


def openai_error(answer: httpx.Response, status: int, code: str) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"].startswith("application/json")
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == code
    return dict(error)


async def test_the_schedulers_pick_is_obeyed(it: Cluster) -> None:
    for name, engine in zip(NAMES, it.workers, strict=True):
        await it.idle(name)
        answer = await it.ask()
        assert answer.json()["worker"] == engine.address
        (call,) = engine.calls
        assert call.headers[headers.REQUEST_ID].startswith("eco-")
        assert float(call.headers[headers.TTFT_SLO]) == TTFT
        await it.idle(name)
        assert (await it.ask(content=LARGE)).json()["size"] == len(LARGE)


async def test_a_picked_worker_that_fails_is_followed_by_the_next(it: Cluster) -> None:
    failing, good = it.workers
    failing.behaviour = "close"
    await it.idle("a")
    assert (await it.ask()).json()["worker"] == good.address
    assert len(failing.calls) == 1


async def test_a_call_waits_until_an_instance_can_take_it(it: Cluster) -> None:
    await it.idle()
    asked = asyncio.create_task(it.ask())
    await it.waiting(1)
    # Longer than the picker may take to react (half a second) before the call would go on alone.
    await asyncio.sleep(1.0)
    assert not asked.done()
    await it.idle("b")
    answer = await asked
    assert answer.json()["worker"] == it.workers[1].address
    (call,) = it.workers[1].calls
    assert float(call.headers[headers.WAITED]) > 0.9


async def test_only_a_full_queue_sheds(it: Cluster) -> None:
    """Late calls are kept and served best-effort; of too many the costliest is turned away."""
    await it.apply(queue_limit=2)
    await it.idle()
    late = {headers.TTFT_SLO: "0.001"}
    kept = [asyncio.create_task(it.ask(headers=late)) for _ in range(2)]
    await it.waiting(2)
    await until("both are late", lambda: _late(it, 2))
    # Of those that are late, the costliest goes for one that may be on time.
    on_time = asyncio.create_task(it.ask())
    done, _ = await asyncio.wait(kept, timeout=10, return_when=asyncio.FIRST_COMPLETED)
    (shed,) = done
    error = openai_error(shed.result(), 429, "rate_limit_exceeded")
    assert "queue is full" in error["message"]
    assert 1 <= int(shed.result().headers["retry-after"]) <= 60
    await it.waiting(2)
    await it.idle(*NAMES)
    (served,) = set(kept) - done
    assert {(await served).status_code, (await on_time).status_code} == {200}


async def _late(it: Cluster, count: int) -> bool:
    return bool((await it.state())["macro_instances"]["m0"]["late"] == count)


async def test_with_late_shed_a_late_call_gets_429(it: Cluster) -> None:
    await it.apply(late="shed")
    await it.idle()
    answer = await it.ask(headers={headers.TTFT_SLO: "0.2"}, content=LARGE)
    openai_error(answer, 429, "rate_limit_exceeded")
    assert int(answer.headers["retry-after"]) >= 1


async def test_no_call_waits_longer_than_the_gateway_lets_it(it: Cluster) -> None:
    await it.idle()
    began = time.monotonic()
    answer = await it.ask()
    took = time.monotonic() - began
    print(f"{it.config.body_mode}: served after {took:.1f} s of at most {MAX_WAIT:g}")
    assert answer.status_code == 200
    assert took < MAX_WAIT
    (call,) = (call for engine in it.workers for call in engine.calls)
    assert float(call.headers[headers.WAITED]) > MAX_WAIT / 2  # the scheduler itself sent it on


async def test_a_client_that_leaves_frees_its_place(it: Cluster) -> None:
    await it.idle()
    asked = [asyncio.create_task(it.ask()) for _ in range(5)]
    await it.waiting(5)
    for task in asked:
        task.cancel()
    await asyncio.wait(asked)
    await it.waiting(0)
    # One that leaves when it is on its way: the worker never hears of it, or not for long.
    await it.idle(*NAMES)
    for engine in it.workers:
        engine.behaviour = "silent"
    asked = [asyncio.create_task(it.ask()) for _ in range(5)]
    await until("all are on their way", lambda: sum(len(e.calls) for e in it.workers) == 5)
    for task in asked:
        task.cancel()
    await asyncio.wait(asked)
    await it.nothing_held()


@pytest.mark.parametrize("how", ["killed", "stopped"])
async def test_a_scheduler_that_goes_away_with_waiting_calls(it: Cluster, how: str) -> None:
    await it.idle()
    small, large = asyncio.create_task(it.ask()), asyncio.create_task(it.ask(content=LARGE))
    await it.waiting(2)
    began = time.monotonic()
    it.signal_picker(signal.SIGKILL if how == "killed" else signal.SIGSTOP)
    answers = await asyncio.gather(small, large)
    took = time.monotonic() - began
    print(f"{it.config.body_mode}, {how}: waiting calls answered after {took:.1f} s")
    if it.duplex:
        # Chunks of the body were sent away: the call cannot go on, and says so.
        for answer in answers:
            error = openai_error(answer, 503, "scheduler_unavailable")
            assert error["type"] == "server_error"
            assert answer.headers["retry-after"] == "1"
        openai_error(await it.ask(), 503, "scheduler_unavailable")
    else:
        assert {answer.status_code for answer in answers} == {200}
        assert took < MAX_WAIT + 2
        assert (await it.ask()).status_code == 200

    returned = time.monotonic()
    if how == "killed":
        it.end_picker()
        it.start_picker()
        await it.apply()
        returned = time.monotonic()
        await it.connect()
    else:
        it.signal_picker(signal.SIGCONT)
    await it.idle("b")

    async def picked() -> bool:
        for engine in it.workers:
            engine.calls.clear()
        await it.ask()
        return any(headers.REQUEST_ID in call.headers for call in it.workers[1].calls)

    await until("picks are obeyed again", picked)
    back = time.monotonic() - returned
    print(f"{it.config.body_mode}, {how}: routing again {back:.2f} s after the return")
    assert back < 2.0
