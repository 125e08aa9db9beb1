"""Whose call goes first when not all can be served: tenants and priorities."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from ecoserve import headers
from ecoserve.proto.v1 import session_pb2
from tests.scheduler.fakes import Reply, chat, until

PATIENT = session_pb2.SLO(ttft_s=300.0, tpot_s=0.5)


class Crowd:
    """Calls that wait at a scheduler whose only worker is full, and who of them was let in."""

    def __init__(self, rig, worker) -> None:
        self.rig, self.worker = rig, worker
        self.routed: list[str] = []
        self.calls: list[asyncio.Task[None]] = []
        self._finished = 0

    async def calls_in(self, name: str, **values: str) -> None:
        """One more call, until it waits."""
        waiting = len(self.rig.server.store.clusters["c"].tickets)
        fields = {"priority": int(values.pop("body"))} if "body" in values else {}

        async def call() -> None:
            reply = await self.rig.gateway.call(
                chat("x" * 400, max_tokens=10, **fields), values=values
            )
            self.routed.append(name)
            self._finished += 1
            done = session_pb2.Finished(
                number=self._finished, id=reply.id, status=200, prompt_tokens=102, generated=10
            )
            self.worker.report(batch_limit=1, finished=[done], running=[OTHER])

        self.calls.append(asyncio.create_task(call()))
        await until(lambda: len(self.rig.server.store.clusters["c"].tickets) == waiting + 1)

    async def let_in(self, count: int) -> None:
        """Room for that many, one after the other."""
        for _ in range(count):
            before = len(self.routed)
            await self.worker.acked(self.worker.report(batch_limit=1))
            await until(lambda before=before: len(self.routed) > before)

    async def gone(self) -> None:
        self.worker.report(batch_limit=64)
        await asyncio.gather(*self.calls)


OTHER = session_pb2.Decode(id="other", context=10, generated=1, slack_s=5.0, tpot_s=0.5)


@pytest.fixture
async def crowd(rig):
    [worker] = await rig.ready("a", slo=PATIENT)
    await worker.acked(worker.report(batch_limit=1, running=[OTHER]))
    return Crowd(rig, worker)


async def test_one_tenant_with_ten_times_the_calls_leaves_the_other_its_share(crowd) -> None:
    for _ in range(20):
        await crowd.calls_in("hog", **{headers.TENANT: "hog"})
    for _ in range(2):
        await crowd.calls_in("other", **{headers.TENANT: "other"})
    await crowd.let_in(4)
    assert Counter(crowd.routed) == {"hog": 2, "other": 2}
    await crowd.let_in(2)
    assert Counter(crowd.routed) == {"hog": 4, "other": 2}
    await crowd.gone()


async def test_priorities_by_header_and_body_and_only_of_a_tenants_own(crowd) -> None:
    await crowd.calls_in("usual")
    await crowd.calls_in("later", body="3")
    await crowd.calls_in("sooner", body="-1")
    await crowd.calls_in("first", body="7", **{headers.PRIORITY: "-2"})
    await crowd.let_in(4)
    assert crowd.routed == ["first", "sooner", "usual", "later"]


async def test_a_malformed_priority_is_named(rig) -> None:
    await rig.ready("a")
    reply: Reply = await rig.gateway.call(chat(), values={headers.PRIORITY: "high"})
    assert reply.status == 400
    assert headers.PRIORITY in reply.error["message"]


async def test_accounts_follow_what_answers_took(rig) -> None:
    [worker] = await rig.ready("a")
    queue = rig.server.store.clusters["c"].macros["m0"]
    reply = await rig.gateway.call(chat("x" * 400), values={headers.TENANT: "t"})
    thought = queue._shares._flows["t"].served
    assert thought > 200
    done = session_pb2.Finished(
        number=1, id=reply.id, status=200, prompt_tokens=100, cached_tokens=64, generated=500
    )
    await worker.acked(worker.report(finished=[done]))
    assert queue._shares._flows["t"].served == 36 + 2 * 500
