"""Overlays, beside what the real ``kubectl patch --local --type=strategic`` makes of them."""

from __future__ import annotations

import copy
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from ecoserve_operator.builders.overlay import OverlayError, overlay
from hypothesis import given
from hypothesis import strategies as st

from tests.operator.kube_api import assets

POD: dict[str, Any] = {
    "apiVersion": "v1",
    "kind": "Pod",
    "metadata": {
        "name": "chat-0",
        "namespace": "default",
        "labels": {"app": "chat", "tier": "model"},
        "annotations": {"a": "1"},
        "finalizers": ["x.io/a", "x.io/b"],
        "ownerReferences": [{"apiVersion": "v1", "kind": "Node", "name": "n", "uid": "1"}],
    },
    "spec": {
        "restartPolicy": "Always",
        "terminationGracePeriodSeconds": 630,
        "nodeSelector": {"gpu": "l20"},
        "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
        "imagePullSecrets": [{"name": "one"}, {"name": "two"}],
        "tolerations": [{"key": "gpu", "operator": "Exists"}],
        "topologySpreadConstraints": [
            {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"}
        ],
        "containers": [
            {
                "name": "worker",
                "image": "worker:1",
                "command": ["python", "-m", "ecoserve_worker"],
                "args": ["--cluster", "default/chat", "--", "--model", "/model"],
                "env": [
                    {"name": "A", "value": "1"},
                    {"name": "B", "value": "2"},
                    {
                        "name": "POD_IP",
                        "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}},
                    },
                ],
                "ports": [
                    {"name": "http", "containerPort": 8000, "protocol": "TCP"},
                    {"name": "health", "containerPort": 8001, "protocol": "TCP"},
                ],
                "resources": {"limits": {"nvidia.com/gpu": "4", "memory": "64Gi"}},
                "volumeMounts": [
                    {"name": "cache", "mountPath": "/cache"},
                    {"name": "tmp", "mountPath": "/tmp"},
                ],
                "livenessProbe": {
                    "httpGet": {"path": "/live", "port": 8001},
                    "periodSeconds": 10,
                },
            }
        ],
        "volumes": [{"name": "cache", "emptyDir": {}}, {"name": "tmp", "emptyDir": {}}],
    },
}

_FILE = yaml.safe_load(Path(__file__).with_name("overlays.yaml").read_text())
OVERLAYS, REFUSED = _FILE["merged"], _FILE["refused"]


def kubectl(patch: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [
            *(assets() / "kubectl", "patch", "--local", "--type=strategic"),
            *("-f", "-", "-o", "json", "-p", json.dumps(patch)),
        ],
        input=json.dumps(POD),
        capture_output=True,
        text=True,
        timeout=60,
        env={"PATH": os.environ["PATH"], "HOME": "/nonexistent", "KUBECONFIG": "/dev/null"},
    )


def without_unknown(pod: Any) -> Any:
    """Without the directives that kubectl leaves where it had nothing to merge; the API server
    drops them as unknown fields."""
    if isinstance(pod, dict):
        return {k: without_unknown(v) for k, v in pod.items() if k != "$retainKeys"}
    return [without_unknown(item) for item in pod] if isinstance(pod, list) else pod


def test_there_are_enough() -> None:
    assert len(OVERLAYS) >= 30


@pytest.mark.parametrize("name", OVERLAYS)
def test_overlays_as_kubectl_merges_them(name: str) -> None:
    theirs = kubectl(OVERLAYS[name])
    assert theirs.returncode == 0, theirs.stderr
    ours = overlay(POD, OVERLAYS[name])
    assert ours == without_unknown(json.loads(theirs.stdout))


@pytest.mark.parametrize("name", REFUSED)
def test_what_kubectl_refuses_is_refused(name: str) -> None:
    assert kubectl(REFUSED[name]).returncode != 0
    with pytest.raises(OverlayError, match=r"^podTemplate\.spec\."):
        overlay(POD, REFUSED[name])


@pytest.mark.parametrize("name", OVERLAYS)
def test_nothing_that_was_given_is_changed(name: str) -> None:
    pod, patch = copy.deepcopy(POD), copy.deepcopy(OVERLAYS[name])
    overlay(pod, patch)
    assert pod == POD
    assert patch == OVERLAYS[name]


json_values = st.recursive(
    st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("abc"), inner, max_size=3),
    max_leaves=10,
)


@given(st.dictionaries(st.text("abcd", min_size=1), json_values, max_size=4))
def test_a_patch_is_applied_once_and_for_all(patch: dict[str, Any]) -> None:
    once = overlay({"a": {"b": 1}, "c": [1]}, patch)
    assert overlay(once, patch) == once
    assert patch.keys() <= once.keys()


names = st.lists(st.sampled_from("PQRST"), unique=True)


@given(names, names)
def test_items_merge_without_loss(before: list[str], given: list[str]) -> None:
    def pod(items: list[str], value: str) -> dict[str, Any]:
        env = [{"name": name, "value": value} for name in items]
        return {"spec": {"containers": [{"name": "worker", "env": env}]}}

    merged = overlay(pod(before, "old"), pod(given, "new"))["spec"]["containers"][0]["env"]
    assert {item["name"]: item["value"] for item in merged} == {
        **dict.fromkeys(before, "old"),
        **dict.fromkeys(given, "new"),
    }
    assert len(merged) == len({*before, *given})
    assert [item["name"] for item in merged if item["name"] in given] == given
