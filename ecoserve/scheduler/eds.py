"""Endpoint discovery: the workers of each cluster, as Envoy is to know them.

State of the world. A resource is named as its cluster. After a (re)start nothing is answered until
a cluster was declared and its instances are back, or ``HOLD_S`` after its declaration: an empty
answer would take from Envoy what it still knows to be good.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any, TypeAlias

import grpc
from envoy.config.core.v3 import address_pb2, health_check_pb2
from envoy.config.endpoint.v3 import endpoint_components_pb2, endpoint_pb2
from envoy.service.discovery.v3 import discovery_pb2
from envoy.service.endpoint.v3 import eds_pb2_grpc
from google.protobuf import any_pb2

from ecoserve.scheduler import peers
from ecoserve.scheduler.cluster import Cluster
from ecoserve.scheduler.hello import Endpoint
from ecoserve.scheduler.store import Store

log = logging.getLogger("ecoserve.scheduler")

HOLD_S = 3.0
TYPE_URL = "type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment"


Known: TypeAlias = tuple[tuple[Endpoint, Endpoint | None, bool], ...]
"""Of each instance where it serves, where its health is asked for if elsewhere, and whether it
drains."""


def known(cluster: Cluster, now: float) -> Known | None:
    """The cluster's endpoints; None while that is not known (see the module's text).

    Lost instances are left out once they have had time to come back. When every session is gone,
    the fault is more likely this side's: Envoy's own health checks judge the workers then.
    """
    members = [cluster.instances[name] for name in cluster.members]
    if now - cluster.applied_at < HOLD_S and not all(
        i.connected and (i.accepted or i.draining) for i in members
    ):
        return None
    all_lost = not any(i.connected for i in members)
    found = []
    for instance in members:
        hello, draining = instance.hello, instance.draining
        if hello is None or not (instance.accepted or draining):
            continue
        if instance.state == "lost" and not (all_lost or instance.returning(now)):
            continue
        found.append((hello.address, hello.health, draining))
    return tuple(found)


def assignment(name: str, instances: Known) -> Any:
    """The endpoints of the cluster ``name`` as Envoy is told them."""
    endpoints = []
    for address, health, draining in instances:
        status = health_check_pb2.DRAINING if draining else health_check_pb2.HEALTHY
        endpoint = endpoint_components_pb2.Endpoint(address=_address(address))
        if health is not None:
            endpoint.health_check_config.port_value = health.port
            endpoint.health_check_config.address.CopyFrom(_address(health))
        endpoints.append(
            endpoint_components_pb2.LbEndpoint(endpoint=endpoint, health_status=status)
        )
    return endpoint_pb2.ClusterLoadAssignment(
        cluster_name=name,
        endpoints=[endpoint_components_pb2.LocalityLbEndpoints(lb_endpoints=endpoints)],
    )


def _address(endpoint: Endpoint) -> Any:
    socket = address_pb2.SocketAddress(address=endpoint.ip, port_value=endpoint.port)
    return address_pb2.Address(socket_address=socket)


class EndpointService(eds_pb2_grpc.EndpointDiscoveryServiceServicer):  # type: ignore[misc]
    """Serves ``envoy.service.endpoint.v3.EndpointDiscoveryService``."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def StreamEndpoints(
        self,
        request_iterator: AsyncIterator[Any],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> AsyncIterator[Any]:
        stream = _Subscription(self._store, context)
        stop = self._store.listen(stream.wake.set)
        reader = asyncio.create_task(stream.read(request_iterator))
        try:
            while not reader.done():
                answer = stream.answer()
                if stream.refused:
                    # Ended, so that it comes again by a connection with the certificate that it
                    # has then: what was good when this one was made may not be now.
                    log.warning("no endpoints for %s: %s", context.peer(), stream.refused)
                    await context.abort(grpc.StatusCode.PERMISSION_DENIED, stream.refused)
                if answer is not None:
                    yield answer
                await stream.wake.wait()
                stream.wake.clear()
        finally:
            stop()
            reader.cancel()


class _Subscription:
    """What one stream asked for and what it was sent."""

    def __init__(self, store: Store, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        self._store = store
        self._context = context
        self.refused = ""
        self.wake = asyncio.Event()
        self._names: tuple[str, ...] = ()
        self._sent: dict[str, Known] | None = None
        self._version = 0
        self._nonce = 0

    async def read(self, requests: AsyncIterator[Any]) -> None:
        try:
            async for request in requests:
                self._take(request)
        except Exception:
            # Envoy keeps the endpoints that it has, and asks again.
            log.exception("%s: endpoints end by a fault of the scheduler", self._context.peer())
        finally:
            self.wake.set()

    def _take(self, request: Any) -> None:
        if request.HasField("error_detail"):
            # The same again would be turned down again; the next change is a new answer.
            log.error("endpoints turned down by a gateway: %s", request.error_detail.message)
        if request.response_nonce and request.response_nonce != str(self._nonce):
            # An answer to something older than what is under way.
            return
        names = tuple(request.resource_names)
        if names != self._names:
            self._names = names
            self._sent = None
            self.wake.set()

    def answer(self) -> Any | None:
        """The next answer; None while there is nothing new to say or not all is known, or when it
        is ``refused``."""
        now = self._store.clock()
        wanted: dict[str, Known] = {}
        for name in self._names:
            cluster = self._store.clusters.get(name)
            if cluster is None:
                continue
            self.refused = peers.refusal(self._context, cluster.spec, "gateway") or ""
            if self.refused:
                return None
            found = known(cluster, now)
            if found is not None:
                wanted[name] = found
        # State of the world may be sent in parts for endpoints: what is not known yet is left out.
        if not wanted or wanted == self._sent:
            return None
        self._sent = wanted
        self._version += 1
        self._nonce += 1
        return discovery_pb2.DiscoveryResponse(
            version_info=f"{self._store.started_at:.6f}-{self._version}",
            type_url=TYPE_URL,
            nonce=str(self._nonce),
            resources=[
                any_pb2.Any(type_url=TYPE_URL, value=assignment(*item).SerializeToString())
                for item in wanted.items()
            ],
        )
