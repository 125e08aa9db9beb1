"""What the scheduler is told of clusters, and is told again."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import grpc
from ecoserve_operator.api import EcoServeCluster
from ecoserve_operator.membership import Membership, declare

from ecoserve.proto.v1 import admin_pb2
from tests.operator.control_world import Scheduler, until
from tests.operator.manifests import example

KEY = ("default", "demo")


class Deaf(Scheduler):
    """A scheduler that takes nothing away while it is ``deaf``."""

    deaf = True
    heard = 0

    async def Remove(self, request: admin_pb2.RemoveRequest, context: Any) -> Any:
        self.heard += 1
        if self.deaf:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "busy")
        return await super().Remove(request, context)


async def test_a_cluster_that_is_gone_is_taken_away_once_the_scheduler_hears_of_it() -> None:
    scheduler = Deaf()
    await scheduler.start()
    membership = Membership(scheduler.target)
    running = asyncio.create_task(membership.run())
    spec = EcoServeCluster.model_validate(example()).spec
    try:
        await membership.declare(KEY, declare(KEY, spec, {}), busy=False)
        assert "default/demo" in scheduler.clusters
        await membership.forget(KEY)
        await until(lambda: scheduler.heard >= 2, "it is not told again")
        assert "default/demo" in scheduler.clusters
        scheduler.deaf = False
        await until(lambda: not scheduler.clusters, "it still has the cluster")
        # One of the same name that came meanwhile stays.
        scheduler.deaf = True
        await membership.declare(KEY, declare(KEY, spec, {}), busy=False)
        await membership.forget(KEY)
        await membership.declare(KEY, declare(KEY, spec, {}), busy=False)
        asked, scheduler.deaf = scheduler.asked, False
        await until(lambda: scheduler.asked > asked)
        assert "default/demo" in scheduler.clusters
    finally:
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
        await membership.close()
        await scheduler.stop()
