"""A scheduler in process, and workers and a gateway connected to it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import httpx
import pytest

from ecoserve.proto.v1 import admin_pb2, admin_pb2_grpc
from ecoserve.scheduler.server import Server
from tests.scheduler.fakes import Gateway, Worker, cluster, until


class Rig:
    """One scheduler and all that is connected to it."""

    def __init__(self) -> None:
        self.server: Server
        self.admin: admin_pb2_grpc.AdminStub
        self.gateway: Gateway
        self.http: httpx.AsyncClient
        self.workers: list[Worker] = []
        self._admin_channel: grpc.aio.Channel

    async def start(self, *, grpc_port: int = 0, **options: Any) -> None:
        self.server = Server(
            grpc_address=f"127.0.0.1:{grpc_port}", http_address="127.0.0.1:0", **options
        )
        await self.server.start()
        self._admin_channel = grpc.aio.insecure_channel(f"127.0.0.1:{self.port}")
        self.admin = admin_pb2_grpc.AdminStub(self._admin_channel)
        self.gateway = Gateway(self.port)
        self.http = httpx.AsyncClient(base_url=f"http://127.0.0.1:{self.server.http_port}")

    @property
    def port(self) -> int:
        return self.server.grpc_port

    async def apply(self, declared: admin_pb2.Cluster) -> None:
        await self.admin.Apply(admin_pb2.ApplyRequest(cluster=declared))

    async def state(self, name: str = "c") -> admin_pb2.ClusterState:
        return await self.admin.Get(admin_pb2.GetRequest(name=name))

    async def states(self, name: str = "c") -> dict[str, str]:
        return {i.name: i.state for i in (await self.state(name)).instances}

    def worker(self, name: str, **options: Any) -> Worker:
        worker = Worker(self.port, name, **options)
        self.workers.append(worker)
        return worker

    async def ready(self, *names: str, **fields: Any) -> list[Worker]:
        """A cluster of these instances, all accepted."""
        await self.apply(cluster(*names, **fields))
        workers = [self.worker(name) for name in names]
        await asyncio.gather(*(worker.ready() for worker in workers))
        return workers

    def reservations(self, name: str = "c") -> dict[str, set[str]]:
        found = self.server.store.clusters[name].instances.values()
        return {i.name: set(i.reservations) for i in found if i.reservations}

    async def none_reserved(self) -> None:
        await until(lambda: not self.reservations(), "all reservations released")
        cluster = self.server.store.clusters["c"]
        assert not cluster.tickets
        assert not len(cluster.ledger)
        for macro, home in cluster.homes._homes.items():
            able = [i for i in home if i.routable]
            assert cluster.homes.routable(macro) == able
            assert cluster.homes._loads[macro] == sum(i.load for i in able)
        for instance in cluster.instances.values():
            assert instance._reserved_seconds == 0
            assert instance._reserved_kv == 0
            assert instance._reserved_sequences == 0

    async def stop(self) -> None:
        for worker in self.workers:
            await worker.close()
        self.workers.clear()
        await self.gateway.close()
        await self._admin_channel.close()
        await self.http.aclose()
        await self.server.stop()


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    rig = Rig()
    await rig.start()
    yield rig
    await rig.stop()


@pytest.fixture
async def rigs() -> AsyncIterator[Callable[..., Awaitable[Rig]]]:
    """Makes rigs with options of their own."""
    made: list[Rig] = []

    async def make(**options: Any) -> Rig:
        rig = Rig()
        await rig.start(**options)
        made.append(rig)
        return rig

    yield make
    for rig in made:
        await rig.stop()
