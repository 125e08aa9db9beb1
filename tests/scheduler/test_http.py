"""Metrics, state and timeline, health, and the process as a whole."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys
import threading

import grpc
import httpx
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client.parser import text_string_to_metric_families

from ecoserve.proto.v1 import admin_pb2, session_pb2
from ecoserve.scheduler.server import HEALTH_SERVICES
from tests.scheduler.fakes import chat, cluster, until

LABELS = {"cluster": "c", "macro_instance": "m0", "instance": "a"}


async def _samples(rig) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    text = (await rig.http.get("/metrics")).text
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def test_metrics_of_ended_requests(rig) -> None:
    [worker] = await rig.ready("a")
    slos = {"ttft_slo_s": 1.0, "tpot_slo_s": 0.1, "prompt_tokens": 100, "cached_tokens": 40}
    done = [
        session_pb2.Finished(number=1, id="1", status=200, ttft_s=0.5, tpot_s=0.05, **slos),
        session_pb2.Finished(number=2, id="2", status=200, ttft_s=2.0, tpot_s=0.05, **slos),
        session_pb2.Finished(number=3, id="3", status=200, ttft_s=2.0, tpot_s=0.2, **slos),
        session_pb2.Finished(number=4, id="4", status=499, ttft_s=0.5, **slos),
        session_pb2.Finished(number=5, id="5", status=200, broken=True),
        session_pb2.Finished(number=6, id="6", status=500),
        session_pb2.Finished(number=7, id="7", status=400),
    ]
    await worker.acked(worker.report(finished=done))
    samples = await _samples(rig)

    def value(name: str, **labels: str) -> float:
        return samples[name, frozenset((LABELS | labels).items())]

    for outcome, count in (
        ("ok", 3), ("client_gone", 1), ("broken", 1), ("error", 1), ("rejected", 1),
    ):  # fmt: skip
        assert value("ecoserve_requests_total", outcome=outcome) == count
    for kind, count in (("ttft", 2), ("tpot", 1), ("joint", 2)):
        assert value("ecoserve_slo_violations_total", kind=kind) == count
    assert value("ecoserve_ttft_seconds_count") == 4
    assert value("ecoserve_tpot_seconds_count") == 3
    assert value("ecoserve_prefix_hit_tokens_total") == 160
    assert value("ecoserve_prefix_asked_tokens_total") == 400


async def test_gauges_of_instances_and_their_end(rig) -> None:
    [worker] = await rig.ready("a")
    running = session_pb2.Decode(id="r", context=9, generated=1, slack_s=2.0, tpot_s=0.5)
    await worker.acked(
        worker.report(
            phase="decode",
            running=[running],
            use=0.5,
            busy=0.9,
            kv_free_tokens=777,
            latency=session_pb2.Latency(
                prefill_fixed=0.01, prefill_token=0.001, decode_fixed=0.1, mixing=0.25
            ),
        )
    )
    await rig.gateway.call(chat())
    samples = await _samples(rig)
    expected = {
        "accepted": 1, "prefill": 0, "use": 0.5, "busy": 0.9, "free_kv_tokens": 777,
        "kv_tokens": 100_000, "running": 1, "waiting": 0, "batch_limit": 64,
        "mixing_penalty": 0.25, "reservations": 1,
    }  # fmt: skip
    for name, figure in expected.items():
        assert samples[f"ecoserve_instance_{name}", frozenset(LABELS.items())] == figure
    for name in ("backlog_seconds", "least_slack_seconds"):
        assert f"ecoserve_instance_{name}" in {key for key, _ in samples}
    macro = frozenset({"cluster": "c", "macro_instance": "m0"}.items())
    assert samples["ecoserve_macro_waiting", macro] == 0
    assert samples["ecoserve_pick_seconds_count", frozenset({("cluster", "c")})] == 1

    await rig.apply(cluster("b"))
    await worker.close()
    await until(lambda: "a" not in rig.server.store.clusters["c"].instances)
    samples = await _samples(rig)
    assert not any(("instance", "a") in labels for _, labels in samples)


async def test_picks_go_on_while_the_metrics_are_written(rig, monkeypatch) -> None:
    [worker] = await rig.ready("a")
    metrics = rig.server.store.metrics
    written, go_on = metrics.exposition, threading.Event()

    def slowly(gauges) -> bytes:
        assert go_on.wait(30)
        return written(gauges)

    monkeypatch.setattr(metrics, "exposition", slowly)
    scrape = asyncio.create_task(rig.http.get("/metrics", timeout=60))
    assert (await rig.gateway.call(chat())).destinations == [worker.address]
    go_on.set()
    assert "ecoserve_instance_accepted" in (await scrape).text


async def test_nothing_is_left_in_the_metrics_of_a_cluster_that_is_removed(rig) -> None:
    await rig.ready("a")
    await rig.gateway.call(chat())
    await rig.admin.Remove(admin_pb2.RemoveRequest(name="c"))
    assert 'cluster="c"' not in (await rig.http.get("/metrics")).text


async def test_a_fault_in_one_cluster_does_not_stop_the_clock_of_the_others(rig, caplog) -> None:
    await rig.apply(cluster(name="a-first"))
    await rig.ready("a")
    clusters = rig.server.store.clusters
    clusters["a-first"].ledger = None
    await rig.gateway.call(chat())
    clusters["c"].instances["a"].connected = False
    for reservation in clusters["c"].instances["a"].reservations.values():
        reservation.seen -= 10.0
    await until(lambda: not rig.reservations())
    assert "cluster a-first: a fault of the scheduler" in caplog.text


async def test_state_and_timeline(rig) -> None:
    [worker] = await rig.ready("a")
    switches = [
        session_pb2.Switch(phase="prefill", age_s=2.0, reason="slack"),
        session_pb2.Switch(phase="decode", age_s=0.5, reason="backlog"),
    ]
    await worker.acked(worker.report(phase="decode", switches=switches))
    await rig.gateway.call(chat())
    state = (await rig.http.get("/state")).json()["clusters"]["c"]
    [instance] = state["macro_instances"]["m0"]["instances"]
    assert instance["state"] == "accepted"
    assert instance["phase"] == "decode"
    assert instance["least_slack"] is None
    assert len(instance["reservations"]) == 1
    assert state["models"] == ["m"]
    timeline = (await rig.http.get("/timeline")).json()["c"]["a"]
    assert [s["reason"] for s in timeline["switches"]] == ["slack", "backlog"]
    ages = [s["age"] for s in timeline["switches"]]
    assert ages[0] >= 2.0
    assert abs(ages[0] - ages[1] - 1.5) < 1e-6
    assert (await rig.http.get("/healthz")).text == "ok\n"


async def test_grpc_health(rig) -> None:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{rig.port}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for name in HEALTH_SERVICES:
            answer = await stub.Check(health_pb2.HealthCheckRequest(service=name))
            assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_debug_logs_picks_and_switches(rigs, caplog) -> None:
    caplog.set_level("INFO", "ecoserve.scheduler")
    rig = await rigs(debug=True)
    [worker] = await rig.ready("a")
    reply = await rig.gateway.call(chat())
    switch = session_pb2.Switch(phase="decode", reason="backlog 2")
    await worker.acked(worker.report(switches=[switch]))
    assert f"{reply.id} -> a" in caplog.text
    assert "a: phase decode: backlog 2" in caplog.text


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _process(grpc_port: int, http_port: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [
            sys.executable, "-m", "ecoserve.scheduler",
            "--grpc", f"127.0.0.1:{grpc_port}", "--http", f"127.0.0.1:{http_port}",
        ],
        stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip


async def test_process_starts_says_what_is_in_use_and_ends_cleanly() -> None:
    ports = _free_port(), _free_port()
    first = _process(*ports)
    try:
        async with httpx.AsyncClient() as client:

            async def healthy() -> bool:
                try:
                    answer = await client.get(f"http://127.0.0.1:{ports[1]}/healthz")
                except httpx.TransportError:
                    return False
                return answer.status_code == 200

            await until(healthy, seconds=30)
        for taken in ((ports[0], _free_port()), (_free_port(), ports[1])):
            second = _process(*taken)
            _, said = second.communicate(timeout=30)
            assert second.returncode == 1
            [line] = said.splitlines()
            assert "cannot listen on 127.0.0.1:" in line
        first.send_signal(signal.SIGTERM)
        first.communicate(timeout=30)
        assert first.returncode == 0
    finally:
        first.kill()
        first.wait()
