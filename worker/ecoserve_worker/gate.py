"""The ASGI gate in front of vLLM's app: who gets in, how an answer that fails is told.

- takes the headers of ``ecoserve.headers``, gives the request its id and tells the engine of it;
- refuses with a retryable 503 what another worker should take;
- tells the stream relay what it needs to continue an answer (``ecoserve_worker.continuation``);
- holds an answer's head back until the first byte of its body, so that until then a dying engine is
  a status (503, retryable), not a broken stream;
- lets a begun stream that fails end with an error event and without a ``[DONE]``.
"""

from __future__ import annotations

import asyncio
import json
import re
import secrets
from typing import Any

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ecoserve import headers
from ecoserve.numbers import SECONDS, WAIT
from ecoserve.relay.messages import TEXT_PATH
from ecoserve_worker.continuation import Continuation
from ecoserve_worker.ledger import CLIENT_GONE, Call, Ledger

HEALTH = "/ecoserve/health"

# Routes of vLLM that make the engine work, by their beginnings; all else passes untouched.
_WORK = (
    "/v1/",
    "/v2/",
    "/inference/",
    "/pooling",
    "/score",
    "/rerank",
    "/classify",
    "/invocations",
)
# The one route whose request id vLLM takes from the body alone.
_RESPONSES = "/v1/responses"
_ID = re.compile(headers.REQUEST_ID_PATTERN)
_DONE = b"data: [DONE]"
_ERROR = b'data: {"error"'
_ABORTED = (b'"finish_reason":"abort"', b'"finish_reason": "abort"')


class _Unbegun(Exception):
    """The answer failed before any of it was sent."""


class _Ended(Exception):
    """The answer was ended by the gate; what the app still sends is of no use."""


