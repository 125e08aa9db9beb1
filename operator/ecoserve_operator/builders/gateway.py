"""The gateway: an Envoy Deployment with its Service and configuration."""

from __future__ import annotations

import hashlib
import math

from ecoserve import gateway
from ecoserve_operator.api import EcoServeCluster
from ecoserve_operator.api.common import Resources
from ecoserve_operator.api.gateway import Gateway
from ecoserve_operator.builders import common
from ecoserve_operator.builders.common import GATEWAY, GATEWAY_HEALTH_PORT, GATEWAY_PORT, Json
from ecoserve_operator.builders.overlay import overlay
from ecoserve_operator.fields import quantity_value

_FOLDER = "/etc/ecoserve/gateway"
_RUN = "/run/ecoserve"
_TLS, _KEYS = "/etc/ecoserve/tls", "/etc/ecoserve/api-keys"
_RELAY = "/run/ecoserve-relay"
_ADMIN = "127.0.0.1:9901"
# After its last answer, or the end of the drain: Envoy's own end.
_END_S = 15


def url(cluster: EcoServeCluster) -> str:
    """Where clients inside of Kubernetes reach it."""
    scheme = "http" if cluster.spec.gateway.tls is None else "https"
    port = cluster.spec.gateway.service.port
    usual = {"http": 80, "https": 443}[scheme]
    suffix = f":{port}" if port not in (None, usual) else ""
    return f"{scheme}://{cluster.metadata.name}.{cluster.metadata.namespace}.svc{suffix}/v1"


def objects(cluster: EcoServeCluster, installation: common.Installation) -> list[Json]:
    """Service account, ConfigMap, Deployment, Service and disruption budget of the gateway; nothing
    if there is none. Raises ``OverlayError``, a ``ValueError``."""
    if not cluster.spec.gateway.enabled:
        return []
    files = _files(cluster, installation)
    return [
        common.service_account(cluster, GATEWAY),
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": common.metadata(cluster, _name(cluster), GATEWAY),
            "data": files,
        },
        _deployment(cluster, installation, files),
        _service(cluster),
        _budget(cluster),
    ]


def _name(cluster: EcoServeCluster) -> str:
    return f"{cluster.metadata.name}-{GATEWAY}"


def _files(cluster: EcoServeCluster, installation: common.Installation) -> dict[str, str]:
    spec = cluster.spec.gateway
    config = gateway.GatewayConfig(
        listen=f"0.0.0.0:{GATEWAY_PORT}",
        admin=_ADMIN,
        status=f"0.0.0.0:{GATEWAY_HEALTH_PORT}",
        scheduler=common.scheduler(cluster, installation),
        cluster=common.key(cluster),
        body_limit=int(quantity_value(spec.body_limit)),
        idle_timeout_s=spec.idle_timeout,
        api_keys_file=f"{_RUN}/keys.json" if spec.api_keys is not None else None,
        tls_file=f"{_FOLDER}/tls.json" if spec.tls is not None else None,
        mtls=_mtls(cluster, installation),
        drain_s=cluster.spec.drain.timeout,
        access_log="/dev/stdout",
        relay=_RELAY if spec.relay.enabled else None,
    )
    files = {"envoy.json": gateway.dump(config)}
    if spec.tls is not None:
        files["tls.json"] = gateway.tls_file_text(_TLS)
    if cluster.spec.mtls.enabled:
        files |= gateway.mtls_files(common.MTLS)
    return files


def _mtls(cluster: EcoServeCluster, installation: common.Installation) -> gateway.MutualTls | None:
    if not cluster.spec.mtls.enabled:
        return None
    host, _, _ = installation.scheduler_tls.rpartition(":")
    return gateway.MutualTls(_FOLDER, common.identity_of(cluster, common.WORKER), host)


def _deployment(
    cluster: EcoServeCluster, installation: common.Installation, files: dict[str, str]
) -> Json:
    spec = cluster.spec.gateway
    labels = common.labels(cluster, GATEWAY)
    digest = hashlib.sha256("\0".join(files.values()).encode()).hexdigest()[:16]
    template: Json = {
        "metadata": {"labels": labels},
        "spec": {
            "serviceAccountName": _name(cluster),
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "terminationGracePeriodSeconds": math.ceil(cluster.spec.drain.timeout) + _END_S,
            "securityContext": common.pod_security(),
            "containers": [_container(cluster, installation), *_relay(cluster, installation)],
            "volumes": _volumes(cluster),
            # Two on one node would be lost together.
            "topologySpreadConstraints": [
                {
                    "maxSkew": 1,
                    "topologyKey": "kubernetes.io/hostname",
                    "whenUnsatisfiable": "ScheduleAnyway",
                    "labelSelector": {"matchLabels": common.selector(cluster, GATEWAY)},
                }
            ],
            **common.pull_secrets([], installation),
        },
    }
    template = overlay(template, spec.pod_template, "spec.gateway.podTemplate")
    common.check_metadata(template, labels, "spec.gateway.podTemplate")
    metadata = template.get("metadata", {})
    template["metadata"] = {
        **metadata,
        "labels": {**metadata.get("labels", {}), **labels},
        # Envoy does not read its configuration again: another one is another Pod.
        "annotations": {**metadata.get("annotations", {}), "ecoserve.io/config": digest},
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": common.metadata(cluster, _name(cluster), GATEWAY),
        "spec": {
            "replicas": spec.replicas,
            "revisionHistoryLimit": 3,
            "selector": {"matchLabels": common.selector(cluster, GATEWAY)},
            "strategy": {
                "type": "RollingUpdate",
                "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1},
            },
            "template": template,
        },
    }


