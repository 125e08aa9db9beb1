"""Who may connect to what, where the cluster's network enforces NetworkPolicies; and what is left
of gateway and policies once they are switched off."""

from __future__ import annotations

import json

import pytest

from e2e.kube.kube import Images, Json, Kube, Release, conditions, identity, miss, until
from e2e.kube.world import gateway_ready, output, pod, script, settle, standins, workers

PROMETHEUS = {"app": "prometheus"}

pytestmark = pytest.mark.timeout(600)


def knock(
    kube: Kube, namespace: str, images: Images, name: str, labels: dict[str, str], *targets: str
) -> dict[str, bool]:
    """Which of the targets answer a Pod with these labels."""
    kube.apply(pod(name, namespace, images, [*script("knock"), *targets], labels=labels))
    found: dict[str, bool] = json.loads(output(kube, namespace, name))
    return found


def address(item: Json) -> str:
    return str(item["status"]["podIP"])


def enforced(kube: Kube, namespace: str, images: Images) -> bool:
    """Whether a policy that lets nobody in keeps a Pod from being reached."""
    labels = {"app": "locked"}
    kube.apply(
        {
            "apiVersion": "networking.k8s.io/v1",
            "kind": "NetworkPolicy",
            "metadata": {"name": "locked", "namespace": namespace},
            "spec": {"podSelector": {"matchLabels": labels}, "policyTypes": ["Ingress"]},
        },
        pod("locked", namespace, images, ["python", "-m", "http.server", "8000"], labels=labels),
    )
    kube.ctl("-n", namespace, "wait", "pod/locked", "--for=condition=Ready")
    target = f"{address(kube.named('pod', 'locked', namespace))}:8000"
    return not knock(kube, namespace, images, "locked-out", {"app": "stray"}, target)[target]


def test_strangers_reach_the_gateway_alone(
    kube: Kube, release: Release, namespace: str, images: Images
) -> None:
    if not enforced(kube, namespace, images):
        miss("the cluster's network does not enforce NetworkPolicies")
    peers = [{"podSelector": {"matchLabels": PROMETHEUS}}]
    outside = [
        {
            "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}},
            "podSelector": {"matchLabels": PROMETHEUS},
        }
    ]
    release.upgrade(networkPolicy={"prometheus": outside})
    kube.apply(standins("demo", namespace, images, 1, networkPolicy={"prometheus": peers}))
    # Ready: probes pass, the worker and the gateway reach the scheduler.
    (worker,) = settle(kube, namespace, "demo", 1)
    gateway_ready(kube, namespace, "demo")
    gateways = "app.kubernetes.io/component=gateway"
    (gateway,) = kube.items("pods", namespace, selector=gateways)
    operator = address(release.pod())

    serving = {f"{address(gateway)}:8080", f"demo.{namespace}.svc:80"}
    metrics = {f"{address(worker)}:8001", f"{address(gateway)}:8081"}
    metrics |= {f"{operator}:9003", f"{operator}:8081"}
    internal = {f"{address(worker)}:8000", f"{operator}:9002", f"{operator}:9004"}
    every = sorted(serving | metrics | internal)
    stray = knock(kube, namespace, images, "stray", {"app": "stray"}, *every)
    assert {target for target, answers in stray.items() if answers} == serving
    scraper = knock(kube, namespace, images, "scraper", PROMETHEUS, *every)
    assert {target for target, answers in scraper.items() if answers} == serving | metrics

    # The kubelet's probes passed all the while.
    (after,) = workers(kube, namespace, "demo")
    assert conditions(after)["Ready"] == "True"
    assert after["metadata"]["uid"] == worker["metadata"]["uid"]
    assert not any(s["restartCount"] for s in after["status"]["containerStatuses"])


def test_what_is_switched_off_goes(
    kube: Kube, release: Release, namespace: str, images: Images
) -> None:
    kube.apply(standins("demo", namespace, images, 1))
    before = identity(settle(kube, namespace, "demo", 1))
    gateway_ready(kube, namespace, "demo")
    kinds = "deployments,services,configmaps,serviceaccounts,networkpolicies,poddisruptionbudgets"

    def parts() -> set[str]:
        found = kube.items(kinds, namespace, selector="ecoserve.io/cluster=demo")
        return {f"{item['kind']} {item['metadata']['name']}" for item in found}

    stay = {"ServiceAccount demo-worker", "PodDisruptionBudget demo-worker"}
    assert parts() > stay
    off = {"enabled": False}
    kube.apply(standins("demo", namespace, images, 1, gateway=off, networkPolicy=off))
    until(lambda: parts() == stay, f"something is left besides {stay}")
    assert identity(workers(kube, namespace, "demo")) == before
