"""What all objects of a cluster have in common."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from ecoserve_operator.api import API_VERSION, GROUP, EcoServeCluster
from ecoserve_operator.api.common import LocalReference
from ecoserve_operator.builders.overlay import OverlayError
from ecoserve_operator.names import CLUSTER_LABEL, identity, tls_secret

Json: TypeAlias = dict[str, Any]

COMPONENT_LABEL = "app.kubernetes.io/component"
WORKER, GATEWAY = "worker", "gateway"

# Where containers listen. Probes and metrics have plain ports of their own: neither the kubelet nor
# Prometheus has a certificate.
WORKER_PORT, WORKER_HEALTH_PORT = 8000, 8001
GATEWAY_PORT, GATEWAY_HEALTH_PORT = 8080, 8081
PICKER_PORT, PICKER_TLS_PORT = 9002, 9004
# Where the Secret with a component's certificate is mounted.
MTLS = "/etc/ecoserve/mtls"


@dataclass(frozen=True, slots=True)
class Installation:
    """What the operator was installed with. ``scheduler`` is host:port of its gRPC as Pods reach
    it, ``scheduler_tls`` that of its gRPC by mutual TLS, ``scheduler_ip`` the address of the
    scheduler's Pod, ``pull_policy`` that of the default images, ``inference_pools`` whether their
    CRD is there."""

    worker_image: str
    gateway_image: str
    scheduler: str
    scheduler_tls: str
    scheduler_ip: str | None = None
    pull_policy: str = "IfNotPresent"
    pull_secrets: tuple[str, ...] = ()
    inference_pools: bool = False


def selector(cluster: EcoServeCluster, component: str) -> dict[str, str]:
    """The labels that tell a cluster's Pods of one component."""
    return {CLUSTER_LABEL: cluster.metadata.name, COMPONENT_LABEL: component}


def labels(cluster: EcoServeCluster, component: str) -> dict[str, str]:
    """All labels of an object, but those that the controller changes."""
    return {
        "app.kubernetes.io/name": "ecoserve",
        "app.kubernetes.io/instance": cluster.metadata.name,
        "app.kubernetes.io/managed-by": "ecoserve-operator",
        **selector(cluster, component),
    }


def metadata(
    cluster: EcoServeCluster,
    name: str,
    component: str,
    *,
    more: Mapping[str, str] | None = None,
    annotations: Mapping[str, str] | None = None,
) -> Json:
    """The metadata of an object that belongs to the cluster; ``more`` are further labels."""
    return {
        "name": name,
        "namespace": cluster.metadata.namespace,
        "labels": {**(more or {}), **labels(cluster, component)},
        **({"annotations": dict(annotations)} if annotations else {}),
        "ownerReferences": [
            {
                "apiVersion": API_VERSION,
                "kind": "EcoServeCluster",
                "name": cluster.metadata.name,
                "uid": cluster.metadata.uid or "",
                "controller": True,
                "blockOwnerDeletion": False,
            }
        ],
    }


def scheduler(cluster: EcoServeCluster, installation: Installation) -> str:
    """host:port of the scheduler's gRPC for the cluster's Pods."""
    return installation.scheduler_tls if cluster.spec.mtls.enabled else installation.scheduler


def identity_of(cluster: EcoServeCluster, component: str) -> str:
    """The DNS name in the certificate of the cluster's component."""
    return identity(cluster.metadata.namespace or "", cluster.metadata.name, component)


def mtls_volumes(cluster: EcoServeCluster, component: str) -> list[Json]:
    """The volume with the component's certificate; none where there is no mutual TLS."""
    if not cluster.spec.mtls.enabled:
        return []
    name = tls_secret(cluster.metadata.name, component)
    return [{"name": "mtls", "secret": {"secretName": name}}]


def mtls_mounts(cluster: EcoServeCluster) -> list[Json]:
    """Where it is mounted."""
    if not cluster.spec.mtls.enabled:
        return []
    return [{"name": "mtls", "mountPath": MTLS, "readOnly": True}]


def check_metadata(pod: Json, labels: Mapping[str, str], path: str) -> None:
    """Raises ``OverlayError`` where an overlay, the field ``path``, has given the Pod other labels
    than ``labels`` of those names, or labels or annotations of the operator's own."""
    metadata = pod.get("metadata") or {}
    for field, ours in (("labels", labels), ("annotations", {})):
        for name, value in (metadata.get(field) or {}).items():
            if ours.get(name, value) != value or (
                name.startswith(f"{GROUP}/") and name not in ours
            ):
                raise OverlayError(f"{path}.metadata.{field}: {name} is the operator's own")


def key(cluster: EcoServeCluster) -> str:
    """The cluster's name in the scheduler."""
    return f"{cluster.metadata.namespace}/{cluster.metadata.name}"


def pod_security() -> Json:
    """A Pod's security context under the ``restricted`` standard. No user is named: the images have
    theirs, and some clusters choose one."""
    return {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}


def container_security() -> Json:
    """A container's security context under the ``restricted`` standard, and a root file system that
    nobody writes to."""
    return {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": True,
    }


def image(
    own: str | None, policy: str | None, default: str, installation: Installation
) -> dict[str, str]:
    """Image and pull policy of a container; ``own`` is what the spec says."""
    if own is not None:
        return {"image": own, "imagePullPolicy": policy or installation.pull_policy}
    return {"image": default, "imagePullPolicy": installation.pull_policy}


def pull_secrets(own: list[LocalReference], installation: Installation) -> Json:
    """The Pod's pull secrets: the spec's, and those of the installation."""
    names = dict.fromkeys([*(ref.name for ref in own), *installation.pull_secrets])
    return {"imagePullSecrets": [{"name": name} for name in names]} if names else {}


def probe(path: str, port: int, **timing: int) -> Json:
    """A probe by HTTP; ``timing`` are its further fields."""
    return {"httpGet": {"path": path, "port": port}, **timing}


def service_account(cluster: EcoServeCluster, component: str) -> Json:
    """A service account with no rights: its Pods do not talk to the API server."""
    return {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": metadata(cluster, f"{cluster.metadata.name}-{component}", component),
        "automountServiceAccountToken": False,
    }
