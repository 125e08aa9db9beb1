"""What is left of it all, in whatever order it is taken away; and upgrades."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Iterator

import pytest

from e2e.kube.kube import Images, Kube, Release, identity, until
from e2e.kube.world import Load, gateway_ready, settle, standins, workers

STEPS = ("cluster", "release", "namespace")
# One that begins with each step; the other three are for `make soak`.
ROTATIONS = [STEPS[first:] + STEPS[:first] for first in range(3)]
ORDERS = [
    pytest.param(order, id="-".join(order), marks=() if order in ROTATIONS else pytest.mark.soak)
    for order in itertools.permutations(STEPS)
]

pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def fresh(kube: Kube, images: Images) -> Iterator[Release]:
    """A release of the test's own, not installed yet."""
    release = Release(kube, images, f"system-{uuid.uuid4().hex[:6]}")
    yield release
    release.uninstall()
    kube.drop_namespace(release.namespace)


def left(kube: Kube, *namespaces: str) -> list[str]:
    """All of ours in these namespaces, or in none, by labels and by who wrote it; but for the CRDs,
    which stay, and events, which Kubernetes forgets by itself."""
    listable = ("api-resources", "--verbs=list", "-o", "name")
    found = []
    for scope in ("true", "false"):
        kinds = kube.ctl(*listable, f"--namespaced={scope}").split()
        kinds = [kind for kind in kinds if kind.partition(".")[0] != "events"]
        for item in kube.items(",".join(kinds), ""):
            metadata = item["metadata"]
            labels = metadata.get("labels") or {}
            ours = (
                labels.get("app.kubernetes.io/name") == "ecoserve"
                or any(label.startswith("ecoserve.io/") for label in labels)
                or any(
                    field["manager"] == "ecoserve-operator"
                    for field in metadata.get("managedFields", ())
                )
            )
            if item["kind"] == "CustomResourceDefinition":
                continue
            if ours and metadata.get("namespace", "") in (*namespaces, ""):
                found.append(f"{item['kind']} {metadata.get('namespace', '')}/{metadata['name']}")
    return found


@pytest.mark.parametrize("order", ORDERS)
def test_nothing_is_left_whatever_goes_first(
    kube: Kube, images: Images, fresh: Release, namespace: str, order: tuple[str, ...]
) -> None:
    fresh.install()
    kube.apply(standins("demo", namespace, images, 2))
    before = identity(settle(kube, namespace, "demo", 2))
    gateway_ready(kube, namespace, "demo")
    for number, step in enumerate(order):
        if step == "cluster":
            kube.ctl(
                *("-n", namespace, "delete", "esc", "demo", "--ignore-not-found", "--timeout=60s")
            )
        elif step == "release":
            fresh.uninstall()
            if not number:
                # Nobody is there to do anything; it goes on serving.
                load = Load(kube, images, namespace, "demo", clients=2, tokens=10)
                load.start()
                load.goes_on()
                load.stop()
                assert identity(workers(kube, namespace, "demo")) == before
        else:
            kube.drop_namespace(namespace)
    until(lambda: not left(kube, namespace, fresh.namespace), "something is left")


def test_a_namespace_of_everything_goes_at_once(kube: Kube, images: Images, fresh: Release) -> None:
    namespace = fresh.namespace
    fresh.values = {"namespaces": [namespace]}
    fresh.install()
    kube.apply(standins("demo", namespace, images, 2))
    settle(kube, namespace, "demo", 2)
    kube.drop_namespace(namespace)
    assert not left(kube, namespace)


def test_an_upgrade_under_load(kube: Kube, images: Images, fresh: Release, namespace: str) -> None:
    fresh.install()
    kube.apply(standins("demo", namespace, images, 2))
    before = identity(settle(kube, namespace, "demo", 2))
    gateway_ready(kube, namespace, "demo")
    load = Load(kube, images, namespace, "demo")
    load.start()
    operator = fresh.pod()["metadata"]["uid"]
    fresh.upgrade(podAnnotations={"upgraded": "yes"}, scheduler={"debug": True})
    assert fresh.pod()["metadata"]["uid"] != operator
    load.goes_on()
    assert identity(settle(kube, namespace, "demo", 2)) == before
    load.stop()
