"""A worker and a gateway that speak the scheduler's protocols, and no more."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable
from typing import Any

import grpc
from envoy.config.core.v3 import base_pb2
from envoy.extensions.filters.http.ext_proc.v3 import processing_mode_pb2
from envoy.service.ext_proc.v3 import external_processor_pb2 as ext_proc
from envoy.service.ext_proc.v3 import external_processor_pb2_grpc
from google.protobuf import struct_pb2

from ecoserve import headers
from ecoserve.proto.v1 import admin_pb2, session_pb2, session_pb2_grpc

LATENCY = session_pb2.Latency(
    prefill_fixed=0.01,
    prefill_token=0.0001,
    prefill_pair=0.0,
    decode_fixed=0.02,
    decode_sequence=0.001,
    decode_context=0.0,
    error=0.05,
)
LIMITS = session_pb2.Limits(
    max_num_seqs=64, max_model_len=8192, step_budget=2048, kv_tokens=100_000, block_tokens=16
)
FULL_DUPLEX = processing_mode_pb2.ProcessingMode.FULL_DUPLEX_STREAMED
BUFFERED = processing_mode_pb2.ProcessingMode.BUFFERED

_numbers = itertools.count(1)


async def until(condition: Callable[[], Any], what: str = "", seconds: float = 15.0) -> Any:
    """Polls until ``condition`` is truthy; returns its value."""
    deadline = asyncio.get_running_loop().time() + seconds
    while True:
        value = condition()
        if asyncio.iscoroutine(value):
            value = await value
        if value:
            return value
        if asyncio.get_running_loop().time() > deadline:
            raise AssertionError(f"not within {seconds} s: {what or condition}")
        await asyncio.sleep(0.01)


def cluster(*instances: str, **fields: Any) -> admin_pb2.Cluster:
    """A declaration with one macro instance, or with ``macro_instances`` as given."""
    declared: dict[str, Any] = {
        "name": "c",
        "model": "m",
        "slo": session_pb2.SLO(ttft_s=5.0, tpot_s=0.5),
        "policy": "padg",
        "macro_instances": [admin_pb2.MacroInstance(name="m0", instances=instances)],
    }
    return admin_pb2.Cluster(**(declared | fields))


class Worker:
    """A worker's agent. Commands are carried out unless their kind is in ``deaf``."""

    def __init__(
        self,
        port: int,
        name: str,
        *,
        cluster: str = "c",
        incarnation: str = "1",
        deaf: tuple[str, ...] = (),
        **hello: Any,
    ) -> None:
        self.name = name
        self.address = f"127.0.0.1:{20000 + next(_numbers)}"
        self.hello = session_pb2.Hello(
            **{
                "cluster": cluster,
                "instance": name,
                "incarnation": incarnation,
                "address": self.address,
                "model": "m",
                "limits": LIMITS,
                "latency": LATENCY,
                **hello,
            }
        )
        self.address = self.hello.address
        self.deaf = deaf
        self.draining = False
        self.accepted: session_pb2.Accepted | None = None
        self.refused: list[str] = []
        self.commands: list[session_pb2.Command] = []
        self.acks: list[session_pb2.Ack] = []
        self.error: grpc.aio.AioRpcError | None = None
        self.ended = asyncio.Event()
        self._reports = itertools.count(1)
        self._out: asyncio.Queue[session_pb2.WorkerMessage] = asyncio.Queue()
        self._channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}")
        self._task = asyncio.create_task(self._run())

    async def _send(self) -> Any:
        yield session_pb2.WorkerMessage(hello=self.hello)
        while True:
            yield await self._out.get()

    async def _run(self) -> None:
        try:
            call = session_pb2_grpc.SessionStub(self._channel).Connect(self._send())
            async for message in call:
                self._take(message)
        except grpc.aio.AioRpcError as error:
            self.error = error
        finally:
            self.ended.set()

    def _take(self, message: session_pb2.SchedulerMessage) -> None:
        kind = message.WhichOneof("message")
        if kind == "accepted":
            self.accepted = message.accepted
        elif kind == "refused":
            self.accepted = None
            self.refused.append(message.refused.reason)
        elif kind == "ack":
            self.acks.append(message.ack)
        elif kind == "command":
            self.commands.append(message.command)
            command = message.command.WhichOneof("command")
            if command in self.deaf:
                return
            if command in ("drain", "resume"):
                self.draining = command == "drain"
                self.report()
            self.done(message.command.number)

    def done(self, number: int, error: str = "") -> None:
        done = session_pb2.CommandDone(number=number, error=error)
        self._out.put_nowait(session_pb2.WorkerMessage(done=done))

    def report(self, **fields: Any) -> int:
        """Sends a report: idle, in its prefill phase, all KV free, unless said otherwise."""
        number = next(self._reports)
        report = session_pb2.Report(
            **{
                "number": number,
                "phase": "prefill",
                "kv_free_tokens": 100_000,
                "batch_limit": 64,
                "draining": self.draining,
                **fields,
            }
        )
        self._out.put_nowait(session_pb2.WorkerMessage(report=report))
        return number

    def busy(self, prefill_s: float = 1000.0) -> int:
        """Reports prompts that take so long that no other is admitted."""
        tokens = int(prefill_s / LATENCY.prefill_token)
        prompt = session_pb2.Prompt(id="other", tokens=tokens, since_switch=True)
        return self.report(waiting=[prompt])

    async def acked(self, number: int) -> None:
        await until(lambda: any(a.report >= number for a in self.acks), f"ack of report {number}")

    async def ready(self) -> Worker:
        """Accepted, and its first report taken."""
        await until(lambda: self.accepted, f"{self.name} accepted; refused: {self.refused}")
        await self.acked(self.report())
        return self

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self._channel.close()


