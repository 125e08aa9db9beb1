"""What the operator's tests share: an API server of their own, with the CRDs installed."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest
from ecoserve_operator.crd import crds

from tests.operator.kube_api import ApiServer, api_server


@pytest.fixture(scope="session")
def kube(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """etcd and kube-apiserver from ``KUBEBUILDER_ASSETS``, with EcoServe's CRDs; skipped
    without."""
    with api_server(tmp_path_factory.mktemp("kube")) as server:
        server.install(list(crds().values()))
        yield server


@pytest.fixture
def namespace(kube: ApiServer) -> str:
    """A namespace of the test's own."""
    name = f"test-{uuid.uuid4().hex[:8]}"
    kube.client.post("/api/v1/namespaces", json={"metadata": {"name": name}}).raise_for_status()
    return name
