"""The workers' sessions: who may join, how it is made ready, what it reports and is told."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import grpc

from ecoserve.proto.v1 import session_pb2, session_pb2_grpc
from ecoserve.scheduler import hello as hellos
from ecoserve.scheduler import peers
from ecoserve.scheduler.cluster import Cluster
from ecoserve.scheduler.config import configure
from ecoserve.scheduler.hello import Hello
from ecoserve.scheduler.instance import Instance
from ecoserve.scheduler.store import Store

log = logging.getLogger("ecoserve.scheduler")

# An instance is accepted after this even if its warm-up has not ended; it is only slower at first.
WARM_S = 30.0
# What all workers together may report a second, and what one may.
REPORTS_A_SECOND = 2000
REPORTS_OF_ONE = 20
# Instances that are accepted within so long of each other have started together.
TOGETHER_S = 3.0


class Link:
    """One open session: what the worker was told and has answered."""

    def __init__(self, hello: Hello, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        self.hello = hello
        self.context = context
        self.closed = False
        self.outgoing: asyncio.Queue[session_pb2.SchedulerMessage | None] = asyncio.Queue()
        self.cluster: Cluster | None = None
        self.instance: Instance | None = None
        self.is_warm = False
        self.refusal: str | None = None
        self.accepted_told = False
        self.drain_told = False
        self.configured: bytes | None = None
        self.commands = 0
        self.configuring: int | None = None
        self.configure_failed: str | None = None
        self.warming: int | None = None
        self.warm_timer: asyncio.TimerHandle | None = None

    def send(self, message: session_pb2.SchedulerMessage) -> None:
        self.outgoing.put_nowait(message)

    def command(self, command: session_pb2.Command) -> int:
        """Sends a command; returns its number."""
        self.commands += 1
        command.number = self.commands
        self.send(session_pb2.SchedulerMessage(command=command))
        return self.commands

    def close(self) -> None:
        """Ends the session from this side."""
        self.closed = True
        if self.warm_timer is not None:
            self.warm_timer.cancel()
        self.outgoing.put_nowait(None)


class SessionService(session_pb2_grpc.SessionServicer):
    """Serves the workers' sessions."""

    def __init__(self, store: Store, *, warm_s: float = WARM_S) -> None:
        self._store = store
        self._warm_s = warm_s
        self._links: dict[tuple[str, str], Link] = {}

    async def Connect(
        self,
        request_iterator: AsyncIterator[session_pb2.WorkerMessage],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> AsyncIterator[session_pb2.SchedulerMessage]:
        first = await anext(aiter(request_iterator), None)
        if first is None or not first.HasField("hello"):
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT, "the first message of a session is a hello"
            )
        try:
            hello = hellos.check(first.hello)
        except hellos.BadHello as error:
            yield session_pb2.SchedulerMessage(refused=session_pb2.Refused(reason=str(error)))
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        link = Link(hello, context)
        why = self._not_theirs(link)
        if why is not None:
            # It must not take the place of one that belongs here.
            log.warning("%s/%s turned away: %s", hello.cluster, hello.instance, why)
            yield session_pb2.SchedulerMessage(refused=session_pb2.Refused(reason=why))
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, why)
        key = (hello.cluster, hello.instance)
        old = self._links.get(key)
        if old is not None:
            self._replace(old, link)
        self._links[key] = link
        log.info("%s/%s connected from %s", hello.cluster, hello.instance, hello.address)
        self.settle(link)
        reader = asyncio.create_task(self._read(link, request_iterator))
        try:
            while (message := await link.outgoing.get()) is not None:
                yield message
        finally:
            reader.cancel()
            if self._links.get(key) is link:
                del self._links[key]
                self._lost(link)

    def _replace(self, old: Link, new: Link) -> None:
        reason = f"replaced by a session of incarnation {new.hello.incarnation}"
        old.send(session_pb2.SchedulerMessage(refused=session_pb2.Refused(reason=reason)))
        old.close()

    def _lost(self, link: Link) -> None:
        log.info("%s/%s lost", link.hello.cluster, link.hello.instance)
        link.close()
        if link.cluster is not None and link.instance is not None:
            link.cluster.disconnect(link.instance, self._store.clock())
            self._store.changed()
            self._store.wake()

    async def _read(self, link: Link, incoming: AsyncIterator[session_pb2.WorkerMessage]) -> None:
        try:
            async for message in incoming:
                if link.closed:
                    return
                if message.HasField("report"):
                    self._report(link, message.report)
                elif message.HasField("done"):
                    self._done(link, message.done)
        except Exception:
            # The worker keeps serving and comes back with a session that begins anew.
            log.exception(
                "%s/%s: the session ends by a fault of the scheduler",
                link.hello.cluster, link.hello.instance,
            )  # fmt: skip
        finally:
            link.outgoing.put_nowait(None)

    def _report(self, link: Link, report: session_pb2.Report) -> None:
        cluster, instance = link.cluster, link.instance
        if cluster is None or instance is None:
            # Nothing was taken in, so nothing is acknowledged: what has finished comes again.
            return
        before = instance.state
        cluster.report(instance, report, self._store.clock())
        link.send(
            session_pb2.SchedulerMessage(
                ack=session_pb2.Ack(
                    report=report.number,
                    finished=instance.finished_seen,
                    interval_s=max(1 / REPORTS_OF_ONE, len(self._links) / REPORTS_A_SECOND),
                )
            )
        )
        if instance.state != before or not instance.accepted:
            self.settle(link)
        if instance.state != before:
            self._store.changed()
        if cluster.tickets:
            self._store.wake()

    def _done(self, link: Link, done: session_pb2.CommandDone) -> None:
        if done.error:
            log.warning(
                "%s/%s: command %d failed: %s",
                link.hello.cluster, link.hello.instance, done.number, done.error,
            )  # fmt: skip
        if done.number == link.configuring:
            link.configuring = None
            link.configure_failed = done.error or None
        elif done.number == link.warming:
            self._warmed(link)
        self.settle(link)

    def settle_all(self) -> None:
        """Membership or declarations may have changed: brings every session up to date."""
        for link in list(self._links.values()):
            self.settle(link)

    def settle(self, link: Link) -> None:
        """Takes a session as far as it can go now: refused, configured, warmed, accepted."""
        cluster = self._store.clusters.get(link.hello.cluster)
        why = self._not_theirs(link)
        if why is not None:
            # It came before the cluster was declared, or its certificate does not count any more.
            self._refuse(link, why)
            link.close()
            return
        if cluster is not link.cluster:
            link.cluster = cluster
            link.instance = None
            link.configured = None
            if cluster is not None:
                link.instance = cluster.connect(link.hello)
                link.is_warm = link.instance.accepted
                self._store.changed()
        reason = self._refusal(link)
        if reason is not None:
            self._refuse(link, reason)
            return
        assert cluster is not None
        instance = link.instance
        assert instance is not None
        link.refusal = None
        self._drain(link, cluster, instance)
        self._configure(link, cluster)
        if link.configuring is not None or instance.draining:
            return
        if not link.is_warm:
            self._warm(link, cluster, instance)
        if not link.is_warm:
            return
        if not instance.accepted:
            # One that joins others starts with a small share; after a start of everything, or of
            # the scheduler alone, all come at about the same time and nobody has the rest.
            now = self._store.clock()
            joins = any(now - other.accepted_at > TOGETHER_S for other in cluster.homes.routable())
            ramps = joins and not cluster.spec.cold_joins
            instance.accept(now, cluster.spec.ramp_s if ramps else 0.0)
        instance.refused = ""
        if not link.accepted_told:
            link.accepted_told = True
            link.send(
                session_pb2.SchedulerMessage(
                    accepted=session_pb2.Accepted(configure=configure(cluster.spec))
                )
            )
            log.info("%s/%s accepted", link.hello.cluster, link.hello.instance)
            self._store.changed()

    def _not_theirs(self, link: Link) -> str | None:
        cluster = self._store.clusters.get(link.hello.cluster)
        return None if cluster is None else peers.refusal(link.context, cluster.spec, "worker")

    def _refusal(self, link: Link) -> str | None:
        cluster = link.cluster
        if cluster is None:
            return f"cluster {link.hello.cluster} is not known (yet)"
        if link.hello.instance not in cluster.members:
            return f"not in any macro instance of cluster {cluster.name}"
        if cluster.spec.slo is None:
            return f"the SLO of cluster {cluster.name} is not known yet"
        return link.configure_failed

    def _refuse(self, link: Link, reason: str) -> None:
        if link.instance is not None:
            link.instance.refuse(reason)
        if link.refusal != reason:
            link.refusal = reason
            link.accepted_told = False
            link.send(session_pb2.SchedulerMessage(refused=session_pb2.Refused(reason=reason)))
            log.info("%s/%s refused: %s", link.hello.cluster, link.hello.instance, reason)
        if link.configure_failed is not None and link.cluster is not None:
            # Another declaration may be one that the worker can carry out.
            spec = link.cluster.spec
            if spec.slo is not None and self._settings(link.cluster) != link.configured:
                link.configure_failed = None
                self.settle(link)

    @staticmethod
    def _settings(cluster: Cluster) -> bytes:
        return configure(cluster.spec).SerializeToString(deterministic=True)

    def _configure(self, link: Link, cluster: Cluster) -> None:
        settings = self._settings(cluster)
        if settings != link.configured:
            link.configured = settings
            link.configuring = link.command(session_pb2.Command(configure=configure(cluster.spec)))
            if link.instance is not None and not link.instance.accepted:
                link.instance.warming = True

    def _warm(self, link: Link, cluster: Cluster, instance: Instance) -> None:
        if link.warming is not None:
            return
        heads = [] if cluster.spec.cold_joins else cluster.heads.most_frequent()
        if not heads:
            link.is_warm = True
            return
        instance.warming = True
        requests = [session_pb2.WarmRequest(path=path, body=body) for path, body in heads]
        link.warming = link.command(session_pb2.Command(warm=session_pb2.Warm(requests=requests)))

        def give_up() -> None:
            self._warmed(link)
            self.settle(link)

        link.warm_timer = asyncio.get_running_loop().call_later(self._warm_s, give_up)

    def _warmed(self, link: Link) -> None:
        link.is_warm = True
        link.warming = None
        if link.warm_timer is not None:
            link.warm_timer.cancel()

    def _drain(self, link: Link, cluster: Cluster, instance: Instance) -> None:
        if instance.drain_wanted and not link.drain_told:
            link.drain_told = True
            timeout = instance.drain_timeout_s or cluster.spec.drain_timeout_s
            link.command(session_pb2.Command(drain=session_pb2.Drain(timeout_s=timeout)))
        elif (link.drain_told or instance.resume_wanted) and not instance.drain_wanted:
            link.drain_told = instance.resume_wanted = False
            link.command(session_pb2.Command(resume=session_pb2.Resume()))
