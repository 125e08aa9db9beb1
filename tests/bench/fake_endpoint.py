"""An OpenAI-like server of known delays, in process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web


@dataclass
class FakeEndpoint:
    """``slots`` calls are served at once, others wait in line. A word of a prompt is ``per_word``
    tokens and a call has ``overhead`` of them beside."""

    ttft: float = 0.02
    tpot: float = 0.002
    slots: int = 1000
    per_word: float = 1.0
    overhead: int = 5
    models: tuple[str, ...] = ("fake",)
    longest: int | None = None
    key: str | None = None
    refused_fields: tuple[str, ...] = ()
    # Every so many-th call fails so: "500", "broken" (no [DONE]), "error" (an error event).
    failure: str = ""
    every: int = 0
    usage: bool = True
    # Whether a chat's role is told before its first token or, as vLLM does, with it.
    role_at_once: bool = True
    bodies: list[dict[str, Any]] = field(default_factory=list)
    url: str = ""
    _line: asyncio.Semaphore = field(init=False)

    @asynccontextmanager
    async def serve(self) -> AsyncIterator[FakeEndpoint]:
        self._line = asyncio.Semaphore(self.slots)
        app = web.Application(client_max_size=2**26)
        app.router.add_get("/v1/models", self._list)
        app.router.add_post("/v1/chat/completions", self._answer)
        app.router.add_post("/v1/completions", self._answer)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield self
        finally:
            await runner.cleanup()

    async def _list(self, request: web.Request) -> web.Response:
        if self.key and request.headers.get("Authorization") != f"Bearer {self.key}":
            return web.json_response({"error": {"message": "who are you"}}, status=401)
        more = {} if self.longest is None else {"max_model_len": self.longest}
        return web.json_response({"data": [{"id": m} | more for m in self.models]})

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        for name in self.refused_fields:
            if name in body:
                error = {"message": f"Unrecognized request argument: {name}", "code": "unknown"}
                return web.json_response({"error": error}, status=400)
        self.bodies.append(body)
        number = len(self.bodies)
        failing = self.failure if self.every and number % self.every == 0 else ""
        if failing == "500":
            return web.json_response({"error": {"code": "oops"}}, status=500)
        chat = "messages" in body
        said = " ".join(map(_text, body["messages"])) if chat else body["prompt"]
        prompt = int(len(said.split()) * self.per_word) + self.overhead
        tokens = body.get("max_tokens") or body["max_completion_tokens"]
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        role = {"choices": [{"delta": {"role": "assistant"}}]}
        if chat and self.role_at_once:
            await self._event(response, role)
        async with self._line:
            for i in range(tokens):
                await asyncio.sleep(self.tpot if i else self.ttft)
                if chat and not i and not self.role_at_once:
                    await self._event(response, role)
                said = f"w{i} "
                choice = {"delta": {"content": said}} if chat else {"text": said}
                await self._event(response, {"choices": [choice]})
                if failing and i == tokens // 2:
                    break
        if failing == "broken":
            return response
        if failing == "error":
            await self._event(response, {"error": {"code": "engine_dead"}})
        if self.usage:
            usage = {"prompt_tokens": prompt, "completion_tokens": tokens}
            await self._event(response, {"choices": [], "usage": usage})
        await response.write(b"data: [DONE]\n\n")
        return response

    @staticmethod
    async def _event(response: web.StreamResponse, event: dict[str, Any]) -> None:
        # A client that has gone is nothing to speak of.
        with suppress(ConnectionError):
            await response.write(f"data: {json.dumps(event)}\n\n".encode())


def _text(message: dict[str, Any]) -> str:
    content = message["content"]
    if isinstance(content, str):
        return content
    return " ".join(part["text"] for part in content)
