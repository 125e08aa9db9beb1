"""The channel between a worker's front end and its EngineCore: datagrams over a Unix socket.

The engine's end never blocks and never raises for a slow reader: a state that does not fit is
dropped (the next one replaces it), events are kept for the next message. The front end's end is
driven by its event loop; commands that do not fit wait there in order.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections import deque
from collections.abc import Callable
from pathlib import Path

import msgspec

from ecoserve_worker.messages import (
    Command,
    FromEngine,
    PhaseSwitch,
    Sample,
    SequenceDone,
    State,
)

logger = logging.getLogger(__name__)

_BUFFER = 1 << 20  # asked for; the kernel's own limit may be lower
_EVENTS_A_MESSAGE = 500
_COMMANDS_A_MESSAGE = 200
_ENTRIES_A_STATE = 1500  # keeps a state within the smallest default socket buffer


def _socket() -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        sock.setsockopt(socket.SOL_SOCKET, option, _BUFFER)
    return sock


class EngineEnd:
    """The engine's end. ``path=None`` makes an end that is connected to nothing."""

    def __init__(self, path: str | None) -> None:
        self._sock: socket.socket | None = None
        if path is not None:
            self._sock = _socket()
            self._sock.connect(path)
            self._sock.setblocking(False)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(list[Command])
        self._buffer = bytearray()
        self._first_tokens: list[str] = []
        self._done: list[SequenceDone] = []
        self._switches: list[PhaseSwitch] = []
        self._samples: list[Sample] = []

    @property
    def connected(self) -> bool:
        return self._sock is not None

    def first_token(self, id: str) -> None:
        if self._sock is not None:
            self._first_tokens.append(id)

    def done(self, done: SequenceDone) -> None:
        if self._sock is not None:
            self._done.append(done)

    def switch(self, switch: PhaseSwitch) -> None:
        if self._sock is not None:
            self._switches.append(switch)

    def sample(self, sample: Sample) -> None:
        if self._sock is not None:
            self._samples.append(sample)

    def commands(self) -> list[Command]:
        """All commands that have come since the last call."""
        if self._sock is None:
            return []
        commands: list[Command] = []
        while True:
            try:
                data = self._sock.recv(_BUFFER)
            except (BlockingIOError, InterruptedError):
                return commands
            except OSError as error:
                self._lost(error)
                return commands
            if not data:
                self._lost("closed by the front end")
                return commands
            commands += self._decoder.decode(data)

    def send(self, state: State | None) -> None:
        """Sends the state with the events gathered so far."""
        if self._sock is None:
            return
        if state is not None and len(state.waiting) + len(state.running) > _ENTRIES_A_STATE:
            state = msgspec.structs.replace(
                state,
                running=state.running[:_ENTRIES_A_STATE],
                waiting=state.waiting[: max(0, _ENTRIES_A_STATE - len(state.running))],
            )
        message = FromEngine(
            state,
            self._first_tokens[:_EVENTS_A_MESSAGE],
            self._done[:_EVENTS_A_MESSAGE],
            self._switches[:_EVENTS_A_MESSAGE],
            self._samples[:_EVENTS_A_MESSAGE],
        )
        self._encoder.encode_into(message, self._buffer)
        try:
            self._sock.send(self._buffer)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self._lost(error)
            return
        del self._first_tokens[:_EVENTS_A_MESSAGE]
        del self._done[:_EVENTS_A_MESSAGE]
        del self._switches[:_EVENTS_A_MESSAGE]
        del self._samples[:_EVENTS_A_MESSAGE]

    def close(self) -> None:
        if self._sock is not None:
            self._sock.close()
            self._sock = None

    def _lost(self, why: object) -> None:
        # Serving goes on with the settings in force; only reports and metadata end.
        logger.info("the channel to the front end is gone: %s", why)
        self.close()


class FrontEnd:
    """The front end's end: listens before the engine starts, one engine connects.

    ``received`` is called for each message, in the event loop that ``start`` was called in.
    """

    def __init__(self, path: Path, received: Callable[[FromEngine], None]) -> None:
        self.path = path
        self._received = received
        self._listener = _socket()
        self._listener.bind(str(path))
        path.chmod(0o600)
        self._listener.listen(1)
        self._listener.setblocking(False)
        self._sock: socket.socket | None = None
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(FromEngine)
        self._pending: deque[Command] = deque()
        self._writing = False
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        """Begins to take the engine's connection and messages, in the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._listener, self._accept)

    def tell(self, command: Command) -> None:
        """Sends a command, before anything that is sent to the engine after this call returns,
        unless the socket is full; never blocks."""
        self._pending.append(command)
        if not self._writing:
            self._write()

    def close(self) -> None:
        for sock in (self._listener, self._sock):
            if sock is None or sock.fileno() < 0:
                continue
            if self._loop is not None:
                self._loop.remove_reader(sock)
                self._loop.remove_writer(sock)
            sock.close()
        self._sock = None
        self._writing = False
        with contextlib.suppress(FileNotFoundError):
            self.path.unlink()

    def _accept(self) -> None:
        assert self._loop is not None
        try:
            self._sock, _ = self._listener.accept()
        except (BlockingIOError, InterruptedError):
            return
        self._loop.remove_reader(self._listener)
        self._sock.setblocking(False)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            self._sock.setsockopt(socket.SOL_SOCKET, option, _BUFFER)
        self._loop.add_reader(self._sock, self._read)
        self._write()

    def _read(self) -> None:
        assert self._loop is not None
        while self._sock is not None:
            try:
                data = self._sock.recv(_BUFFER)
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                data = b""
            if not data:
                self._loop.remove_reader(self._sock)
                self._loop.remove_writer(self._sock)
                self._sock.close()
                self._sock = None
                return
            self._received(self._decoder.decode(data))

    def _write(self) -> None:
        while self._pending and self._sock is not None:
            count = min(len(self._pending), _COMMANDS_A_MESSAGE)
            batch = [self._pending[i] for i in range(count)]
            try:
                self._sock.send(self._encoder.encode(batch))
            except (BlockingIOError, InterruptedError):
                break
            except OSError:
                return  # the reader notices the end of the connection
            for _ in range(count):
                self._pending.popleft()
        if self._loop is None or self._sock is None:
            return
        if self._pending and not self._writing:
            self._loop.add_writer(self._sock, self._write)
            self._writing = True
        elif not self._pending and self._writing:
            self._loop.remove_writer(self._sock)
            self._writing = False
