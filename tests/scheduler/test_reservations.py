"""Whatever becomes of a routed call, what was reserved for it goes back to nothing."""

from __future__ import annotations

import asyncio
import json

from ecoserve.proto.v1 import session_pb2
from tests.scheduler.fakes import BUFFERED, Reply, _body, chat, head, until


async def test_covered_when_waiting_running_or_finished(rig) -> None:
    [worker] = await rig.ready("a")
    ids = [(await rig.gateway.call(chat())).id for _ in range(3)]
    assert rig.reservations() == {"a": set(ids)}
    await worker.acked(
        worker.report(
            waiting=[session_pb2.Prompt(id=ids[0], tokens=5)],
            running=[session_pb2.Decode(id=ids[1], context=5, slack_s=1.0, tpot_s=0.5)],
            present=ids[:2],
        )
    )
    assert rig.reservations() == {"a": {ids[2]}}
    done = session_pb2.Finished(number=1, id=ids[2], status=200)
    await worker.acked(worker.report(finished=[done]))
    await rig.none_reserved()


async def test_view_lays_reservations_over_the_report(rig) -> None:
    await rig.ready("a")
    instance = rig.server.store.clusters["c"].instances["a"]
    now = rig.server.store.clock()
    before = instance.view(now)
    await rig.gateway.call(chat("x" * 4000, max_tokens=10, n=3))
    [reservation] = instance.reservations.values()
    assert instance.view(now) == before.take(reservation.request)
    assert reservation.request.sequences == 3
    assert reservation.request.output_tokens == 30


async def test_the_client_goes_away_while_its_call_waits(rig) -> None:
    [worker] = await rig.ready("a")
    await worker.acked(worker.busy(prefill_s=4.9))
    for how in ("cancel", "half-close"):
        stream = rig.gateway.open()
        await stream.write(head("/v1/chat/completions", "POST", {}, BUFFERED, None, end=False))
        await stream.read()
        await stream.write(_body(json.dumps(chat("x" * 8000)).encode(), True))
        assert (await stream.read()).HasField("override_message_timeout")
        if how == "cancel":
            stream.cancel()
        else:
            await stream.done_writing()
        tickets = rig.server.store.clusters["c"].tickets
        await until(lambda tickets=tickets: not tickets, how)
        assert (await rig.state()).waiting == 0
    await rig.none_reserved()


async def test_expires_when_no_report_names_it(rig) -> None:
    [worker] = await rig.ready("a")
    lost = (await rig.gateway.call(chat())).id
    kept = (await rig.gateway.call(chat())).id
    cluster = rig.server.store.clusters["c"]
    now = rig.server.store.clock()
    cluster.sweep(now + 4.0)
    assert rig.reservations() == {"a": {lost, kept}}
    cluster.instances["a"].reservations[lost].seen -= 10.0
    await worker.acked(worker.report(present=[kept]))
    cluster.sweep(now + 1.0)
    assert rig.reservations() == {"a": {kept}}
    # One that is not heard of may have all that it was sent.
    cluster.sweep(now + 100.0)
    assert rig.reservations() == {"a": {kept}}
    cluster.instances["a"].reservations[kept].seen -= 10.0
    await worker.acked(worker.report())
    cluster.sweep(now + 1.0)
    await rig.none_reserved()


async def test_what_is_lost_with_its_instance_expires(rig) -> None:
    [worker] = await rig.ready("a")
    await rig.gateway.call(chat())
    await worker.close()
    cluster = rig.server.store.clusters["c"]
    await until(lambda: not cluster.instances["a"].connected)
    cluster.sweep(rig.server.store.clock() + 6.0)
    await rig.none_reserved()


async def test_a_retry_moves_it(rig) -> None:
    a, b = await rig.ready("a", "b")
    reply = await rig.gateway.call(chat())
    home, other = (a, b) if reply.destinations[0] == a.address else (b, a)
    assert rig.reservations() == {home.name: {reply.id}}
    await other.acked(other.report(present=[reply.id]))
    assert rig.reservations() == {other.name: {reply.id}}
    waiting = [session_pb2.Prompt(id=reply.id, tokens=5)]
    await other.acked(other.report(waiting=waiting, present=[reply.id]))
    await rig.none_reserved()
    text = (await rig.http.get("/metrics")).text
    assert f'instance="{other.name}",macro_instance="m0"}} 1.0' in "\n".join(
        line for line in text.splitlines() if line.startswith("ecoserve_retries_moved_total")
    )


async def test_waiting_for_one_that_is_lost(rig) -> None:
    a, b = await rig.ready("a", "b")
    for worker in (a, b):
        await worker.acked(worker.busy(prefill_s=4.9))
    reply = Reply()
    call = asyncio.create_task(rig.gateway.call(chat("x" * 8000), reply=reply))
    await until(lambda: reply.extensions)
    await a.close()
    await until(lambda: not rig.server.store.clusters["c"].instances["a"].connected)
    await b.acked(b.report())
    await call
    assert reply.destinations == [b.address]


async def test_nothing_is_left_of_an_instance_that_leaves_with_a_retry(rig) -> None:
    [a] = await rig.ready("a")
    b = rig.worker("b")
    await until(lambda: b.refused)
    reply = await rig.gateway.call(chat())
    await b.acked(b.report(present=[reply.id]))
    assert rig.reservations() == {"b": {reply.id}}
    await b.close()
    await rig.none_reserved()
    await a.acked(a.report(present=[reply.id]))
