"""The controller against a real API server, with a scheduler and a node that are played."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from ecoserve_operator.cluster_api import CLUSTERS, LEASES, MACROS, PODS
from ecoserve_operator.names import CLUSTER_LABEL
from ecoserve_operator.objects import KINDS, OPTIONAL, SERVICES
from ecoserve_operator.store import selector_of

from tests.operator.control_world import until
from tests.operator.kube_api import ApiServer, wait_for
from tests.operator.manifests import foreign_crd
from tests.operator.operated import Operator, operator


@pytest.fixture
async def esc(
    kube: ApiServer, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Operator]:
    monkeypatch.setenv("KUBECONFIG", str(kube.kubeconfig))
    async with operator(namespace) as found:
        yield found


async def test_from_creation_to_deletion(esc: Operator) -> None:
    await esc.create(minReplicas=2)
    await esc.settle(2)
    cluster = await esc.cluster()
    assert cluster["spec"]["replicas"] == 2, "filled in, or /scale would fail"
    status = cluster["status"]
    assert status["replicas"] == status["updatedReplicas"] == 2
    assert (status["macroLower"], status["macroUpper"]) == (3, 6)
    conditions = {c["type"]: c for c in status["conditions"]}
    assert {name: c["status"] for name, c in conditions.items()} == {
        "Ready": "True",
        "Available": "True",
        "Progressing": "False",
        "Degraded": "False",
        "ReplicasClamped": "False",
        "Drained": "True",
        "Autoscaling": "False",
    }
    assert all(c["reason"] and c["observedGeneration"] >= 1 for c in conditions.values())
    await esc.tells("Scaled", "MacroInstanceMade", "Created", "Accepted")
    for name in ("demo-worker", "demo-gateway"):
        assert await esc.api.get(KINDS[0], esc.namespace, name) is not None
    finalizers = [
        item["metadata"].get("finalizers")
        for kind in (CLUSTERS, MACROS, PODS)
        for item in (await esc.api.list_all(kind, esc.namespace))[0]
    ]
    assert not any(finalizers)

    await esc.api.delete(CLUSTERS, esc.namespace, "demo", cluster["metadata"]["uid"])

    async def nothing() -> bool:
        kinds = (CLUSTERS, MACROS, PODS, *KINDS)
        found = [await esc.api.list_all(k, esc.namespace, selector_of(k)) for k in kinds]
        return not any(items for items, _ in found) and not esc.scheduler.clusters

    await until(nothing, "something is left")


async def test_a_cluster_at_rest_costs_no_calls(esc: Operator) -> None:
    await esc.create(minReplicas=2)
    await esc.settle(2)
    await esc.at_rest()


async def test_scaling_gives_the_sizes_and_replaces_nothing(esc: Operator) -> None:
    await esc.create(replicas=2, maxReplicas=16)
    await esc.settle(2)
    for replicas, sizes in ((5, (5,)), (13, (6, 4, 3))):
        before = await esc.uids()
        await esc.scale(replicas)
        await esc.settle(*sizes)
        assert before.items() <= (await esc.uids()).items()
    before = await esc.uids()
    await esc.scale(3)
    await esc.settle(3)
    assert (await esc.uids()).items() <= before.items()
    assert len(esc.scheduler.drains) == 10
    await esc.tells("Split", "Moved", "Draining", "Drained")


async def test_replicas_out_of_bounds_are_clamped(esc: Operator) -> None:
    await esc.create(replicas=9, minReplicas=1, maxReplicas=3)
    await esc.settle(3)
    await esc.becomes("ReplicasClamped", "True")
    clamped = await esc.condition("ReplicasClamped")
    assert "spec.replicas 9" in clamped["message"]
    assert "spec.maxReplicas 3" in clamped["message"]


async def test_scale_in_waits_for_requests(esc: Operator) -> None:
    await esc.create(replicas=3)
    await esc.settle(3)
    key = f"{esc.namespace}/demo"
    for name, requests in (("demo-0", 9), ("demo-1", 2), ("demo-2", 5)):
        esc.scheduler.member(key, name).requests = requests
    before = await esc.uids()
    # The controller hears of loads when it asks the next time but one at the latest.
    asked = esc.scheduler.asked
    await until(lambda: esc.scheduler.asked >= asked + 2)
    await esc.scale(2)
    await until(lambda: "demo-1" in esc.scheduler.drains)
    assert esc.scheduler.drains == ["demo-1"], "the one with the fewest requests"

    async def draining() -> bool:
        condition = await esc.condition("Drained")
        return condition["status"] == "False" and "demo-1" in condition["message"]

    await until(draining)
    assert await esc.uids() == before
    esc.scheduler.member(key, "demo-1").requests = 0
    await esc.settle(2)
    await esc.becomes("Drained", "True")


async def test_rollout_one_at_a_time_and_what_stops_it(esc: Operator) -> None:
    await esc.create(replicas=3, rollout={"strategy": "Surge"})
    await esc.settle(3)
    before = await esc.uids()
    await esc.change(engine={"env": [{"name": "BROKEN", "value": "1"}]})

    async def stuck() -> bool:
        status = (await esc.cluster())["status"]
        return status.get("updatedReplicas") == 1 and status.get("readyReplicas") == 3

    await until(stuck)
    # It asks often while it waits for the new one.
    asked = esc.scheduler.asked
    await until(lambda: esc.scheduler.asked >= asked + 5)
    assert before.items() <= (await esc.uids()).items(), "no more is replaced"
    assert len(await esc.pods()) == 4
    await esc.change(engine={"env": [{"name": "FIXED", "value": "1"}]})
    await esc.settle(3)
    status = (await esc.cluster())["status"]
    assert status["updatedReplicas"] == 3
    assert not before.items() & (await esc.uids()).items()


async def test_rollout_without_room_drains_first(esc: Operator) -> None:
    await esc.create(replicas=2, rollout={"strategy": "DrainFirst"})
    await esc.settle(2)
    esc.node.room = 2
    before = await esc.uids()
    await esc.change(engine={"env": [{"name": "A", "value": "1"}]})

    async def rolled() -> bool:
        return await esc.settled(2) and not before.items() & (await esc.uids()).items()

    await until(rolled)


async def test_failed_and_deleted_pods_are_replaced(esc: Operator) -> None:
    await esc.create(replicas=2)
    await esc.settle(2)
    before = await esc.uids()
    await esc.api.patch_status(PODS, esc.namespace, "demo-0", {"status": {"phase": "Failed"}})
    await esc.api.delete(PODS, esc.namespace, "demo-1", before["demo-1"])

    async def replaced() -> bool:
        return await esc.settled(2) and set(await esc.uids()) == {"demo-2", "demo-3"}

    await until(replaced)


async def test_a_macro_instance_deleted_by_hand_comes_back(esc: Operator) -> None:
    await esc.create(replicas=2)
    await esc.settle(2)
    (macro,) = (await esc.api.list_all(MACROS, esc.namespace))[0]
    metadata = macro["metadata"]
    before = await esc.uids()
    await esc.api.delete(MACROS, esc.namespace, metadata["name"], metadata["uid"])

    async def replaced() -> bool:
        return await esc.settled(2) and not before.items() & (await esc.uids()).items()

    await until(replaced)


async def test_the_scheduler_restarts(esc: Operator) -> None:
    await esc.create(replicas=3)
    await esc.settle(3)
    before = await esc.uids()
    await esc.scheduler.stop()

    async def told() -> bool:
        return (await esc.condition("Degraded"))["reason"] == "SchedulerUnavailable"

    await until(told)
    await esc.scale(2)

    async def waits() -> bool:
        return "no instance that serves is retired" in (await esc.condition("Degraded"))["message"]

    await until(waits)
    assert await esc.uids() == before, "nobody is there to name the one to retire"
    ready = [
        p
        for p in await esc.pods()
        if {"type": "Ready", "status": "True"}.items()
        <= {
            key: value
            for c in p["status"]["conditions"]
            if c["type"] == "Ready"
            for key, value in c.items()
        }.items()
    ]
    assert len(ready) == 3, "readiness outlives the scheduler"
    await esc.scheduler.start()
    await esc.settle(2)
    await esc.becomes("Degraded", "False")


async def test_what_the_scheduler_refuses_is_told(esc: Operator) -> None:
    esc.scheduler.refuses = "cluster.policy_settings: no such setting"
    await esc.create(replicas=1)

    async def told() -> bool:
        condition = await esc.condition("Degraded")
        return "no such setting" in condition.get("message", "")

    await until(told)


async def test_a_bad_overlay_is_told_and_what_runs_stays(esc: Operator) -> None:
    await esc.create(replicas=1)
    await esc.settle(1)
    before = await esc.uids()
    await esc.change(podTemplate={"spec": {"containers": [{"name": "worker", "image": 7}]}})

    async def told() -> bool:
        condition = await esc.condition("Degraded")
        return condition["status"] == "True" and "image" in condition["message"]

    await until(told)
    assert before.items() <= (await esc.uids()).items()


async def test_what_keeps_an_instance_from_running_is_told(esc: Operator) -> None:
    esc.node.room = 1
    await esc.create(replicas=2)

    async def told() -> bool:
        condition = await esc.condition("Degraded")
        return condition.get("reason") == "Unschedulable" and all(
            part in condition["message"] for part in ("demo-", "0/1 nodes have room")
        )

    await until(told)
    await esc.becomes("Available", "True")
    esc.node.room = 2
    await esc.settle(2)
    await esc.becomes("Degraded", "False")


async def test_objects_changed_by_others_are_repaired(esc: Operator) -> None:
    await esc.create(replicas=1)
    await esc.settle(1)
    service = await esc.api.get(SERVICES, esc.namespace, "demo")
    assert service is not None
    await esc.api.delete(SERVICES, esc.namespace, "demo", service["metadata"]["uid"])
    await until(lambda: esc.api.get(SERVICES, esc.namespace, "demo"))
    # Without its label it is out of sight, but still the cluster's own.
    bare = {"metadata": {"labels": {CLUSTER_LABEL: None}}}
    await esc.api.patch(SERVICES, esc.namespace, "demo", bare)

    async def labelled() -> bool:
        found = await esc.api.get(SERVICES, esc.namespace, "demo")
        return found is not None and CLUSTER_LABEL in found["metadata"]["labels"]

    await until(labelled)
    await esc.change(gateway={"enabled": False})

    async def gone() -> bool:
        return await esc.api.get(SERVICES, esc.namespace, "demo") is None

    await until(gone)


async def test_kinds_of_others_may_be_installed_and_removed_later(
    kube: ApiServer, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(kube.kubeconfig))
    (monitors,) = (kind for kind in OPTIONAL if kind.plural == "podmonitors")
    crd = foreign_crd(monitors)
    given = {"optional_groups": (monitors.group,), "discovery": 0.2, "namespaces": (namespace,)}
    async with operator(namespace, given=given) as esc:
        await esc.create(replicas=1)
        await esc.settle(1)
        try:
            await asyncio.to_thread(kube.install, [crd])

            async def made() -> dict[str, str]:
                found = (await esc.api.list_all(monitors, namespace))[0]
                return {one["metadata"]["name"]: one["metadata"]["uid"] for one in found}

            async def all_made() -> bool:
                return len(await made()) == 2  # of the workers, and of the gateway

            await until(all_made, "no PodMonitors")
            # They are watched, so what others do to them is mended.
            name, uid = next(iter((await made()).items()))
            await esc.api.delete(monitors, namespace, name, uid)

            async def made_again() -> bool:
                return (await made()).get(name, uid) != uid

            await until(made_again, "the PodMonitor is not there any more")
        finally:
            kube.kubectl("delete", "crd", crd["metadata"]["name"])
            path = f"/apis/{monitors.group}/{monitors.version}"
            wait_for(lambda: kube.client.get(path).status_code == 404, f"{path} is still served")
        await esc.scale(2)
        await esc.settle(2)
        assert (await esc.condition("Degraded"))["status"] == "False"


async def test_a_second_controller_waits_for_the_lease(esc: Operator) -> None:
    await esc.create(replicas=1)
    await esc.settle(1)
    lease = await esc.api.get(LEASES, esc.namespace, "ecoserve-operator")
    assert lease is not None
    # Another one took over.
    lease["spec"]["holderIdentity"] = "other"
    await esc.api.replace(LEASES, lease)
    assert esc.task is not None
    with pytest.raises(Exception, match="held by another"):
        await asyncio.wait_for(asyncio.shield(esc.task), 30)
    esc.task = None


async def test_killed_after_any_write_of_a_split_and_of_a_merge(esc: Operator) -> None:
    await esc.create(replicas=6, maxReplicas=16)
    await esc.settle(6)
    await esc.stop()
    writes = {"split": 0, "merge": 0}
    finished: set[str] = set()
    last = 0
    while len(finished) < 2:
        last += 1
        for what, replicas, sizes in (("split", 7, (4, 3)), ("merge", 6, (6,))):
            before = await esc.uids()
            await esc.scale(replicas)
            await esc.start(last)

            async def dead_or_settled(sizes: tuple[int, ...] = sizes) -> bool:
                dead = esc.mortal is not None and esc.mortal.dead.is_set()
                return dead or await esc.settled(*sizes)

            await until(dead_or_settled)
            assert esc.mortal is not None
            if not esc.mortal.dead.is_set():
                finished.add(what)
            else:
                writes[what] = last
            await esc.stop()
            await esc.start()
            await esc.settle(*sizes)
            after = await esc.uids()
            kept = before.items() & after.items()
            assert len(kept) == 6, f"{what} killed after write {last}: {before} {after}"
            assert len(after) == replicas
            await esc.stop()
    await esc.tells("Split", "Merged")
    # The roster, two macro instances, three moves, a Pod and its gate, the statuses.
    assert writes["split"] >= 8
    assert writes["merge"] >= 8
