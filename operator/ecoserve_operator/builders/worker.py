"""The worker Pod: one instance of a cluster."""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import PurePosixPath

from ecoserve import engine_args
from ecoserve_operator.api import EcoServeCluster, EcoServeClusterSpec
from ecoserve_operator.api.model import ClaimSource
from ecoserve_operator.api.worker import RESERVED
from ecoserve_operator.builders import common
from ecoserve_operator.builders.common import (
    GATEWAY,
    WORKER,
    WORKER_HEALTH_PORT,
    WORKER_PORT,
    Json,
)
from ecoserve_operator.builders.overlay import overlay
from ecoserve_operator.fields import quantity_value
from ecoserve_operator.names import GATE, index_of

INDEX_LABEL = "ecoserve.io/index"
MODEL = "/model"
ADDRESS = "POD_IP"  # the variable with it
# Beyond the drain: the last answers and the engine's own end.
_END_S = 30
_PROBE_S = 5


def revision(cluster: EcoServeCluster) -> str:
    """The hash of all in the spec that a worker Pod is made from; another one means a rollout.

    It is of the spec rather than of the Pod, so that another version of the operator, or another
    default image, replaces no worker by itself.
    """
    spec = cluster.spec.dump()
    made_from = ("model", "engine", "device", "parallelism", "kvTiers", "placement", "podTemplate")
    text = json.dumps(
        {name: spec.get(name) for name in made_from}
        # What is in its Secret reaches a Pod while it runs.
        | {"mtls": spec["mtls"]["enabled"]},
        sort_keys=True,
    )
    return hashlib.sha256(text.encode()).hexdigest()[:10]


def worker(cluster: EcoServeCluster, name: str, installation: common.Installation) -> Json:
    """A worker Pod, with the spec's overlay on it. The labels that change in a Pod's life and its
    owner are the controller's to add.

    Raises ``ValueError`` for what fits no Pod, with the field's name; ``OverlayError`` is one.
    """
    spec = cluster.spec
    _check(spec)
    labels = common.labels(cluster, WORKER)
    labels[INDEX_LABEL] = str(index_of(name, labels))
    pod: Json = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "labels": labels,
            # Said to tools that choose one container for logs and exec.
            "annotations": {"kubectl.kubernetes.io/default-container": WORKER},
        },
        "spec": {
            "serviceAccountName": f"{cluster.metadata.name}-{WORKER}",
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            # A dead engine starts anew in its Pod; the scheduler knows it for a new incarnation.
            "restartPolicy": "Always",
            # SIGTERM is all it takes to drain, so there is no preStop hook.
            "terminationGracePeriodSeconds": math.ceil(spec.drain.timeout) + _END_S,
            "readinessGates": [{"conditionType": GATE}],
            "securityContext": common.pod_security(),
            "containers": [_container(cluster, name, installation)],
            "volumes": [*_volumes(spec), *common.mtls_volumes(cluster, WORKER)],
            **common.pull_secrets(spec.engine.image_pull_secrets, installation),
            **_placement(spec),
        },
    }
    pod = overlay(pod, spec.pod_template, "spec.podTemplate")
    common.check_metadata(pod, labels, "spec.podTemplate")
    # A template's name is nobody's, as in Kubernetes.
    metadata = pod.get("metadata", {})
    identity = {
        "name": name,
        "namespace": cluster.metadata.namespace,
        "labels": {**metadata.get("labels", {}), **labels},
    }
    return {**pod, "apiVersion": "v1", "kind": "Pod", "metadata": {**metadata, **identity}}


def _check(spec: EcoServeClusterSpec) -> None:
    """Refuses what would silently win over what the operator sets, or lose to it."""
    try:
        engine_args.check(spec.engine.args, RESERVED)
    except ValueError as error:
        raise ValueError(f"spec.engine.args{error}") from None
    for place, variable in enumerate(spec.engine.env):
        if variable.name == ADDRESS:
            raise ValueError(f"spec.engine.env[{place}]: {ADDRESS} is the operator's own")
    resource = spec.device.resource_name
    for field in ("requests", "limits"):
        given = getattr(spec.engine.resources, field).get(resource)
        if spec.gpus and given is not None and quantity_value(given) != spec.gpus:
            raise ValueError(
                f"spec.engine.resources.{field}: {resource} must not be given here: set "
                f"spec.parallelism, which makes it {spec.gpus}"
            )


def _container(cluster: EcoServeCluster, name: str, installation: common.Installation) -> Json:
    spec = cluster.spec
    engine = spec.engine
    return {
        "name": WORKER,
        **common.image(
            engine.image, engine.image_pull_policy, installation.worker_image, installation
        ),
        "command": ["python", "-m", "ecoserve_worker"],
        "args": _arguments(cluster, name, installation),
        "env": _environment(spec),
        "ports": [
            {"name": "http", "containerPort": WORKER_PORT, "protocol": "TCP"},
            {"name": "health", "containerPort": WORKER_HEALTH_PORT, "protocol": "TCP"},
        ],
        "resources": _resources(spec),
        # Nothing listens until the engine is up.
        "startupProbe": common.probe(
            "/ecoserve/live",
            WORKER_HEALTH_PORT,
            periodSeconds=_PROBE_S,
            timeoutSeconds=_PROBE_S,
            failureThreshold=math.ceil(engine.start_timeout / _PROBE_S),
        ),
        "livenessProbe": common.probe(
            "/ecoserve/live",
            WORKER_HEALTH_PORT,
            periodSeconds=10,
            timeoutSeconds=10,
            failureThreshold=6,
        ),
        # Ready once the scheduler has accepted it, until it drains.
        "readinessProbe": common.probe(
            "/ecoserve/health",
            WORKER_HEALTH_PORT,
            periodSeconds=_PROBE_S,
            timeoutSeconds=_PROBE_S,
            failureThreshold=3,
        ),
        "securityContext": common.container_security(),
        "volumeMounts": [*_mounts(spec), *common.mtls_mounts(cluster)],
    }


