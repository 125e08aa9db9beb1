"""The CRDs as the API server sees them: what it refuses and how it says so, defaults,
subresources."""

from __future__ import annotations

import copy
import time
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from ecoserve_operator.api import API_VERSION, EcoServeCluster, MacroInstance, example
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from tests.operator.kube_api import ApiServer

CLUSTERS, MACROS = "ecoserveclusters", "macroinstances"
GONE = object()  # as a value: the field is left out


def url(plural: str, namespace: str = "default", name: str = "", more: str = "") -> str:
    """The path of a collection or of an object."""
    parts = ("/apis", API_VERSION, "namespaces", namespace, plural, name, more)
    return "/".join(part for part in parts if part)


def manifest(*changes: tuple[str, Any], **spec: Any) -> dict[str, Any]:
    """The least EcoServeCluster with changes, each a path such as "spec.slo.ttft" and a value."""
    made = copy.deepcopy(example(**spec))
    for path, value in changes:
        *folders, last = path.split(".")
        place = made
        for folder in folders:
            place = place.setdefault(folder, {})
        if value is GONE:
            del place[last]
        else:
            place[last] = value
    return made


def macro(**spec: Any) -> dict[str, Any]:
    """A MacroInstance."""
    return {
        "apiVersion": API_VERSION,
        "kind": "MacroInstance",
        "metadata": {"name": "demo-m0"},
        "spec": {"cluster": "demo", **spec},
    }


def create(kube: ApiServer, body: dict[str, Any], **query: str) -> httpx.Response:
    """Asks the API server whether it would take the object; nothing is stored."""
    plural = CLUSTERS if body["kind"] == "EcoServeCluster" else MACROS
    params = {"dryRun": "All", "fieldValidation": "Strict"} | query
    return kube.client.post(url(plural), json=body, params=params)


def model_takes(body: dict[str, Any]) -> bool:
    """Whether the pydantic model takes it."""
    kind = EcoServeCluster if body["kind"] == "EcoServeCluster" else MacroInstance
    try:
        kind.model_validate(body)
    except ValidationError:
        return False
    return True


# --- what is refused -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Bad:
    """A change that makes a manifest invalid; the message names ``field`` and has ``rule`` in
    it."""

    field: str
    value: Any
    rule: str
    more: tuple[tuple[str, Any], ...] = ()
    named: str = ""  # the field that the message names, if it is another

    @property
    def manifest(self) -> dict[str, Any]:
        return manifest((self.field, self.value), *self.more)


def bad(field: str, value: Any, rule: str, *more: tuple[str, Any], named: str = "") -> Bad:
    return Bad(field, value, rule, more, named)


