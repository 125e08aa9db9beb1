"""An L20 cluster on nodes of KWOK's: where its instances go, and what scaling does to them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator

import pytest

from e2e.kube import fake_gpus
from e2e.kube.kube import Json, Kube, Release, identity
from e2e.kube.world import settle

NAME = "llama-30b"

pytestmark = pytest.mark.timeout(900)


@pytest.fixture
def placement(kube: Kube) -> Iterator[Json]:
    """Eight nodes of eight GPUs."""
    with fake_gpus.fake_nodes(kube, 8) as placement:
        yield placement


@pytest.fixture
async def l20(release: Release, placement: Json, namespace: str) -> AsyncIterator[Json]:
    """The example for L20. The nodes go last, or nobody would end their Pods."""
    async with fake_gpus.l20(release, namespace, placement) as (body, _):
        macro = body["spec"]["macro"]
        assert (macro["lower"], macro["upper"]) == (3, 6)
        yield body


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
