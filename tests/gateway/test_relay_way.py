"""The way through the stream relay: a real Envoy, and the relay's own process."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ecoserve import gateway, headers
from ecoserve.relay.messages import TEXT_PATH
from tests.gateway.test_calls import is_openai_error
from tests.gateway.world import CHAT, until, world

pytestmark = pytest.mark.envoy

ON = {headers.RELAY: "on", "authorization": "Bearer sk-one"}


@pytest.fixture
def sockets() -> Iterator[Path]:
    """Short enough for the paths of sockets."""
    with tempfile.TemporaryDirectory(prefix="relay-") as name:
        yield Path(name)


@contextmanager
def relay(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "ecoserve.relay", "--sockets", str(folder), "--drain-timeout", "5"]
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


async def test_calls_that_ask_for_the_relay_go_through_it(tmp_path: Path, sockets: Path) -> None:
    async with world(tmp_path, workers=1, api_keys=("sk-one",), relay=str(sockets)) as it:
        (worker,) = it.workers

        async def through(**request: Any) -> str | None:
            answer = await it.ask(headers=ON, **request)
            assert answer.status_code == 200, answer.text
            assert answer.json()["worker"] == worker.address
            return answer.headers.get(headers.RELAY)

        assert await through() is None  # there is none yet: calls pass it by
        with relay(sockets) as process:
            await until("the relay is there", through)
            await it.ask(headers={"authorization": "Bearer sk-one"})
            direct = worker.calls[-1]
            worker.calls.clear()
            before = len(it.picked())
            assert await through() == "off; no stream"
            assert await through(path="/v1/embeddings") == "off; /v1/embeddings"
            # Each was picked once and reached the worker once, without what is not for it.
            assert len(it.picked()) == before + 2
            assert len(worker.calls) == 2
            for call in worker.calls:
                assert not {"authorization", headers.RELAY} & set(call.headers)
                assert call.headers["x-forwarded-for"] == direct.headers["x-forwarded-for"]
            assert set(direct.headers) - set(call.headers) == {"x-envoy-external-address"}
            # Who does not ask for it does not meet it, and a key is asked for all the same.
            answer = await it.ask(headers={"authorization": "Bearer sk-one"})
            assert headers.RELAY not in answer.headers
            answer = await it.ask(headers={headers.RELAY: "on"})
            is_openai_error(answer, 401, "invalid_api_key")
            answer = await it.ask(headers=ON | {headers.RELAY: "maybe"})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, headers.RELAY)
            # What the relay asks workers is not for clients.
            answer = await it.ask(path=TEXT_PATH, headers={"authorization": "Bearer sk-one"})
            is_openai_error(answer, 404, "not_found")
            # A body that is small enough for clients has room to grow behind the relay.
            limit = it.config.body_limit
            assert await through(content=b"x" * limit) == "off; no JSON"
            answer = await it.ask(headers=ON, content=b"x" * (limit + 1))
            is_openai_error(answer, 413, "request_too_large")
            process.kill()
            assert [await through() for _ in range(5)] == [None] * 5


async def test_an_error_comes_through_the_relay_and_sigterm_ends_it(
    tmp_path: Path, sockets: Path
) -> None:
    asked = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True}
    async with world(tmp_path, workers=1, relay=str(sockets)) as it:
        with relay(sockets) as process:

            async def through() -> str | None:
                return (await it.ask(headers=ON)).headers.get(headers.RELAY)

            await until("the relay is there", through)
            it.workers[0].behaviour = "error"
            answer = await it.ask(path=CHAT, json=asked, headers=ON)
            assert answer.status_code == 500
            assert answer.json() == {"own": "broken"}
            process.terminate()
            assert process.wait(20) is not None


async def test_a_drain_waits_for_streams_of_the_relay(tmp_path: Path, sockets: Path) -> None:
    asked = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "n": 2, "stream": True}
    async with world(tmp_path, workers=1, relay=str(sockets)) as it:
        (worker,) = it.workers
        with relay(sockets):

            async def through() -> str | None:
                return (await it.ask(headers=ON)).headers.get(headers.RELAY)

            await until("the relay is there", through)
            worker.behaviour = "stream"
            running = await it.stream(json=asked, headers=ON)
            assert running.headers[headers.RELAY] == "off; n"
            lines = running.aiter_lines()
            await anext(lines)
            assert await gateway.drain(it.config.admin) == 1
            # The way behind the relay stays open, for what it has to continue.
            worker.behaviour = "answer"
            assert await through() == "off; no stream"
            drained = asyncio.create_task(gateway.drain(it.config.admin, timeout_s=15))
            worker.gate.set()
            assert [line async for line in lines if line][-1] == "data: [DONE]"
            assert await drained == 0