def _container(cluster: EcoServeCluster, installation: common.Installation) -> Json:
    spec = cluster.spec.gateway
    keys = ("--keys-from", _KEYS, "--keys-to", f"{_RUN}/keys.json")
    return {
        "name": "envoy",
        **common.image(spec.image, None, installation.gateway_image, installation),
        "command": ["python", "-m", "ecoserve.gateway"],
        "args": [
            *("--config", f"{_FOLDER}/envoy.json"),
            *("--admin", _ADMIN),
            *("--drain-timeout", f"{cluster.spec.drain.timeout:g}"),
            *(keys if spec.api_keys is not None else ()),
        ],
        "ports": [
            {"name": "http", "containerPort": GATEWAY_PORT, "protocol": "TCP"},
            {"name": "health", "containerPort": GATEWAY_HEALTH_PORT, "protocol": "TCP"},
        ],
        "resources": _resources(spec.resources),
        "livenessProbe": common.probe(
            "/live", GATEWAY_HEALTH_PORT, periodSeconds=10, timeoutSeconds=5, failureThreshold=6
        ),
        "readinessProbe": common.probe(
            "/healthz", GATEWAY_HEALTH_PORT, periodSeconds=2, timeoutSeconds=2, failureThreshold=2
        ),
        "securityContext": common.container_security(),
        "volumeMounts": [
            {"name": "config", "mountPath": _FOLDER, "readOnly": True},
            {"name": "run", "mountPath": _RUN},
            *_relay_mounts(spec),
            *common.mtls_mounts(cluster),
            *([{"name": "tls", "mountPath": _TLS, "readOnly": True}] if spec.tls else []),
            *(
                [{"name": "api-keys", "mountPath": _KEYS, "readOnly": True}]
                if spec.api_keys
                else []
            ),
        ],
    }


def _relay(cluster: EcoServeCluster, installation: common.Installation) -> list[Json]:
    """The stream relay's container, if there is one. Kubelet cannot ask a Unix socket how it is;
    Envoy does, and passes it by."""
    spec = cluster.spec.gateway
    if not spec.relay.enabled:
        return []
    return [
        {
            "name": "relay",
            **common.image(spec.image, None, installation.gateway_image, installation),
            "command": ["python", "-m", "ecoserve.relay"],
            "args": [
                *("--sockets", _RELAY),
                *("--drain-timeout", f"{cluster.spec.drain.timeout:g}"),
            ],
            "resources": _resources(spec.relay.resources),
            "securityContext": common.container_security(),
            "volumeMounts": _relay_mounts(spec),
        }
    ]


def _relay_mounts(spec: Gateway) -> list[Json]:
    return [{"name": "relay", "mountPath": _RELAY}] if spec.relay.enabled else []


def _resources(resources: Resources) -> Json:
    return {
        **({"requests": resources.requests} if resources.requests else {}),
        **({"limits": resources.limits} if resources.limits else {}),
    }


def _volumes(cluster: EcoServeCluster) -> list[Json]:
    spec = cluster.spec.gateway
    volumes: list[Json] = [
        {"name": "config", "configMap": {"name": _name(cluster)}},
        {"name": "run", "emptyDir": {"medium": "Memory", "sizeLimit": "8Mi"}},
        *common.mtls_volumes(cluster, GATEWAY),
    ]
    if spec.relay.enabled:
        volumes.append({"name": "relay", "emptyDir": {"medium": "Memory", "sizeLimit": "1Mi"}})
    if spec.tls is not None:
        volumes.append({"name": "tls", "secret": {"secretName": spec.tls.secret_name}})
    if spec.api_keys is not None:
        volumes.append({"name": "api-keys", "secret": {"secretName": spec.api_keys.secret_name}})
    return volumes


def _service(cluster: EcoServeCluster) -> Json:
    spec = cluster.spec.gateway
    port: Json = {
        "name": "http" if spec.tls is None else "https",
        "port": spec.service.port or (80 if spec.tls is None else 443),
        "targetPort": GATEWAY_PORT,
        "protocol": "TCP",
    }
    if spec.service.node_port is not None:
        port["nodePort"] = spec.service.node_port
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": common.metadata(
            cluster, cluster.metadata.name, GATEWAY, annotations=spec.service.annotations
        ),
        "spec": {
            "type": spec.service.type,
            "selector": common.selector(cluster, GATEWAY),
            "ports": [port],
        },
    }


def _budget(cluster: EcoServeCluster) -> Json:
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": common.metadata(cluster, _name(cluster), GATEWAY),
        "spec": {
            "maxUnavailable": 1,
            "selector": {"matchLabels": common.selector(cluster, GATEWAY)},
            # One that is not ready serves nobody.
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
        },
    }
