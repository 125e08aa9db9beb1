"""Tells the scheduler which clusters there are and who belongs to them, and asks how they fare.

The scheduler forgets all when it restarts, so what is declared is kept here, and declared anew when
it is found not to know it. What went while nobody was there to tell it is found in its list of all
clusters.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, TypeAlias

import grpc

from ecoserve.proto.v1 import admin_pb2, session_pb2
from ecoserve.proto.v1.admin_pb2_grpc import AdminStub
from ecoserve_operator.api import EcoServeClusterSpec
from ecoserve_operator.states import Instance
from ecoserve_operator.store import Key

log = logging.getLogger("ecoserve.operator")

Method: TypeAlias = "grpc.aio.UnaryUnaryMultiCallable[Any, Any]"

_TIMEOUT_S = 2.0
# How often the scheduler is asked: while something is on its way, and else.
_BUSY_S, _IDLE_S = 0.3, 5.0
_TICK_S = 0.1
# The least time between two looks at which clusters it has.
_TIDY_S = 0.3
_OPTIONS = [
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # A proxy that the environment names is for the world outside.
    ("grpc.enable_http_proxy", 0),
]


def declare(
    key: Key,
    spec: EcoServeClusterSpec,
    members: Mapping[str, list[str]],
    mtls: admin_pb2.MutualTls | None = None,
) -> admin_pb2.Cluster:
    """The cluster in the scheduler's words; ``members`` are the instances of each macro instance,
    ``mtls`` says who its gateways and workers are (None: connections are plain)."""
    policy = spec.policy
    return admin_pb2.Cluster(
        name="/".join(key),
        model=spec.model.name,
        slo=session_pb2.SLO(ttft_s=spec.slo.ttft, tpot_s=spec.slo.tpot),
        policy=policy.name,
        policy_settings=policy.settings,
        late=policy.late,
        queue_limit=policy.queue_limit,
        late_wait_s=policy.late_wait,
        macro_instances=[
            admin_pb2.MacroInstance(name=name, instances=instances)
            for name, instances in members.items()
        ],
        ramp_s=policy.ramp,
        debug=policy.debug,
        drain_timeout_s=spec.drain.timeout,
        mtls=mtls,
    )


@dataclass(slots=True)
class _Declared:
    message: admin_pb2.Cluster
    applied: bytes | None = None
    refused: str = ""
    instances: Mapping[str, Instance] | None = None
    waiting: int = 0
    busy: bool = True
    asked: float = field(default=float("-inf"))


class Membership:
    """The Admin service of one scheduler. ``changed`` is called with the key of a cluster whenever
    the state of one of its instances, or the scheduler's answering, has changed. ``gone`` says of a
    cluster whether it is known to be no more; the scheduler keeps all others."""

    def __init__(
        self,
        target: str,
        changed: Callable[[Key], None] = lambda _: None,
        gone: Callable[[Key], bool] = lambda _: False,
    ) -> None:
        self.changed = changed
        self.gone = gone
        self._clusters: dict[Key, _Declared] = {}
        self._tidy = False
        self._tidied = float("-inf")
        self._channel = grpc.aio.insecure_channel(target, options=_OPTIONS)
        self._stub = AdminStub(self._channel)  # type: ignore[no-untyped-call]
        self._answers = True

    async def close(self) -> None:
        await self._channel.close(None)

    def instances(self, key: Key) -> Mapping[str, Instance] | None:
        """The instances of a cluster as last seen, None while the scheduler does not answer."""
        declared = self._clusters.get(key)
        return declared.instances if declared is not None and self._answers else None

    def refused(self, key: Key) -> str:
        """Why the scheduler does not take the cluster as declared; empty if it does."""
        declared = self._clusters.get(key)
        return declared.refused if declared is not None else ""

    async def declare(self, key: Key, message: admin_pb2.Cluster, *, busy: bool) -> None:
        """Has the scheduler know the cluster as ``message`` says, now and whenever it forgets.

        ``busy``: something of it is on its way, so ask often.
        """
        declared = self._clusters.setdefault(key, _Declared(message))
        declared.message = message
        declared.busy = busy
        if self._answers and declared.applied != _bytes(message):
            await self._apply(key, declared)

    def forget(self, key: Key) -> None:
        """The cluster is no more; the scheduler is told soon, or when it answers again."""
        self._clusters.pop(key, None)
        self.tidy()

    def tidy(self) -> None:
        """Has the scheduler forget all clusters that are ``gone``, soon or when it answers."""
        self._tidy = False

    async def drain(self, key: Key, instance: str, seconds: float) -> None:
        """Stops routing to an instance, which finishes what it has."""
        await self._instance(self._stub.DrainInstance, key, instance, seconds)

    async def resume(self, key: Key, instance: str) -> None:
        """Routes to an instance again."""
        await self._instance(self._stub.ResumeInstance, key, instance)

    async def run(self) -> None:
        """Keeps asking; runs until cancelled."""
        clock = asyncio.get_running_loop().time
        while True:
            if not self._tidy and clock() - self._tidied >= _TIDY_S:
                self._tidied = clock()
                self._tidy = True
                if not await self._remove_gone():
                    self._tidy = False
            for key, declared in list(self._clusters.items()):
                if self._clusters.get(key) is not declared:
                    continue  # it went while others were seen to
                often = declared.busy or not self._answers
                if self._answers and declared.applied != _bytes(declared.message):
                    await self._apply(key, declared)
                elif clock() - declared.asked >= (_BUSY_S if often else _IDLE_S):
                    await self._ask(key, declared)
                    if not self._answers:
                        break
            await asyncio.sleep(_TICK_S)

    async def _remove_gone(self) -> bool:
        """Whether all that is gone was removed."""
        listed = await self._call(self._stub.List, admin_pb2.ListRequest())
        if not isinstance(listed, admin_pb2.ListResponse):
            return False
        for name in listed.names:
            namespace, _, cluster = name.partition("/")
            key = (namespace, cluster)
            if key not in self._clusters and self.gone(key):
                log.info("%s: no such cluster any more; the scheduler is told", name)
                answer = await self._call(self._stub.Remove, admin_pb2.RemoveRequest(name=name))
                if isinstance(answer, grpc.aio.AioRpcError):
                    return False
        return True

    async def _instance(self, method: Method, key: Key, name: str, seconds: float = 0.0) -> None:
        request = admin_pb2.InstanceRequest(cluster="/".join(key), instance=name, timeout_s=seconds)
        await self._call(method, request)
        if key in self._clusters:
            await self._ask(key, self._clusters[key])

    async def _apply(self, key: Key, declared: _Declared) -> None:
        message = declared.message
        refused = declared.refused
        answer = await self._call(self._stub.Apply, admin_pb2.ApplyRequest(cluster=message))
        if isinstance(answer, grpc.aio.AioRpcError):
            if answer.code() != grpc.StatusCode.INVALID_ARGUMENT:
                return
            declared.refused = answer.details() or "no reason given"
        else:
            declared.refused = ""
        declared.applied = _bytes(message)
        if declared.refused != refused:
            self.changed(key)
        await self._ask(key, declared)

    async def _ask(self, key: Key, declared: _Declared) -> None:
        declared.asked = asyncio.get_running_loop().time()
        answer = await self._call(self._stub.Get, admin_pb2.GetRequest(name="/".join(key)))
        before = declared.instances
        if isinstance(answer, admin_pb2.ClusterState):
            declared.instances = MappingProxyType(
                {
                    instance.name: Instance(
                        instance.state, instance.waiting + instance.running, instance.use
                    )
                    for instance in answer.instances
                }
            )
            if not _same(before, declared.instances):
                self.changed(key)
        elif (
            isinstance(answer, grpc.aio.AioRpcError)
            and answer.code() == grpc.StatusCode.NOT_FOUND
            and not declared.refused
        ):
            # It has forgotten; ``run`` declares it anew.
            declared.instances = None
            declared.applied = None

    async def _call(self, method: Method, request: object) -> object | grpc.aio.AioRpcError:
        try:
            answer: object = await method(request, timeout=_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            self._heard(not _is_silence(error), error.details() or "")
            return error
        self._heard(True)
        return answer

    def _heard(self, answers: bool, why: str = "") -> None:
        if answers == self._answers:
            return
        self._answers = answers
        self.tidy()
        log.info("the scheduler answers" if answers else f"the scheduler does not answer: {why}")
        for key, declared in self._clusters.items():
            if not answers:
                # It may be another process when it comes back.
                declared.applied = None
                declared.instances = None
            self.changed(key)


def _is_silence(error: grpc.aio.AioRpcError) -> bool:
    return error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


def _same(old: Mapping[str, Instance] | None, new: Mapping[str, Instance]) -> bool:
    return old is not None and {name: i.state for name, i in old.items()} == {
        name: i.state for name, i in new.items()
    }


def _bytes(message: admin_pb2.Cluster) -> bytes:
    return message.SerializeToString(deterministic=True)
