"""Worlds that several tests share: one Envoy is started for each file."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.gateway.world import World, world


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    directory = tmp_path_factory.mktemp("gateway")
    async with world(directory, picker_timeout_s=0.3, access_log=str(directory / "log")) as it:
        yield it


@pytest_asyncio.fixture(loop_scope="module")
async def three(shared: World) -> World:
    """Three workers, well and idle, and a picker that answers."""
    for worker in shared.workers:
        worker.reset()
        if not worker.listening:
            await worker.start(int(worker.address.rpartition(":")[2]))
    shared.tell_endpoints(shared.workers)
    await shared.until_hosts(shared.workers)
    await shared.until_picked()
    for worker in shared.workers:
        worker.calls.clear()
    shared.log.write_text("")
    return shared
