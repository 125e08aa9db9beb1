"""The worker Pod that is made of an EcoServeCluster, and what replaces it."""

from __future__ import annotations

import dataclasses
import re

import pytest
from ecoserve_operator.builders import Builders, OverlayError
from ecoserve_worker.options import parse

from tests.operator.built import (
    BUILDERS,
    INSTALLATION,
    SPECS,
    Json,
    cluster,
    container,
    objects,
    worker,
)


@pytest.mark.parametrize("spec", SPECS)
def test_the_worker_takes_its_arguments(spec: str) -> None:
    arguments = container(worker(spec))["args"]
    options = parse([argument.replace("$(POD_IP)", "10.0.0.7") for argument in arguments])
    assert options.cluster == "default/demo"
    assert options.instance == "demo-3"
    assert options.scheduler == INSTALLATION.scheduler_tls
    assert options.tls_gateway == "gateway.demo.default.svc"
    assert options.host == "10.0.0.7"
    assert (options.port, options.health_port) == (8000, 8001)
    assert options.drain_timeout == cluster(spec).spec.drain.timeout
    assert "--model" in options.engine


def test_gpus_and_parallel_sizes() -> None:
    pod = worker("on GPUs")
    item = container(pod)
    assert item["resources"] == {
        "requests": {"cpu": "8", "memory": "64Gi", "nvidia.com/gpu": "4"},
        "limits": {"memory": "64Gi", "nvidia.com/gpu": "4"},
    }
    text = " ".join(item["args"])
    assert "--tensor-parallel-size 2 --pipeline-parallel-size 2" in text
    assert text.endswith("--max-model-len 8192 $$(HOME)")
    assert pod["spec"]["nodeSelector"] == {"gpu": "l20"}
    assert pod["spec"]["tolerations"] == [{"key": "nvidia.com/gpu", "operator": "Exists"}]
    assert pod["spec"]["priorityClassName"] == "high"
    assert pod["spec"]["runtimeClassName"] == "nvidia"
    assert pod["spec"]["imagePullSecrets"] == [{"name": "registry"}]
    shm = {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "16Gi"}}
    assert shm in pod["spec"]["volumes"]
    assert item["startupProbe"]["failureThreshold"] * item["startupProbe"]["periodSeconds"] == 3600
    assert pod["spec"]["terminationGracePeriodSeconds"] == 120


def test_cpus() -> None:
    item = container(worker("on CPUs"))
    assert item["resources"] == {"requests": {"cpu": "2500m"}}
    values = {entry["name"]: entry.get("value") for entry in item["env"]}
    assert values["OMP_NUM_THREADS"] == "2"
    assert values["VLLM_CPU_OMP_THREADS_BIND"] == "0-1"  # the spec's own
    assert len(item["env"]) == len(values)
    assert "--tensor-parallel-size" not in item["args"]


@pytest.mark.parametrize(
    ("spec", "path", "volume"),
    [
        ("least", "/model", None),
        (
            "from a volume",
            "/model/a/b",
            {"persistentVolumeClaim": {"claimName": "weights", "readOnly": True}},
        ),
        (
            "from an image",
            "/model/m",
            {"image": {"reference": "models/m:1", "pullPolicy": "IfNotPresent"}},
        ),
    ],
)
def test_weights(spec: str, path: str, volume: Json | None) -> None:
    pod = worker(spec)
    arguments = container(pod)["args"]
    assert arguments[arguments.index("--model") + 1] == path
    volumes = {item["name"]: item for item in pod["spec"]["volumes"]}
    mounts = {item["name"]: item for item in container(pod)["volumeMounts"]}
    assert volumes.keys() == mounts.keys()
    assert volumes.get("model") == (volume and {"name": "model", **volume})
    if volume:
        assert mounts["model"] == {"name": "model", "mountPath": "/model", "readOnly": True}


def test_readiness_is_the_schedulers_to_give() -> None:
    pod = worker()
    assert pod["spec"]["readinessGates"] == [{"conditionType": "ecoserve.io/accepted"}]
    item = container(pod)
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert item[probe]["httpGet"]["port"] == 8001
    assert item["readinessProbe"]["httpGet"]["path"] == "/ecoserve/health"


def test_an_overlay_changes_all_but_the_identity() -> None:
    pod = worker("with an overlay")
    assert pod["metadata"]["name"] == "demo-3"
    labels = pod["metadata"]["labels"]
    assert labels["team"] == "nlp"
    assert labels["ecoserve.io/cluster"] == "demo"
    assert labels["ecoserve.io/index"] == "3"
    assert {"name": "EXTRA", "value": "1"} in container(pod)["env"]
    assert container(pod, "sidecar")["image"] == "sidecar:1"
    assert container(pod)["args"]


