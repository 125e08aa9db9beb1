"""Telling a real scheduler what the cluster is."""

from __future__ import annotations

import asyncio

import pytest

from ecoserve.local.admin import Admin, Refused
from ecoserve.proto.v1 import admin_pb2
from ecoserve.scheduler.server import Server


async def test_a_proxy_of_the_environment_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "no_grpc_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    server = Server(grpc_address="127.0.0.1:0", http_address="127.0.0.1:0")
    await server.start()
    try:
        async with Admin(f"127.0.0.1:{server.grpc_port}", "c") as admin:
            assert await admin.get() is None
            await asyncio.wait_for(admin.apply(admin_pb2.Cluster(name="c", model="m")), 20)
            state = await admin.get()
            assert state is not None
            assert state.cluster.name == "c"
            with pytest.raises(Refused):
                await admin.apply(admin_pb2.Cluster(name="c", model="m", policy="nope"))
    finally:
        await server.stop()
