"""The relay's two tasks for each call: neither fails unnoticed."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from ecoserve.relay.app import Relay


async def test_a_watch_for_the_client_that_fails_fails_the_call() -> None:
    asked = asyncio.Event()

    async def gateway(_: httpx.Request) -> httpx.Response:
        asked.set()
        await asyncio.Event().wait()
        raise AssertionError

    messages: list[dict[str, Any]] = [{"type": "http.request", "body": b"{}"}]

    async def receive() -> dict[str, Any]:
        if messages:
            return messages.pop()
        await asked.wait()
        raise KeyError("fault")

    async def send(_: Any) -> None:
        raise AssertionError("there is no answer")

    scope = {"type": "http", "path": "/v1/models", "method": "GET", "raw_path": b"/v1/models"}
    scope |= {"query_string": b"", "headers": [(b"x-ecoserve-relay", b"on")]}
    transport = httpx.MockTransport(gateway)
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
        with pytest.raises(KeyError, match="fault"):
            await asyncio.wait_for(Relay(client)(scope, receive, send), 30)
