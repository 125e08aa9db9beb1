"""Who is accepted when, what becomes of a restart, of a drain, of a declaration."""

from __future__ import annotations

import grpc
import pytest

from ecoserve.proto.v1 import admin_pb2, session_pb2
from ecoserve.scheduler import server, sessions
from tests.scheduler.fakes import LATENCY, LIMITS, Worker, chat, cluster, until
from tests.worker.network import Network


async def test_refused_until_cluster_and_slo_are_known_then_accepted(rig) -> None:
    worker = rig.worker("a")
    await until(lambda: worker.refused)
    assert "cluster c is not known" in worker.refused[-1]

    unset = cluster("a")
    unset.ClearField("slo")
    await rig.apply(unset)
    await until(lambda: "SLO" in worker.refused[-1])
    assert not worker.commands
    assert (await rig.states())["a"] == "connected"

    await rig.apply(cluster("a", policy_settings={}, debug=True))
    await worker.ready()
    configure = worker.commands[0].configure
    assert configure.policy == "padg"
    assert configure.slo.ttft_s == 5.0
    assert configure.debug
    assert worker.accepted.configure == configure
    await until(lambda: _accepted(rig))


async def _accepted(rig) -> bool:
    return (await rig.states())["a"] == "accepted"


async def test_the_session_of_a_machine_that_is_gone_ends(
    rigs, monkeypatch: pytest.MonkeyPatch
) -> None:
    keepalive = (("grpc.keepalive_time_ms", 200), ("grpc.http2.ping_timeout_ms", 300))
    monkeypatch.setattr(server, "_KEEPALIVE", keepalive)
    rig = await rigs()
    network = Network(rig.port)
    await network.start()
    await rig.apply(cluster("a"))
    worker = Worker(network.port, "a")
    await worker.ready()
    network.silence()
    await until(lambda: not rig.server._sessions._links)
    await worker.close()
    await network.stop()


async def test_one_that_cannot_be_configured_is_refused_until_declared_anew(rig) -> None:
    await rig.apply(cluster("a"))
    worker = rig.worker("a", deaf=("configure",))
    await until(lambda: worker.commands)
    worker.done(worker.commands[0].number, "no such setting")
    await until(lambda: worker.refused)
    assert worker.refused[-1] == "no such setting"
    worker.deaf = ()
    await rig.apply(cluster("a", policy="window"))
    await worker.ready()


async def test_not_a_member_is_refused(rig) -> None:
    await rig.apply(cluster("a"))
    worker = rig.worker("b")
    await until(lambda: worker.refused)
    assert "macro instance" in worker.refused[-1]
    await rig.apply(cluster("a", "b"))
    await worker.ready()
    await rig.apply(cluster("a"))
    await until(lambda: len(worker.refused) == 2)
    assert (await rig.gateway.call(chat())).status == 503


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("address", "worker.local:80"),
        ("address", ""),
        ("address", "127.0.0.1:99999"),
        ("incarnation", ""),
        ("limits", session_pb2.Limits(max_num_seqs=1, max_model_len=1, step_budget=1)),
        ("latency", session_pb2.Latency()),
        ("latency", session_pb2.Latency(prefill_token=float("nan"))),
        ("health_address", "nowhere"),
    ],
)
async def test_malformed_hello_names_its_field(rig, field, value) -> None:
    await rig.apply(cluster("a"))
    worker = Worker(rig.port, "a", **{field: value})
    await until(worker.ended.is_set)
    assert worker.error is not None
    assert worker.error.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert f"hello.{field}" in worker.error.details()
    assert f"hello.{field}" in worker.refused[0]
    await worker.close()


async def test_a_restarted_scheduler_has_its_state_back_from_hello_and_report(rigs) -> None:
    first = await rigs()
    [worker] = await first.ready("a")
    port = first.port
    await first.stop()
    await until(worker.ended.is_set)

    second = await rigs(grpc_port=port)
    again = second.worker("a", address=worker.address)
    await until(lambda: again.refused)
    await second.apply(cluster("a"))
    await again.ready()
    assert (await second.gateway.call(chat())).destinations == [worker.address]


async def test_new_incarnation_replaces_the_old_and_forgets_what_was_reserved(rig) -> None:
    [worker] = await rig.ready("a")
    assert (await rig.gateway.call(chat())).status == 0
    assert rig.reservations()
    again = await rig.worker("a", incarnation="2").ready()
    await until(worker.ended.is_set)
    assert "incarnation 2" in worker.refused[-1]
    await rig.none_reserved()
    assert (await rig.gateway.call(chat())).destinations == [again.address]


