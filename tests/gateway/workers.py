"""Workers that do as they are told, over plain sockets, so that they can also break the rules."""

from __future__ import annotations

import asyncio
import contextlib
import json
from dataclasses import dataclass, field

from ecoserve import headers


@dataclass(slots=True)
class Call:
    method: str
    path: str
    headers: dict[str, str]
    body: bytes


@dataclass(slots=True, eq=False)
class Worker:
    """``behaviour`` is one of

    answer     200 with the worker's address
    stream     three pieces, the second of which waits for ``gate``
    silent     waits for ``gate``, then as answer
    close      closes the connection instead of an answer
    retryable  503 that says that nothing was begun
    refuse     503 that does not
    error      500
    break      the head and one piece, then the connection is reset
    """

    behaviour: str = "answer"
    healthy: bool = True
    address: str = ""
    calls: list[Call] = field(default_factory=list)
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    _server: asyncio.Server | None = None
    _tasks: dict[asyncio.Task[None], asyncio.StreamWriter] = field(default_factory=dict)

    async def start(self, port: int = 0) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", port)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    @property
    def listening(self) -> bool:
        return self._server is not None

    async def kill(self) -> None:
        """As a killed process: the port refuses, connections are reset."""
        if self._server is not None:
            self._server.close()
        for writer in self._tasks.values():
            writer.transport.abort()
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._server = None

    def reset(self) -> None:
        self.behaviour, self.healthy = "answer", True
        self.calls.clear()
        self.gate = asyncio.Event()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks[task] = writer
        try:
            while await self._one(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            # Cancelled, too, it just ends: asyncio would report a cancelled handler as an error.
            pass
        finally:
            del self._tasks[task]
            writer.close()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        call = await _read(reader)
        if call.path == "/ecoserve/health":
            await _answer(writer, 200 if self.healthy else 503, {})
            return True
        self.calls.append(call)
        gate = self.gate
        match self.behaviour:
            case "close":
                return False
            case "retryable":
                await _answer(writer, 503, {"served": "no"}, {headers.RETRYABLE: "1"})
            case "refuse":
                await _answer(writer, 503, {"own": "busy"})
            case "error":
                await _answer(writer, 500, {"own": "broken"})
            case "stream" | "break":
                writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n")
                writer.write(b"content-type: text/event-stream\r\n\r\n")
                await _chunk(writer, f"data: {self.address}\n\n")
                await gate.wait()
                if self.behaviour == "break":
                    writer.transport.abort()
                    return False
                await _chunk(writer, "data: more\n\n")
                await _chunk(writer, "data: [DONE]\n\n")
                await _chunk(writer, "")
            case behaviour:
                if behaviour == "silent":
                    await gate.wait()
                await _answer(writer, 200, {"worker": self.address, "size": len(call.body)})
        return True


async def _read(reader: asyncio.StreamReader) -> Call:
    method, path, _ = (await reader.readuntil(b"\r\n")).decode().split(" ", 2)
    found: dict[str, str] = {}
    while (line := (await reader.readuntil(b"\r\n")).decode().strip()) != "":
        key, _, value = line.partition(":")
        found[key.lower()] = value.strip()
    if "content-length" in found:
        body = await reader.readexactly(int(found["content-length"]))
    elif found.get("transfer-encoding") == "chunked":
        body = b""
        while size := int(await reader.readuntil(b"\r\n"), 16):
            body += await reader.readexactly(size)
            await reader.readexactly(2)
        await reader.readexactly(2)
    else:
        body = b""
    return Call(method, path, found, body)


async def _answer(
    writer: asyncio.StreamWriter,
    status: int,
    value: dict[str, object],
    more: dict[str, str] | None = None,
) -> None:
    body = json.dumps(value).encode()
    lines = [f"HTTP/1.1 {status} X", f"content-length: {len(body)}"]
    lines += [f"{key}: {text}" for key, text in (more or {}).items()]
    writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + body)
    with contextlib.suppress(ConnectionError):
        await writer.drain()


async def _chunk(writer: asyncio.StreamWriter, text: str) -> None:
    writer.write(f"{len(text):x}\r\n{text}\r\n".encode())
    await writer.drain()
