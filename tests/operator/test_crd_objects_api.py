"""Custom resources as they are stored: changes, subresources, conditions, and how they read."""

from __future__ import annotations

import time
from typing import Any

import httpx
import pytest
from ecoserve_operator.api import API_VERSION, EcoServeCluster
from ecoserve_operator.crd import crds

from tests.operator.crd_requests import CLUSTERS, MACROS, url
from tests.operator.kube_api import ApiServer
from tests.operator.manifests import macro, manifest


@pytest.fixture
def stored(kube: ApiServer, namespace: str) -> str:
    """The path of an EcoServeCluster that exists."""
    made = kube.client.post(url(CLUSTERS, namespace), json=manifest(("metadata", {"name": "demo"})))
    assert made.status_code == 201, made.text
    return url(CLUSTERS, namespace, "demo")


def patch(kube: ApiServer, path: str, body: dict[str, Any]) -> httpx.Response:
    """A merge patch."""
    headers = {"Content-Type": "application/merge-patch+json"}
    return kube.client.patch(path, json=body, headers=headers)


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        ({"model": {"name": "other"}}, "spec.model.name"),
        ({"device": {"type": "cpu"}}, "spec.device.type"),
        ({"mtls": {"enabled": False}}, "spec.mtls.enabled"),
    ],
    ids=["model.name", "device.type", "mtls.enabled"],
)
def test_some_fields_never_change(
    kube: ApiServer, stored: str, spec: dict[str, Any], field: str
) -> None:
    answer = patch(kube, stored, {"spec": spec})
    assert answer.status_code == 422
    assert field in answer.json()["message"]
    assert "is immutable: " in answer.json()["message"]


def test_a_macro_instance_keeps_its_cluster(kube: ApiServer, namespace: str) -> None:
    kube.client.post(url(MACROS, namespace), json=macro()).raise_for_status()
    path = url(MACROS, namespace, "demo-m0")
    answer = patch(kube, path, {"spec": {"cluster": "other"}})
    assert answer.status_code == 422
    assert "spec.cluster" in answer.json()["message"]
    assert "is immutable: " in answer.json()["message"]
    assert patch(kube, path, {"spec": {"replicas": 3}}).status_code == 200


def test_the_rest_may_change(kube: ApiServer, stored: str) -> None:
    spec = {
        "model": {"source": {"image": {"path": "/other"}}},
        "parallelism": {"tensor": 2},
        "engine": {"args": ["--max-model-len", "8192"]},
        "maxReplicas": 8,
    }
    answer = patch(kube, stored, {"spec": spec})
    assert answer.status_code == 200, answer.text
    assert answer.json()["metadata"]["generation"] == 2


def test_scale(kube: ApiServer, namespace: str, stored: str) -> None:
    path = f"{stored}/scale"
    early = kube.client.get(path)
    assert early.status_code >= 400, "the operator fills replicas in because of this"
    assert ".spec.replicas" in early.json()["message"]
    patch(kube, stored, {"spec": {"replicas": 1}}).raise_for_status()
    answer = patch(kube, path, {"spec": {"replicas": 5}})
    assert answer.status_code == 200, answer.text
    assert kube.client.get(stored).json()["spec"]["replicas"] == 5
    status = {"replicas": 4, "selector": "ecoserve.io/cluster=demo"}
    patch(kube, f"{stored}/status", {"status": status}).raise_for_status()
    assert kube.client.get(path).json()["status"] == status
    done = kube.kubectl("scale", "ecoservecluster/demo", "--replicas=7", "-n", namespace)
    assert "scaled" in done.stdout
    assert kube.client.get(stored).json()["spec"]["replicas"] == 7
    assert patch(kube, path, {"spec": {"replicas": 2000}}).status_code == 422


def test_macro_instances_have_no_scale(kube: ApiServer, namespace: str) -> None:
    kube.client.post(url(MACROS, namespace), json=macro()).raise_for_status()
    assert kube.client.get(url(MACROS, namespace, "demo-m0", "scale")).status_code == 404


def condition(**changes: Any) -> dict[str, Any]:
    return {
        "type": "Ready",
        "status": "True",
        "reason": "AllReady",
        "message": "2 of 2 instances take requests",
        "lastTransitionTime": "2026-01-02T03:04:05Z",
        "observedGeneration": 1,
    } | changes


def test_status_is_a_subresource(kube: ApiServer, stored: str) -> None:
    patch(kube, stored, {"status": {"readyReplicas": 9}})
    assert "status" not in kube.client.get(stored).json(), "only by /status"
    status = {"readyReplicas": 2, "observedGeneration": 1, "conditions": [condition()]}
    answer = patch(kube, f"{stored}/status", {"status": status, "spec": {"replicas": 9}})
    read = EcoServeCluster.model_validate(answer.json())
    assert (read.status.ready_replicas, read.spec.replicas) == (2, None)
    assert read.metadata.generation == 1, "a status is no new generation"
    assert read.status.conditions[0].reason == "AllReady"


