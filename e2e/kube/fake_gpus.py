"""Nodes with GPUs that KWOK plays, and the sessions with the scheduler of workers that are not."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field

from e2e.kube.kube import Json, Kube, Release, conditions, miss, until
from ecoserve.local.machine import free_ports
from tests.scheduler.fakes import Worker

KWOK = (
    "no node with the annotation kwok.x-k8s.io/node=fake becomes ready: this test needs KWOK, see "
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
    """Plays the agents of all instances of a cluster whose Pods run."""

    kube: Kube
    namespace: str
    cluster: str
    port: int
    model: str
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
            for uid, pod in running.items():
                agent = self.agents.get(uid)
                if agent is None or agent.ended.is_set():
                    agent = self.agents[uid] = self._agent(pod)
                agent.report()
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
