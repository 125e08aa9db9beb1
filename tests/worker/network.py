"""What is between an agent and its scheduler."""

from __future__ import annotations

import asyncio


class Network:
    """Leads to a port of this machine.

    ``silence`` is what happens when the machine at the other end is gone: connections that are
    there stay, and nothing comes by them any more.
    """

    def __init__(self, port: int) -> None:
        self._to = port
        self._silent = asyncio.Event()
        self._ways: set[asyncio.Task[None]] = set()
        self.port = 0

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._connect, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    def silence(self) -> None:
        self._silent.set()
        self._silent = asyncio.Event()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", self._to)
        for ends in ((reader, back), (there, writer)):
            way = asyncio.create_task(self._pass(*ends, self._silent))
            self._ways.add(way)

    async def _pass(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, silent: asyncio.Event
    ) -> None:
        while data := await reader.read(1 << 16):
            if not silent.is_set():
                writer.write(data)
        writer.close()

    async def stop(self) -> None:
        self._server.close()
        for way in self._ways:
            way.cancel()
        await asyncio.gather(*self._ways, return_exceptions=True)
