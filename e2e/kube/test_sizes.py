"""An L20 cluster on nodes of KWOK's: where its instances go, and what scaling does to them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import yaml

from e2e.kube.fake_gpus import fake_nodes, sessions
from e2e.kube.kube import CHART, Json, Kube, Release, identity
from e2e.kube.world import settle

NAME = "llama-30b"

pytestmark = pytest.mark.timeout(900)


@pytest.fixture
def placement(kube: Kube) -> Iterator[Json]:
    """Eight nodes of eight GPUs."""
    with fake_nodes(kube, 8) as placement:
        yield placement


@pytest.fixture
async def l20(
    kube: Kube, release: Release, placement: Json, namespace: str
) -> AsyncIterator[dict[str, Any]]:
    """The example for L20 with its model, and workers who are played. The nodes go last, or
    nobody would end their Pods."""
    claim: Json = {"accessModes": ["ReadOnlyMany"], "storageClassName": ""}
    claim |= {"resources": {"requests": {"storage": "1Gi"}}}
    volume = {
        "accessModes": ["ReadOnlyMany"],
        "storageClassName": "",
        "capacity": {"storage": "1Gi"},
        "hostPath": {"path": "/models"},
        "claimRef": {"namespace": namespace, "name": "models"},
    }
    name = {"name": f"models-{namespace}"}
    kube.apply(
        {"apiVersion": "v1", "kind": "PersistentVolume", "metadata": name, "spec": volume},
        {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": "models", "namespace": namespace},
            "spec": claim | {"volumeName": name["name"]},
        },
    )
    body = yaml.safe_load((CHART / "examples/l20.yaml").read_text())
    body["metadata"]["namespace"] = namespace
    spec = body["spec"]
    assert (spec["macro"]["lower"], spec["macro"]["upper"]) == (3, 6)
    spec["placement"] = placement
    spec["macro"]["mergeCooldown"] = "0s"
    # What is played speaks no TLS, and nobody asks it anything.
    spec |= {"gateway": {"enabled": False}, "mtls": {"enabled": False}}
    try:
        async with sessions(release, namespace, NAME, spec["model"]["name"]):
            yield body
    finally:
        kube.ctl("delete", "pv", name["name"], "--wait=false")


async def scale(kube: Kube, namespace: str, replicas: int) -> None:
    await asyncio.to_thread(
        kube.ctl, "-n", namespace, "scale", f"ecoservecluster/{NAME}", f"--replicas={replicas}"
    )


async def test_sixteen_instances_two_a_node(kube: Kube, l20: Json, namespace: str) -> None:
    l20["spec"]["replicas"] = 16
    await asyncio.to_thread(kube.apply, l20)
    pods = await asyncio.to_thread(settle, kube, namespace, NAME, 6, 6, 4)
    assert all(
        pod["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "4" for pod in pods
    )
    assert sorted(Counter(pod["spec"]["nodeName"] for pod in pods).values()) == [2] * 8


async def test_scaling_replaces_nothing(kube: Kube, l20: Json, namespace: str) -> None:
    l20["spec"]["replicas"] = 2
    await asyncio.to_thread(kube.apply, l20)
    before = identity(await asyncio.to_thread(settle, kube, namespace, NAME, 2))
    assert all(started for _, started in before.values())
    for replicas, sizes in ((5, (5,)), (13, (6, 4, 3)), (3, (3,))):
        await scale(kube, namespace, replicas)
        after = identity(await asyncio.to_thread(settle, kube, namespace, NAME, *sizes))
        grown = replicas > len(before)
        survivors = before if grown else after
        assert survivors.items() <= (after if grown else before).items(), replicas
        before = after
