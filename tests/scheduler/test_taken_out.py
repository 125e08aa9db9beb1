"""Instances that are given nothing: those that fell silent, and those whose answers fail."""

from __future__ import annotations

from ecoserve.policy.breaker import FAILURES
from ecoserve.proto.v1 import session_pb2
from ecoserve.scheduler.instance import SILENT_S
from tests.scheduler.fakes import chat, until


def pass_time(rig, seconds: float) -> None:
    """Has the scheduler's clock go on, with a sweep every half second as there is."""
    store = rig.server.store
    clock, ahead = store.clock, 0.0

    def later() -> float:
        return clock() + ahead

    store.clock = later
    for _ in range(int(2 * seconds)):
        ahead += 0.5
        store.clusters["c"].sweep(later())


async def destinations(rig, count: int = 6) -> set[str]:
    found = set()
    for i in range(count):
        found.add((await rig.gateway.call(chat(f"{i} {'x' * 300}"))).destinations[0])
    return found


async def test_one_that_misses_its_reports_is_out_and_back_with_the_next(rig) -> None:
    a, b = await rig.ready("a", "b")
    pass_time(rig, SILENT_S - 0.5)
    await b.acked(b.report())
    pass_time(rig, 1.0)
    assert await destinations(rig) == {b.address}
    state = await rig.state()
    assert next(i.reason for i in state.instances if i.name == "a").startswith(
        "it has not reported"
    )
    await a.acked(a.report())
    await b.acked(b.busy())
    assert await destinations(rig, 1) == {a.address}


async def test_a_pause_of_the_scheduler_is_nobodys_silence(rig) -> None:
    [a] = await rig.ready("a")
    cluster = rig.server.store.clusters["c"]
    cluster.sweep(rig.server.store.clock() + 30.0)
    assert await destinations(rig, 1) == {a.address}


async def fail(worker, count: int, first: int = 1, **fields) -> None:
    done = [
        session_pb2.Finished(number=first + i, id=f"{worker.name}{first + i}", status=500, **fields)
        for i in range(count)
    ]
    await worker.acked(worker.report(finished=done))


async def test_failing_answers_take_one_out_and_a_trial_brings_it_back(rig) -> None:
    a, b = await rig.ready("a", "b")
    await fail(a, FAILURES)
    assert await destinations(rig) == {b.address}
    [reason] = [i.reason for i in (await rig.state()).instances if i.reason]
    assert "circuit breaker is open" in reason
    text = (await rig.http.get("/metrics")).text
    labels = '{cluster="c",instance="a",macro_instance="m0"}'
    assert f"ecoserve_breaker_opened_total{labels} 1.0" in text
    assert f"ecoserve_instance_accepted{labels} 0.0" in text

    pass_time(rig, 1.5)
    await b.acked(b.busy())
    trial = await rig.gateway.call(chat())
    assert trial.destinations == [a.address, b.address]
    # Only the one, until it is known to be well.
    await b.acked(b.report())
    assert await destinations(rig) == {b.address}
    running = session_pb2.Decode(id=trial.id, context=9, generated=1, slack_s=1.0, tpot_s=0.5)
    await a.acked(a.report(running=[running]))
    await b.acked(b.busy())
    assert await destinations(rig, 2) == {a.address}


async def test_requests_that_are_retried_elsewhere_count_against_the_first(rig) -> None:
    a, b = await rig.ready("a", "b")
    for _ in range(FAILURES):
        await b.acked(b.busy())
        reply = await rig.gateway.call(chat())
        assert reply.destinations[0] == a.address
        await b.acked(b.report(present=[reply.id]))
    assert await destinations(rig) == {b.address}


async def test_what_fails_everywhere_takes_no_more_than_half_out(rig) -> None:
    workers = await rig.ready("a", "b", "c", "d")
    for worker in workers:
        await fail(worker, FAILURES + 2)
    routable = rig.server.store.clusters["c"].homes.routable()
    assert [i.name for i in routable] == ["c", "d"]


async def test_the_only_one_is_never_taken_out_for_its_answers(rig) -> None:
    [only] = await rig.ready("a")
    await fail(only, FAILURES + 2)
    assert await destinations(rig, 1) == {only.address}


async def test_while_one_is_on_trial_the_other_is_not_taken_out(rig) -> None:
    a, b = await rig.ready("a", "b")
    await fail(a, FAILURES)
    pass_time(rig, 1.5)
    await fail(b, FAILURES)
    await b.acked(b.busy())
    assert await destinations(rig, 1) == {a.address}
    await b.acked(b.report())
    assert await destinations(rig, 2) == {b.address}


async def test_the_last_one_that_is_there_is_not_taken_out(rig) -> None:
    a, b = await rig.ready("a", "b")
    await b.close()
    await until(lambda: len(rig.server.store.clusters["c"].homes.routable()) == 1)
    await fail(a, FAILURES + 2)
    assert await destinations(rig, 2) == {a.address}


async def test_what_one_still_says_of_calls_that_went_elsewhere_takes_nobody_out(rig) -> None:
    a, b = await rig.ready("a", "b")
    calls = []
    for _ in range(FAILURES):
        await b.acked(b.busy())
        calls.append((await rig.gateway.call(chat())).id)
    await b.acked(b.report(present=calls))
    assert rig.reservations() == {"b": set(calls)}
    await a.acked(a.report(present=calls))
    done = [session_pb2.Finished(number=i + 1, id=c, status=503) for i, c in enumerate(calls)]
    await a.acked(a.report(finished=done))
    assert rig.reservations() == {"b": set(calls)}
    assert [i.name for i in rig.server.store.clusters["c"].homes.routable()] == ["b"]
    done = [session_pb2.Finished(number=i + 1, id=c, status=200) for i, c in enumerate(calls)]
    await b.acked(b.report(finished=done))
    await rig.none_reserved()


async def test_clients_that_leave_or_send_nonsense_say_nothing(rig) -> None:
    a, _ = await rig.ready("a", "b")
    number = 0
    for status in (499, 400, 404, 422):
        for _ in range(FAILURES):
            number += 1
            done = session_pb2.Finished(number=number, id=f"x{number}", status=status)
            await a.acked(a.report(finished=[done]))
    assert len(rig.server.store.clusters["c"].homes.routable()) == 2


async def test_a_dead_socket_takes_one_out_at_once(rig) -> None:
    a, b = await rig.ready("a", "b")
    await a.close()
    await until(lambda: len(rig.server.store.clusters["c"].homes.routable()) == 1)
    assert await destinations(rig) == {b.address}