class Reply:
    """What a gateway was told about a call."""

    def __init__(self) -> None:
        self.responses: list[Any] = []

    @property
    def immediate(self) -> Any | None:
        for response in self.responses:
            if response.HasField("immediate_response"):
                return response.immediate_response
        return None

    @property
    def status(self) -> int:
        return self.immediate.status.code if self.immediate else 0

    @property
    def error(self) -> dict[str, Any]:
        assert self.immediate is not None
        return json.loads(self.immediate.body)["error"]

    @property
    def set_headers(self) -> dict[str, str]:
        found = {}
        for response in self.responses:
            kind = response.WhichOneof("response")
            if kind is None:
                continue
            answer = getattr(response, kind)
            common = answer if kind == "immediate_response" else answer.response
            mutation = common.headers if kind == "immediate_response" else common.header_mutation
            for option in mutation.set_headers:
                found[option.header.key] = option.header.raw_value.decode()
        return found

    @property
    def destinations(self) -> list[str]:
        return self.set_headers[headers.DESTINATION].split(",")

    @property
    def id(self) -> str:
        return self.set_headers[headers.REQUEST_ID]

    @property
    def metadata_destination(self) -> str:
        for response in self.responses:
            if response.HasField("dynamic_metadata"):
                inner = response.dynamic_metadata.fields[headers.METADATA_NAMESPACE].struct_value
                return inner.fields[headers.DESTINATION].string_value
        return ""

    @property
    def extensions(self) -> int:
        return sum(r.HasField("override_message_timeout") for r in self.responses)

    @property
    def body(self) -> bytes:
        return b"".join(
            r.request_body.response.body_mutation.streamed_response.body
            for r in self.responses
            if r.HasField("request_body")
        )


class Gateway:
    """Calls the picker as Envoy does."""

    def __init__(self, port: int) -> None:
        self._channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}")
        self._stub = external_processor_pb2_grpc.ExternalProcessorStub(self._channel)

    async def close(self) -> None:
        await self._channel.close()

    def open(self, metadata: tuple[tuple[str, str], ...] = ()) -> Any:
        return self._stub.Process(metadata=metadata)

    async def call(
        self,
        body: Any,
        *,
        path: str = "/v1/chat/completions",
        method: str = "POST",
        values: dict[str, str] | None = None,
        mode: int = BUFFERED,
        subset: Any = None,
        metadata: tuple[tuple[str, str], ...] = (),
        reply: Reply | None = None,
        chunk: int = 65536,
        trailers: bool = False,
    ) -> Reply:
        """One call, whole; ``body`` None for none, bytes as they are, else as JSON."""
        reply = reply if reply is not None else Reply()
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        stream = self.open(metadata)
        first = head(path, method, values or {}, mode, subset, end=data is None)
        await stream.write(first)
        if data is None:
            await self._expect(stream, reply, "request_headers")
        elif mode == BUFFERED:
            await self._expect(stream, reply, "request_headers")
            await stream.write(_body(data, True))
            await self._expect(stream, reply, "request_body")
        else:
            pieces = [data[i : i + chunk] for i in range(0, len(data), chunk)] or [b""]
            for i, piece in enumerate(pieces):
                await stream.write(_body(piece, i == len(pieces) - 1 and not trailers))
            if trailers:
                await stream.write(
                    ext_proc.ProcessingRequest(request_trailers=ext_proc.HttpTrailers())
                )
            await self._expect(stream, reply, "request_headers")
            while not reply.immediate and len(reply.body) < len(data):
                await self._expect(stream, reply, "request_body")
            if trailers:
                await self._expect(stream, reply, "request_trailers")
        await stream.done_writing()
        while (message := await stream.read()) is not grpc.aio.EOF:
            reply.responses.append(message)
        return reply

    @staticmethod
    async def _expect(stream: Any, reply: Reply, kind: str) -> None:
        while True:
            message = await stream.read()
            if message is grpc.aio.EOF:
                return
            reply.responses.append(message)
            if message.WhichOneof("response") in (kind, "immediate_response"):
                return


def head(
    path: str, method: str, values: dict[str, str], mode: int, subset: Any, *, end: bool
) -> Any:
    pairs = {":path": path, ":method": method, **values}
    message = ext_proc.ProcessingRequest(
        request_headers=ext_proc.HttpHeaders(
            headers=base_pb2.HeaderMap(
                headers=[
                    base_pb2.HeaderValue(key=key, raw_value=value.encode())
                    for key, value in pairs.items()
                ]
            ),
            end_of_stream=end,
        ),
        protocol_config=ext_proc.ProtocolConfiguration(request_body_mode=mode),
    )
    if subset is not None:
        hint = struct_pb2.Struct()
        hint.update({headers.DESTINATION_SUBSET: subset})
        message.metadata_context.filter_metadata[headers.SUBSET_NAMESPACE].CopyFrom(hint)
    return message


def _body(data: bytes, end: bool) -> Any:
    return ext_proc.ProcessingRequest(request_body=ext_proc.HttpBody(body=data, end_of_stream=end))


def chat(text: str = "hello", *, model: str = "m", **fields: Any) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": text}], **fields}
