"""What the API server takes of the custom resources and fills in; the models take the same."""

from __future__ import annotations

from typing import Any

import pytest
from ecoserve_operator.api import EcoServeCluster
from hypothesis import given
from hypothesis import strategies as st

from tests.operator.crd_requests import CLUSTERS, create, model_takes, url
from tests.operator.kube_api import ApiServer
from tests.operator.manifests import manifest

SOURCE = "spec.model.source"


def filled(value: Any) -> Any:
    """Without what is empty, all the way down: an empty list is as good as none."""
    if isinstance(value, dict):
        inner = {key: filled(item) for key, item in value.items()}
        return {key: item for key, item in inner.items() if item not in ({}, [])}
    return [filled(item) for item in value] if isinstance(value, list) else value


GOOD = {
    "least": manifest(),
    "pvc": manifest((SOURCE, {"pvc": {"claimName": "weights"}})),
    "image volume": manifest((SOURCE, {"imageVolume": {"reference": "registry/m@sha256:0"}})),
    "cpu": manifest(("spec.device.type", "cpu")),
    "two per node": manifest(("spec.parallelism.tensor", 4), ("spec.replicas", 16)),
    "whole node": manifest(("spec.parallelism", {"tensor": 4, "pipeline": 2})),
    "sizes": manifest(("spec.macro", {"lower": 6, "upper": 11})),
    "upper alone": manifest(("spec.macro", {"upper": 1})),
    "to zero": manifest(("spec.minReplicas", 0), ("spec.replicas", 0)),
    "outside of its range": manifest(("spec.maxReplicas", 4), ("spec.replicas", 9)),
    "policy": manifest(("spec.policy", {"name": "padg", "settings": {"backlog": 4, "busy": 0.8}})),
    "autoscaling": manifest(
        ("spec.autoscaling", {"enabled": True, "prometheus": "http://prometheus:9090/x"})
    ),
    "quantities": manifest(
        ("spec.engine.resources", {"requests": {"cpu": 2, "memory": "4Gi"}}),
        ("spec.gateway.bodyLimit", 1048576),
    ),
    "durations": manifest(("spec.slo", {"ttft": "1m30s", "tpot": "0.25s"})),
    "network": manifest(
        (
            "spec.networkPolicy",
            {
                "prometheus": [{"namespaceSelector": {"matchLabels": {"name": "monitoring"}}}],
                "gateways": [
                    {"podSelector": {"matchExpressions": [{"key": "a", "operator": "Exists"}]}}
                ],
            },
        ),
        ("spec.mtls", {"enabled": False, "gatewaySecret": "a", "workerSecret": "b"}),
    ),
    "overlay": manifest(
        (
            "spec.podTemplate",
            {"spec": {"hostNetwork": True, "containers": [{"name": "worker", "tty": True}]}},
        )
    ),
    "gateway": manifest(
        (
            "spec.gateway",
            {
                "service": {"type": "NodePort", "nodePort": 30080},
                "tls": {"secretName": "tls"},
                "resources": {"requests": {"cpu": 1}},
            },
        )
    ),
}


@pytest.mark.parametrize("body", GOOD.values(), ids=list(GOOD))
def test_the_model_fills_in_what_the_api_server_fills_in(
    kube: ApiServer, body: dict[str, Any]
) -> None:
    answer = create(kube, body)
    assert answer.status_code == 201, answer.text
    stored = answer.json()
    read = EcoServeCluster.model_validate(stored)
    assert read.spec == EcoServeCluster.model_validate(body).spec
    kept = filled(stored["spec"])
    assert set(kept) <= set(filled(read.dump()["spec"]))
    # What is stored needs nothing of the model's own defaults: written back it is the same.
    assert EcoServeCluster.model_validate(read.dump()).spec == read.spec
    assert create(kube, manifest(("spec", read.dump()["spec"]))).status_code == 201


def test_defaults_are_stored(kube: ApiServer, namespace: str) -> None:
    made = kube.client.post(url(CLUSTERS, namespace), json=manifest(("metadata", {"name": "d"})))
    spec = made.json()["spec"]
    assert spec["drain"] == {"timeout": "10m"}
    assert spec["device"] == {"type": "gpu", "resourceName": "nvidia.com/gpu", "perNode": 8}
    assert spec["parallelism"] == {"tensor": 1, "pipeline": 1}
    assert (spec["minReplicas"], spec["maxReplicas"]) == (1, 64)
    assert spec["policy"]["name"] == "paced"
    assert spec["mtls"]["enabled"] is True
    assert "replicas" not in spec, "the operator fills it in"
    assert "macro" in spec
    assert "upper" not in spec["macro"], "chosen by the GPUs"


