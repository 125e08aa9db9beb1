"""spec.autoscaling on a cluster: a Prometheus there scrapes the scheduler as the chart says."""

from __future__ import annotations

import asyncio
import re
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

from e2e.kube.fake_gpus import Sessions, fake_nodes, l20
from e2e.kube.kube import CHART, Images, Json, Kube, Release, identity, installed, until
from e2e.kube.prometheus import PEERS, Prometheus
from e2e.kube.world import Load, gateway_ready, settle, standins

pytestmark = pytest.mark.timeout(900)

# The load of all instances together, in instances' worth, every 30 seconds of the published
# experiment as the simulator plays it (`ecoserve sim scale --variant mitosis`, with 40, 30, 20 and
# 10 requests a second after the 50): use, as the instances report it, times their number.
RISING = (
    *(4.4, 6.3, 6.7, 6.8, 7.5, 7.5, 8.3, 8.6, 9.1, 9.6, 9.7, 9.3, 9.5, 11.7, 11.7, 12.1, 13.1),
    *(12.8, 12.3, 12.9, 13.1, 13.6, 14.3, 13.3, 14.6, 15.8, 15.8, 16.1),
)
FALLING = (15.9, 15.6, 14.5, 13.4, 10.9, 10.1, 9.9, 9.0, 8.1, 6.9, 6.8, 5.9, 4.2, 3.1, 2.8, 3.3)
PACE_S = 3.0  # ten times as fast as it was
BLIND_S = 30.0


def autoscaling(prometheus: Prometheus, expand: int, contract: int) -> Json:
    """Quick, and by use: above ``expand`` percent and below ``contract`` for ten seconds."""
    lasting = "10s"
    others = {"violationFor": lasting, "ttftFor": lasting, "waitingFor": lasting}
    return {
        "enabled": True,
        "prometheus": prometheus.url,
        "interval": "5s",
        "staleAfter": "10s",
        "expand": {"usePercent": expand, "useFor": lasting, "cooldown": lasting, **others},
        "contract": {
            "usePercent": contract,
            "useFor": lasting,
            "idleFor": lasting,
            "cooldown": lasting,
            "maxStep": 4,
        },
    }


@pytest.fixture(scope="module")
def release(kube: Kube, images: Images) -> Iterator[Release]:
    """The chart, whose metrics are Prometheus' to read."""
    with installed(kube, images, networkPolicy={"prometheus": PEERS}) as release:
        yield release


@pytest.fixture
def prometheus(release: Release) -> Iterator[Prometheus]:
    """A Prometheus that runs."""
    prometheus = Prometheus(release)
    try:
        prometheus.start()
        yield prometheus
    finally:
        prometheus.kill()


@pytest.fixture
def placement(kube: Kube) -> Iterator[Json]:
    """Eight nodes of eight GPUs."""
    with fake_nodes(kube, 8) as placement:
        yield placement


@pytest.fixture
async def played(
    release: Release, placement: Json, namespace: str
) -> AsyncIterator[tuple[Json, Sessions]]:
    """The example for L20, and its workers, who are played. The nodes go last."""
    async with l20(release, namespace, placement) as found:
        yield found


@contextmanager
def layouts(
    kube: Kube, namespace: str, name: str, folder: Path
) -> Iterator[Callable[[], list[list[int]]]]:
    """Watches a cluster; gives the sizes of its macro instances, one list after the other, as they
    were until now."""
    path = folder / "layouts"
    what = "-o=jsonpath={.status.groups[*].replicas}{'\\n'}"
    with path.open("w") as out:
        process = subprocess.Popen(
            [kube.kubectl, "-n", namespace, "get", "esc", name, "--watch", what],
            env=dict(kube.environment),
            stdout=out,
        )
    try:
        yield lambda: [[int(size) for size in line.split()] for line in path.open()]
        assert process.poll() is None
    finally:
        process.terminate()
        process.wait(10)


def condition(kube: Kube, namespace: str, name: str) -> Json:
    """The cluster's condition Autoscaling."""
    found = kube.named("esc", name, namespace).get("status", {}).get("conditions", ())
    return {c["type"]: c for c in found}.get("Autoscaling", {})


def steps(kube: Kube, namespace: str, name: str) -> list[Json]:
    """The steps that its status tells of, oldest first."""
    found: list[Json] = kube.named("esc", name, namespace)["status"].get("scaling", [])
    return found[::-1]


def told(kube: Kube, namespace: str, name: str) -> str:
    """What `kubectl describe` tells, of each step why among it."""
    text = kube.ctl("-n", namespace, "describe", "esc", name)
    for step in steps(kube, namespace, name):
        done = "Expanded" if step["after"] > step["before"] else "Contracted"
        change = f"from {step['before']} to {step['after']} instances: {step['reason']}"
        assert re.search(rf"{done}\s.*{re.escape(change)}", text), f"{change}\n{text}"
    return text


async def replay(played: Sessions, loads: Sequence[float]) -> None:
    """Has the workers report what was recorded."""
    for load in loads:
        played.load = load
        await asyncio.sleep(PACE_S)