async def test_same_incarnation_returns_as_what_it_was(rig) -> None:
    [worker] = await rig.ready("a")
    await worker.close()
    await until(lambda: _is(rig, "a", "lost"))
    again = rig.worker("a", address=worker.address)
    await again.ready()
    assert (await rig.states())["a"] == "accepted"
    assert not any(c.HasField("warm") for c in again.commands)


async def _is(rig, name: str, state: str) -> bool:
    return (await rig.states())[name] == state


async def test_finished_are_acknowledged_and_counted_once(rig) -> None:
    [worker] = await rig.ready("a")
    done = [session_pb2.Finished(number=n, id=f"x{n}", status=200) for n in (1, 2)]
    await worker.acked(worker.report(finished=done))
    assert worker.acks[-1].finished == 2
    done.append(session_pb2.Finished(number=3, id="x3", status=200))
    await worker.acked(worker.report(finished=done))
    assert worker.acks[-1].finished == 3
    text = (await rig.http.get("/metrics")).text
    ok = 'ecoserve_requests_total{cluster="c",instance="a",macro_instance="m0",outcome="ok"} 3.0'
    assert ok in text


async def test_workers_are_told_to_report_so_seldom_that_all_together_are_few(
    rig, monkeypatch
) -> None:
    a, b = await rig.ready("a", "b")
    assert a.acks[-1].interval_s == 1 / sessions.REPORTS_OF_ONE
    monkeypatch.setattr(sessions, "REPORTS_A_SECOND", 4)
    await b.acked(b.report())
    assert b.acks[-1].interval_s == 0.5


async def test_warm_prompts_are_the_frequent_heads_and_acceptance_waits_for_them(rig) -> None:
    await rig.ready("a")
    system = {"role": "system", "content": "You are a careful assistant. " * 40}
    for i in range(4):
        await rig.gateway.call(
            {"model": "m", "messages": [system, {"role": "user", "content": f"q{i}"}]}
        )
    await rig.apply(cluster("a", "b"))
    joining = rig.worker("b", deaf=("warm",))
    await until(lambda: any(c.HasField("warm") for c in joining.commands))
    assert joining.accepted is None
    assert (await rig.states())["b"] == "warming"
    command = joining.commands[-1]
    [request] = command.warm.requests
    assert request.path == "/v1/chat/completions"
    assert system["content"].encode() in request.body
    joining.done(command.number)
    await joining.ready()


async def test_cold_joins_are_neither_warmed_nor_ramped(rig) -> None:
    store = rig.server.store
    await rig.ready("a", ramp_s=1000.0)
    for _ in range(4):
        await rig.gateway.call(
            {"model": "m", "messages": [{"role": "system", "content": "s" * 600}]}
        )
    begun = store.clock
    store.clock = lambda: begun() + 60.0
    await rig.apply(cluster("a", "b", ramp_s=1000.0, cold_joins=True))
    joining = await rig.worker("b").ready()
    assert not any(c.HasField("warm") for c in joining.commands)
    assert store.clusters["c"].instances["b"].weight(store.clock()) == 1.0


async def test_warming_ends_after_a_bounded_time(rigs) -> None:
    rig = await rigs(warm_s=0.05)
    await rig.ready("a")
    for _ in range(4):
        await rig.gateway.call(
            {"model": "m", "messages": [{"role": "system", "content": "s" * 600}]}
        )
    await rig.apply(cluster("a", "b"))
    joining = rig.worker("b", deaf=("warm",))
    await joining.ready()
    assert any(c.HasField("warm") for c in joining.commands)


async def test_one_that_drains_by_word_of_a_scheduler_that_is_no_more_is_resumed(rig) -> None:
    await rig.apply(cluster("a"))
    worker = rig.worker("a", draining=True)
    worker.draining = True
    await until(lambda: _is(rig, "a", "drained"))
    await rig.admin.ResumeInstance(admin_pb2.InstanceRequest(cluster="c", instance="a"))
    await worker.ready()
    assert [c.WhichOneof("command") for c in worker.commands].count("resume") == 1


async def test_drain_and_resume(rig) -> None:
    a, b = await rig.ready("a", "b")
    running = session_pb2.Decode(id="r", context=10, generated=1, slack_s=5.0, tpot_s=0.5)
    a.deaf = ("drain",)
    await a.acked(a.report(running=[running]))
    await rig.admin.DrainInstance(
        admin_pb2.InstanceRequest(cluster="c", instance="a", timeout_s=7.0)
    )
    assert (await rig.states())["a"] == "draining"
    await until(lambda: a.commands[-1].HasField("drain"))
    assert a.commands[-1].drain.timeout_s == 7.0
    for _ in range(4):
        assert (await rig.gateway.call(chat())).destinations == [b.address]
    a.draining = True
    await a.acked(a.report())
    assert (await rig.states())["a"] == "drained"

    await rig.admin.ResumeInstance(admin_pb2.InstanceRequest(cluster="c", instance="a"))
    await until(lambda: _is(rig, "a", "accepted"))
    with pytest.raises(grpc.aio.AioRpcError) as missing:
        await rig.admin.DrainInstance(admin_pb2.InstanceRequest(cluster="c", instance="z"))
    assert missing.value.code() == grpc.StatusCode.NOT_FOUND


