"""Membership and plans, as told by whoever runs the cluster."""

from __future__ import annotations

from typing import Any, NoReturn, TypeAlias

import grpc

from ecoserve.proto.v1 import admin_pb2, admin_pb2_grpc, session_pb2
from ecoserve.scheduler import peers
from ecoserve.scheduler.cluster import Cluster
from ecoserve.scheduler.config import from_proto, to_proto
from ecoserve.scheduler.instance import Instance
from ecoserve.scheduler.sessions import SessionService
from ecoserve.scheduler.store import Store

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


class AdminService(admin_pb2_grpc.AdminServicer):
    """Serves Admin, to callers on this machine. Every change is in force when its call returns."""

    def __init__(self, store: Store, sessions: SessionService) -> None:
        self._store = store
        self._sessions = sessions

    async def Apply(
        self, request: admin_pb2.ApplyRequest, context: Context
    ) -> admin_pb2.ApplyResponse:
        await _local_only(context)
        try:
            spec = from_proto(request.cluster)
        except ValueError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        self._store.apply(spec)
        self._settle()
        return admin_pb2.ApplyResponse()

    async def Remove(
        self, request: admin_pb2.RemoveRequest, context: Context
    ) -> admin_pb2.RemoveResponse:
        await _local_only(context)
        self._store.remove(request.name)
        self._settle()
        return admin_pb2.RemoveResponse()

    async def Get(self, request: admin_pb2.GetRequest, context: Context) -> admin_pb2.ClusterState:
        await _local_only(context)
        cluster = self._store.clusters.get(request.name)
        if cluster is None:
            await self._unknown(context, request.name)
        return admin_pb2.ClusterState(
            cluster=to_proto(cluster.spec),
            instances=[_state(cluster, instance) for instance in cluster.instances.values()],
            waiting=sum(len(queue.waiting) for queue in cluster.macros.values()),
            late=sum(len(queue.late) for queue in cluster.macros.values()),
        )

    async def List(
        self, request: admin_pb2.ListRequest, context: Context
    ) -> admin_pb2.ListResponse:
        await _local_only(context)
        return admin_pb2.ListResponse(names=sorted(self._store.clusters))

    async def DrainInstance(
        self, request: admin_pb2.InstanceRequest, context: Context
    ) -> admin_pb2.InstanceResponse:
        await _local_only(context)
        instance = await self._instance(request, context)
        instance.drain(request.timeout_s)
        self._settle()
        return admin_pb2.InstanceResponse()

    async def ResumeInstance(
        self, request: admin_pb2.InstanceRequest, context: Context
    ) -> admin_pb2.InstanceResponse:
        await _local_only(context)
        instance = await self._instance(request, context)
        instance.resume()
        self._settle()
        return admin_pb2.InstanceResponse()

    def _settle(self) -> None:
        self._sessions.settle_all()
        for cluster in self._store.clusters.values():
            cluster.pump(self._store.clock())
        self._store.changed()
        self._store.wake()

    async def _instance(self, request: admin_pb2.InstanceRequest, context: Context) -> Instance:
        cluster = self._store.clusters.get(request.cluster)
        if cluster is None:
            await self._unknown(context, request.cluster)
        instance = cluster.instances.get(request.instance)
        if instance is None:
            await context.abort(
                grpc.StatusCode.NOT_FOUND,
                f"cluster {request.cluster} has no instance {request.instance!r}",
            )
        return instance

    @staticmethod
    async def _unknown(context: Context, name: str) -> NoReturn:
        await context.abort(grpc.StatusCode.NOT_FOUND, f"cluster {name!r} is not known")


async def _local_only(context: Context) -> None:
    if not peers.is_local(context):
        await context.abort(
            grpc.StatusCode.PERMISSION_DENIED, "Admin is served to the scheduler's own machine only"
        )


def _state(cluster: Cluster, instance: Instance) -> admin_pb2.InstanceState:
    reported, hello, model = instance.reported, instance.hello, instance.latency
    state = admin_pb2.InstanceState(
        name=instance.name,
        macro_instance=cluster.members.get(instance.name, ""),
        state=instance.state,
        reason=instance.reason,
    )
    if hello is not None:
        state.incarnation = hello.incarnation
        state.address = str(hello.address)
        limits = hello.limits
        state.limits.CopyFrom(
            session_pb2.Limits(
                max_num_seqs=limits.max_num_seqs,
                max_model_len=limits.max_model_len,
                step_budget=limits.step_budget,
                kv_tokens=limits.kv_tokens,
                block_tokens=limits.block_tokens,
            )
        )
    if model is not None:
        state.latency.CopyFrom(
            session_pb2.Latency(**{name: getattr(model, name) for name in model.__slots__})
        )
    if reported is not None:
        state.use = reported.use
        state.waiting = reported.waiting
        state.running = reported.running
    return state
