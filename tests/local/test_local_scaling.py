"""A launcher's cluster scales by the metrics of a real scheduler; workers are played."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise

import httpx
import pytest

from ecoserve.local import scaling
from ecoserve.local.admin import Admin
from ecoserve.local.engine import SetupError
from ecoserve.local.fleet import Fleet
from ecoserve.local.options import CLUSTER
from ecoserve.local.scaling import Hands, Scaler, settings_of
from ecoserve.policy.mitosis import Bounds
from ecoserve.policy.signals import Contract, Expand, Settings
from ecoserve.proto.v1 import admin_pb2
from ecoserve.scheduler.server import Server
from tests.scheduler.fakes import Worker, cluster, until

NAMES = [f"worker-{n}" for n in range(4)]
# As usual, but a hundred times as fast.
QUICK = Settings(
    Expand(0.05, 0.6, 0.85, 0.6, 1.0, 0.6, 1.0, 0.6, cooldown=1.0, max_step=1, starting=5.0),
    Contract(use_for=0.6, idle_for=0.6, saved_for=0.6, cooldown=1.0),
)


class World:
    """A real scheduler, played workers that report ``use``, and the scaler between them."""

    def __init__(self) -> None:
        self.use = 0.6
        self.reports = True
        self.workers: dict[str, Worker] = {}
        self.told: list[str] = []
        self.fleet = Fleet(NAMES, 2, Bounds(1, 2, merge_cooldown=0.5))

    async def start(self, name: str) -> None:
        self.workers[name] = Worker(self.server.grpc_port, name, cluster=CLUSTER)

    async def stop(self, name: str) -> None:
        await self.workers.pop(name).close()

    async def declare(self) -> None:
        await self.admin.apply(
            cluster(
                name=CLUSTER,
                macro_instances=[
                    admin_pb2.MacroInstance(name=name, instances=some)
                    for name, some in self.fleet.groups.items()
                ],
            )
        )

    async def keep_reporting(self) -> None:
        while True:
            for worker in self.workers.values():
                if worker.accepted and self.reports:
                    worker.report(use=self.use)
            await asyncio.sleep(0.05)

    async def sizes(self) -> list[int]:
        """Accepted workers of each macro instance."""
        state = await self.admin.get()
        assert state is not None
        homes = [i.macro_instance for i in state.instances if i.state == "accepted"]
        return sorted((homes.count(home) for home in set(homes)), reverse=True)

    async def comes_to(self, *sizes: int) -> None:
        async def so() -> bool:
            return await self.sizes() == list(sizes) and len(self.workers) == sum(sizes)

        await until(so, f"{sizes}; {self.told}", seconds=60)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        self.server = Server(grpc_address="127.0.0.1:0", http_address="127.0.0.1:0")
        await self.server.start()
        async with Admin(f"127.0.0.1:{self.server.grpc_port}", CLUSTER) as self.admin:
            await self.declare()
            for name in self.fleet.running:
                await self.start(name)
            scaler = Scaler(
                self.fleet,
                QUICK,
                2,
                4,
                scheduler=self.admin,
                metrics=f"http://127.0.0.1:{self.server.http_port}/metrics",
                ttft_slo=5.0,
                drain_timeout=5.0,
                hands=Hands(self.start, self.stop, self.declare, self.told.append),
            )
            tasks = [asyncio.create_task(self.keep_reporting()), asyncio.create_task(scaler.run())]
            try:
                yield
                assert not any(task.done() for task in tasks)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                for worker in self.workers.values():
                    await worker.close()
        await self.server.stop()


async def test_it_grows_splits_shrinks_and_merges(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("TICK_S", 0.05), ("SCRAPE_S", 0.1), ("DECIDE_S", 0.2)):
        monkeypatch.setattr(scaling, name, value)
    world = World()
    async with world.running():
        await world.comes_to(2)
        world.use = 0.9
        await until(lambda: any("from 2 to 3 workers" in text for text in world.told), seconds=60)
        world.use = 0.6
        await world.comes_to(2, 1)
        assert any("from 2 to 3 workers: use stayed above 85 %" in text for text in world.told)
        assert any(text.startswith("macro instances: local-0 (") for text in world.told)
        world.use = 0.1
        await world.comes_to(2)
        assert any("from 3 to 2 workers: use stayed below 40 %" in text for text in world.told)


async def test_without_figures_nothing_scales(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("TICK_S", 0.05), ("SCRAPE_S", 0.1), ("DECIDE_S", 0.05)):
        monkeypatch.setattr(scaling, name, value)
    decided = []

    def watch(*arguments: object) -> object:
        decision = decide(*arguments)  # type: ignore[arg-type]
        decided.append(decision)
        return decision

    decide = scaling.decide
    monkeypatch.setattr(scaling, "decide", watch)
    world = World()
    async with world.running():
        await world.comes_to(2)
        world.use, world.reports = float("nan"), True
        await until(lambda: any("nan" in d.reason for d in decided), seconds=60)
        # Windows that hold nothing else are looked at, again and again.
        seen = len(decided)
        await until(lambda: len(decided) > seen + 15, seconds=60)
        assert {d.after for d in decided[seen:]} == {2}
        assert all(d.cause == "SignalsUnknown" for d in decided[seen:])
        # The user reads which are unknown and why, and no line again while it is the same.
        told = [text for text in world.told if "nan" in text]
        assert told
        assert all(text.startswith("it stays at 2 workers: not all is known: ") for text in told)
        assert all(one != next for one, next in pairwise(world.told))


async def test_what_cannot_be_scraped_is_told_once() -> None:
    told: list[str] = []
    statuses = iter([500, 500, 200, 500])

    def answer(_: httpx.Request) -> httpx.Response:
        return httpx.Response(next(statuses), text="")

    async def never(*_: str) -> None:
        raise AssertionError

    hands = Hands(never, never, never, told.append)
    scaler = Scaler(
        Fleet(["worker-0"], 1, Bounds(1, 1)),
        QUICK,
        1,
        1,
        scheduler=None,  # type: ignore[arg-type]
        metrics="http://scheduler/metrics",
        ttft_slo=1.0,
        drain_timeout=1.0,
        hands=hands,
    )
    async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as client:
        for _ in range(4):
            await scaler._scrape(client)
    assert [text[:40] for text in told] == ["no metrics: Server error '500 Internal S"] * 2


def test_settings_by_name() -> None:
    chosen = settings_of({"expand.use": 0.7, "expand.max_step": 2.0, "contract.idle_for": 30.0})
    assert chosen == Settings(Expand(use=0.7, max_step=2), Contract(idle_for=30.0))
    for given, words in (
        ({"expand.nothing": 1.0}, "no setting 'expand.nothing'; it has: expand.violations"),
        ({"expand.max_step": 1.5}, "expand.max_step must be a whole number, not 1.5"),
        ({"expand.use": 0.1}, "contract.use must be less than expand.use"),
    ):
        with pytest.raises(SetupError, match=words):
            settings_of(given)