class Gate:
    """ASGI middleware around vLLM's app."""

    def __init__(
        self, app: ASGIApp, ledger: Ledger, continuation: Continuation | None = None
    ) -> None:
        self._app = app
        self._ledger = ledger
        self._continuation = continuation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path: str = scope["path"]
        if path == HEALTH:
            reason = self._ledger.refusal()
            status = 200 if reason is None else 503
            answer = JSONResponse({"ready": reason is None, "reason": reason or ""}, status)
            await answer(scope, receive, send)
        elif path == TEXT_PATH and self._continuation is not None:
            await self._continuation(scope, receive, send)
        elif scope["method"] == "POST" and path.startswith(_WORK):
            await self._work(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _work(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = Headers(scope=scope)
        slo: dict[str, float | None] = {}
        for name in (headers.TTFT_SLO, headers.TPOT_SLO):
            try:
                slo[name] = SECONDS.read(given[name]) if name in given else None
            except ValueError as error:
                text = f"header {name} {error}"
                await _error(400, "BadRequestError", text, name)(scope, receive, send)
                return
        reason = self._ledger.refusal()
        if reason is not None:
            await _unavailable(reason)(scope, receive, send)
            return
        id = given.get(headers.REQUEST_ID, "")
        if not _ID.fullmatch(id):
            id = f"eco-{secrets.token_hex(8)}"
        try:
            waited = WAIT.read(given.get(headers.WAITED, "0"))
        except ValueError:
            waited = 0.0
        scope = dict(scope)
        scope["headers"] = [
            *(pair for pair in scope["headers"] if pair[0] != b"x-request-id"),
            (b"x-request-id", id.encode()),
        ]
        if scope["path"] == _RESPONSES:
            receive = await _with_request_id(receive, f"resp_{id}")
        call = self._ledger.begin(id, waited, slo[headers.TTFT_SLO], slo[headers.TPOT_SLO])
        limits = None
        if self._continuation is not None:
            limits = self._continuation.header(scope["path"])
        answer = _Answer(self._ledger, call, receive, send, limits)
        try:
            await self._app(scope, answer.receive, answer.send)
        except _Ended:
            pass
        except _Unbegun:
            await _unavailable("the engine died")(scope, receive, answer.send_through)
        except asyncio.CancelledError:
            # The worker's time is up. What it had not begun, another one can.
            if not answer.begun:
                await _unavailable("it is ending")(scope, receive, answer.send_through)
            raise
        except Exception:
            if answer.begun or not self._ledger.engine_dead():
                raise  # a begun answer ends with a broken connection
            await _unavailable("the engine died")(scope, receive, answer.send_through)
        finally:
            answer.end()


class _Answer:
    """One answer on its way out."""

    def __init__(
        self, ledger: Ledger, call: Call, receive: Receive, send: Send, limits: bytes | None
    ) -> None:
        self.begun = False
        self._ledger = ledger
        self._call = call
        self._receive = receive
        self._send = send
        self._limits = limits
        self._head: Message | None = None
        self._status = 500
        self._events = False  # a stream of server-sent events
        self._whole = False
        self._failed = False
        self._client_gone = False

    async def receive(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.disconnect" and not self._whole:
            self._client_gone = True
        return message

    async def send_through(self, message: Message) -> None:
        """Sends what the gate itself answers."""
        if message["type"] == "http.response.start":
            self._status = message["status"]
        await self._send(message)
        self._whole = not message.get("more_body", False)

    async def send(self, message: Message) -> None:
        """Takes what the app answers."""
        if message["type"] == "http.response.start":
            self._take_head(message)
            return
        if message["type"] != "http.response.body":
            await self._send(message)
            return
        body: bytes = message.get("body", b"")
        more: bool = message.get("more_body", False)
        if not self.begun:
            if not body and more:
                return
            await self._begin(body)
        if self._events and body:
            await self._check_event(body)
        await self._send(message)
        self._whole = not more

    def end(self) -> None:
        """Books how the answer ended."""
        broken = self._failed or (self.begun and not self._whole)
        status = CLIENT_GONE if self._client_gone and not self._whole else self._status
        self._ledger.end(self._call, status, broken=broken)

    def _take_head(self, message: Message) -> None:
        self._head = message
        self._status = message["status"]
        kind = Headers(raw=message.get("headers", [])).get("content-type", "")
        self._events = kind.startswith("text/event-stream")
        if self._status == 503:
            _add(message, headers.RETRYABLE, b"1")
        elif self._events and self._limits is not None:
            _add(message, headers.LIMITS, self._limits)

    async def _begin(self, body: bytes) -> None:
        assert self._head is not None
        lost = self._status >= 500 or body.startswith(_ERROR)
        if (lost and self._ledger.engine_dead()) or _aborted(body):
            raise _Unbegun
        self.begun = True
        await self._send(self._head)

    async def _check_event(self, body: bytes) -> None:
        if _aborted(body):
            self._failed = True
            event = json.dumps(_body(503, "ServiceUnavailableError", "the engine was stopped"))
            await self._send(_last(f"data: {event}\n\n".encode()))
        elif body.startswith(_ERROR):
            self._failed = True
            return
        elif not (self._failed and body.startswith(_DONE)):
            return
        else:
            await self._send(_last(b""))
        self._whole = True
        raise _Ended


async def _with_request_id(receive: Receive, id: str) -> Receive:
    """The same body with its ``request_id`` set; one that is no JSON object is left to vLLM."""
    body = b""
    more = True
    while more:
        message = await receive()
        if message["type"] != "http.request":
            return _replay(message, receive)
        body += message.get("body", b"")
        more = message.get("more_body", False)
    try:
        given = json.loads(body)
        if isinstance(given, dict):
            body = json.dumps(given | {"request_id": id}).encode()
    except ValueError:
        pass
    return _replay({"type": "http.request", "body": body, "more_body": False}, receive)


def _replay(first: Message, then: Receive) -> Receive:
    messages = [first]

    async def receive() -> Message:
        return messages.pop() if messages else await then()

    return receive


def _add(head: Message, name: str, value: bytes) -> None:
    head["headers"] = [*head.get("headers", ()), (name.encode(), value)]


def _aborted(body: bytes) -> bool:
    """Whether the engine says that it gave the request up; to clients that looks like an end."""
    return any(mark in body for mark in _ABORTED)


def _last(body: bytes) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": False}


def _body(status: int, kind: str, text: str, param: str | None = None) -> dict[str, Any]:
    return {"error": {"message": text, "type": kind, "param": param, "code": status}}


def _error(status: int, kind: str, text: str, param: str | None = None) -> JSONResponse:
    """An error in OpenAI's shape."""
    return JSONResponse(_body(status, kind, text, param), status)


def _unavailable(reason: str) -> JSONResponse:
    text = f"this worker cannot take the request: {reason}"
    answer = _error(503, "ServiceUnavailableError", text)
    answer.headers[headers.RETRYABLE] = "1"
    return answer
