"""What the API server refuses of the custom resources, and how it says so."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import yaml
from ecoserve_operator.api.worker import RESERVED

from tests.operator.crd_requests import create, model_takes
from tests.operator.kube_api import ApiServer
from tests.operator.manifests import GONE, macro, manifest


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
    ("arguments", "place", "says"),
    [
        (["--tensor-parallel-size", "2"], 0, "set spec.parallelism.tensor"),
        (["--seed", "1", "-tp", "2"], 2, "(--tensor-parallel-size, -tp): set spec.parallelism.te"),
        (["--tensor_parallel_size=2"], 0, "set spec.parallelism.tensor"),
        (["--scheduler-cls.x", "y"], 0, "set spec.policy"),
        *(([option], 0, item.instead) for item in RESERVED for option in item.options),
    ],
)
def test_arguments_that_have_a_field_are_refused(
    kube: ApiServer, arguments: list[str], place: int, says: str
) -> None:
    answer = create(kube, manifest(("spec.engine.args", arguments)))
    assert answer.status_code == 422, answer.text
    message = answer.json()["message"]
    assert f"spec.engine.args[{place}]" in message
    assert says in message


def test_other_arguments_are_taken(kube: ApiServer) -> None:
    arguments = ["--max-model-len", "8192", "--tokenizer", "-tp-x", "--model-impl=auto", "--hosts"]
    answer = create(kube, manifest(("spec.engine.args", arguments)))
    assert answer.status_code == 201, answer.text


@pytest.mark.parametrize(
    ("body", "field", "rule"),
    [
        (macro(cluster="Demo"), "spec.cluster", "should match"),
        (macro(replicas=-1), "spec.replicas", "should be greater than or equal to 0"),
    ],
    ids=["cluster", "replicas"],
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
    body = manifest(("spec.parallelism", {"tensor": 16}), ("metadata.namespace", namespace))
    done = kube.kubectl("apply", "-f", "-", stdin=yaml.safe_dump(body), check=False)
    assert done.returncode == 1
    assert "spec.parallelism" in done.stderr
    assert "an instance is one Pod on one node" in done.stderr