SOURCE = "spec.model.source"
AUTO = ("spec.autoscaling.enabled", True)
BAD = [
    bad("metadata.name", "a" * 41, "metadata.name must be at most 40 lower-case letters"),
    bad("metadata.name", "7b", "begin with a letter"),
    bad("spec.model", GONE, "Required value"),
    bad("spec.model.name", "", "should be at least 1 chars long"),
    bad("spec.model.name", "my model", "should match"),
    bad(SOURCE, {}, "exactly one of pvc, image, imageVolume must be set"),
    bad(
        SOURCE,
        {"image": {"path": "/m"}, "pvc": {"claimName": "m"}},
        "exactly one of pvc, image, imageVolume must be set",
    ),
    bad(SOURCE, {"pvc": {"claimName": "My_Claim"}}, "should match", named="pvc.claimName"),
    bad(SOURCE, {"image": {"path": "model"}}, "should match", named="image.path"),
    bad(SOURCE, {"imageVolume": {}}, "Required value", named="imageVolume.reference"),
    bad("spec.slo", GONE, "Required value"),
    bad("spec.slo.ttft", "5", "should match"),
    bad("spec.slo.ttft", "0s", "must be from 1ms to 1h"),
    bad("spec.slo.tpot", "2m", "must be from 1ms to 1m"),
    bad("spec.engine.imagePullPolicy", "Sometimes", 'supported values: "Always", "IfNotPresent"'),
    bad("spec.engine.env", [{"name": "1 A"}], "should match", named="spec.engine.env[0].name"),
    bad("spec.engine.sharedMemory", "lots", "should match"),
    bad("spec.engine.resources", {"limits": {"cpu": "-1"}}, "should match", named="limits.cpu"),
    bad("spec.device.type", "tpu", 'supported values: "gpu", "cpu"'),
    bad("spec.device.resourceName", "gpu", "should match"),
    bad("spec.device.perNode", 0, "should be greater than or equal to 1"),
    bad("spec.parallelism.tensor", 0, "should be greater than or equal to 1"),
    bad("spec.parallelism", {"tensor": 16}, "tensor x pipeline must not be more than device.perN"),
    bad(
        "spec.parallelism",
        {"tensor": 4, "pipeline": 2},
        "tensor x pipeline must not be more than device.perNode",
        ("spec.device.perNode", 4),
    ),
    bad(
        "spec.parallelism",
        {"tensor": 2},
        "tensor and pipeline must be 1 where device.type is cpu",
        ("spec.device.type", "cpu"),
    ),
    bad("spec.replicas", -1, "should be greater than or equal to 0"),
    bad("spec.replicas", 1025, "should be less than or equal to 1024"),
    bad("spec.minReplicas", 5, "must not be more than maxReplicas", ("spec.maxReplicas", 4)),
    bad("spec.macro.lower", 0, "should be greater than or equal to 1", ("spec.macro.upper", 8)),
    bad("spec.macro", {"lower": 2}, "must be set when lower is", named="spec.macro.upper"),
    bad("spec.macro.upper", 6, "must be at least 2 x lower - 1", ("spec.macro.lower", 4)),
    bad("spec.macro.mergeCooldown", "-5m", "should match"),
    bad("spec.autoscaling.enabled", True, "must be set when autoscaling", named="ing.prometheus"),
    bad("spec.autoscaling.prometheus", "prometheus:9090", "should match", AUTO),
    bad("spec.autoscaling.strategy", "Magic", 'supported values: "Threshold", "Predictive"'),
    bad("spec.autoscaling.expand", {"usePercent": 101}, "less than or equal to 100"),
    bad(
        "spec.autoscaling.contract",
        {"usePercent": 85},
        "contract.usePercent must be less than expand.usePercent",
        named="spec.autoscaling",
    ),
    bad("spec.policy.name", "fifo", 'supported values: "paper", "padg", "window", "paced"'),
    bad(
        "spec.policy.settings",
        {"bcklog": 4},
        "must be settings of policy padg, which has: backlog, busy, chunk, margin",
        ("spec.policy.name", "padg"),
    ),
    bad(
        "spec.policy.settings",
        {"chunk": 4},
        "must be settings of policy paper, which has: none",
        ("spec.policy.name", "paper"),
    ),
    bad("spec.policy.late", "drop", 'supported values: "serve", "shed"'),
    bad("spec.policy.queueLimit", 0, "should be greater than or equal to 1"),
    bad("spec.kvTiers.cold", {"codec": "gzip"}, "supported values", named="cold.codec"),
    bad("spec.placement.tolerations", [{"effect": "Now"}], "supported", named="[0].effect"),
    bad("spec.gateway.replicas", 0, "should be greater than or equal to 1"),
    bad("spec.gateway.bodyLimit", "3Gi", "must be from 1Ki to 2Gi"),
    bad("spec.gateway.bodyLimit", 100, "must be from 1Ki to 2Gi"),
    bad("spec.gateway.tls", {}, "Required value", named="spec.gateway.tls.secretName"),
    bad("spec.gateway.service", {"type": "ExternalName"}, "supported values", named="type"),
    bad("spec.gateway.service", {"port": 65536}, "less than or equal to 65535", named="port"),
    bad("spec.gateway.service", {"nodePort": 30000}, "needs type NodePort", named="nodePort"),
    bad("spec.networkPolicy.prometheus", [{}], "namespaceSelector or podSelector must be set"),
    bad("spec.mtls.workerSecret", "certs", "must be set together", named="spec.mtls"),
    bad("spec.mtls.lifetime", "5m", "must be from 1h to 87600h"),
    bad("spec.drain.timeout", "25h", "must be from 1s to 24h"),
    bad("spec.rollout.strategy", "BlueGreen", 'supported values: "Auto", "Surge", "DrainFirst"'),
    bad("spec.disruption.maxUnavailable", 0, "should be greater than or equal to 1"),
    bad("spec.monitoring.interval", "0s", "must be from 1s to 10m"),
]


