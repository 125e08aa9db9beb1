"""The endpoint picker: Envoy asks for each call where it goes.

Three ways are served: headers and a buffered body, one message each; the endpoint-picker protocol's
streamed body; and our own gateway's, a single message with the body, which is answered by metadata.

The cluster of a call is the gRPC metadata ``x-ecoserve-cluster`` of the gateway's stream, or the
only cluster there is. How long a call may wait is the metadata ``x-ecoserve-max-wait`` (seconds,
the filter's ``max_message_timeout``), or ``MAX_WAIT_S``.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from functools import partial
from typing import Any

import grpc
from envoy.extensions.filters.http.ext_proc.v3 import processing_mode_pb2
from envoy.service.ext_proc.v3 import external_processor_pb2

from ecoserve import headers
from ecoserve.numbers import SECONDS, Allowed
from ecoserve.policy.state import SLO
from ecoserve.scheduler import extproc, peers, work
from ecoserve.scheduler.cluster import Cluster
from ecoserve.scheduler.requests import Outcome, Picked, Turned
from ecoserve.scheduler.store import Store

SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"
CLUSTER_METADATA = "x-ecoserve-cluster"
MAX_WAIT_METADATA = "x-ecoserve-max-wait"
MAX_WAIT_S = 60.0
MAX_WAITS = Allowed(0, 3600, above=True, of="seconds")
PRIORITIES = Allowed(-(2**63), 2**63 - 1, whole=True)
# So long after a start a cluster may yet be declared: a controller that takes over from one that
# was killed waits for its lease to run out.
DECLARED_WITHIN_S = 30.0
MOST_BODY_BYTES = 32 * 1024 * 1024

_BUFFERED = processing_mode_pb2.ProcessingMode.BUFFERED
_FULL_DUPLEX = processing_mode_pb2.ProcessingMode.FULL_DUPLEX_STREAMED

_EOF: Any = grpc.aio.EOF  # type: ignore[attr-defined]

Context = Any  # grpc.aio.ServicerContext; its stubs miss read() and write()


class NotTheirs(Exception):
    """The gateway is none of the cluster's; the message says why."""


class ClientGone(Exception):
    """The gateway ended the stream before it had its answer."""


class BadHeader(ValueError):
    """A header of the client that cannot be used; the message names it."""