async def test_a_worker_that_drains_by_itself_is_not_routed_to(rig) -> None:
    a, b = await rig.ready("a", "b")
    a.draining = True
    await a.acked(a.report())
    assert (await rig.states())["a"] == "drained"
    assert (await rig.gateway.call(chat())).destinations == [b.address]


async def test_dead_engine_is_not_routed_to(rig) -> None:
    a, b = await rig.ready("a", "b")
    await a.acked(a.report(engine_dead=True))
    state = await rig.state()
    assert next((i.state, i.reason) for i in state.instances) == ("lost", "its engine is dead")
    assert (await rig.gateway.call(chat())).destinations == [b.address]


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"name": ""}, "cluster.name"),
        ({"slo": session_pb2.SLO(ttft_s=1.0)}, "cluster.slo.tpot_s"),
        ({"late": "maybe"}, "cluster.late"),
        ({"policy": "magic"}, "policy"),
        ({"policy_settings": {"magic": 1.0}}, "magic"),
        ({"ramp_s": -1.0}, "cluster.ramp_s"),
        (
            {"mtls": admin_pb2.MutualTls(gateway="g", worker="w", ca="no certificate")},
            "cluster.mtls.ca: must be certificates in PEM",
        ),
        (
            {
                "macro_instances": [
                    admin_pb2.MacroInstance(name="x", instances=["a"]),
                    admin_pb2.MacroInstance(name="y", instances=["a"]),
                ]
            },
            "cluster.macro_instances",
        ),
    ],
)
async def test_bad_declarations_name_the_field(rig, fields, named) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as bad:
        await rig.apply(cluster("a", **fields))
    assert bad.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert named in bad.value.details()


async def test_no_ramp_and_no_wait_are_not_the_defaults(rig) -> None:
    await rig.apply(cluster("a", ramp_s=0.0, late_wait_s=0.0))
    spec = rig.server.store.clusters["c"].spec
    assert (spec.ramp_s, spec.late_wait_s) == (0.0, 0.0)
    await rig.apply(cluster("a"))
    spec = rig.server.store.clusters["c"].spec
    assert (spec.ramp_s, spec.late_wait_s) == (20.0, 30.0)


async def test_apply_is_idempotent_and_remove_forgets(rig) -> None:
    [worker] = await rig.ready("a")
    commands = len(worker.commands)
    await rig.apply(cluster("a"))
    await worker.acked(worker.report())
    assert len(worker.commands) == commands
    state = await rig.state()
    assert state.cluster.policy == "padg"
    assert state.instances[0].limits == LIMITS
    assert state.instances[0].latency == LATENCY
    await rig.admin.Remove(admin_pb2.RemoveRequest(name="c"))
    await rig.admin.Remove(admin_pb2.RemoveRequest(name="c"))
    await until(lambda: "not known" in (worker.refused or [""])[-1])
    with pytest.raises(grpc.aio.AioRpcError) as gone:
        await rig.state()
    assert gone.value.code() == grpc.StatusCode.NOT_FOUND


async def test_a_changed_declaration_is_configured_without_a_gap(rig) -> None:
    [worker] = await rig.ready("a")
    await rig.apply(cluster("a", slo=session_pb2.SLO(ttft_s=9.0, tpot_s=0.4)))
    await until(lambda: worker.commands[-1].configure.slo.ttft_s == 9.0)
    assert (await rig.states())["a"] == "accepted"
    assert not worker.refused


async def test_one_that_joins_has_a_small_share_first_a_common_start_has_none(rig) -> None:
    store = rig.server.store
    unset = cluster("a", "b", "c", ramp_s=1000.0)
    unset.ClearField("slo")
    await rig.apply(unset)
    workers = [rig.worker("a"), rig.worker("b")]
    await until(lambda: all(worker.refused for worker in workers))
    # However long the start took, those that are accepted together share evenly.
    begun = store.clock
    store.clock = lambda: begun() + 60.0
    await rig.apply(cluster("a", "b", "c", ramp_s=1000.0))
    for worker in workers:
        await worker.ready()
    instances = store.clusters["c"].instances
    assert [instances[name].weight(store.clock()) for name in "ab"] == [1.0, 1.0]
    store.clock = lambda: begun() + 70.0
    await rig.worker("c").ready()
    assert instances["c"].weight(store.clock()) == pytest.approx(0.1)
