"""Envoy's endpoints: held back after a start, then kept true."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
from envoy.config.core.v3 import health_check_pb2
from envoy.config.endpoint.v3 import endpoint_pb2
from envoy.service.discovery.v3 import discovery_pb2
from envoy.service.endpoint.v3 import eds_pb2_grpc
from google.rpc import status_pb2

from ecoserve.proto.v1 import admin_pb2
from ecoserve.scheduler import eds
from tests.scheduler.fakes import cluster, until


class Discovery:
    """A stream as Envoy opens it; every answer is acknowledged unless ``reject`` is set."""

    def __init__(self, port: int) -> None:
        self._channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}")
        stub = eds_pb2_grpc.EndpointDiscoveryServiceStub(self._channel)
        self._stream = stub.StreamEndpoints()
        self.answers: list[Any] = []
        self.reject = False
        self.names: tuple[str, ...] = ()
        self._task = asyncio.create_task(self._read())

    async def ask(self, *names: str, **fields: Any) -> None:
        self.names = names
        await self._stream.write(
            discovery_pb2.DiscoveryRequest(type_url=eds.TYPE_URL, resource_names=names, **fields)
        )

    async def _read(self) -> None:
        while (answer := await self._stream.read()) is not grpc.aio.EOF:
            self.answers.append(answer)
            error = status_pb2.Status(code=3, message="no") if self.reject else None
            await self.ask(
                *self.names,
                version_info=answer.version_info,
                response_nonce=answer.nonce,
                error_detail=error,
            )

    def endpoints(self, name: str = "c") -> dict[str, Any] | None:
        """Health by address as of the last answer that names the cluster."""
        for answer in reversed(self.answers):
            for resource in answer.resources:
                found = endpoint_pb2.ClusterLoadAssignment.FromString(resource.value)
                if found.cluster_name == name:
                    places = {}
                    for item in found.endpoints[0].lb_endpoints:
                        socket = item.endpoint.address.socket_address
                        places[f"{socket.address}:{socket.port_value}"] = item.health_status
                    return places
        return None

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self._channel.close()


HEALTHY, DRAINING = health_check_pb2.HEALTHY, health_check_pb2.DRAINING


async def test_held_back_until_every_instance_is_back(rig) -> None:
    discovery = Discovery(rig.port)
    await discovery.ask("c")
    await rig.apply(cluster("a", "b"))
    a = await rig.worker("a").ready()
    assert not discovery.answers
    b = await rig.worker("b").ready()
    await until(lambda: discovery.endpoints() == {a.address: HEALTHY, b.address: HEALTHY})
    assert len(discovery.answers) == 1
    await discovery.close()


async def test_held_back_no_longer_than_bounded(rig) -> None:
    await rig.apply(cluster("a", "b"))
    a = await rig.worker("a").ready()
    discovery = Discovery(rig.port)
    await discovery.ask("c")
    rig.server.store.clusters["c"].applied_at -= eds.HOLD_S
    await until(lambda: discovery.endpoints() == {a.address: HEALTHY})
    await discovery.close()


async def test_follows_joins_drains_and_losses(rig) -> None:
    a, b = await rig.ready("a", "b")
    discovery = Discovery(rig.port)
    await discovery.ask("c")
    await until(lambda: discovery.endpoints() == {a.address: HEALTHY, b.address: HEALTHY})
    request = admin_pb2.InstanceRequest(cluster="c", instance="a")
    await rig.admin.DrainInstance(request)
    await until(lambda: discovery.endpoints() == {a.address: DRAINING, b.address: HEALTHY})
    await rig.admin.ResumeInstance(request)
    await until(lambda: discovery.endpoints() == {a.address: HEALTHY, b.address: HEALTHY})

    rig.server.store.clusters["c"].applied_at -= eds.HOLD_S
    await rig.apply(cluster("a", "b", "n"))
    joined = await rig.worker("n", health_address="127.0.0.1:1234").ready()
    await until(lambda: joined.address in discovery.endpoints())
    answer = endpoint_pb2.ClusterLoadAssignment.FromString(discovery.answers[-1].resources[0].value)
    check = answer.endpoints[0].lb_endpoints[-1].endpoint.health_check_config
    assert (check.port_value, check.address.socket_address.address) == (1234, "127.0.0.1")

    await a.close()
    instance = rig.server.store.clusters["c"].instances["a"]
    await until(lambda: not instance.connected)
    assert a.address in discovery.endpoints()
    instance.lost_at -= 10.0
    await until(lambda: a.address not in discovery.endpoints())

    # Nobody left: the last set stays, for it is likelier that the fault is on this side.
    await b.close()
    await joined.close()
    await until(lambda: rig.server.store.clusters["c"].instances["n"].lost_at)
    for lost in rig.server.store.clusters["c"].instances.values():
        lost.lost_at -= 10.0
    rig.server.store.changed()
    assert b.address in discovery.endpoints()
    versions = [answer.version_info for answer in discovery.answers]
    assert len(set(versions)) == len(versions)
    await discovery.close()


async def test_a_rejected_answer_is_not_repeated(rig) -> None:
    [a] = await rig.ready("a")
    discovery = Discovery(rig.port)
    discovery.reject = True
    await discovery.ask("c")
    await until(lambda: discovery.answers)
    await a.acked(a.report())
    rig.server.store.changed()
    await a.acked(a.report())
    assert len(discovery.answers) == 1
    discovery.reject = False
    await rig.admin.DrainInstance(admin_pb2.InstanceRequest(cluster="c", instance="a"))
    await until(lambda: discovery.endpoints() == {a.address: DRAINING})
    assert len(discovery.answers) == 2
    await discovery.close()


async def test_several_clusters_and_changed_subscriptions(rig) -> None:
    [a] = await rig.ready("a")
    await rig.apply(cluster("b", name="other"))
    b = await rig.worker("b", cluster="other").ready()
    discovery = Discovery(rig.port)
    await discovery.ask("c", "nix")
    await until(lambda: discovery.endpoints("c") == {a.address: HEALTHY})
    assert discovery.endpoints("other") is None
    nonce = discovery.answers[-1].nonce
    await discovery.ask("c", "nix", "other", response_nonce=nonce)
    await until(lambda: discovery.endpoints("other") == {b.address: HEALTHY})
    await discovery.close()
