"""Calls through a relay over real sockets, to workers that die."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from ecoserve import headers
from ecoserve.relay.app import MOST_BREAKS
from tests.gateway.world import until
from tests.relay.engine import CHAT, COMPLETIONS, Engine, ids
from tests.relay.gateway import Death, Gateway, How, relay
from tests.relay.test_relay_answer import PROMPT, Seen, body

ON = {headers.RELAY: "on"}
ANSWER = "the 🙂 cat, 你好 and abcabc the dog. " * 2
ASKED = {"stream_options": {"include_usage": True}, "max_tokens": 60}


@pytest.fixture
def folder() -> Iterator[Path]:
    """Short enough for the paths of sockets."""
    with tempfile.TemporaryDirectory(prefix="relay-") as name:
        yield Path(name)


@pytest.fixture
def gateway() -> Gateway:
    engine = Engine()
    engine.give(ids(PROMPT), ids(ANSWER))
    return Gateway(engine)


def events(answer: httpx.Response) -> list[dict[str, Any]]:
    """Those of a stream that ended well."""
    assert answer.status_code == 200, answer.text
    datas = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert datas.pop() == "[DONE]"
    return [json.loads(data) for data in datas]


def uncut(gateway: Gateway, path: str, asked: dict[str, Any]) -> Any:
    return Seen.of(list(gateway.engine.stream(path, asked))).shape()


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("how", ["reset", "error", "error at once", "end"])
async def test_a_stream_survives_its_workers(
    gateway: Gateway, folder: Path, path: str, how: How
) -> None:
    whole = uncut(gateway, path, body(path, **ASKED))
    assert len(whole[2]) > 40
    async with relay(gateway, folder) as client:
        for after in ([0], [1], [2], [20], [1, 1], [5, 0, 7]):
            gateway.deaths = [Death(number, how) for number in after]
            gateway.calls.clear()
            answer = await client.post(path, json=body(path, **ASKED), headers=ON)
            assert Seen.of(events(answer)).shape() == whole, after
            assert answer.headers[headers.RELAY] == "on"
            assert headers.LIMITS not in answer.headers
            assert not gateway.deaths
            assert len(gateway.calls) == len(after) + 1
            assert all(headers.RELAY not in call[1] for call in gateway.calls)


async def test_a_worker_that_dies_between_the_last_token_and_the_end_is_not_missed(
    gateway: Gateway, folder: Path
) -> None:
    whole = uncut(gateway, CHAT, body(CHAT, **ASKED))
    async with relay(gateway, folder) as client:
        for left in (1, 2):
            gateway.calls.clear()
            gateway.deaths = [Death(-left)]
            answer = await client.post(CHAT, json=body(CHAT, **ASKED), headers=ON)
            assert Seen.of(events(answer)).shape() == whole
            assert len(gateway.calls) == left


async def test_it_waits_for_a_worker_and_no_longer_than_it_may(
    gateway: Gateway, folder: Path
) -> None:
    whole = uncut(gateway, CHAT, body(CHAT, **ASKED))
    async with relay(gateway, folder, patience=1.0) as client:
        gateway.deaths, gateway.then = [Death(9)], [503, 429, 503]
        answer = await client.post(CHAT, json=body(CHAT, **ASKED), headers=ON)
        assert Seen.of(events(answer)).shape() == whole
        assert not gateway.refusals

        gateway.deaths, gateway.then = [Death(9)], [503] * 100
        lost(await client.post(CHAT, json=body(CHAT, **ASKED), headers=ON), "503")


def lost(answer: httpx.Response, reason: str) -> None:
    """The client sees that the stream is not whole, and why."""
    last = answer.text.split("\n\n")[-2]
    error = json.loads(last.removeprefix("data: "))["error"]
    assert reason in error["message"]
    assert error["code"] == 503
    assert "[DONE]" not in answer.text
    assert "the 🙂 cat" in "".join(
        json.loads(data.removeprefix("data: "))["choices"][0]["delta"]["content"]
        for data in answer.text.split("\n\n")[:-2]
    )


async def test_a_call_that_kills_its_workers_is_given_up(gateway: Gateway, folder: Path) -> None:
    async with relay(gateway, folder) as client:
        gateway.deaths = [Death(12)] * (MOST_BREAKS + 5)
        lost(await client.post(CHAT, json=body(CHAT, **ASKED), headers=ON), "broke off")
        assert len(gateway.calls) == MOST_BREAKS + 1


async def test_a_stop_string_across_the_last_break_that_may_be_is_no_further_break(
    gateway: Gateway, folder: Path
) -> None:
    asked = body(CHAT, stop=["cat, 你好 and"], **ASKED)
    whole = uncut(gateway, CHAT, asked)
    assert whole[3] == [("stop", "cat, 你好 and")]
    async with relay(gateway, folder) as client:
        for after in range(3, 20):
            gateway.deaths = [Death(after), *[Death(0)] * (MOST_BREAKS - 1)]
            answer = await client.post(CHAT, json=asked, headers=ON)
            assert Seen.of(events(answer)).shape() == whole, after
            gateway.deaths.clear()


async def test_a_call_that_is_at_fault_is_told_so_once(gateway: Gateway, folder: Path) -> None:
    async with relay(gateway, folder) as client:
        for after in (0, 9):
            gateway.deaths = [Death(after, "refusal")]
            gateway.calls.clear()
            answer = await client.post(CHAT, json=body(CHAT, **ASKED), headers=ON)
            *_, last = answer.text.split("\n\n")[:-1]
            assert json.loads(last.removeprefix("data: "))["error"]["code"] == 400
            assert answer.text.count('"error"') == 1
            assert len(gateway.calls) == 1


async def test_what_another_worker_refuses_is_the_end(gateway: Gateway, folder: Path) -> None:
    async with relay(gateway, folder) as client:
        gateway.deaths, gateway.then = [Death(30)], [400]
        lost(await client.post(CHAT, json=body(CHAT, **ASKED), headers=ON), "400")


async def test_what_cannot_be_continued_passes_untouched(gateway: Gateway, folder: Path) -> None:
    async with relay(gateway, folder) as client:
        raw = b'{"input": "x",   "odd": \xff}'
        answer = await client.post("/v1/embeddings?a=b%20c", content=raw, headers=ON)
        assert (answer.status_code, answer.content) == (201, raw)
        assert answer.headers["x-own"] == "yes"
        assert answer.headers["query"] == "a=b%20c"
        assert answer.headers[headers.RELAY] == "off; /v1/embeddings"
        # A stream, too: it comes as the worker gives it, and it breaks as the worker does.
        asked = body(CHAT, n=1, logprobs=True)
        answer = await client.post(CHAT, json=asked, headers=ON)
        assert answer.headers[headers.RELAY] == "off; logprobs"
        assert gateway.calls[-1][2] == asked
        gateway.deaths = [Death(4)]
        with pytest.raises(httpx.RemoteProtocolError):
            await client.post(CHAT, json=asked, headers=ON)
        answer = await client.post(CHAT, json={**asked, "stream": False}, headers=ON)
        assert answer.headers[headers.RELAY] == "off; no stream"


@pytest.mark.parametrize(
    ("field", "told"),
    [
        ("a\r\nx-evil: 1\r\n\r\nHTTP/1.1 200 OK", "a??x-evil: 1????HTTP/1.1 200 OK"),
        ("你", "?"),
        ("x" * 100_000, "x" * 195),
    ],
)
async def test_names_of_fields_are_told_as_a_header_may_be(
    gateway: Gateway, folder: Path, field: str, told: str
) -> None:
    async with relay(gateway, folder) as client:
        answer = await client.post(CHAT, json=body(CHAT, **{field: 1}), headers=ON)
        assert answer.headers[headers.RELAY] == f"off; {told}"
        assert "x-evil" not in answer.headers
        assert answer.text.endswith("[DONE]\n\n")


async def test_a_worker_that_parses_answers_is_not_continued(
    gateway: Gateway, folder: Path
) -> None:
    gateway.limits = False
    whole = uncut(gateway, CHAT, body(CHAT, **ASKED))
    async with relay(gateway, folder) as client:
        answer = await client.post(CHAT, json=body(CHAT, **ASKED), headers=ON)
        assert answer.headers[headers.RELAY] == "off; the worker parses the answer"
        assert Seen.of(events(answer)).shape() == whole
        gateway.deaths = [Death(12)]
        lost(await client.post(CHAT, json=body(CHAT, **ASKED), headers=ON), "broke off")


async def test_errors_are_passed_on(gateway: Gateway, folder: Path) -> None:
    async with relay(gateway, folder) as client:
        gateway.refusals = [429]
        answer = await client.post(CHAT, json=body(CHAT), headers=ON)
        assert answer.status_code == 429
        assert answer.json()["error"]["message"] == "not now"
        answer = await client.post(CHAT, json=body(CHAT), headers={headers.RELAY: "yes"})
        assert answer.status_code == 400
        assert headers.RELAY in answer.json()["error"]["message"]


async def test_a_client_that_leaves_frees_the_worker(gateway: Gateway, folder: Path) -> None:
    gateway.stall = True
    async with relay(gateway, folder) as client:
        request = client.build_request("POST", CHAT, json=body(CHAT), headers=ON)
        response = await client.send(request, stream=True)
        assert gateway.open == 1
        await response.aclose()
        await until("the worker is free", lambda: gateway.open == 0)