async def test_a_recorded_load_goes_from_8_to_16_instances_and_back(
    kube: Kube,
    played: tuple[Json, Sessions],
    namespace: str,
    prometheus: Prometheus,
    tmp_path: Path,
) -> None:
    body, workers = played
    name = body["metadata"]["name"]
    body["spec"] |= {"minReplicas": 8, "maxReplicas": 16, "replicas": 8}
    body["spec"]["macro"] |= {"lower": 6, "upper": 11}
    body["spec"]["autoscaling"] = autoscaling(prometheus, 85, 40)
    here = (kube, namespace, name)

    async def settled(*sizes: int) -> dict[str, tuple[str, str | None]]:
        return identity(await asyncio.to_thread(settle, *here, *sizes))

    workers.load = RISING[0]
    await asyncio.to_thread(kube.apply, body)
    eight = await settled(8)
    with layouts(*here, tmp_path) as seen:
        await replay(workers, RISING)
        sixteen = await settled(10, 6)
        rising = [sizes for sizes in seen() if sizes]
        text = await asyncio.to_thread(told, *here)
        shown = f'ecoserve:instances:accepted{{cluster="{namespace}/{name}"}}'
        assert await asyncio.to_thread(prometheus.value, shown) == 16

        await replay(workers, FALLING)
        left = await settled(8)
        everything = [sizes for sizes in seen() if sizes]
    # All were there before, and none was replaced or begun anew.
    assert eight.items() <= sixteen.items()
    assert left.items() <= sixteen.items()

    # Split at one more than N_u, and never more than that; in N_l at least.
    assert all(max(sizes) <= 11 for sizes in everything)
    assert all((len(sizes) > 1) == (sum(sizes) > 11) for sizes in rising), rising
    assert all(min(sizes) >= 6 for sizes in rising), rising
    assert re.search(r"Split\s.* 6 instances of \S+ become ", text), text
    up = await asyncio.to_thread(steps, *here)
    text = await asyncio.to_thread(told, *here)
    assert re.search(r"Merged\s.* go to \S+; sizes: ", text), text
    grown = [step for step in up if step["after"] > step["before"]]
    fewer = [step for step in up if step["after"] < step["before"]]
    assert [grown[0]["before"], grown[-1]["after"]] == [8, 16]
    assert [fewer[0]["before"], fewer[-1]["after"]] == [16, 8]
    assert all(s["reason"].startswith("use stayed above 85 % for 10 s") for s in grown)
    assert all(s["reason"].startswith("use stayed below 40 % for 10 s") for s in fewer)

    # Without Prometheus nothing scales, whatever the load.
    await asyncio.to_thread(prometheus.kill)
    await becomes(*here, "PrometheusUnavailable")
    workers.load = RISING[-1]
    end = time.monotonic() + BLIND_S
    while time.monotonic() < end:
        item = await asyncio.to_thread(kube.named, "esc", name, namespace)
        assert item["spec"]["replicas"] == 8
        assert item["status"]["scaling"][::-1] == up
        await asyncio.sleep(1)
    blind = await asyncio.to_thread(condition, *here)
    assert (blind["status"], blind["reason"]) == ("False", "PrometheusUnavailable")
    # That load does scale it, as soon as there is one again.
    await asyncio.to_thread(prometheus.start)
    assert left.items() <= (await settled(10, 6)).items()


async def becomes(kube: Kube, namespace: str, name: str, reason: str) -> None:
    """Waits until the condition Autoscaling has that reason."""

    def so() -> bool:
        return bool(condition(kube, namespace, name).get("reason") == reason)

    await asyncio.to_thread(until, so, f"Autoscaling is not {reason}")


def up_and_down(
    kube: Kube,
    images: Images,
    namespace: str,
    body: Json,
    clients: int,
) -> None:
    """A cluster goes from one instance to two when clients come, and back when they have gone, and
    loses no answer. One client asks all the time."""
    name, model = body["metadata"]["name"], body["spec"]["model"]["name"]
    here = (kube, namespace, name)
    kube.apply(body)
    one = identity(settle(*here, 1, seconds=600))
    gateway_ready(*here)
    calm = Load(kube, images, namespace, name, model, clients=1, tokens=200, name="calm")
    calm.start()
    wave = Load(kube, images, namespace, name, model, clients=clients, tokens=60, name="wave")
    wave.start()
    two = identity(settle(*here, 2, seconds=600))
    assert one.items() <= two.items()
    wave.goes_on()
    wave.stop()
    left = identity(settle(*here, 1, seconds=600))
    assert left.items() <= two.items()
    calm.goes_on(3)
    calm.stop()
    text = told(*here)
    sizes = [(step["before"], step["after"]) for step in steps(*here)]
    assert sizes == [(1, 2), (2, 1)], text


def test_stand_ins_come_and_go_with_their_load(
    kube: Kube, release: Release, prometheus: Prometheus, namespace: str, images: Images
) -> None:
    scaled = autoscaling(prometheus, 30, 15)
    body = standins("demo", namespace, images, 1, maxReplicas=2, autoscaling=scaled)
    up_and_down(kube, images, namespace, body, 32)


@pytest.mark.engine
def test_real_workers_come_and_go_with_their_load(
    kube: Kube,
    release: Release,
    prometheus: Prometheus,
    namespace: str,
    images: Images,
    worker_image: str,
) -> None:
    body = yaml.safe_load((CHART / "examples/cpu.yaml").read_text())
    body["metadata"]["namespace"] = namespace
    spec = body["spec"]
    spec |= {"minReplicas": 1, "maxReplicas": 2, "replicas": 1, "drain": {"timeout": "60s"}}
    spec["engine"] |= {"image": worker_image, "imagePullPolicy": "IfNotPresent"}
    spec["autoscaling"] = autoscaling(prometheus, 30, 15)
    up_and_down(kube, images, namespace, body, 8)