def test_a_bad_overlay_is_named() -> None:
    bad = {"podTemplate": {"spec": {"containers": [{"image": "x"}]}}}
    with pytest.raises(OverlayError, match=r"spec\.podTemplate\.spec\.containers\[0\]: name"):
        worker(bad)
    with pytest.raises(OverlayError, match=r"spec\.gateway\.podTemplate\.spec\.containers"):
        objects({"gateway": bad})


@pytest.mark.parametrize(
    ("metadata", "named"),
    [
        ({"labels": {"ecoserve.io/cluster": "other"}}, r"labels: ecoserve\.io/cluster is the"),
        ({"labels": {"app.kubernetes.io/component": "x"}}, r"labels: app\.kubernetes\.io/comp"),
        ({"labels": {"ecoserve.io/macro-instance": "m"}}, r"labels: ecoserve\.io/macro-inst"),
        ({"annotations": {"ecoserve.io/leaving-since": "x"}}, r"annotations: ecoserve\.io/leav"),
    ],
)
def test_an_overlay_does_not_say_whose_a_pod_is(metadata: Json, named: str) -> None:
    bad = {"podTemplate": {"metadata": metadata}}
    with pytest.raises(OverlayError, match=r"spec\.podTemplate\.metadata\." + named):
        worker(bad)
    with pytest.raises(OverlayError, match=r"spec\.gateway\.podTemplate\.metadata\." + named):
        objects({"gateway": bad})


@pytest.mark.parametrize(
    ("engine", "says"),
    [
        (
            {"args": ["--seed", "1", "--tensor-parallel-size", "2"]},
            "spec.engine.args[2]: --tensor-parallel-size must not be given here: set "
            "spec.parallelism.tensor",
        ),
        ({"args": ["-tp", "2"]}, "spec.engine.args[0]: -tp must not be given here: set spec.par"),
        ({"args": ["--tensor_parallel_size=2"]}, "spec.engine.args[0]: --tensor-parallel-size mu"),
        ({"args": ["--tensor-par=2"]}, "--tensor-par (--tensor-parallel-size) must not be given"),
        ({"args": ["--pipeline_parallel_size", "2"]}, "set spec.parallelism.pipeline"),
        ({"args": ["--port=8001"]}, "a worker has EcoServe's own server"),
        ({"args": ["--model", "/other"]}, "set spec.model.source"),
        ({"args": ["--served-model-name", "x"]}, "set spec.model.name"),
        ({"args": ["--scheduler-cls", "x"]}, "set spec.policy"),
        ({"args": ["--no-enable-prefix-caching"]}, "set spec.kvTiers.warm"),
        ({"args": ["--config", "/x.yaml"]}, "nobody looks into a file of them"),
        ({"env": [{"name": "POD_IP", "value": "::"}]}, "spec.engine.env[0]: POD_IP is the operat"),
        (
            {"resources": {"limits": {"nvidia.com/gpu": "2"}}},
            "spec.engine.resources.limits: nvidia.com/gpu must not be given here: set "
            "spec.parallelism, which makes it 1",
        ),
    ],
)
def test_what_has_a_field_of_its_own_is_not_set_otherwise(engine: Json, says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)):
        worker({"engine": engine})


def test_what_says_the_same_is_taken() -> None:
    engine = {"resources": {"limits": {"nvidia.com/gpu": "1"}}, "args": ["--max-model-len", "-1"]}
    assert container(worker({"engine": engine}))["resources"]["limits"]["nvidia.com/gpu"] == "1"
    on_cpus = {"device": {"type": "cpu"}, "engine": {"resources": {"limits": {"amd.com/gpu": 2}}}}
    assert worker(on_cpus)


# --- the revision --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "rolls"),
    [
        ({"engine": {"image": "worker:2"}}, True),
        ({"engine": {"args": ["--max-model-len", "4096"]}}, True),
        ({"parallelism": {"tensor": 2}}, True),
        ({"placement": {"nodeSelector": {"zone": "a"}}}, True),
        ({"podTemplate": {"spec": {"hostname": "x"}}}, True),
        ({"kvTiers": {"warm": False}}, True),
        ({"slo": {"ttft": "1s", "tpot": "50ms"}}, False),
        ({"policy": {"name": "padg", "debug": True}}, False),
        ({"replicas": 7, "maxReplicas": 9}, False),
        ({"drain": {"timeout": "1m"}}, False),
        ({"gateway": {"replicas": 5}}, False),
        ({"monitoring": {"enabled": False}}, False),
    ],
)
def test_only_what_a_worker_is_made_from_replaces_it(change: Json, rolls: bool) -> None:
    before, after = BUILDERS.revision(cluster()), BUILDERS.revision(cluster(change))
    assert (before != after) is rolls


def test_another_installation_replaces_no_worker() -> None:
    other = Builders(dataclasses.replace(INSTALLATION, worker_image="worker:2"))
    assert other.revision(cluster()) == BUILDERS.revision(cluster())
    assert container(other.worker(cluster(), "demo-4"))["image"] == "worker:2"