class _Stream:
    """One call's messages. While an answer is waited for, the next message is read already, since
    its end is how one learns that the client went away."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self._next: asyncio.Task[Any] | None = None
        self._extended = False
        self.buffered = True
        metadata = dict(context.invocation_metadata() or ())
        self.cluster_name = metadata.get(CLUSTER_METADATA)
        wait = _read(metadata.get(MAX_WAIT_METADATA), MAX_WAIT_METADATA, MAX_WAITS)
        self.max_wait = wait or MAX_WAIT_S

    async def read(self) -> Any | None:
        if self._next is not None:
            message = await self._next
            self._next = None
        else:
            message = await self.context.read()
        return None if message is _EOF else message

    async def write(self, message: Any) -> None:
        await self.context.write(message)

    async def wait(self, future: asyncio.Future[None], seconds: float | None = None) -> None:
        """Waits for ``future``, at most so long. ClientGone if the stream ends before."""
        if self.buffered and not self._extended:
            self._extended = True
            await self.write(extproc.more_time(self.max_wait))
        if self._next is None:
            self._next = asyncio.ensure_future(self.context.read())
        await asyncio.wait(
            {future, self._next}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED
        )
        if not future.done() and self._next.done() and self._next.result() is _EOF:
            raise ClientGone
        if not future.done() and self._next.done():
            # Trailers, or what a gateway sends ahead; it is answered in its turn.
            await asyncio.wait({future}, timeout=seconds)

    def close(self) -> None:
        if self._next is not None:
            self._next.cancel()


class Picker:
    """Serves ``envoy.service.ext_proc.v3.ExternalProcessor``."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def handler(self) -> grpc.GenericRpcHandler[Any, Any]:
        """To be added to a server. The generated one could not send what is serialised already."""
        method = grpc.stream_stream_rpc_method_handler(
            self.Process,
            request_deserializer=external_processor_pb2.ProcessingRequest.FromString,
            response_serializer=extproc.serialised,
        )
        return grpc.method_handlers_generic_handler(SERVICE, {"Process": method})

    async def Process(self, _requests: Any, context: Context) -> None:
        try:
            stream = _Stream(context)
        except BadHeader as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        try:
            await self._serve(stream)
        except ClientGone:
            return
        except NotTheirs as error:
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, str(error))
        finally:
            stream.close()

    async def _serve(self, stream: _Stream) -> None:
        message = await stream.read()
        if message is None:
            return
        if message.HasField("request_body") and message.request_body.end_of_stream:
            # Our own gateway's way: the whole body, and what is to be known of the headers.
            call = _Call(self._store, stream, message)
            await self._answer(stream, call, message.request_body.body, "metadata")
            return
        if not message.HasField("request_headers"):
            await self._pass_on(stream, message, streamed=False)
            return
        mode = message.protocol_config.request_body_mode
        stream.buffered = mode != _FULL_DUPLEX
        has_body = not message.request_headers.end_of_stream
        call = _Call(self._store, stream, message)
        if not has_body or mode not in (_BUFFERED, _FULL_DUPLEX):
            await self._answer(stream, call, b"", "request_headers", with_work=False)
            await self._pass_on(stream, None, streamed=mode == _FULL_DUPLEX)
        elif mode == _BUFFERED:
            await stream.write(extproc.go_on())
            body = await stream.read()
            if body is not None and body.HasField("request_body"):
                await self._answer(stream, call, body.request_body.body, "request_body")
        else:
            await self._full_duplex(stream, call)

    async def _full_duplex(self, stream: _Stream, call: _Call) -> None:
        pieces = []
        size = 0
        trailers = None
        while True:
            message = await stream.read()
            if message is None:
                return
            if not message.HasField("request_body"):
                # Trailers end a body too.
                trailers = message
                break
            pieces.append(message.request_body.body)
            size += len(message.request_body.body)
            if size > MOST_BODY_BYTES:
                await stream.write(extproc.turned_away(_too_large()))
                return
            if message.request_body.end_of_stream:
                break
        body = b"".join(pieces)
        if not await self._answer(stream, call, body, "request_headers"):
            return
        try:
            for chunk in extproc.request_chunks(body, end=trailers is None):
                await stream.write(chunk)
        except BaseException:
            call.abandon()
            raise
        await self._pass_on(stream, trailers, streamed=True)

    async def _pass_on(self, stream: _Stream, message: Any | None, *, streamed: bool) -> None:
        """Answers what a gateway sends beyond what concerns us, until it ends the stream."""
        if message is None:
            message = await stream.read()
        while message is not None:
            answer = extproc.passed_on(message, streamed=streamed)
            if answer is not None:
                await stream.write(answer)
            message = await stream.read()

    async def _answer(
        self,
        stream: _Stream,
        call: _Call,
        body: bytes,
        kind: extproc.Kind,
        *,
        with_work: bool = True,
    ) -> bool:
        """Decides a call and says so; False if it was turned away."""
        try:
            outcome = await call.decide(body, with_work=with_work)
            if isinstance(outcome, Turned):
                await stream.write(extproc.turned_away(outcome))
                return False
            await stream.write(call.answer(outcome, kind))
        except BaseException:
            call.abandon()
            raise
        return True