def test_an_overlay_is_kept_as_it_is(kube: ApiServer) -> None:
    overlay = {
        "metadata": {"annotations": {"a": "b"}},
        "spec": {"volumes": [{"name": "x", "unheardOf": {"y": [1, {"z": None}]}}]},
    }
    answer = create(kube, manifest(("spec.podTemplate", overlay)))
    assert answer.json()["spec"]["podTemplate"] == overlay


CHOICES: dict[str, list[Any]] = {
    "metadata.name": ["demo", "a", "a" * 40, "a" * 41, "9a", "a-", "a-b"],
    "spec.replicas": [0, 1, 64, 65, 1024, 1025, -1],
    "spec.minReplicas": [0, 1, 3, 65, 1024],
    "spec.maxReplicas": [0, 1, 3, 64, 1024],
    "spec.macro.lower": [0, 1, 3, 4, 6],
    "spec.macro.upper": [0, 1, 5, 6, 7, 11],
    "spec.macro.mergeCooldown": ["0s", "5m", "24h", "24h1ms", "1.5h", "h", ""],
    "spec.parallelism.tensor": [0, 1, 2, 4, 8, 64, 65],
    "spec.parallelism.pipeline": [1, 2, 4],
    "spec.device.perNode": [1, 4, 8, 64],
    "spec.device.type": ["gpu", "cpu", "GPU"],
    "spec.policy.name": ["paper", "padg", "window", "paced", ""],
    "spec.policy.settings": [{}, {"chunk": 1}, {"backlog": 2}, {"worth": 0.5, "guard": 0}],
    "spec.autoscaling.enabled": [True, False],
    "spec.autoscaling.prometheus": ["http://p", "https://p.x:1/y", "p", "http://"],
    "spec.autoscaling.expand.usePercent": [0, 40, 41, 100, 101],
    "spec.autoscaling.contract.usePercent": [0, 40, 84, 85],
    "spec.slo.ttft": ["1ms", "0.5ms", "1h", "1h0.1ms", "1.5s", "5 s", "5"],
    "spec.slo.tpot": ["1ms", "60s", "61s", "1m", "0ms"],
    "spec.gateway.bodyLimit": ["1Ki", "1023", 1024, "2Gi", "2.5Gi", "16e", "1500m"],
    "spec.gateway.service.type": ["ClusterIP", "NodePort", "LoadBalancer"],
    "spec.gateway.service.nodePort": [1, 30000, 65536],
    "spec.gateway.service.port": [1, 443, 0],
    "spec.mtls.gatewaySecret": ["a", "A", "a.b", ""],
    "spec.mtls.workerSecret": ["a", "b-"],
    "spec.model.name": ["a", "org/Model-1.0:x", "-a", "a b", "a" * 254],
    SOURCE: [{}, {"pvc": {"claimName": "a", "path": "/x:y"}}, {"image": {"path": "/"}}],
    "spec.engine.args": [[], ["--a", ""], ["x" * 4097], ["x"] * 129],
    "spec.engine.resources.limits": [{"cpu": 1}, {"cpu": "1"}, {"cpu": "1x"}, {"memory": "1.5Gi"}],
    "spec.networkPolicy.clients": [[], [{}], [{"podSelector": {}}], [{"podSelector": {}}] * 17],
}
CHANGES = st.dictionaries(st.sampled_from(sorted(CHOICES)), st.integers(0, 6), max_size=5)


@given(CHANGES)
def test_the_model_and_the_api_server_take_the_same(
    kube: ApiServer, changes: dict[str, int]
) -> None:
    chosen = {path: CHOICES[path][n % len(CHOICES[path])] for path, n in changes.items()}
    # A whole before its parts, so that none is overwritten.
    body = manifest(*sorted(chosen.items(), key=lambda item: item[0].count(".")))
    answer = create(kube, body)
    assert answer.status_code in (201, 422), answer.text
    assert model_takes(body) == (answer.status_code == 201), answer.text
