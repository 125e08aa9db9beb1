"""What surrounds the controller in its tests: a scheduler's Admin service, and a kubelet and a
garbage collector in one, which play what a node and a controller manager would do."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import grpc
from ecoserve_operator.builders import Builders, Installation
from ecoserve_operator.cluster_api import (
    CLUSTERS,
    EVENTS,
    MACROS,
    PODS,
    ApiError,
    ClusterApi,
    Json,
    Kind,
)
from ecoserve_operator.names import GATE
from ecoserve_operator.objects import KINDS
from ecoserve_operator.views import stamp

from ecoserve.proto.v1 import admin_pb2, admin_pb2_grpc

SECONDS = 60.0
RENDER = Builders(
    Installation(
        worker_image="worker:1",
        gateway_image="gateway:1",
        scheduler="scheduler:9002",
        scheduler_tls="scheduler:9004",
    )
)


async def until(what: Callable[[], Any], why: str = "", seconds: float = SECONDS) -> Any:
    """Polls until ``what()`` is true; returns its value."""
    end = time.monotonic() + seconds
    while True:
        value = what()
        if asyncio.iscoroutine(value):
            value = await value
        if value:
            return value
        if time.monotonic() > end:
            raise AssertionError(f"not within {seconds:.0f} s: {why or what}")
        await asyncio.sleep(0.02)


@dataclass
class Member:
    """An instance of the scheduler; ``requests`` are those it has."""

    running: bool = False
    draining: bool = False
    requests: int = 0

    @property
    def state(self) -> str:
        if not self.running:
            return "lost"
        if self.draining:
            return "draining" if self.requests else "drained"
        return "accepted"


class Scheduler(admin_pb2_grpc.AdminServicer):
    """Admin, as the scheduler serves it; forgets all when it is restarted."""

    def __init__(self) -> None:
        self.clusters: dict[str, admin_pb2.Cluster] = {}
        self.members: dict[tuple[str, str], Member] = {}
        self.refuses = ""
        self.target = ""
        self.drains: list[str] = []
        self.asked = 0
        self._server: grpc.aio.Server | None = None

    async def start(self) -> None:
        self._server = grpc.aio.server()
        admin_pb2_grpc.add_AdminServicer_to_server(self, self._server)
        port = self._server.add_insecure_port(self.target or "127.0.0.1:0")
        self.target = f"127.0.0.1:{port}"
        await self._server.start()

    async def stop(self) -> None:
        """Ends, and forgets what is soft."""
        assert self._server is not None
        await self._server.stop(None)
        self.clusters.clear()
        for member in self.members.values():
            member.draining = False

    def member(self, cluster: str, name: str) -> Member:
        return self.members.setdefault((cluster, name), Member())

    def sizes(self, cluster: str) -> dict[str, list[str]]:
        return {m.name: list(m.instances) for m in self.clusters[cluster].macro_instances}

    async def Apply(self, request: admin_pb2.ApplyRequest, context: Any) -> Any:
        if self.refuses:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, self.refuses)
        self.clusters[request.cluster.name] = request.cluster
        return admin_pb2.ApplyResponse()

    async def Remove(self, request: admin_pb2.RemoveRequest, context: Any) -> Any:
        self.clusters.pop(request.name, None)
        return admin_pb2.RemoveResponse()

    async def Get(self, request: admin_pb2.GetRequest, context: Any) -> Any:
        self.asked += 1
        cluster = self.clusters.get(request.name)
        if cluster is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, "not known")
        states = [
            admin_pb2.InstanceState(name=name, state=m.state, running=m.requests)
            for macro in cluster.macro_instances
            for name in macro.instances
            for m in [self.member(request.name, name)]
        ]
        return admin_pb2.ClusterState(cluster=cluster, instances=states)

    async def List(self, request: admin_pb2.ListRequest, context: Any) -> Any:
        return admin_pb2.ListResponse(names=list(self.clusters))

    async def DrainInstance(self, request: admin_pb2.InstanceRequest, context: Any) -> Any:
        self.drains.append(request.instance)
        self.member(request.cluster, request.instance).draining = True
        return admin_pb2.InstanceResponse()

    async def ResumeInstance(self, request: admin_pb2.InstanceRequest, context: Any) -> Any:
        self.member(request.cluster, request.instance).draining = False
        return admin_pb2.InstanceResponse()


@dataclass
class Node:
    """Runs Pods at once, as far as there is ``room``; takes away what has lost its owner. Pods
    whose environment has ``BROKEN`` never become ready."""

    api: ClusterApi
    namespace: str
    scheduler: Scheduler
    room: int = 100
    collects: tuple[Kind, ...] = KINDS  # besides Pods and MacroInstances
    seen: dict[str, Json] = field(default_factory=dict)
    used: dict[str, str] = field(default_factory=dict)

    async def run(self) -> None:
        while True:
            # A write that lost a race is made the next time.
            with contextlib.suppress(ApiError):
                await self.step()
            await asyncio.sleep(0.02)

    async def step(self) -> None:
        clusters = await self._uids(CLUSTERS)
        macros, _ = await self.api.list_all(MACROS, self.namespace)
        for macro in macros:
            await self._collect(MACROS, macro, clusters)
        owners = await self._uids(MACROS) | clusters
        pods, _ = await self.api.list_all(PODS, self.namespace)
        running = sum(p["status"].get("phase") == "Running" for p in pods)
        for pod in pods:
            metadata = pod["metadata"]
            name, uid = metadata["name"], metadata["uid"]
            assert self.used.setdefault(name, uid) == uid, f"the name {name} is used twice"
            self.seen[uid] = pod
            if "deletionTimestamp" in metadata:
                self._member(pod).running = False
                await self.api.delete(PODS, self.namespace, name, uid, grace=0)
            elif await self._collect(PODS, pod, owners):
                continue
            elif pod["status"].get("phase") == "Pending":
                running += await self._start(pod, running < self.room)
            elif pod["status"].get("phase") == "Running":
                await self._ready(pod)
        for kind in self.collects:
            for item in (await self.api.list_all(kind, self.namespace))[0]:
                await self._collect(kind, item, clusters)

    async def _uids(self, kind: Kind) -> set[str]:
        return {i["metadata"]["uid"] for i in (await self.api.list_all(kind, self.namespace))[0]}

    async def _collect(self, kind: Kind, item: Json, owners: set[str]) -> bool:
        if not self._orphaned(item, owners):
            return False
        # The lists are of different moments, so look again, as the real one does.
        name = item["metadata"]["name"]
        fresh = await self.api.get(kind, self.namespace, name)
        if fresh is None or not self._orphaned(
            fresh, await self._uids(MACROS) | await self._uids(CLUSTERS)
        ):
            return False
        metadata = fresh["metadata"]
        same = {"uid": metadata["uid"], "resourceVersion": metadata["resourceVersion"]}
        body = {"preconditions": same, "propagationPolicy": "Background"}
        await self.api._call("DELETE", kind.path(self.namespace, name), {}, body)
        return True

    @staticmethod
    def _orphaned(item: Json, owners: set[str]) -> bool:
        references = item["metadata"].get("ownerReferences", [])
        return bool(references) and not any(owner["uid"] in owners for owner in references)

    def _member(self, pod: Json) -> Member:
        cluster = pod["metadata"]["labels"]["ecoserve.io/cluster"]
        return self.scheduler.member(f"{self.namespace}/{cluster}", pod["metadata"]["name"])

    async def _start(self, pod: Json, room: bool) -> bool:
        scheduled: Json = {"type": "PodScheduled", "status": "True" if room else "False"}
        if not room:
            scheduled |= {"reason": "Unschedulable", "message": "0/1 nodes have room"}
            old = {c["type"]: c for c in pod["status"].get("conditions", ())}
            if old.get("PodScheduled", {}).get("status") == "False":
                return False
        scheduled["lastTransitionTime"] = stamp(time.time())
        status: Json = {"conditions": [scheduled]}
        if room:
            container = {"name": "worker", "image": "worker:1", "imageID": "", "ready": True}
            container |= {"restartCount": 0, "state": {"running": {}}}
            status |= {"phase": "Running", "containerStatuses": [container]}
            environment = pod["spec"]["containers"][0].get("env", ())
            broken = any(variable["name"] == "BROKEN" for variable in environment)
            self._member(pod).running = not broken
        await self.api.patch_status(
            PODS, self.namespace, pod["metadata"]["name"], {"status": status}
        )
        return room

    async def _ready(self, pod: Json) -> None:
        conditions = {c["type"]: c["status"] for c in pod["status"].get("conditions", ())}
        wanted = "True" if conditions.get(GATE) == "True" else "False"
        if conditions.get("Ready") != wanted:
            ready = {"type": "Ready", "status": wanted, "lastTransitionTime": stamp(time.time())}
            await self.api.patch_status(
                PODS, self.namespace, pod["metadata"]["name"], {"status": {"conditions": [ready]}}
            )


class Mortal(ClusterApi):
    """A connection of a controller that dies right after its ``last`` write (events not counted):
    nothing that comes after it has any effect. None: it lives."""

    def __init__(self, *arguments: Any, last: int | None, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.last = last
        self.writes = 0
        self.dead = asyncio.Event()

    async def _write(self, method: str, path: str, *rest: Any) -> Json:
        if self.dead.is_set():
            await asyncio.Event().wait()
        answer = await super()._write(method, path, *rest)
        if f"/{EVENTS.plural}" not in path:
            self.writes += 1
            if self.writes == self.last:
                self.dead.set()
                await asyncio.Event().wait()
        return answer
