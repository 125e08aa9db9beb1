"""A controller that runs against a real API server, and its user."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from ecoserve_operator.app import Options, run
from ecoserve_operator.builders import Builders
from ecoserve_operator.cluster_api import (
    CLUSTERS,
    EVENTS,
    MACROS,
    PODS,
    ClusterApi,
    Json,
    configured,
)
from ecoserve_operator.names import MACRO_LABEL

from tests.operator.control_world import RENDER, Mortal, Node, Scheduler, until
from tests.operator.manifests import example

MACRO = {"lower": 3, "upper": 6, "mergeCooldown": "0s"}


@dataclass
class Operator:
    """A running controller and what surrounds it, in one namespace. ``given`` are options of the
    controller other than the usual ones, ``connection`` makes its connection."""

    api: ClusterApi
    namespace: str
    scheduler: Scheduler
    node: Node
    render: Builders = RENDER
    given: Mapping[str, Any] = field(default_factory=dict)
    connection: Callable[..., Mortal] = Mortal
    cluster_name: str = "demo"
    task: asyncio.Task[None] | None = None
    mortal: Mortal | None = None

    async def start(self, last: int | None = None) -> None:
        """Starts a controller that dies after its ``last`` write."""
        configuration = await configured()

        async def connect(guard: Callable[[], None]) -> ClusterApi:
            # The lease is written through the first connection, all else through the second.
            if not made:
                made.append(Mortal(configuration, last=None, guard=guard))
                return made[0]
            self.mortal = self.connection(configuration, last=last, guard=guard)
            return self.mortal

        made: list[ClusterApi] = []
        self.mortal = None
        usual: dict[str, Any] = {
            "identity": "test",
            "lease_namespace": self.namespace,
            "scheduler": self.scheduler.target,
            "namespaces": (self.namespace,),
            "health_port": 0,
        }
        options = Options(**{**usual, **self.given})
        self.task = asyncio.create_task(run(options, self.render, connect))

    async def stop(self) -> None:
        assert self.task is not None
        self.task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self.task
        self.task = None

    # -- the user ---------------------------------------------------------------------------------

    async def create(self, **spec: Any) -> None:
        body = example(**({"macro": MACRO} | spec))
        body["metadata"] = {"name": self.cluster_name, "namespace": self.namespace}
        body["spec"].setdefault("device", {"type": "cpu"})
        await self.api.create(CLUSTERS, body)

    async def change(self, **spec: Any) -> None:
        await self.api.patch(CLUSTERS, self.namespace, self.cluster_name, {"spec": spec})

    async def scale(self, replicas: int) -> None:
        await self.change(replicas=replicas)

    async def cluster(self) -> Json:
        item = await self.api.get(CLUSTERS, self.namespace, self.cluster_name)
        assert item is not None
        return item

    async def condition(self, kind: str) -> Json:
        status = (await self.cluster()).get("status", {})
        return {c["type"]: c for c in status.get("conditions", ())}.get(kind, {})

    async def becomes(self, kind: str, status: str) -> None:
        """Waits until a condition is as it should be."""

        async def is_so() -> bool:
            return (await self.condition(kind)).get("status") == status

        await until(is_so, f"{kind} is not {status}")

    async def pods(self) -> list[Json]:
        return (await self.api.list_all(PODS, self.namespace))[0]

    async def uids(self) -> dict[str, str]:
        return {p["metadata"]["name"]: p["metadata"]["uid"] for p in await self.pods()}

    async def settled(self, *sizes: int) -> bool:
        """Whether macro instances of these sizes run, in the cluster's status, in MacroInstances,
        in labels and owners of Pods, and in the scheduler alike."""
        cluster = await self.cluster()
        status, generation = cluster.get("status", {}), cluster["metadata"]["generation"]
        if status.get("observedGeneration") != generation:
            return False
        groups = {group["name"]: group["replicas"] for group in status.get("groups", ())}
        macros = (await self.api.list_all(MACROS, self.namespace))[0]
        pods = await self.pods()
        owners = {m["metadata"]["uid"]: m["metadata"]["name"] for m in macros}
        found: dict[str, list[str]] = {name: [] for name in groups}
        for pod in pods:
            metadata = pod["metadata"]
            ready = {c["type"]: c["status"] for c in pod["status"].get("conditions", ())}
            macro = metadata["labels"][MACRO_LABEL]
            (owner,) = metadata["ownerReferences"]
            if ready.get("Ready") != "True" or "deletionTimestamp" in metadata:
                return False
            if owners.get(owner["uid"]) != macro or macro not in found:
                return False
            found[macro].append(metadata["name"])
        declared = self.scheduler.clusters.get(f"{self.namespace}/{self.cluster_name}")
        return (
            sorted(groups.values(), reverse=True) == sorted(sizes, reverse=True)
            and {m["metadata"]["name"]: m["spec"]["replicas"] for m in macros} == groups
            and {name: len(members) for name, members in found.items()} == groups
            and declared is not None
            and {m.name: sorted(m.instances) for m in declared.macro_instances}
            == {name: sorted(members) for name, members in found.items()}
            and status.get("readyReplicas") == status.get("updatedReplicas") == sum(sizes)
        )

    async def settle(self, *sizes: int) -> None:
        try:
            await until(lambda: self.settled(*sizes))
        except AssertionError:
            pods = [
                (p["metadata"]["name"], p["metadata"]["labels"].get(MACRO_LABEL), p["status"])
                for p in await self.pods()
            ]
            raise AssertionError(
                f"no {sizes}: {(await self.cluster()).get('status')}\n{pods}\n"
                f"{self.scheduler.clusters}"
            ) from None

    async def at_rest(self) -> None:
        """Waits until the controller has nothing left to ask of the API server."""
        mortal, calls = self.mortal, -1
        assert mortal is not None

        async def still() -> bool:
            nonlocal calls
            before, calls = calls, mortal.calls
            await asyncio.sleep(1.0)
            return before == calls

        await until(still, "calls go on")

    async def tells(self, *reasons: str) -> None:
        """Waits until there are events with these reasons."""

        async def told() -> bool:
            events, _ = await self.api.list_all(EVENTS, self.namespace)
            return set(reasons) <= {event["reason"] for event in events}

        await until(told, f"no events {reasons}")


@asynccontextmanager
async def operator(
    namespace: str, kubeconfig: Path | None = None, **given: Any
) -> AsyncIterator[Operator]:
    """Runs a controller for a namespace, with the rights of ``kubeconfig`` if there is one; all
    else is done with those of ``KUBECONFIG``. ``given`` are further fields of ``Operator``."""
    scheduler = Scheduler()
    await scheduler.start()
    async with ClusterApi(await configured()) as api:
        node = Node(api, namespace, scheduler)
        playing = asyncio.create_task(node.run())
        found = Operator(api, namespace, scheduler, node, **given)
        with pytest.MonkeyPatch.context() as patch:
            if kubeconfig is not None:
                patch.setenv("KUBECONFIG", str(kubeconfig))
            await found.start()
            try:
                yield found
                assert not playing.done(), playing.exception()
            finally:
                if found.task is not None:
                    await found.stop()
                playing.cancel()
                await asyncio.gather(playing, return_exceptions=True)
                await scheduler.stop()
