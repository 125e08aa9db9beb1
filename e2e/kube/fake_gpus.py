"""Nodes with GPUs that KWOK plays, and the sessions with the scheduler of workers that are not."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field

import yaml

from e2e.kube.kube import CHART, Json, Kube, Release, conditions, miss, until
from ecoserve.local.machine import free_ports
from tests.scheduler.fakes import Worker

KWOK = (
    "no node with the annotation kwok.x-k8s.io/node=fake becomes ready: this test needs KWOK (with "
    "--node-lease-duration-seconds=40, or nodes are lost after a minute), see "
    "https://kwok.sigs.k8s.io"
)
TAINT = {"key": "kwok.x-k8s.io/node", "value": "fake", "effect": "NoSchedule"}


@contextmanager
def fake_nodes(kube: Kube, count: int, *, gpus: int = 8, pods: int = 110) -> Iterator[Json]:
    """Makes nodes; gives the ``placement`` of what is to run on them. Skips the test where nobody
    plays them, or fails it in CI."""
    label = {"fake-nodes": f"{count}x{gpus}"}
    names = [f"ecoserve-fake-{number}" for number in range(count)]
    room = {"cpu": "256", "memory": "2Ti", "pods": str(pods), "nvidia.com/gpu": str(gpus)}
    kube.apply(
        *(
            {
                "apiVersion": "v1",
                "kind": "Node",
                "metadata": {
                    "name": name,
                    "annotations": {"kwok.x-k8s.io/node": "fake"},
                    "labels": {**label, "type": "kwok", "kubernetes.io/hostname": name},
                },
                "spec": {"taints": [TAINT]},
                "status": {"allocatable": room, "capacity": room},
            }
            for name in names
        )
    )
    try:
        try:
            until(lambda: all(_ready(kube, name) for name in names), "", 30)
        except AssertionError:
            miss(KWOK)
        tolerations = [
            {"key": TAINT["key"], "operator": "Exists", "effect": "NoSchedule"},
            {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"},
        ]
        yield {"nodeSelector": label, "tolerations": tolerations}
    finally:
        kube.ctl("delete", "node", *names, "--wait=false")


def _ready(kube: Kube, name: str) -> bool:
    return conditions(kube.named("node", name)).get("Ready") == "True"


@contextmanager
def scheduler_port(release: Release) -> Iterator[int]:
    """A port of this machine that leads to the scheduler's gRPC."""
    kube = release.kube
    (port,) = free_ports(1)
    command = [kube.kubectl, "-n", release.namespace, "port-forward", f"deployment/{release.name}"]
    process = subprocess.Popen(
        [*command, f"{port}:9002"],
        env=dict(kube.environment),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("Forwarding"), line
        yield port
    finally:
        process.terminate()
        process.wait(10)


@dataclass
class Sessions:
    """Plays the agents of all instances of a cluster whose Pods run. Those that take requests share
    the ``load``, which is in instances' worth."""

    kube: Kube
    namespace: str
    cluster: str
    port: int
    model: str
    load: float = 0.0
    agents: dict[str, Worker] = field(default_factory=dict)

    async def run(self) -> None:
        """Opens and ends sessions as Pods come and go, until cancelled."""
        selector = f"app.kubernetes.io/component=worker,ecoserve.io/cluster={self.cluster}"
        while True:
            pods = await asyncio.to_thread(
                self.kube.items, "pods", self.namespace, selector=selector
            )
            running = {
                pod["metadata"]["uid"]: pod
                for pod in pods
                if pod["status"].get("phase") == "Running" and pod["status"].get("podIP")
            }
            for uid in self.agents.keys() - running.keys():
                await self.agents.pop(uid).close()
            taking = sum(bool(a.accepted) and not a.draining for a in self.agents.values())
            for uid, pod in running.items():
                agent = self.agents.get(uid)
                if agent is None or agent.ended.is_set():
                    agent = self.agents[uid] = self._agent(pod)
                agent.report(use=self.load / max(taking, 1))
            await asyncio.sleep(0.5)

    def _agent(self, pod: Json) -> Worker:
        return Worker(
            self.port,
            pod["metadata"]["name"],
            cluster=f"{self.namespace}/{self.cluster}",
            incarnation=pod["metadata"]["uid"],
            address=f"{pod['status']['podIP']}:8000",
            model=self.model,
        )


@asynccontextmanager
async def sessions(
    release: Release, namespace: str, cluster: str, model: str
) -> AsyncIterator[Sessions]:
    """Plays the workers of a cluster."""
    with scheduler_port(release) as port:
        found = Sessions(release.kube, namespace, cluster, port, model)
        playing = asyncio.create_task(found.run())
        try:
            yield found
            assert not playing.done(), playing.exception()
        finally:
            playing.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await playing
            for agent in found.agents.values():
                await agent.close()


@asynccontextmanager
async def l20(
    release: Release, namespace: str, placement: Json
) -> AsyncIterator[tuple[Json, Sessions]]:
    """The chart's example for L20 with its model, and its workers, who are played."""
    kube = release.kube
    claim: Json = {"accessModes": ["ReadOnlyMany"], "storageClassName": ""}
    claim |= {"resources": {"requests": {"storage": "1Gi"}}}
    volume = {
        "accessModes": ["ReadOnlyMany"],
        "storageClassName": "",
        "capacity": {"storage": "1Gi"},
        "hostPath": {"path": "/models"},
        "claimRef": {"namespace": namespace, "name": "models"},
    }
    shared = {"name": f"models-{namespace}"}
    kube.apply(
        {"apiVersion": "v1", "kind": "PersistentVolume", "metadata": shared, "spec": volume},
        {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": "models", "namespace": namespace},
            "spec": claim | {"volumeName": shared["name"]},
        },
    )
    body = yaml.safe_load((CHART / "examples/l20.yaml").read_text())
    body["metadata"]["namespace"] = namespace
    spec = body["spec"]
    spec["placement"] = placement
    spec["macro"]["mergeCooldown"] = "0s"
    # What is played speaks no TLS, and nobody asks it anything.
    spec |= {"gateway": {"enabled": False}, "mtls": {"enabled": False}}
    name, model = body["metadata"]["name"], spec["model"]["name"]
    try:
        async with sessions(release, namespace, name, model) as played:
            yield body, played
    finally:
        kube.ctl("delete", "pv", shared["name"], "--wait=false")
