"""What the scheduler is told of clusters, and is told again."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import kmock
import pytest
from ecoserve_operator.api import EcoServeCluster
from ecoserve_operator.cluster_api import CLUSTERS
from ecoserve_operator.membership import Membership, declare
from ecoserve_operator.store import Key

from ecoserve.proto.v1 import admin_pb2
from ecoserve.scheduler.config import from_proto
from ecoserve.scheduler.server import Server
from tests.operator.control_world import Scheduler, until
from tests.operator.kmock_world import emulated
from tests.operator.manifests import example
from tests.operator.operated import operator

KEY = ("default", "demo")
SPEC = EcoServeCluster.model_validate(example()).spec


class Deaf(Scheduler):
    """A scheduler that takes nothing away while it is ``deaf``."""

    deaf = True
    heard = 0

    async def Remove(self, request: admin_pb2.RemoveRequest, context: Any) -> Any:
        self.heard += 1
        if self.deaf:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "busy")
        return await super().Remove(request, context)


@asynccontextmanager
async def talking(
    target: str, gone: Callable[[Key], bool] = lambda _: False
) -> AsyncIterator[Membership]:
    """What a controller is to the scheduler, as long as it lives."""
    membership = Membership(target, gone=gone)
    running = asyncio.create_task(membership.run())
    try:
        yield membership
    finally:
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
        await membership.close()


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    """A real scheduler."""
    server = Server(grpc_address="127.0.0.1:0", http_address="127.0.0.1:0")
    await server.start()
    yield server
    await server.stop()


def test_no_ramp_and_no_wait_are_told_as_such() -> None:
    given = {"policy": {"ramp": "0s", "lateWait": "0s"}}
    message = declare(KEY, EcoServeCluster.model_validate(example(**given)).spec, {})
    spec = from_proto(message)
    assert (spec.ramp_s, spec.late_wait_s) == (0.0, 0.0)
    assert not declare(KEY, SPEC, {}).HasField("late_wait_s")


async def test_a_cluster_that_is_gone_is_taken_away_once_the_scheduler_hears_of_it() -> None:
    scheduler = Deaf()
    await scheduler.start()
    there = True
    async with talking(scheduler.target, lambda _: not there) as membership:
        await membership.declare(KEY, declare(KEY, SPEC, {}), busy=False)
        assert "default/demo" in scheduler.clusters
        there = False
        membership.forget(KEY)
        await until(lambda: scheduler.heard >= 2, "it is not told again")
        assert "default/demo" in scheduler.clusters
        scheduler.deaf = False
        await until(lambda: not scheduler.clusters, "it still has the cluster")
        # One of the same name that came meanwhile stays.
        there, scheduler.deaf = True, True
        await membership.declare(KEY, declare(KEY, SPEC, {}), busy=False)
        there = False
        membership.forget(KEY)
        there = True
        await membership.declare(KEY, declare(KEY, SPEC, {}), busy=False)
        asked, scheduler.deaf = scheduler.asked, False
        await until(lambda: scheduler.asked > asked)
        assert "default/demo" in scheduler.clusters
    await scheduler.stop()


async def test_what_went_between_two_controllers_is_taken_away(server: Server) -> None:
    target = f"127.0.0.1:{server.grpc_port}"
    names = ("one/stays", "one/went", "two/stays")
    async with talking(target) as first:
        for name in names:
            key = (name.partition("/")[0], name.partition("/")[2])
            members = {"m0": [f"{key[1]}-0", f"{key[1]}-1"]}
            await first.declare(key, declare(key, SPEC, members), busy=False)
    assert sorted(server.store.clusters) == sorted(names)
    async with talking(target, lambda key: key == ("one", "went")) as second:
        await until(lambda: "one/went" not in server.store.clusters, "it still has the cluster")
        # Of one that stays it has those members only that it is told of now.
        members = {"m1": ["stays-1"]}
        await second.declare(("one", "stays"), declare(("one", "stays"), SPEC, members), busy=False)
        cluster = server.store.clusters["one/stays"]
        assert dict(cluster.members) == {"stays-1": "m1"}
        assert set(cluster.macros) == {"m1"}
        assert set(cluster.instances) == {"stays-1"}
    assert sorted(server.store.clusters) == ["one/stays", "two/stays"]


@pytest.mark.parametrize("everywhere", [False, True])
async def test_a_controller_that_starts_takes_away_what_went_before(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, everywhere: bool
) -> None:
    """But nothing before it has listed the clusters, and nothing of namespaces that are none of its
    business."""
    target = f"127.0.0.1:{server.grpc_port}"
    async with talking(target) as before:
        for key in (("another", "went"), ("one", "went")):
            await before.declare(key, declare(key, SPEC, {}), busy=False)
    had: list[list[str]] = []

    def refuse(request: kmock.Request) -> None:
        listing = request.action == kmock.action.LIST and request.resource == api.key(CLUSTERS)
        if listing and "kopf" not in request.headers["User-Agent"] and len(had) < 3:
            had.append(sorted(server.store.clusters))
            raise kmock.KubernetesError(status=503, reason="ServiceUnavailable")

    async with emulated(tmp_path) as (api, kubeconfig):
        monkeypatch.setenv("KUBECONFIG", str(kubeconfig))
        api.before = refuse
        namespaces = () if everywhere else ("one",)
        given = {"optional_groups": (), "namespaces": namespaces, "scheduler": target}
        async with operator("one", given=given) as esc:
            esc.node.collects = ()
            await esc.create(replicas=1)
            await until(lambda: "one/demo" in server.store.clusters, "it is not declared")
            await until(lambda: "one/went" not in server.store.clusters, "it has the other still")
            # The scheduler lists them by their names, so this one was looked at before.
            assert ("another/went" in server.store.clusters) != everywhere
    assert had == [["another/went", "one/went"]] * 3
