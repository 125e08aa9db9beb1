"""The worker's side of the session with the scheduler.

One bidirectional gRPC stream: reports up (on each change, coalesced, at least one a second),
commands down. A lost stream is opened anew, with backoff and the same incarnation, for as long as
the worker lives; what ended meanwhile is kept until it is acknowledged. When the certificate has
changed, the session moves to a connection with the new one, once the scheduler has taken that.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

import grpc

from ecoserve import grpc_tls, tls
from ecoserve.proto.v1 import session_pb2 as pb
from ecoserve.proto.v1.session_pb2_grpc import SessionStub
from ecoserve_worker.ledger import Ledger, Outcome

logger = logging.getLogger(__name__)

_REPORT_INTERVAL = 0.05  # at most 20 a second, or as the scheduler says
_REPORT_AT_LEAST = 1.0
_ACKNOWLEDGED_WITHIN = 2.0  # what is not is sent again
# A scheduler that comes back is to route again within two seconds, so both stay well below.
_BACKOFF_FIRST, _BACKOFF_MOST = 0.1, 0.5
_RECONNECT = (("initial_reconnect_backoff", 100), ("max_reconnect_backoff", 500))
# How long an attempt may take; that with TLS takes computing on both sides.
_ATTEMPT_PLAIN, _ATTEMPT_SECURE = 100, 1000
# A scheduler whose machine is gone says nothing, and TCP waits a quarter of an hour for a word.
_KEEPALIVE = (("keepalive_time", 5_000), ("http2.ping_timeout", 10_000))
_LOOK_S = 1.0  # at the certificate
_TAKEN_WITHIN_S = 5.0

Handler = Callable[[pb.Command], Awaitable[None]]
_Stream = grpc.aio.StreamStreamCall[pb.WorkerMessage, pb.SchedulerMessage]


@dataclass(frozen=True, slots=True)
class _Link:
    """A connection to the scheduler, and what it is secured with."""

    channel: grpc.aio.Channel
    material: tls.Material | None


class _Renewed(Exception):
    """The session is to move to another connection."""

    def __init__(self, link: _Link) -> None:
        self.link = link


class Agent:
    """Keeps the session. ``execute`` carries out a command and raises what goes wrong.

    ``hello`` is sent first on each stream; its latency and drain state are kept current. With
    ``files`` the session is by mutual TLS.
    """

    def __init__(
        self,
        target: str,
        hello: pb.Hello,
        ledger: Ledger,
        execute: Handler,
        files: tls.Files | None = None,
    ) -> None:
        self._target = target
        self._hello = hello
        self._ledger = ledger
        self._execute = execute
        self._files = files
        self._reports = 0
        self._interval = _REPORT_INTERVAL
        self._sent_finished = 0
        self._sent_finished_at = 0.0
        self._sent_latency: tuple[float, ...] | None = None
        self._sessions = 0
        self._done: list[pb.CommandDone] = []
        self._running: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Keeps a session up until cancelled."""
        backoff = _BACKOFF_FIRST
        link = self._open()
        try:
            while True:
                began = time.monotonic()
                renewed: _Link | None = None
                try:
                    await self._session(link)
                    logger.warning("the scheduler ended the session")
                except* _Renewed as told:
                    (renewed,) = (e.link for e in told.exceptions if isinstance(e, _Renewed))
                except* (grpc.aio.AioRpcError, asyncio.InvalidStateError) as broken:
                    # A report that is written when the stream has just ended gets the second.
                    logger.warning("no session with %s: %s", self._target, _cause(broken))
                except* Exception:
                    # A fault of ours ends this session, never the answers that are being made.
                    logger.exception("the session failed and is opened anew")
                if renewed is None:
                    if time.monotonic() - began > 5:
                        backoff = _BACKOFF_FIRST
                    await asyncio.sleep(backoff * random.uniform(0.5, 1.0))
                    backoff = min(_BACKOFF_MOST, backoff * 2)
                    if self._is_current(link):
                        continue
                    renewed = self._open()
                link, old = renewed, link
                await old.channel.close(None)
        finally:
            await link.channel.close(None)

    def _open(self) -> _Link:
        attempt = _ATTEMPT_PLAIN if self._files is None else _ATTEMPT_SECURE
        times = (*_RECONNECT, ("min_reconnect_backoff", attempt), *_KEEPALIVE)
        options = [(f"grpc.{name}_ms", ms) for name, ms in times]
        # A proxy that the environment names is for the world outside.
        options.append(("grpc.enable_http_proxy", 0))
        if self._files is None:
            return _Link(grpc.aio.insecure_channel(self._target, options=options), None)
        material = self._files.current()
        credentials = grpc_tls.channel_credentials(material)
        channel = grpc.aio.secure_channel(self._target, credentials, options=options)
        return _Link(channel, material)

    def _is_current(self, link: _Link) -> bool:
        return self._files is None or self._files.current() is link.material

    async def _renew(self, link: _Link) -> None:
        """Raises ``_Renewed`` when there is a better connection than ``link``."""
        told: tls.Material | None = None
        while True:
            await asyncio.sleep(_LOOK_S)
            if self._is_current(link):
                continue
            new = self._open()
            try:
                async with asyncio.timeout(_TAKEN_WITHIN_S):
                    await new.channel.channel_ready()
            except BaseException as error:
                await new.channel.close(None)
                if not isinstance(error, TimeoutError):
                    raise
                if told is not new.material:
                    told = new.material
                    logger.warning("with the new certificate there is no connection; the old stays")
                continue
            raise _Renewed(new)

    async def _session(self, link: _Link) -> None:
        stream = SessionStub(link.channel).Connect()  # type: ignore[no-untyped-call]
        try:
            hello = pb.Hello()
            hello.CopyFrom(self._hello)
            hello.draining = self._ledger.draining
            if self._ledger.latency is not None:
                hello.latency.CopyFrom(_latency(self._ledger.latency))
            await stream.write(pb.WorkerMessage(hello=hello))
            # On a new stream the scheduler knows nothing of what was sent on the last one, and its
            # commands are counted anew.
            self._sessions += 1
            self._done = []
            self._sent_finished = 0
            self._sent_latency = self._ledger.latency
            self._interval = _REPORT_INTERVAL
            async with asyncio.TaskGroup() as tasks:
                own = [tasks.create_task(self._send(stream))]
                if self._files is not None:
                    own.append(tasks.create_task(self._renew(link)))
                async for message in _messages(stream):
                    self._take(message)
                for task in own:
                    task.cancel()
        finally:
            stream.cancel()

    async def _send(self, stream: _Stream) -> None:
        ledger = self._ledger
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_REPORT_AT_LEAST):
                    await ledger.changed.wait()
            ledger.changed.clear()
            ledger.settle()
            done, self._done = self._done, []
            for message in done:
                await stream.write(pb.WorkerMessage(done=message))
            await stream.write(pb.WorkerMessage(report=self._report()))
            await asyncio.sleep(self._interval)

    def _take(self, message: pb.SchedulerMessage) -> None:
        ledger = self._ledger
        kind = message.WhichOneof("message")
        if kind == "ack":
            ledger.acknowledged(message.ack.finished)
            self._interval = message.ack.interval_s or _REPORT_INTERVAL
        elif kind == "refused":
            logger.info("not accepted: %s", message.refused.reason)
            if not ledger.accepted:
                ledger.starting = message.refused.reason
        elif kind == "accepted":
            configure = pb.Command(configure=message.accepted.configure)
            self._start(self._accept(configure, message.accepted.HasField("configure")))
        elif kind == "command":
            self._start(self._carry_out(message.command))

    async def _accept(self, configure: pb.Command, has_configure: bool) -> None:
        if has_configure:
            await self._execute(configure)
        if not self._ledger.accepted:
            logger.info("accepted by the scheduler")
        self._ledger.accepted = True
        self._ledger.changed.set()

    async def _carry_out(self, command: pb.Command) -> None:
        done, session = pb.CommandDone(number=command.number), self._sessions
        try:
            await self._execute(command)
        except Exception as error:
            logger.warning("command %s failed: %s", command.WhichOneof("command"), error)
            done.error = str(error) or type(error).__name__
        if session == self._sessions:
            self._done.append(done)
            self._ledger.changed.set()

    def _start(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._running.add(task)
        task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if not task.cancelled() and task.exception() is not None:
            logger.error("the scheduler's settings were refused: %s", task.exception())

    # --- reports

    def _report(self) -> pb.Report:
        ledger = self._ledger
        self._reports += 1
        report = pb.Report(
            number=self._reports,
            present=ledger.present,
            draining=ledger.draining,
            engine_dead=ledger.engine_dead(),
        )
        now = time.monotonic()
        state = ledger.state
        if state is None:
            # No step has run yet, so the engine has said nothing: all of it is free.
            report.phase = "decode"
            report.kv_free_tokens = self._hello.limits.kv_tokens
            report.batch_limit = self._hello.limits.max_num_seqs
        else:
            age = max(0.0, now - state.at)
            report.phase = state.phase
            report.since_switch_s = state.since_switch + age
            for prompt in state.waiting:
                report.waiting.add(
                    id=prompt.id,
                    tokens=prompt.tokens,
                    context=prompt.context,
                    since_switch=prompt.since_switch,
                )
            for decode in state.running:
                report.running.add(
                    id=decode.id,
                    context=decode.context,
                    generated=decode.generated,
                    slack_s=decode.slack - age,
                    tpot_s=decode.tpot,
                    since_switch=decode.since_switch,
                )
            report.kv_free_tokens = state.free_kv
            report.use, report.busy = ledger.load
            if state.step_kind:
                report.step.kind = state.step_kind
                report.step.estimated_s = state.step_estimate
                report.step.elapsed_s = age
            report.batch_limit = state.batch_limit
        if ledger.latency is not None and ledger.latency != self._sent_latency:
            report.latency.CopyFrom(_latency(ledger.latency))
            self._sent_latency = ledger.latency
        if now - self._sent_finished_at > _ACKNOWLEDGED_WITHIN:
            self._sent_finished = 0
        for outcome in ledger.finished:
            if outcome.number > self._sent_finished:
                report.finished.append(_finished(outcome))
                self._sent_finished = outcome.number
                self._sent_finished_at = now
        while ledger.switches:
            switch = ledger.switches.popleft()
            report.switches.add(phase=switch.phase, age_s=now - switch.at, reason=switch.reason)
        return report


def _cause(broken: BaseExceptionGroup[Exception]) -> str:
    errors = broken.exceptions
    return next((str(e.details()) for e in errors if isinstance(e, grpc.aio.AioRpcError)), "")


async def _messages(stream: _Stream) -> AsyncIterator[pb.SchedulerMessage]:
    while True:
        message = await stream.read()
        if not isinstance(message, pb.SchedulerMessage):
            return  # grpc.aio.EOF
        yield message


def _latency(fields: tuple[float, ...]) -> pb.Latency:
    names = [field.name for field in pb.Latency.DESCRIPTOR.fields]
    return pb.Latency(**dict(zip(names, fields, strict=True)))


def _finished(outcome: Outcome) -> pb.Finished:
    return pb.Finished(
        number=outcome.number,
        id=outcome.id,
        status=outcome.status,
        prompt_tokens=outcome.prompt_tokens,
        cached_tokens=outcome.cached_tokens,
        generated=outcome.generated,
        ttft_s=outcome.ttft,
        tpot_s=outcome.tpot,
        ttft_slo_s=outcome.slo.ttft,
        tpot_slo_s=outcome.slo.tpot,
        broken=outcome.broken,
    )
