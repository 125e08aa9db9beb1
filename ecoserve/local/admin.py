"""Tells the scheduler what the cluster is, and goes on telling it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

import grpc

from ecoserve.local.slo import Calibrated
from ecoserve.policy.latency import LatencyModel
from ecoserve.proto.v1 import admin_pb2
from ecoserve.proto.v1.admin_pb2_grpc import AdminStub

_CALL_TIMEOUT = 2.0
_POLL = 0.2
_WATCH = 0.5


class Refused(RuntimeError):
    """The scheduler does not take the cluster as declared; the message says why."""


class Admin:
    """The Admin service of one scheduler, for one cluster. An async context manager."""

    def __init__(self, target: str, cluster: str) -> None:
        self._cluster = cluster
        options = [
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.max_reconnect_backoff_ms", 500),
            ("grpc.enable_http_proxy", 0),  # it is on this machine
        ]
        self._channel = grpc.aio.insecure_channel(target, options=options)
        self._stub = AdminStub(self._channel)  # type: ignore[no-untyped-call]

    async def __aenter__(self) -> Admin:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._channel.close(None)

    async def apply(self, cluster: admin_pb2.Cluster) -> None:
        """Declares the cluster, trying until the scheduler answers; ``Refused`` if it says no."""
        while True:
            try:
                await self._stub.Apply(
                    admin_pb2.ApplyRequest(cluster=cluster), timeout=_CALL_TIMEOUT
                )
                return
            except grpc.aio.AioRpcError as error:
                if error.code() == grpc.StatusCode.INVALID_ARGUMENT:
                    raise Refused(error.details() or "no reason given") from error
            await asyncio.sleep(_POLL)

    async def get(self) -> admin_pb2.ClusterState | None:
        """The cluster's state; None while the scheduler does not answer or does not know it."""
        try:
            state: admin_pb2.ClusterState = await self._stub.Get(
                admin_pb2.GetRequest(name=self._cluster), timeout=_CALL_TIMEOUT
            )
        except grpc.aio.AioRpcError:
            return None
        return state

    async def wait(
        self,
        ready: Callable[[admin_pb2.InstanceState], bool],
        count: int,
        progress: Callable[[int], None],
    ) -> list[admin_pb2.InstanceState]:
        """Polls until ``count`` instances are ``ready``; ``progress`` is told how many are."""
        while True:
            state = await self.get()
            found = [instance for instance in state.instances if ready(instance)] if state else []
            progress(len(found))
            if len(found) >= count:
                return found
            await asyncio.sleep(_POLL)

    async def drain(self, instance: str, seconds: float) -> None:
        """Stops routing to an instance, which finishes what it has. Lost if the scheduler does not
        answer: ask again while the instance does not drain."""
        request = admin_pb2.InstanceRequest(
            cluster=self._cluster, instance=instance, timeout_s=seconds
        )
        with contextlib.suppress(grpc.aio.AioRpcError):
            await self._stub.DrainInstance(request, timeout=_CALL_TIMEOUT)

    async def resume(self, instance: str) -> None:
        """Routes to an instance again, likewise."""
        request = admin_pb2.InstanceRequest(cluster=self._cluster, instance=instance)
        with contextlib.suppress(grpc.aio.AioRpcError):
            await self._stub.ResumeInstance(request, timeout=_CALL_TIMEOUT)

    async def keep(
        self, cluster: Callable[[], admin_pb2.Cluster], works: Callable[[str], None]
    ) -> None:
        """Declares the cluster anew whenever the scheduler has lost it; runs until cancelled.

        A scheduler that was restarted knows nothing: its state is soft and this is its source.
        ``works`` is told the name of each instance that is routed to, again and again.
        """
        while True:
            state = await self.get()
            if state is None:
                await self.apply(cluster())
            else:
                for instance in filter(is_accepted, state.instances):
                    works(instance.name)
            await asyncio.sleep(_WATCH)


def is_calibrated(instance: admin_pb2.InstanceState) -> bool:
    """Whether the worker has connected with its measured latency model."""
    return instance.HasField("latency") and instance.state not in {"", "lost"}


def is_accepted(instance: admin_pb2.InstanceState) -> bool:
    """Whether the instance is routed to."""
    return instance.state == "accepted"


def calibrated(instance: admin_pb2.InstanceState) -> Calibrated:
    """The instance's figures as the SLO derivation wants them."""
    latency = instance.latency
    names = LatencyModel.__slots__
    return Calibrated(
        LatencyModel(**{name: getattr(latency, name) for name in names}),
        max_model_len=instance.limits.max_model_len,
        step_budget=instance.limits.step_budget,
        max_num_seqs=instance.limits.max_num_seqs,
    )
