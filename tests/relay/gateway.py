"""In the gateway's place: a server on a Unix socket whose workers die where a test wants it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import httpx
import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from ecoserve import headers
from ecoserve.gateway.relay import GATEWAY_SOCKET, RELAY_SOCKET
from ecoserve.relay.app import Relay
from ecoserve.relay.messages import TEXT_PATH, TextQuestion
from tests.relay.engine import CHAT, COMPLETIONS, LIMITS, Engine, told

How = Literal["reset", "error", "error at once", "refusal", "end"]


@dataclass
class Death:
    """A worker's after so many events (counted from the end, if negative): its connection is reset,
    or its engine is gone and it says so (with the event before, if at once), or it says that the
    call is at fault, or the stream ends as if it were whole but for its last event."""

    after: int
    how: How = "reset"


class _Killed(Exception):
    pass


@dataclass
class Gateway:
    """``deaths`` are those of the workers in turn, ``refusals`` the statuses of answers before a
    worker is found, ``then`` those from the next death on; all are used up."""

    engine: Engine = field(default_factory=Engine)
    deaths: list[Death] = field(default_factory=list)
    refusals: list[int] = field(default_factory=list)
    then: list[int] = field(default_factory=list)
    limits: bool = True
    calls: list[tuple[str, dict[str, str], Any]] = field(default_factory=list)
    open: int = 0
    stalled: asyncio.Event = field(default_factory=asyncio.Event)
    stall: bool = False

    def app(self) -> Starlette:
        routes = [Route(path, self._stream, methods=["POST"]) for path in (CHAT, COMPLETIONS)]
        routes.append(Route(TEXT_PATH, self._text, methods=["POST"]))
        routes.append(Route("/v1/embeddings", self._echo, methods=["POST"]))
        return Starlette(routes=routes)

    async def _echo(self, request: Request) -> Response:
        body = await request.body()
        self.calls.append((request.url.path, dict(request.headers), body))
        query = {"query": request.url.query}
        return Response(body, 201, {"x-own": "yes", **query}, "application/octet-stream")

    async def _text(self, request: Request) -> Response:
        if self.refusals:
            return JSONResponse({}, self.refusals.pop(0))
        question = msgspec.json.decode(await request.body(), type=TextQuestion)
        return Response(msgspec.json.encode(told(question)))

    async def _stream(self, request: Request) -> Response:
        body = await request.json()
        self.calls.append((request.url.path, dict(request.headers), body))
        if self.refusals:
            status = self.refusals.pop(0)
            return JSONResponse({"error": {"message": "not now", "code": status}}, status)
        if not body.get("stream"):
            return JSONResponse({"choices": [], "own": body})
        events = self.engine.stream(request.url.path, body)
        death = self.deaths.pop(0) if self.deaths else None
        if death is not None:
            self.refusals, self.then = [*self.refusals, *self.then], []
        found = {headers.LIMITS: LIMITS.header()} if self.limits else {}
        return StreamingResponse(
            self._pieces(list(events), death), headers=found, media_type="text/event-stream"
        )

    async def _pieces(self, events: list[Any], death: Death | None) -> AsyncIterator[bytes]:
        self.open += 1
        try:
            for number, event in enumerate(events):
                if death is not None and number == death.after % len(events):
                    if death.how == "error":
                        yield _error(500)
                    if death.how == "error at once":
                        yield b"data: " + json.dumps(event).encode() + b"\n\n" + _error(500)
                    if death.how == "refusal":
                        yield _error(400)
                    if death.how == "reset":
                        yield b'data: {"id": "chatcmpl-'  # in the middle of an event
                        raise _Killed
                    return
                yield b"data: " + json.dumps(event).encode() + b"\n\n"
                if self.stall:
                    await self.stalled.wait()
            yield b"data: [DONE]\n\n"
        finally:
            self.open -= 1


def _error(code: int) -> bytes:
    error = {"message": "no", "type": "x", "code": code}
    return b"data: " + json.dumps({"error": error}).encode() + b"\n\n"


@asynccontextmanager
async def served(app: Any, socket: Path) -> AsyncIterator[None]:
    config = uvicorn.Config(app, uds=str(socket), lifespan="off", log_level="critical")
    config.load()
    server = uvicorn.Server(config)
    server.lifespan = config.lifespan_class(config)
    await server.startup()
    ticking = asyncio.create_task(server.main_loop())
    try:
        yield
    finally:
        server.should_exit = server.force_exit = True
        await ticking
        await server.shutdown()


@asynccontextmanager
async def relay(
    gateway: Gateway, folder: Path, patience: float = 5.0
) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a relay in front of ``gateway``."""

    def through(socket: str) -> httpx.AsyncClient:
        transport = httpx.AsyncHTTPTransport(uds=str(folder / socket))
        return httpx.AsyncClient(transport=transport, base_url="http://gateway", timeout=30)

    async with (
        through(GATEWAY_SOCKET) as onward,
        served(gateway.app(), folder / GATEWAY_SOCKET),
        served(Relay(onward, patience=patience), folder / RELAY_SOCKET),
        through(RELAY_SOCKET) as client,
    ):
        yield client
