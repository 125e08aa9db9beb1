"""Workers that answer at once: what is left of a call's time is the gateway's and the router's.

A process of its own: ``python instant.py HTTP_PORT SCHEDULER_GRPC WORKERS RATE``. Worker i listens
on 127.1.0.i; each has a session with the scheduler (``-`` for none), in which it reports what it
has served, RATE times a second or as seldom as it is told, beside as many made-up running decodes
as a busy engine has.

With a fifth argument, GAP seconds, answers are streams instead: as many tokens as the call's
``max_tokens``, one every GAP seconds; a header ``x-worker`` tells the worker, and the reports name
the streams that run.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import sys
from collections.abc import AsyncIterator, Sequence
from typing import cast

import grpc
import uvloop

from ecoserve import headers
from ecoserve.proto.v1 import session_pb2, session_pb2_grpc

_TOKENS = 8
_EVENTS = b"".join(
    b'data: {"id":"c","object":"chat.completion.chunk","model":"m","choices":'
    b'[{"index":0,"delta":{"content":"word "}}]}\n\n'
    for _ in range(_TOKENS)
)
_STREAM = _EVENTS + b"data: [DONE]\n\n"
_ANSWER = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: %d\r\n\r\n%s" % (
    len(_STREAM),
    _STREAM,
)
_STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n"
    b"x-worker: %s\r\n\r\n"
)
_WELL = b'{"status":"ok","data":[{"id":"m","object":"model"}],"object":"list"}'
_OTHER = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s" % (
    len(_WELL),
    _WELL,
)
_ID = b"\r\n" + headers.REQUEST_ID.encode() + b": "
# Running decodes that are reported, worker by worker: idle, usual and full batches.
_RUNNING = (0, 4, 16, 32, 64)


def address(worker: int) -> str:
    """The IP address of worker ``worker``, from 0."""
    return f"127.1.{worker // 250}.{worker % 250 + 1}"


def hello(
    worker: int, port: int, *, prefill_token: float = 1e-8, decode_sequence: float = 1e-5
) -> session_pb2.Hello:
    """What worker ``worker`` says of itself; seconds of its latency model."""
    return session_pb2.Hello(
        cluster="c",
        instance=f"w{worker}",
        incarnation="1",
        address=f"{address(worker)}:{port}",
        model="m",
        limits=session_pb2.Limits(
            max_num_seqs=256,
            max_model_len=131072,
            step_budget=2048,
            kv_tokens=2_000_000,
            block_tokens=16,
        ),
        latency=session_pb2.Latency(
            prefill_fixed=1e-3,
            prefill_token=prefill_token,
            decode_fixed=5e-3,
            decode_sequence=decode_sequence,
            error=0.05,
        ),
    )


def report(
    number: int, running: Sequence[session_pb2.Decode], finished: Sequence[session_pb2.Finished]
) -> session_pb2.Report:
    """Report ``number`` of a worker that decodes."""
    return session_pb2.Report(
        number=number, phase="prefill", kv_free_tokens=2_000_000, batch_limit=256,
        running=running, finished=finished, use=0.5,
        step=session_pb2.Step(kind="decode", estimated_s=5e-3, elapsed_s=1e-3),
    )  # fmt: skip


def finished(number: int, name: str) -> session_pb2.Finished:
    """The worker's call ``number``, of the id ``name``, that is over."""
    return session_pb2.Finished(
        number=number, id=name, status=200, prompt_tokens=250, generated=_TOKENS,
        ttft_s=0.001, tpot_s=0.001, ttft_slo_s=5, tpot_slo_s=0.5,
    )  # fmt: skip


class Worker:
    """What one worker has served and not reported yet."""

    def __init__(self) -> None:
        self.served: list[str] = []
        self.streaming: set[str] = set()
        self.finished = 0