def _arguments(cluster: EcoServeCluster, name: str, installation: common.Installation) -> list[str]:
    """The worker's own arguments, then vLLM's. Policy, SLOs and debugging come from the scheduler,
    and change without a restart."""
    spec = cluster.spec
    return [
        *("--cluster", common.key(cluster)),
        *("--instance", name),
        *("--scheduler", common.scheduler(cluster, installation)),
        *("--host", f"$({ADDRESS})"),
        *("--port", str(WORKER_PORT)),
        *("--health-port", str(WORKER_HEALTH_PORT)),
        *("--state-dir", "/cache/calibration"),
        *("--drain-timeout", f"{spec.drain.timeout:g}"),
        *(
            ("--tls-files", common.MTLS, "--tls-gateway", common.identity_of(cluster, GATEWAY))
            if spec.mtls.enabled
            else ()
        ),
        "--",
        *("--model", model_path(spec)),
        *("--served-model-name", spec.model.name),
        *(
            ("--tensor-parallel-size", str(spec.parallelism.tensor))
            if spec.parallelism.tensor > 1
            else ()
        ),
        *(
            ("--pipeline-parallel-size", str(spec.parallelism.pipeline))
            if spec.parallelism.pipeline > 1
            else ()
        ),
        *(() if spec.kv_tiers.warm else ("--no-enable-prefix-caching",)),
        # Kubernetes would take "$(...)" for a variable.
        *(argument.replace("$(", "$$(") for argument in spec.engine.args),
    ]


def model_path(spec: EcoServeClusterSpec) -> str:
    """The model's directory inside the container."""
    source = spec.model.source
    if source.image is not None:
        return source.image.path
    mounted = source.pvc or source.image_volume
    assert mounted is not None
    return str(PurePosixPath(MODEL) / mounted.path.lstrip("/"))


def _environment(spec: EcoServeClusterSpec) -> list[Json]:
    """Plain variables, the spec's over ours, after the Pod's address."""
    values = _cpu_environment(spec) if spec.device.type == "cpu" else {}
    values |= {variable.name: variable.value for variable in spec.engine.env}
    address = {"name": ADDRESS, "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}
    return [address, *({"name": name, "value": value} for name, value in values.items())]


def _cpu_environment(spec: EcoServeClusterSpec) -> dict[str, str]:
    # Bound threads of several Pods would all sit on the same first cores.
    values = {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    resources = spec.engine.resources
    cores = resources.limits.get("cpu") or resources.requests.get("cpu")
    if cores is not None:
        values["OMP_NUM_THREADS"] = str(max(1, int(quantity_value(cores))))
    return values


def _resources(spec: EcoServeClusterSpec) -> Json:
    resources = spec.engine.resources
    gpus = {spec.device.resource_name: str(spec.gpus)} if spec.gpus else {}
    requests, limits = resources.requests | gpus, resources.limits | gpus
    return {
        **({"requests": requests} if requests else {}),
        **({"limits": limits} if limits else {}),
    }


def _volumes(spec: EcoServeClusterSpec) -> list[Json]:
    source = spec.model.source
    volumes: list[Json] = [
        # Compiled kernels and calibrations.
        {"name": "cache", "emptyDir": {}},
        {"name": "tmp", "emptyDir": {}},
        {
            "name": "shm",
            "emptyDir": {"medium": "Memory", "sizeLimit": spec.engine.shared_memory},
        },
    ]
    if isinstance(source.pvc, ClaimSource):
        claim = {"claimName": source.pvc.claim_name, "readOnly": True}
        volumes.append({"name": "model", "persistentVolumeClaim": claim})
    elif source.image_volume is not None:
        volume = source.image_volume
        oci = {"reference": volume.reference, "pullPolicy": volume.pull_policy}
        volumes.append({"name": "model", "image": oci})
    return volumes


def _mounts(spec: EcoServeClusterSpec) -> list[Json]:
    mounts: list[Json] = [
        {"name": "cache", "mountPath": "/cache"},
        {"name": "tmp", "mountPath": "/tmp"},
        {"name": "shm", "mountPath": "/dev/shm"},
    ]
    if spec.model.source.image is None:
        mounts.append({"name": "model", "mountPath": MODEL, "readOnly": True})
    return mounts


def _placement(spec: EcoServeClusterSpec) -> Json:
    placement = spec.placement
    found: Json = {
        "nodeSelector": placement.node_selector,
        "tolerations": [toleration.dump() for toleration in placement.tolerations],
        "priorityClassName": placement.priority_class_name,
        "runtimeClassName": placement.runtime_class_name,
    }
    return {name: value for name, value in found.items() if value}
