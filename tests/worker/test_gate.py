"""The gate, with small ASGI apps in vLLM's place."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest
from ecoserve_worker.continuation import Continuation
from ecoserve_worker.gate import Gate
from ecoserve_worker.ledger import Ledger
from ecoserve_worker.messages import Command, Meta

from ecoserve import headers
from ecoserve.policy.state import SLO
from ecoserve.relay.messages import Limits

PATH = "/v1/completions"
Send = Callable[[dict[str, Any]], Awaitable[None]]


class Rig:
    """A gate over an app that the test gives."""

    def __init__(
        self,
        app: Callable[..., Awaitable[None]],
        continuation: Continuation | None = None,
        **ledger: Any,
    ) -> None:
        self.told: list[Command] = []
        self.dead = False
        ledger.setdefault("accepted", True)
        self.ledger = Ledger(
            SLO(1.0, 0.1), tell=self.told.append, engine_dead=lambda: self.dead, **ledger
        )
        self.gate = Gate(app, self.ledger, continuation)
        transport = httpx.ASGITransport(app=self.gate, raise_app_exceptions=False)
        self.client = httpx.AsyncClient(transport=transport, base_url="http://worker")

    async def post(self, **arguments: Any) -> httpx.Response:
        return await self.client.post(PATH, json={}, **arguments)

    async def messages(self) -> tuple[list[dict[str, Any]], BaseException | None]:
        """What the gate sends, message by message, and what it raises."""
        sent: list[dict[str, Any]] = []

        async def send(message: Any) -> None:
            sent.append(message)

        async def receive() -> Any:
            await asyncio.Event().wait()

        try:
            await self.gate(_scope(), receive, send)
        except Exception as error:
            return sent, error
        return sent, None


def _scope() -> dict[str, Any]:
    return {"type": "http", "method": "POST", "path": PATH, "headers": []}


async def _head(send: Send, status: int = 200, kind: str = "text/event-stream") -> None:
    start = {"type": "http.response.start", "status": status}
    await send({**start, "headers": [(b"content-type", kind.encode())]})


async def _body(send: Send, body: bytes, more: bool = True) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": more})


async def echo(scope: Any, receive: Any, send: Send) -> None:
    given = {key.decode(): value.decode() for key, value in scope["headers"]}
    await _head(send, kind="application/json")
    await _body(send, json.dumps(given).encode(), more=False)


async def test_gives_a_request_its_id_and_tells_the_engine_first() -> None:
    rig = Rig(echo)
    seen = (await rig.post(headers={"x-request-id": "theirs"})).json()["x-request-id"]
    assert seen.startswith("eco-")
    first = rig.told[0]
    assert isinstance(first, Meta)
    assert (first.id, first.ttft, first.tpot) == (seen, None, None)


async def test_takes_the_pickers_headers() -> None:
    rig = Rig(echo, clock=lambda: 100.0)
    given = {
        headers.REQUEST_ID: "eco-0123456789abcdef",
        headers.WAITED: "1.5",
        headers.TTFT_SLO: "2",
        headers.TPOT_SLO: "0.05",
    }
    answer = await rig.post(headers=given)
    assert answer.json()["x-request-id"] == "eco-0123456789abcdef"
    assert rig.told[0] == Meta("eco-0123456789abcdef", 98.5, 2.0, 0.05)


@pytest.mark.parametrize("value", ["soon", "0", "-1", "nan", "inf"])
@pytest.mark.parametrize("name", [headers.TTFT_SLO, headers.TPOT_SLO])
async def test_a_malformed_slo_is_the_clients_error(name: str, value: str) -> None:
    rig = Rig(echo)
    answer = await rig.post(headers={name: value})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert name in error["message"]
    assert (error["param"], error["code"]) == (name, 400)
    assert not rig.told


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"accepted": False}, "not accepted yet"),
        ({"draining": True}, "draining"),
        ({"dead": True}, "dead"),
    ],
)
async def test_refuses_what_another_worker_should_take(
    change: dict[str, bool], reason: str
) -> None:
    rig = Rig(echo)
    for name, value in change.items():
        setattr(rig if name == "dead" else rig.ledger, name, value)
    answer = await rig.post()
    assert answer.status_code == 503
    assert answer.headers[headers.RETRYABLE] == "1"
    assert reason in answer.json()["error"]["message"]
    health = await rig.client.get("/ecoserve/health")
    assert health.status_code == 503
    assert reason in health.json()["reason"]
    assert (await rig.client.get("/metrics")).status_code == 200


async def test_an_accepted_worker_serves_without_its_scheduler() -> None:
    rig = Rig(echo)
    assert (await rig.client.get("/ecoserve/health")).status_code == 200
    assert (await rig.post()).status_code == 200


async def test_holds_the_head_back_until_the_first_byte() -> None:
    go = asyncio.Event()
    sent: list[dict[str, Any]] = []

    async def app(scope: Any, receive: Any, send: Send) -> None:
        await _head(send)
        await _body(send, b"")
        await go.wait()
        await _body(send, b"data: {}\n\n")
        await _body(send, b"", more=False)

    async def send(message: Any) -> None:
        sent.append(message)

    rig = Rig(app)
    task = asyncio.create_task(rig.gate(_scope(), asyncio.Event().wait, send))  # type: ignore[arg-type]
    for _ in range(5):
        await asyncio.sleep(0)
    assert sent == []
    assert len(rig.ledger.present) == 1
    go.set()
    await task
    assert sent[0]["type"] == "http.response.start"
    assert rig.ledger.present == []


def _dies(rig: list[Rig], *chunks: bytes, status: int = 200) -> Callable[..., Awaitable[None]]:
    """An app whose engine is dead by the time it answers."""

    async def app(scope: Any, receive: Any, send: Send) -> None:
        await _head(send, status)
        rig[0].dead = True
        for chunk in chunks:
            await _body(send, chunk)
        await _body(send, b"", more=False)

    return app


ERROR = b'data: {"error": {"message": "EngineCore encountered an issue."}}\n\n'
TOKEN = b'data: {"choices":[{"text":" a","finish_reason":null}]}\n\n'
DONE = b"data: [DONE]\n\n"


@pytest.mark.parametrize(
    ("status", "chunks"),
    [
        (500, (b'{"error": {}}',)),
        (200, (ERROR, DONE)),
        (200, (b'{"choices":[{"text":"","finish_reason":"abort"}]}',)),
    ],
)
async def test_an_engine_that_dies_before_the_first_byte_is_a_retryable_503(
    status: int, chunks: tuple[bytes, ...]
) -> None:
    rigs: list[Rig] = []
    rigs.append(Rig(_dies(rigs, *chunks, status=status)))
    answer = await rigs[0].post()
    assert answer.status_code == 503
    assert answer.headers[headers.RETRYABLE] == "1"


async def test_an_exception_of_a_dead_engine_is_a_retryable_503() -> None:
    async def app(scope: Any, receive: Any, send: Send) -> None:
        rig.dead = True
        raise RuntimeError("dead")

    rig = Rig(app)
    answer = await rig.post()
    assert (answer.status_code, answer.headers[headers.RETRYABLE]) == (503, "1")


async def test_a_begun_stream_that_fails_ends_without_done() -> None:
    rigs: list[Rig] = []
    rigs.append(Rig(_dies(rigs)))

    async def app(scope: Any, receive: Any, send: Send) -> None:
        await _head(send)
        await _body(send, TOKEN)
        rigs[0].dead = True
        await _body(send, ERROR)
        await _body(send, DONE)
        await _body(send, b"", more=False)

    rigs[0] = Rig(app)
    sent, error = await rigs[0].messages()
    assert error is None
    text = b"".join(message.get("body", b"") for message in sent)
    assert text == TOKEN + ERROR
    assert sent[-1]["more_body"] is False
    (outcome,) = _outcomes(rigs[0])
    assert outcome.broken


async def test_an_aborted_stream_does_not_look_whole() -> None:
    async def app(scope: Any, receive: Any, send: Send) -> None:
        await _head(send)
        await _body(send, TOKEN)
        await _body(send, b'data: {"choices":[{"text":"","finish_reason":"abort"}]}\n\n')
        await _body(send, DONE)
        await _body(send, b"", more=False)

    rig = Rig(app)
    sent, error = await rig.messages()
    assert error is None
    text = b"".join(message.get("body", b"") for message in sent)
    assert b"[DONE]" not in text
    assert b'data: {"error"' in text


async def test_a_begun_answer_whose_app_raises_is_a_broken_connection() -> None:
    async def app(scope: Any, receive: Any, send: Send) -> None:
        await _head(send)
        await _body(send, TOKEN)
        raise RuntimeError("boom")

    rig = Rig(app)
    sent, error = await rig.messages()
    assert isinstance(error, RuntimeError)
    assert all(message.get("more_body", True) for message in sent)
    (outcome,) = _outcomes(rig)
    assert outcome.broken


@pytest.mark.parametrize("begun", [False, True])
async def test_what_a_worker_that_ends_had_not_begun_is_a_retryable_503(begun: bool) -> None:
    reached = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Send) -> None:
        await _head(send)
        if begun:
            await _body(send, b"data: {}\n\n")
        reached.set()
        await asyncio.Event().wait()

    sent: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        sent.append(message)

    rig = Rig(app)
    serving = asyncio.create_task(rig.gate(_scope(), send, send))
    await reached.wait()
    serving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await serving
    assert [m["status"] for m in sent if "status" in m] == [200 if begun else 503]
    retryable = (headers.RETRYABLE.encode(), b"1") in sent[0]["headers"]
    assert retryable is not begun
    assert sent[-1].get("more_body", False) is begun  # what was begun is left broken


async def test_a_whole_stream_passes_untouched() -> None:
    async def app(scope: Any, receive: Any, send: Send) -> None:
        await _head(send)
        await _body(send, TOKEN)
        await _body(send, DONE)
        await _body(send, b"", more=False)

    rig = Rig(app)
    answer = await rig.post()
    assert answer.content == TOKEN + DONE
    (outcome,) = _outcomes(rig)
    assert (outcome.status, outcome.broken) == (200, False)


async def test_a_stream_tells_the_relay_what_bounds_it() -> None:
    limits = Limits(2048, default=100)

    async def answers(scope: Any, receive: Any, send: Send) -> None:
        kind = dict(scope["headers"]).get(b"x-kind", b"text/event-stream").decode()
        status = int(dict(scope["headers"]).get(b"x-status", b"200"))
        await _head(send, status, kind)
        await _body(send, b"data: x\n\n", more=False)

    rig = Rig(answers, Continuation(None, {PATH: limits}))
    assert Limits.parse((await rig.post()).headers[headers.LIMITS]) == limits
    for other in ({"x-kind": "application/json"}, {"x-status": "503"}):
        assert headers.LIMITS not in (await rig.post(headers=other)).headers
    chat = await rig.client.post("/v1/chat/completions", json={})
    assert headers.LIMITS not in chat.headers


async def test_a_client_that_goes_away_is_499() -> None:
    async def app(scope: Any, receive: Any, send: Send) -> None:
        await _head(send)
        await _body(send, TOKEN)
        assert (await receive())["type"] == "http.disconnect"

    rig = Rig(app)

    async def receive() -> Any:
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        pass

    await rig.gate(_scope(), receive, send)
    (outcome,) = _outcomes(rig)
    assert outcome.status == 499


async def test_vllms_own_503_says_that_another_worker_may_take_it() -> None:
    async def app(scope: Any, receive: Any, send: Send) -> None:
        await _head(send, 503, "application/json")
        await _body(send, b"{}", more=False)

    assert (await Rig(app).post()).headers[headers.RETRYABLE] == "1"


def _outcomes(rig: Rig) -> list[Any]:
    """What has ended, without waiting for an engine that is not there."""
    rig.ledger._clock = lambda: float("inf")
    rig.ledger.settle()
    return rig.ledger.finished