def test_there_are_forty_of_them() -> None:
    assert len({(case.field, str(case.value), case.more) for case in BAD}) >= 40


@pytest.mark.parametrize("case", BAD, ids=lambda case: f"{case.field}={case.value}"[:60])
def test_the_api_server_names_the_field_and_the_rule(kube: ApiServer, case: Bad) -> None:
    answer = create(kube, case.manifest)
    assert answer.status_code == 422, answer.text
    message = answer.json()["message"]
    assert (case.named or case.field) in message
    assert case.rule in message
    assert not model_takes(case.manifest), "the model takes what the API server refuses"


@pytest.mark.parametrize(
    ("body", "field", "rule"),
    [
        (macro(cluster="Demo"), "spec.cluster", "should match"),
        (macro(replicas=-1), "spec.replicas", "should be greater than or equal to 0"),
        (
            macro(splitFrom="demo-m1", mergeInto="demo-m2"),
            "spec",
            "splitFrom and mergeInto must not be set together",
        ),
    ],
    ids=["cluster", "replicas", "splitFrom"],
)
def test_macro_instances_are_checked(
    kube: ApiServer, body: dict[str, Any], field: str, rule: str
) -> None:
    answer = create(kube, body)
    assert answer.status_code == 422, answer.text
    assert field in answer.json()["message"]
    assert rule in answer.json()["message"]
    assert not model_takes(body)


def test_a_misspelt_field_is_named(kube: ApiServer) -> None:
    answer = create(kube, manifest(("spec.paralelism", {"tensor": 2})))
    assert answer.status_code == 400
    assert 'unknown field "spec.paralelism"' in answer.json()["message"]


def test_kubectl_shows_the_message(kube: ApiServer, namespace: str) -> None:
    """As a user meets it, by a plain apply."""
    import yaml

    body = manifest(("spec.parallelism", {"tensor": 16}), ("metadata.namespace", namespace))
    done = kube.kubectl("apply", "-f", "-", stdin=yaml.safe_dump(body), check=False)
    assert done.returncode == 1
    assert "spec.parallelism" in done.stderr
    assert "an instance is one Pod on one node" in done.stderr


# --- what is taken -------------------------------------------------------------------------------


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


# --- changes, subresources, and how it reads -----------------------------------------------------


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
        "conditions": [condition(status="False", reason="Starting")],
    }
    patch(kube, f"{stored}/status", {"status": status}).raise_for_status()
    head, row = kube.kubectl("get", "esc", "-n", namespace).stdout.splitlines()
    assert head.split() == [
        *("NAME", "MODEL", "DESIRED", "READY", "UPDATED", "MACROS", "AVAILABLE", "REASON", "AGE")
    ]
    assert row.split()[:8] == ["demo", "demo", "2", "1", "2", "1", "False", "Starting"]
    wide = kube.kubectl("get", "esc", "-n", namespace, "-o", "wide").stdout
    assert "http://demo.x/v1" in wide
    assert "2 of 2 instances take requests" in wide
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
    from ecoserve_operator.crd import crds

    kube.install(list(crds().values()))
    assert kube.client.get(stored).status_code == 200