def test_conditions_are_a_map_by_type(kube: ApiServer, namespace: str, stored: str) -> None:
    """Two managers own one condition each, by server-side apply."""
    for manager, kind in (("one", "Ready"), ("two", "Scaling"), ("one", "Ready")):
        answer = kube.client.patch(
            f"{stored}/status",
            params={"fieldManager": manager, "force": "true"},
            headers={"Content-Type": "application/apply-patch+yaml"},
            json={
                "apiVersion": API_VERSION,
                "kind": "EcoServeCluster",
                "metadata": {"name": "demo", "namespace": namespace},
                "status": {"conditions": [condition(type=kind)]},
            },
        )
        assert answer.status_code == 200, answer.text
    found = kube.client.get(stored).json()["status"]["conditions"]
    assert [item["type"] for item in found] == ["Ready", "Scaling"]


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"status": "Maybe"}, "status.conditions[0].status"),
        ({"reason": "not ready"}, "status.conditions[0].reason"),
        ({"lastTransitionTime": "now"}, "status.conditions[0].lastTransitionTime"),
    ],
    ids=["status", "reason", "time"],
)
def test_conditions_are_checked(
    kube: ApiServer, stored: str, changes: dict[str, Any], field: str
) -> None:
    body = {"status": {"conditions": [condition(**changes)]}}
    answer = patch(kube, f"{stored}/status", body)
    assert answer.status_code == 422
    assert field in answer.json()["message"]


def test_short_names_categories_and_columns(kube: ApiServer, namespace: str, stored: str) -> None:
    kube.client.post(url(MACROS, namespace), json=macro(replicas=2)).raise_for_status()
    patch(kube, stored, {"spec": {"replicas": 2}}).raise_for_status()
    status = {
        "readyReplicas": 1,
        "updatedReplicas": 2,
        "macroInstances": 1,
        "url": "http://demo.x/v1",
        "conditions": [
            condition(status="False", reason="NotReady", message="1 of 2"),
            condition(type="Available", reason="Serving"),
        ],
    }
    patch(kube, f"{stored}/status", {"status": status}).raise_for_status()
    head, row = kube.kubectl("get", "esc", "-n", namespace).stdout.splitlines()
    assert head.split() == [
        *("NAME", "MODEL", "DESIRED", "READY", "UPDATED", "MACROS", "AVAILABLE", "REASON", "AGE")
    ]
    assert row.split()[:8] == ["demo", "demo", "2", "1", "2", "1", "True", "Serving"]
    wide = kube.kubectl("get", "esc", "-n", namespace, "-o", "wide").stdout
    assert "http://demo.x/v1" in wide
    assert "1 of 2" in wide
    head, row = kube.kubectl("get", "mi", "-n", namespace).stdout.splitlines()
    assert head.split()[:6] == ["NAME", "CLUSTER", "DESIRED", "CURRENT", "READY", "DRAINING"]
    assert row.split()[:3] == ["demo-m0", "demo", "2"]
    for category in ("ecoserve", "all"):
        listed = kube.kubectl("get", category, "-n", namespace).stdout
        assert "ecoservecluster.ecoserve.io/demo" in listed
        assert "macroinstance.ecoserve.io/demo-m0" in listed


@pytest.mark.parametrize(
    ("field", "words"),
    [
        ("esc", ["A model served within latency promises"]),
        ("esc.spec", ["macro <Object>", "slo <Object> -required-", "model <Object> -required-"]),
        ("esc.spec.slo.ttft", ["FIELD: ttft <string>", "Time to first token, e.g. 5s."]),
        ("esc.spec.macro.upper", ["N_u: the most instances of a macro instance"]),
        ("esc.spec.policy.name", ["ENUM: paper padg window paced", "The scheduling policy."]),
        ("esc.spec.podTemplate", ["kubectl patch", "metadata <Object>", "spec <Object>"]),
        ("esc.status.conditions", ["<[]Object>", "lastTransitionTime <string> -required-"]),
        ("mi.spec", ["cluster <string> -required-", "replicas <integer>"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_explain_reads_well(kube: ApiServer, field: str, words: list[str]) -> None:
    end = time.monotonic() + 60
    while True:  # what kubectl reads is published some time after the CRD is served
        done = kube.kubectl("explain", field, check=False)
        if done.returncode == 0 or time.monotonic() > end:
            break
        time.sleep(0.1)
    assert done.returncode == 0, done.stderr
    text = " ".join(done.stdout.split())
    for word in words:
        assert word in text, done.stdout
    assert "<no description>" not in text


def test_the_crds_can_be_applied_again(kube: ApiServer, stored: str) -> None:
    """As an upgrade does, with objects there."""
    kube.install(list(crds().values()))
    assert kube.client.get(stored).status_code == 200
