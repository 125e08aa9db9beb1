"""What the tests on a cluster share: the cluster, the images, an installed chart."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator

import pytest

from e2e.kube.kube import Images, Kube, Release, connect, installed


@pytest.fixture(scope="session")
def kube(tmp_path_factory: pytest.TempPathFactory) -> Kube:
    """The cluster that ``KUBECONFIG`` names."""
    return connect(tmp_path_factory.mktemp("kube"))


@pytest.fixture(scope="session")
def images() -> Images:
    """The images, by the README's names unless ``OPERATOR_IMAGE`` and ``WORKER_IMAGE`` name others;
    an empty ``WORKER_IMAGE`` says that there is none."""
    return Images(
        os.environ.get("OPERATOR_IMAGE", "ecoserve-operator:0.1.0"),
        os.environ.get("WORKER_IMAGE", "ecoserve-worker-smollm2:0.1.0"),
    )


@pytest.fixture(scope="module")
def release(kube: Kube, images: Images) -> Iterator[Release]:
    """The chart, installed for the tests of a module."""
    with installed(kube, images) as release:
        yield release


@pytest.fixture
def namespace(kube: Kube) -> Iterator[str]:
    """A namespace of the test's own, with Pod Security ``restricted``."""
    name = f"test-{uuid.uuid4().hex[:6]}"
    kube.namespace(name)
    yield name
    kube.clear_namespace(name)
    kube.drop_namespace(name)


@pytest.fixture(scope="session")
def worker_image(images: Images) -> str:
    """The image of real workers; skips the test where there is none."""
    if not images.worker:
        pytest.skip("WORKER_IMAGE is empty: this test runs the engine")
    return images.worker