class _Http(asyncio.Protocol):
    """HTTP/1.1 as far as gateways speak it: whole requests with a length, one after the other."""

    def __init__(self, workers: dict[str, Worker], gap: float) -> None:
        self._workers = workers
        self._gap = gap
        self._timer: asyncio.TimerHandle | None = None
        self._buffer = bytearray()
        self._missing = 0
        self._transport: asyncio.Transport
        self._worker: Worker | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._worker = self._workers.get(transport.get_extra_info("sockname")[0])

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while len(self._buffer) > self._missing:
            end = self._buffer.find(b"\r\n\r\n")
            if end < 0:
                return
            head = bytes(self._buffer[: end + 2])
            length = _number(head.lower(), b"\r\ncontent-length: ")
            if len(self._buffer) < end + 4 + length:
                self._missing = end + 3 + length
                return
            self._missing = 0
            body = bytes(self._buffer[end + 4 : end + 4 + length])
            del self._buffer[: end + 4 + length]
            if self._gap and head.startswith(b"POST"):
                self._begin_stream(head, _number(body, b'"max_tokens":'))
                continue
            self._transport.write(_ANSWER if head.startswith(b"POST") else _OTHER)
            start = head.find(_ID)
            if start >= 0 and self._worker is not None:
                start += len(_ID)
                self._worker.served.append(head[start : head.index(b"\r", start)].decode())

    def _begin_stream(self, head: bytes, tokens: int) -> None:
        host = self._transport.get_extra_info("sockname")[0]
        self._transport.write(_STREAM_HEAD % host.encode())
        start = head.find(_ID)
        name = head[start + len(_ID) :].partition(b"\r")[0].decode() if start >= 0 else ""
        if self._worker is not None:
            self._worker.streaming.add(name)
        self._token(name, tokens)

    def _token(self, name: str, left: int) -> None:
        if left > 0:
            self._transport.write(_chunk(_EVENTS[: len(_EVENTS) // _TOKENS]))
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._gap, self._token, name, left - 1)
            return
        self._transport.write(_chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")
        if self._worker is not None:
            self._worker.streaming.discard(name)
            self._worker.served.append(name)

    def connection_lost(self, error: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def _number(head: bytes, name: bytes) -> int:
    start = head.find(name)
    if start < 0:
        return 0
    digits = head[start + len(name) :].lstrip()
    return int(digits[: len(digits) - len(digits.lstrip(b"0123456789"))])


async def _session(
    stub: session_pb2_grpc.SessionStub, worker: Worker, number: int, port: int, rate: float
) -> None:
    outgoing: asyncio.Queue[session_pb2.WorkerMessage] = asyncio.Queue()
    running = [
        session_pb2.Decode(
            id=f"eco-{number:08x}{i:08x}", context=400 + i, generated=20, slack_s=3.0, tpot_s=0.1
        )
        for i in range(_RUNNING[number % len(_RUNNING)])
    ]

    async def messages() -> AsyncIterator[session_pb2.WorkerMessage]:
        yield session_pb2.WorkerMessage(hello=hello(number, port))
        while True:
            yield await outgoing.get()

    interval = 0.0

    async def report_on() -> None:
        for count in itertools.count(1):
            over = [finished(worker.finished + i, name) for i, name in enumerate(worker.served, 1)]
            worker.finished += len(over)
            worker.served.clear()
            told = report(count, [*running, *_decodes(worker)], over)
            outgoing.put_nowait(session_pb2.WorkerMessage(report=told))
            await asyncio.sleep(max(1 / rate, interval))

    reporting = asyncio.create_task(report_on())
    async for message in stub.Connect(messages()):
        kind = message.WhichOneof("message")
        if kind == "ack":
            interval = message.ack.interval_s
        elif kind == "command":
            done = session_pb2.CommandDone(number=message.command.number)
            outgoing.put_nowait(session_pb2.WorkerMessage(done=done))
    reporting.cancel()


def _decodes(worker: Worker) -> list[session_pb2.Decode]:
    return [
        session_pb2.Decode(id=name, context=250, generated=4, slack_s=3.0, tpot_s=0.5)
        for name in worker.streaming
    ]


async def main(port: int, scheduler: str, count: int, rate: float, gap: float = 0.0) -> None:
    workers = {address(i): Worker() for i in range(count)}
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: _Http(workers, gap), "0.0.0.0", port, backlog=1024)
    async with server, contextlib.AsyncExitStack() as stack:
        if scheduler != "-":
            channel = await stack.enter_async_context(grpc.aio.insecure_channel(scheduler))
            stub = session_pb2_grpc.SessionStub(channel)  # type: ignore[no-untyped-call]
            await asyncio.gather(
                *(_session(stub, w, i, port, rate) for i, w in enumerate(workers.values()))
            )
        await server.serve_forever()


if __name__ == "__main__":
    _port, _scheduler, _count, *_rates = sys.argv[1:]
    uvloop.run(main(int(_port), _scheduler, int(_count), *map(float, _rates)))
