"""kopf on an API server in memory: it tells of what happens, and leaves no trace."""

from __future__ import annotations

import asyncio
from pathlib import Path

import kmock
import pytest
from ecoserve_operator.cluster_api import CLUSTERS, PODS, ClusterApi, Json, Kind, configured
from ecoserve_operator.names import CLUSTER_LABEL
from ecoserve_operator.watch import _registry, _settings
from kopf.testing import KopfRunner

from tests.operator.control_world import until
from tests.operator.kmock_world import emulated
from tests.operator.manifests import manifest

POD = {
    "metadata": {"name": "a", "namespace": "default", "labels": {CLUSTER_LABEL: "demo"}},
    "spec": {},
}


async def test_all_that_happens_is_told_and_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Finalizers above all: an object that has one cannot be deleted once the operator is gone."""
    heard: list[tuple[str, str | None, str]] = []
    written: list[str] = []

    def deliver(kind: Kind, event: str | None, item: Json) -> None:
        heard.append((item["kind"], event, item["metadata"]["resourceVersion"]))

    def note(request: kmock.Request) -> None:
        if request.method != kmock.method.GET and "kopf" in request.headers["User-Agent"]:
            written.append(f"{request.method.value} {request.url.path}")

    async with emulated(tmp_path) as (server, kubeconfig):
        monkeypatch.setenv("KUBECONFIG", str(kubeconfig))
        server.before = note
        kinds = (CLUSTERS, PODS)
        runner = KopfRunner(
            ["run", "--all-namespaces", "--standalone"],
            registry=_registry(kinds, deliver),
            settings=_settings(kinds),
            timeout=60,
        )
        async with ClusterApi(await configured()) as api:
            cluster = await api.create(CLUSTERS, manifest())
            await asyncio.to_thread(runner.__enter__)
            try:
                version = cluster["metadata"]["resourceVersion"]
                await until(lambda: ("EcoServeCluster", None, version) in heard, "not listed")
                await api.create(PODS, POD)
                pod = await api.patch(PODS, "default", "a", {"spec": {"nodeName": "b"}})
                version = pod["metadata"]["resourceVersion"]
                await until(lambda: ("Pod", "MODIFIED", version) in heard, "no change is told")
                await api.delete(PODS, "default", "a", pod["metadata"]["uid"])
                await until(lambda: "DELETED" in [event for _, event, _ in heard], "no end is told")
                metadata = (await api.get(CLUSTERS, "default", "demo") or {})["metadata"]
            finally:
                await asyncio.to_thread(runner.__exit__, None, None, None)
    assert not written
    assert not {"finalizers", "annotations"} & metadata.keys()
