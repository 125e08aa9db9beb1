"""The relay as an ASGI app: between the gateway, which sends it calls, and the gateway again."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import NoReturn, TypeVar

import httpx
import msgspec
from starlette.datastructures import Headers
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.types import Receive, Scope, Send

from ecoserve import headers
from ecoserve.gateway.relay import HEALTH_PATH
from ecoserve.relay.answer import Answer, Broke, Lost
from ecoserve.relay.messages import TEXT_PATH, Limits, Text
from ecoserve.relay.request import Ask, NotContinued, read
from ecoserve.scheduler.work import COMPLETIONS

log = logging.getLogger("ecoserve.relay")

# A call that kills each worker that takes it must not go round them all.
MOST_BREAKS = 3
# So long after a break another worker is looked for, in seconds.
PATIENCE = 30.0

_PAUSE, _LONGEST_PAUSE = 0.05, 1.0
_LONGEST_VALUE = 200
# Answers by which the gateway says that a call may be tried again.
_AGAIN = (429, 500, 502, 503, 504)
# Headers of a connection, not of the call; and those that are set anew.
_HOP = {
    *("connection", "keep-alive", "proxy-connection", "te", "trailer", "transfer-encoding"),
    *("upgrade", "expect", "host", "content-length", headers.RELAY, headers.LIMITS),
}

Pairs = list[tuple[bytes, bytes]]
T = TypeVar("T")


class _NotNow(Exception):
    """It may work in a moment."""


class Relay:
    """ASGI app. ``client`` leads to the gateway, with its base URL."""

    def __init__(self, client: httpx.AsyncClient, *, patience: float = PATIENCE) -> None:
        self._client = client
        self._patience = patience

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise RuntimeError(f"not HTTP: {scope['type']}")
        if scope["path"] == HEALTH_PATH:
            await PlainTextResponse("ok\n")(scope, receive, send)
            return
        body = await _body(receive)
        if body is None:
            return
        call = _Call(self._client, self._patience, scope, body, send)
        answering = asyncio.create_task(call.answer())
        left = asyncio.create_task(_left(receive))
        try:
            # Without it a call whose client has left would go on waiting for a worker.
            done, _ = await asyncio.wait({answering, left}, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                await task
        finally:
            for task in (answering, left):
                task.cancel()
            await asyncio.wait({answering, left})


async def _body(receive: Receive) -> bytes | None:
    """The whole body; None if the client leaves before."""
    parts = []
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return None
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class _Call:
    """One call, from its body on."""

    def __init__(
        self, client: httpx.AsyncClient, patience: float, scope: Scope, body: bytes, send: Send
    ) -> None:
        self._client = client
        self._patience = patience
        self._scope = scope
        self._body = body
        self._send = send
        self._headers = [pair for pair in scope["headers"] if pair[0].decode("latin-1") not in _HOP]

    async def answer(self) -> None:
        """Answers it. Raises ``httpx.HTTPError`` where the answer breaks off."""
        wish = Headers(scope=self._scope).get(headers.RELAY)
        if wish != "on":
            message = f"header {headers.RELAY} must be on, not {wish!r}"
            await _error(message)(self._scope, _nothing, self._send)
            return
        try:
            ask = read(self._scope["path"], self._body)
        except NotContinued as reason:
            await self._pass(str(reason))
            return
        await self._stream(ask)

    # --- as it is

    async def _pass(self, reason: str) -> None:
        target = self._scope["raw_path"].decode("latin-1")
        if self._scope["query_string"]:
            target += "?" + self._scope["query_string"].decode("latin-1")
        response = await self._request(target, self._body, self._headers, self._scope["method"])
        try:
            await self._pass_on(response, f"off; {reason}")
        finally:
            await response.aclose()

    async def _pass_on(self, response: httpx.Response, relay: str | None) -> None:
        await self._start(response, relay)
        async for piece in response.aiter_raw():
            await self._more(piece)
        await self._end()

    # --- as a stream that is continued

    async def _stream(self, ask: Ask) -> None:
        # The events are read, so they must not come compressed.
        self._headers = [pair for pair in self._headers if pair[0] != b"accept-encoding"]
        response = await self._request(ask.path, ask.first(), self._headers)
        try:
            kind = response.headers.get("content-type", "")
            if response.status_code != 200 or not kind.startswith("text/event-stream"):
                await self._pass_on(response, None)
                return
            limits = _limits(response)
            await self._start(response, "on" if limits else "off; the worker parses the answer")
            await self._legs(ask, response, limits)
        finally:
            await response.aclose()

    async def _legs(self, ask: Ask, response: httpx.Response, limits: Limits | None) -> None:
        """Gives the client an answer that ``response`` has begun, to its end."""
        answer = Answer(ask)
        breaks = 0
        while not await self._leg(response, answer):
            breaks += answer.stopped is None
            try:
                if limits is None or breaks > MOST_BREAKS:
                    raise Lost("it broke off" if limits is None else f"it broke off {breaks} times")
                another = await self._another(ask, answer, limits)
            except Lost as lost:
                log.warning("an answer is lost after %d tokens: %s", len(answer.tokens), lost)
                await self._events([_lost(lost)])
                break
            if another is None:
                break
            response = another
            log.info("an answer goes on after %d tokens", len(answer.tokens))
        await self._end()

    async def _leg(self, response: httpx.Response, answer: Answer) -> bool:
        """Gives the client what one worker says; returns whether the answer is whole."""
        try:
            async for events in _events(response):
                made: list[bytes] = []
                try:
                    for data in events:
                        if (event := answer.take(data)) is not None:
                            made.append(event)
                        if answer.whole or answer.stopped:
                            break
                finally:  # what came with an error counts as given
                    if made:
                        await self._events(made)
                if answer.whole or answer.stopped:
                    break
        except (httpx.TransportError, Broke) as error:
            log.info("a worker broke off: %s", str(error) or type(error).__name__)
        finally:
            await response.aclose()
        if answer.finished and not answer.whole:
            await self._events(answer.closing())
        return answer.whole

    async def _another(self, ask: Ask, answer: Answer, limits: Limits) -> httpx.Response | None:
        """The stream of another worker; None if the answer was settled without one."""

        async def attempt() -> httpx.Response | None:
            if answer.prompt is None:  # nothing had come yet
                return await self._begin(ask.path, ask.first())
            told = await self._text(answer)
            rest = None if answer.stopped else answer.resume(told, limits)
            if rest is None:
                await self._events(answer.settle(told))
                return None
            return await self._begin(COMPLETIONS, rest)

        return await _patiently(attempt, self._patience)

    async def _begin(self, path: str, body: bytes) -> httpx.Response:
        response = await self._ask(path, body)
        if response.status_code == 200:
            return response
        try:
            text = (await response.aread()).decode(errors="replace")[:300]
        finally:
            await response.aclose()
        _raise(response.status_code, text)

    async def _text(self, answer: Answer) -> Text:
        if not answer.tokens:
            return Text("", [])
        response = await self._ask(TEXT_PATH, msgspec.json.encode(answer.question()))
        try:
            raw = await response.aread()
        except httpx.TransportError as error:
            raise _NotNow(str(error)) from error
        finally:
            await response.aclose()
        if response.status_code != 200:
            _raise(response.status_code, raw.decode(errors="replace")[:300])
        return msgspec.json.decode(raw, type=Text)

    async def _ask(self, path: str, body: bytes) -> httpx.Response:
        try:
            return await self._request(path, body, self._headers)
        except httpx.TransportError as error:
            raise _NotNow(str(error) or type(error).__name__) from error

    # --- both sides

    async def _request(
        self, target: str, body: bytes, given: Pairs, method: str = "POST"
    ) -> httpx.Response:
        # Not the client's `build_request`, which would add headers of its own.
        url = self._client.base_url.join(target)
        request = httpx.Request(method, url, headers=given, content=body)
        return await self._client.send(request, stream=True)

    async def _start(self, response: httpx.Response, relay: str | None) -> None:
        kept = [
            (name.lower(), value)
            for name, value in response.headers.raw
            if name.decode("latin-1").lower() not in _HOP
        ]
        length = response.headers.get("content-length")
        if length is not None:
            kept.append((b"content-length", length.encode()))
        if relay is not None:
            kept.append((headers.RELAY.encode(), _value(relay)))
        start = {"type": "http.response.start", "status": response.status_code, "headers": kept}
        await self._send(start)

    async def _events(self, events: Iterable[bytes]) -> None:
        await self._more(b"".join(b"data: " + event + b"\n\n" for event in events))

    async def _more(self, body: bytes) -> None:
        await self._send({"type": "http.response.body", "body": body, "more_body": True})

    async def _end(self) -> None:
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})


async def _patiently(attempt: Callable[[], Awaitable[T]], patience: float) -> T:
    """Tries until it works or ``patience`` seconds have passed; then raises ``Lost``."""
    clock = asyncio.get_running_loop().time
    until, pause = clock() + patience, _PAUSE
    while True:
        try:
            return await attempt()
        except _NotNow as error:
            if clock() + pause > until:
                raise Lost(str(error)) from error
        await asyncio.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)


async def _events(response: httpx.Response) -> AsyncIterator[list[bytes]]:
    """The data of the events of a stream, as many at once as come at once."""
    rest = b""
    async for piece in response.aiter_bytes():
        *events, rest = (rest + piece).split(b"\n\n")
        found = [event[5:].strip() for event in events if event.startswith(b"data:")]
        if found:
            yield found


def _limits(response: httpx.Response) -> Limits | None:
    header = response.headers.get(headers.LIMITS)
    return None if header is None else Limits.parse(header)


def _value(text: str) -> bytes:
    """Fit for a header: names of fields are in it, and those are the client's."""
    return re.sub(r"[^ -~]", "?", text[:_LONGEST_VALUE]).encode()


def _raise(status: int, text: str) -> NoReturn:
    said = f"{status} {text.strip()}"
    raise _NotNow(said) if status in _AGAIN else Lost(said)


def _error(message: str) -> JSONResponse:
    error = {"message": message, "type": "invalid_request_error", "param": headers.RELAY}
    return JSONResponse({"error": {**error, "code": "bad_request"}}, 400)


def _lost(reason: Lost) -> bytes:
    message = f"The worker died, and the answer could not be continued: {reason}"
    error = {"message": message, "type": "server_error", "param": None, "code": 503}
    return msgspec.json.encode({"error": error})


async def _nothing() -> dict[str, str]:
    return {"type": "http.disconnect"}
