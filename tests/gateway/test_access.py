"""Keys, the one knob of patience, and the drain: an Envoy of its own for each."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest

from ecoserve import gateway, headers
from ecoserve.gateway.keys import tenant
from tests.gateway.test_calls import is_openai_error
from tests.gateway.world import CHAT, World, until, world

pytestmark = pytest.mark.envoy


async def _status(it: World, value: str | None) -> int:
    given = {} if value is None else {"authorization": value}
    answer = await it.ask(headers=given)
    if answer.status_code == 401:
        is_openai_error(answer, 401, "invalid_api_key")
    return answer.status_code


async def test_api_keys(tmp_path: Path) -> None:
    async with world(tmp_path, workers=1, api_keys=("sk-one", "sk-two")) as it:
        assert await _status(it, None) == 401
        assert await _status(it, "Bearer wrong") == 401
        assert await _status(it, "Bearer") == 401
        assert (await it.client.get("/v1/models")).status_code == 401
        assert (await it.client.get("/metrics")).status_code == 401
        assert (await it.client.get("/healthz")).status_code == 200
        assert not it.workers[0].calls
        assert not it.picked()
        assert await _status(it, "Bearer sk-one") == 200
        assert await _status(it, "Bearer sk-two") == 200
        # The key stays at the gateway.
        assert all("authorization" not in call.headers for call in it.workers[0].calls)
        assert all("authorization" not in entry["headers"] for entry in it.picked())


async def test_the_picker_is_told_whose_key_it_is_and_not_the_key(tmp_path: Path) -> None:
    async with world(tmp_path, workers=1, api_keys=("sk-one", "sk-two")) as it:
        for key in ("sk-one", "sk-two", "sk-one"):
            told = {"authorization": f"Bearer {key}", headers.TENANT: "somebody else"}
            assert (await it.ask(headers=told)).status_code == 200
        tenants = [entry["headers"][headers.TENANT] for entry in it.picked()[-3:]]
        assert tenants == [tenant("sk-one"), tenant("sk-two"), tenant("sk-one")]
        assert "sk-" not in "".join(tenants)


async def test_nobody_names_a_tenant_where_no_key_is_asked_for(tmp_path: Path) -> None:
    async with world(tmp_path, workers=1) as it:
        told = {headers.TENANT: "somebody else", headers.PRIORITY: "-3"}
        assert (await it.ask(headers=told)).status_code == 200
        seen = it.picked()[-1]["headers"]
        assert not seen.get(headers.TENANT)
        assert seen[headers.PRIORITY] == "-3"


async def test_keys_change_while_envoy_runs(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"

    def write(*keys: str) -> None:
        new = file.with_suffix(".new")
        new.write_text(gateway.keys_file_text(keys))
        new.rename(file)

    write("old")
    async with world(tmp_path, workers=1, api_keys_file=str(file)) as it:
        assert await _status(it, "Bearer old") == 200
        assert await _status(it, "Bearer new") == 401
        write("new", "other")

        async def taken() -> bool:
            return await _status(it, "Bearer new") == 200

        await until("the new key is taken", taken)
        assert await _status(it, "Bearer old") == 401
        assert await _status(it, "Bearer other") == 200
        file.write_text("not JSON")
        assert await _status(it, "Bearer new") == 200


async def test_one_knob_rules_silence(tmp_path: Path) -> None:
    """Every other time is far below the silence: of them none may cut it. The silence that arrives
    is longer, too, than the four seconds for which an idle connection to a worker is kept."""
    knob, silence = 6.5, 4.5
    short = {"connect_timeout_s": 0.3, "picker_timeout_s": 0.3, "picker_max_wait_s": 0.3}
    async with world(tmp_path, workers=4, idle_timeout_s=knob, **short) as it:
        patient, mute, stuck, _ = it.workers
        patient.behaviour = mute.behaviour = "silent"
        stuck.behaviour = "stream"

        async def arrives() -> None:
            answer = asyncio.create_task(it.ask(pick=patient.address))
            await until("the call is at the worker", lambda: patient.calls)
            await asyncio.sleep(silence)
            patient.gate.set()
            assert (await answer).json()["worker"] == patient.address

        async def cut_before_it_begins() -> None:
            answer = await it.ask(pick=mute.address)
            message = is_openai_error(answer, 504, "timeout")
            assert "6.5 s" in message
            assert len(mute.calls) == 1

        async def cut_after_it_began() -> None:
            answer = await it.stream(pick=stuck.address)
            with pytest.raises(httpx.RemoteProtocolError, match="incomplete chunked"):
                await answer.aread()

        async def cut_while_it_comes_in() -> None:
            host, _, port = it.config.listen.rpartition(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(
                f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n123".encode()
            )
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 408 ")
            assert b'"message": "The request was silent for 6.5 s' in await reader.read(4096)
            writer.close()

        await asyncio.gather(
            arrives(), cut_before_it_begins(), cut_after_it_began(), cut_while_it_comes_in()
        )


@pytest.mark.soak
@pytest.mark.timeout(900)
async def test_ten_minutes_of_silence_arrive(tmp_path: Path) -> None:
    async with world(tmp_path, workers=2) as it:
        mute, stuck = it.workers
        mute.behaviour, stuck.behaviour = "silent", "stream"
        it.client.timeout = httpx.Timeout(None)
        answer = asyncio.create_task(it.ask(pick=mute.address))
        stream = await it.stream(pick=stuck.address)
        await until("the call is at the worker", lambda: mute.calls)
        await asyncio.sleep(600)
        mute.gate.set()
        stuck.gate.set()
        assert (await answer).json()["worker"] == mute.address
        assert (await stream.aread()).endswith(b"data: [DONE]\n\n")


async def test_drain(tmp_path: Path) -> None:
    async with world(tmp_path, workers=1) as it:
        worker = it.workers[0]
        worker.behaviour = "stream"
        running = await it.stream(pick=worker.address)
        lines = running.aiter_lines()
        await anext(lines)
        assert await gateway.drain(it.config.admin) == 1
        assert (await it.client.get("/healthz")).status_code == 503
        # What still comes is served, on connections that are closed after it.
        worker.behaviour = "answer"
        late = await it.ask(pick=worker.address)
        assert late.status_code == 200
        assert late.headers["connection"] == "close"
        drained = asyncio.create_task(gateway.drain(it.config.admin, timeout_s=15))
        worker.gate.set()
        assert [line async for line in lines if line][-1] == "data: [DONE]"
        assert await drained == 0


async def test_envoy_starts_before_the_scheduler(tmp_path: Path) -> None:
    async with world(tmp_path, workers=1, started=False) as it:

        async def up() -> bool:
            try:
                return (await it.client.get("/healthz")).status_code == 200
            except httpx.HTTPError:
                return False

        await until("Envoy listens", up)
        is_openai_error(await it.ask(), 503, "no_worker")
        it.start_picker()
        await it.until_hosts(it.workers)
        assert (await it.ask()).status_code == 200
