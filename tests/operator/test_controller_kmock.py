"""The controller on an API server in memory: what is hard to bring about on a real one."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import kmock
import pytest
from ecoserve_operator import watch
from ecoserve_operator.cluster_api import CLUSTERS, PODS, SECRETS, Json
from ecoserve_operator.objects import DEPLOYMENTS, SERVICES, Objects
from ecoserve_operator.status import Problem
from ecoserve_operator.store import Key

from tests.operator.control_world import until
from tests.operator.kmock_world import Emulator, emulated
from tests.operator.operated import Operator, operator

NAMESPACE = "one"


@pytest.fixture
async def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Emulator]:
    async with emulated(tmp_path) as (server, kubeconfig):
        monkeypatch.setenv("KUBECONFIG", str(kubeconfig))
        yield server


@pytest.fixture
async def esc(server: Emulator) -> AsyncIterator[Operator]:
    async with operator(NAMESPACE, given={"optional_groups": (), "namespaces": ()}) as found:
        found.node.collects = ()  # a request costs more here than on a real server
        yield found


async def test_a_cluster_grows_splits_and_shrinks(esc: Operator) -> None:
    await esc.create(minReplicas=2, maxReplicas=16)
    await esc.settle(2)
    before = await esc.uids()
    await esc.scale(7)
    await esc.settle(4, 3)
    assert before.items() <= (await esc.uids()).items()
    await esc.scale(2)
    await esc.settle(2)
    await esc.tells("Scaled", "Created", "Accepted", "Split", "Draining", "Drained")


async def test_what_a_watch_that_began_anew_has_missed_is_found_out(
    server: Emulator, esc: Operator
) -> None:
    await esc.create(replicas=2)
    await esc.settle(2)
    server.forget(PODS, NAMESPACE, "demo-1")
    await server.gone(PODS)
    await esc.settle(2)
    assert set(await esc.uids()) == {"demo-0", "demo-2"}


async def test_what_others_set_meanwhile_is_not_filled_in(server: Emulator, esc: Operator) -> None:
    def scale(request: kmock.Request) -> None:
        if request.method == kmock.method.PATCH and request.url.path.endswith("clusters/demo"):
            server.before = None
            server.change(CLUSTERS, NAMESPACE, "demo", {"spec": {"replicas": 3}})

    server.before = scale
    await esc.create(minReplicas=1)
    await esc.settle(3)
    assert (await esc.cluster())["spec"]["replicas"] == 3


async def test_an_overlay_that_makes_no_pod_is_told_once(esc: Operator) -> None:
    await esc.create(replicas=1)
    await esc.settle(1)
    await esc.change(replicas=2, podTemplate={"spec": {"containers": [{"image": "other"}]}})

    async def told() -> bool:
        return (
            "spec.podTemplate.spec.containers[0]: name"
            in (await esc.condition("Degraded"))["message"]
        )

    await until(told)
    assert (await esc.cluster())["status"]["nextIndex"] == 1, "an index was spent"
    await esc.tells("InvalidSpec")
    await esc.at_rest()
    # What serves is made known to a new scheduler by a new controller all the same.
    await made_known_anew(esc)
    assert (await esc.cluster())["status"]["nextIndex"] == 1, "an index was spent"
    await esc.change(podTemplate=None)
    await esc.settle(2)


async def made_known_anew(esc: Operator) -> None:
    """A new controller tells a new scheduler of the one instance that serves."""
    await esc.stop()
    await esc.scheduler.stop()
    await esc.scheduler.start()
    await esc.start()
    await until(lambda: esc.scheduler.clusters, "the cluster is not declared")
    assert list(esc.scheduler.sizes(f"{NAMESPACE}/demo").values()) == [["demo-0"]]


async def test_a_stored_spec_that_is_not_valid_any_more_goes_on_serving(esc: Operator) -> None:
    await esc.create(replicas=1)
    await esc.settle(1)
    # An older version, with other rules, had taken it.
    await esc.change(replicas=2, minReplicas=5, maxReplicas=3, drain={"timeout": "9000h"})
    await esc.becomes("Degraded", "True")
    assert "spec.drain.timeout: " in (await esc.condition("Degraded"))["message"]
    await made_known_anew(esc)
    await esc.change(minReplicas=1, drain=None)
    await esc.settle(2)
    assert (await esc.condition("Degraded"))["status"] == "False"


async def test_an_object_that_may_not_be_removed_keeps_nothing_else_up(
    server: Emulator, esc: Operator
) -> None:
    def refuse(request: kmock.Request) -> None:
        if request.method == kmock.method.DELETE and request.url.path.endswith("/services/demo"):
            raise kmock.KubernetesError(status=403, reason="Forbidden", message="protected")

    await esc.create(replicas=1)
    await esc.settle(1)
    server.before = refuse
    await esc.change(replicas=2, gateway={"enabled": False})
    await esc.settle(2)
    degraded = await esc.condition("Degraded")
    assert (degraded["status"], degraded["reason"]) == ("True", "ObjectRefused")
    assert "Service demo: protected" in degraded["message"]
    await esc.tells("ObjectRefused")


async def test_certificates_stay_where_there_is_no_good_one(
    server: Emulator, esc: Operator
) -> None:
    """A Pod that has to start again mounts them."""
    await esc.create(replicas=1)
    await esc.settle(1)
    broken = {"data": {"tls.crt": "eA=="}}
    server.change(SECRETS, NAMESPACE, "demo-worker-tls", broken)
    server.change(SECRETS, NAMESPACE, "demo-gateway-tls", broken)
    await esc.stop()
    await esc.start()
    await esc.change(replicas=2, mtls={"gatewaySecret": "none", "workerSecret": "none"})
    await esc.settle(2)
    await esc.becomes("Degraded", "True")
    assert (await esc.condition("Degraded"))["reason"] == "BadCertificate"
    for name in ("demo-worker-tls", "demo-gateway-tls"):
        assert await esc.api.get(SECRETS, NAMESPACE, name) is not None


async def test_without_a_gateway_it_is_not_available(server: Emulator, esc: Operator) -> None:
    await esc.create(replicas=1)
    await esc.settle(1)
    await esc.becomes("Available", "True")
    for status in ("False", "True"):
        condition = {"type": "Available", "status": status, "message": "no Pod of it runs"}
        body = {"status": {"conditions": [condition]}}
        await esc.api.patch_status(DEPLOYMENTS, NAMESPACE, "demo-gateway", body)
        await esc.becomes("Available", status)


async def test_a_watch_that_was_refused_begins_again(
    server: Emulator, esc: Operator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "RESTART_S", 0.1)
    monkeypatch.setattr(watch, "ENDS_S", 0.5)
    monkeypatch.setattr(watch, "BACKOFFS_S", (0.01,))
    asked = 0

    def refuse(request: kmock.Request) -> None:
        nonlocal asked
        if request.url.path == "/api/v1/pods" and "kopf" in request.headers["User-Agent"]:
            asked += 1
            if asked <= 2:  # kopf gives up
                raise kmock.KubernetesError(status=403, reason="Forbidden", message="not now")

    # A controller that gives up soon.
    await esc.stop()
    await esc.start()
    await esc.create(replicas=2)
    await esc.settle(2)
    server.before = refuse

    async def again() -> bool:
        await server.gone(PODS)
        return asked > 2

    await until(again, "it is not watched again")
    await esc.api.delete(PODS, NAMESPACE, "demo-1", (await esc.uids())["demo-1"])
    await esc.settle(2)
    assert set(await esc.uids()) == {"demo-0", "demo-2"}


async def test_a_namespace_that_is_gone_keeps_no_other_up(
    server: Emulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "RESTART_S", 0.1)
    monkeypatch.setattr(watch, "BACKOFFS_S", (0.01,))
    listed: Counter[str | None] = Counter()

    def refuse(request: kmock.Request) -> None:
        if request.action == kmock.action.LIST and "kopf" in request.headers["User-Agent"]:
            listed[request.namespace] += request.resource == server.key(CLUSTERS)
        if request.namespace == "gone":
            raise kmock.KubernetesError(status=403, reason="Forbidden", message="no role")

    server.before = refuse
    given = {"optional_groups": (), "namespaces": ("gone", NAMESPACE)}
    async with operator(NAMESPACE, given=given) as esc:
        esc.node.collects = ()
        await esc.create(replicas=2)
        await esc.settle(2)
        await until(lambda: listed["gone"] >= 4, "it is not asked for again")
        assert listed[NAMESPACE] == 1, "the other's watches had to begin again"
        await esc.scale(1)
        await esc.settle(1)


async def test_a_status_speaks_of_what_was_done(
    server: Emulator, esc: Operator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The spec changes when the gateway was just applied: that it was observed is not said yet."""
    await esc.create(replicas=1, gateway={"replicas": 1})
    await esc.settle(1)
    asked: list[int] = []
    applied = Objects.sync

    async def sync(self: Objects, key: Key, wanted: list[Json], *, whole: bool) -> list[Problem]:
        problems = await applied(self, key, wanted, whole=whole)
        if not asked:
            server.change(CLUSTERS, NAMESPACE, "demo", {"spec": {"gateway": {"replicas": 3}}})
            changed = server.objects[server.key(CLUSTERS), NAMESPACE, "demo"].raw
            asked.append(changed["metadata"]["generation"])
            self._store.put(CLUSTERS, changed)  # as a watch tells it
        return problems

    told: list[tuple[int, int]] = []

    def note(request: kmock.Request) -> None:
        if request.method == kmock.method.PATCH and request.url.path.endswith("/demo/status"):
            gateway = server.objects[server.key(DEPLOYMENTS), NAMESPACE, "demo-gateway"].raw
            generation = request.data["status"]["observedGeneration"]
            told.append((generation, gateway["spec"]["replicas"]))

    monkeypatch.setattr(Objects, "sync", sync)
    server.before = note
    await esc.change(drain={"timeout": "5m"})
    await until(lambda: [x for x in told if asked == [x[0]]], "it is not told at all")
    assert [gateways for generation, gateways in told if asked == [generation]] == [3]


async def test_what_is_another_s_is_not_taken_over(esc: Operator) -> None:
    service = {
        "metadata": {"name": "demo", "namespace": NAMESPACE, "labels": {"app": "other"}},
        "spec": {"selector": {"app": "other"}, "ports": [{"port": 80}]},
    }
    before = await esc.api.create(SERVICES, service)
    await esc.create(replicas=1)
    await esc.settle(1)
    degraded = await esc.condition("Degraded")
    assert degraded["reason"] == "NameTaken"
    assert "Service demo is there already" in degraded["message"]
    assert await esc.api.get(SERVICES, NAMESPACE, "demo") == before
    await esc.tells("NameTaken")
