"""The InferencePool, for gateways that speak the Gateway API Inference Extension.

A pool names its picker by a Service of its own namespace, but the scheduler runs in the operator's.
So the Service has no selector, and an EndpointSlice says where the scheduler's Pod is. With mutual
TLS a foreign gateway needs the certificate of the cluster's own gateways, for workers and picker.
"""

from __future__ import annotations

from ecoserve_operator.api import EcoServeCluster
from ecoserve_operator.builders import common
from ecoserve_operator.builders.common import (
    PICKER_PORT,
    PICKER_TLS_PORT,
    WORKER,
    WORKER_PORT,
    Json,
)

PICKER = "picker"


def objects(cluster: EcoServeCluster, installation: common.Installation) -> list[Json]:
    """InferencePool, Service and EndpointSlice; nothing if it is switched off, or cannot be."""
    ip = installation.scheduler_ip
    if not (cluster.spec.inference_pool.enabled and installation.inference_pools and ip):
        return []
    name = cluster.metadata.name
    picker = f"{name}-{PICKER}"
    slice_of = {
        "kubernetes.io/service-name": picker,
        "endpointslice.kubernetes.io/managed-by": "ecoserve-operator",
    }
    secure = cluster.spec.mtls.enabled
    number = PICKER_TLS_PORT if secure else PICKER_PORT
    port = {"name": "grpc", "port": number, "protocol": "TCP"}
    if not secure:
        port["appProtocol"] = "kubernetes.io/h2c"
    return [
        {
            "apiVersion": "inference.networking.k8s.io/v1",
            "kind": "InferencePool",
            "metadata": common.metadata(cluster, name, PICKER),
            "spec": {
                "selector": {"matchLabels": common.selector(cluster, WORKER)},
                "targetPorts": [{"number": WORKER_PORT}],
                "endpointPickerRef": {
                    "name": picker,
                    "port": {"number": number},
                    # As our own gateway does when the scheduler is away.
                    "failureMode": "FailOpen",
                },
            },
        },
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": common.metadata(cluster, picker, PICKER),
            "spec": {"ports": [{**port, "targetPort": number}]},
        },
        {
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "metadata": common.metadata(cluster, picker, PICKER, more=slice_of),
            "addressType": "IPv6" if ":" in ip else "IPv4",
            "ports": [port],
            "endpoints": [{"addresses": [ip], "conditions": {"ready": True}}],
        },
    ]