class _Call:
    """One call: what it says of itself, and what is decided of it."""

    def __init__(self, store: Store, stream: _Stream, message: Any) -> None:
        self._store = store
        self._stream = stream
        self._headers = extproc.request_headers(message)
        self._subset = extproc.subset(message)
        self.id = f"eco-{secrets.token_hex(8)}"
        self._cluster: Cluster | None = None
        self._slo: SLO | None = None

    async def decide(self, body: bytes, *, with_work: bool) -> Outcome:
        # With all of its body: how long a client takes to send that is not ours to promise.
        arrived = self._store.clock()
        if len(body) > MOST_BODY_BYTES:
            return _too_large()
        cluster = await self._find_cluster()
        if isinstance(cluster, Turned):
            return cluster
        begun = time.perf_counter()
        spec = cluster.spec
        why = peers.refusal(self._stream.context, spec, "gateway")
        if why is not None:
            raise NotTheirs(why)
        self._cluster = cluster
        told = self._headers.get
        try:
            ttft = _read(told(headers.TTFT_SLO), headers.TTFT_SLO, SECONDS)
            tpot = _read(told(headers.TPOT_SLO), headers.TPOT_SLO, SECONDS)
            priority = _read(told(headers.PRIORITY), headers.PRIORITY, PRIORITIES)
        except BadHeader as error:
            return Turned(400, "invalid_header", str(error))
        if spec.slo is None:
            return Turned(503, "service_unavailable", "No worker can take requests yet.", 2.0)
        slo = self._slo = SLO(ttft or spec.slo.ttft_s, tpot or spec.slo.tpot_s)
        if not with_work:
            return cluster.any_address(self._subset)
        ticket = cluster.offer(
            self.id,
            work.read(told(":path", "").partition("?")[0], body),
            slo,
            arrived,
            patience=max(self._stream.max_wait * 0.95 - 0.1, 0.0),
            conversation=told(headers.CONVERSATION, "").encode(),
            allowed=self._subset,
            tenant=told(headers.TENANT, ""),
            priority=priority,
        )
        self._store.metrics.picked(cluster.name, time.perf_counter() - begun)
        if ticket.outcome is None:
            future = _future()
            ticket.decided = partial(_set, future)
            self._store.wake()
            await self._stream.wait(future)
        assert ticket.outcome is not None
        return ticket.outcome

    async def _find_cluster(self) -> Cluster | Turned:
        """The call's cluster; one that may yet be declared, after a start, is waited for."""
        cluster = self._lookup()
        while cluster is None:
            left = self._store.started_at + DECLARED_WITHIN_S - self._store.clock()
            if left <= 0:
                name = self._stream.cluster_name
                what = f"cluster {name} is not known" if name else "no cluster was named"
                return Turned(503, "service_unavailable", f"The service is not ready: {what}.", 2.0)
            future = _future()
            stop = self._store.listen(partial(_set, future))
            try:
                await self._stream.wait(future, left)
            finally:
                stop()
            cluster = self._lookup()
        return cluster

    def _lookup(self) -> Cluster | None:
        clusters = self._store.clusters
        if self._stream.cluster_name is not None:
            return clusters.get(self._stream.cluster_name)
        return next(iter(clusters.values())) if len(clusters) == 1 else None

    def answer(self, picked: Picked, kind: extproc.Kind) -> bytes:
        """The decision, with the headers that the worker is to see."""
        assert self._slo is not None
        rest = {
            headers.TTFT_SLO: f"{self._slo.ttft:.9g}",
            headers.TPOT_SLO: f"{self._slo.tpot:.9g}",
        }
        destination = ",".join(picked.addresses)
        return extproc.routed(kind, self.id, f"{picked.waited:.6f}", destination, rest)

    def abandon(self) -> None:
        """The client went away before it had its answer: nothing stays reserved."""
        if self._cluster is not None:
            self._cluster.cancel(self.id)


def _future() -> asyncio.Future[None]:
    return asyncio.get_running_loop().create_future()


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _read(text: str | None, name: str, allowed: Allowed) -> Any:
    if text is None:
        return None
    try:
        return allowed.read(text)
    except ValueError as error:
        raise BadHeader(f"{name} {error}") from None


def _too_large() -> Turned:
    limit = MOST_BODY_BYTES // 2**20
    return Turned(413, "request_too_large", f"The request body is larger than {limit} MiB.")
