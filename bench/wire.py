"""A client that costs little: requests made ahead, on connections that stay, answers only counted.

Times are seconds. A request whose answer is not 200 raises ``RuntimeError``.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence
from typing import cast


class Connection(asyncio.Protocol):
    """One connection with one request on its way at a time."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport
        self._answer = bytearray()
        self._done: asyncio.Future[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._answer += data
        head = self._answer.find(b"\r\n\r\n")
        if head < 0 or self._done is None or self._done.done():
            return
        lines = bytes(self._answer[:head]).lower()
        start = lines.find(b"\r\ncontent-length: ")
        if start >= 0:
            length = int(lines[start + 18 :].partition(b"\r")[0])
            whole = len(self._answer) >= head + 4 + length
        else:
            whole = self._answer.endswith(b"\r\n0\r\n\r\n")
        if whole:
            self._done.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(RuntimeError(f"the connection was closed: {error}"))

    async def ask(self, request: bytes) -> None:
        self._answer.clear()
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        await self._done
        if not self._answer.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(f"a request failed: {bytes(self._answer[:400])!r}")

    def close(self) -> None:
        self._transport.close()


def request(path: str, body: bytes) -> bytes:
    """A POST, as it goes over the wire."""
    return (
        f"POST {path} HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n\r\n".encode()
        + body
    )


class Pool:
    """Open connections to one address."""

    def __init__(self, connections: list[Connection], requests: Sequence[bytes]) -> None:
        self._connections = connections
        self._requests = itertools.cycle(requests)

    @classmethod
    async def open(cls, address: str, count: int, requests: Sequence[bytes]) -> Pool:
        host, _, port = address.rpartition(":")
        loop = asyncio.get_running_loop()
        made = [
            (await loop.create_connection(Connection, host, int(port)))[1] for _ in range(count)
        ]
        return cls(made, requests)

    def close(self) -> None:
        for connection in self._connections:
            connection.close()

    async def closed_loop(self, seconds: float) -> list[float]:
        """All connections busy for so long; the latencies."""
        latencies: list[float] = []
        end = time.perf_counter() + seconds

        async def user(connection: Connection) -> None:
            while (start := time.perf_counter()) < end:
                await connection.ask(next(self._requests))
                latencies.append(time.perf_counter() - start)

        await asyncio.gather(*map(user, self._connections))
        return latencies

    async def open_loop(self, rate: float, seconds: float) -> list[float]:
        """Evenly spaced requests; a latency holds the wait for a connection when all are busy, and
        not the timer's millisecond by which a request may go out late."""
        latencies: list[float] = []
        free: asyncio.Queue[Connection] = asyncio.Queue()
        for connection in self._connections:
            free.put_nowait(connection)
        start = time.perf_counter()

        async def one(begun: float) -> None:
            connection = await free.get()
            await connection.ask(next(self._requests))
            latencies.append(time.perf_counter() - begun)
            free.put_nowait(connection)

        async with asyncio.TaskGroup() as group:
            for i in range(int(rate * seconds)):
                due = start + i / rate
                if (wait := due - time.perf_counter()) > 0:
                    await asyncio.sleep(wait)
                # Whatever became of those before: a wait for a connection here would delay, and so
                # leave out, the waits of all that are due meanwhile.
                group.create_task(one(time.perf_counter()))
        return latencies
