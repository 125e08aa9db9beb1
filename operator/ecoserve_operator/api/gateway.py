"""``spec.gateway``: the Envoy that clients talk to; and the pool for other gateways."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from ecoserve_operator.api.common import HOUR, Image, Port, Resources
from ecoserve_operator.fields import (
    Duration,
    Object,
    ObjectName,
    PodOverlay,
    Quantity,
    Rule,
    Within,
    WithinQuantity,
)


class GatewayService(Object):
    """The Service that clients connect to."""

    type: Literal["ClusterIP", "NodePort", "LoadBalancer"] = "ClusterIP"
    """Type of the Service."""
    port: Port | None = None
    """Its port. Unset: 443 with TLS, 80 without."""
    node_port: Annotated[int, Field(ge=1, le=65535)] | None = None
    """The node port, for NodePort and LoadBalancer. Unset: chosen by Kubernetes."""
    annotations: Annotated[dict[str, str], Field(max_length=64)] = {}
    """Annotations of the Service, e.g. for a cloud's load balancer."""

    rules = (
        Rule(
            "!has(self.nodePort) || self.type != 'ClusterIP'",
            "needs type NodePort or LoadBalancer",
            lambda self: self.node_port is None or self.type != "ClusterIP",
            ".nodePort",
        ),
    )


class SecretReference(Object):
    """A Secret in the cluster's namespace."""

    secret_name: ObjectName
    """Name of the Secret."""


class Relay(Object):
    """The stream relay, a process in Python beside each Envoy. Streams that ask for it with the
    header x-ecoserve-relay go through it, and go on on another worker when theirs dies."""

    enabled: bool = False
    """Whether there is one."""
    resources: Resources = Resources(
        requests={"cpu": "100m", "memory": "128Mi"}, limits={"memory": "512Mi"}
    )
    """Its CPU and memory."""


class Gateway(Object):
    """The Envoy that clients talk to."""

    enabled: bool = True
    """Whether the operator runs an Envoy for this cluster. Off where a gateway of your own picks
    endpoints by the InferencePool."""
    replicas: Annotated[int, Field(ge=1, le=100)] = 2
    """Number of Envoy Pods."""
    image: Image | None = None
    """Image with Envoy. Unset: the one that the operator was installed with."""
    service: GatewayService = GatewayService()
    """The Service that clients connect to."""
    tls: SecretReference | None = None
    """Secret of type kubernetes.io/tls; clients then connect by TLS. Changes are taken over
    live."""
    api_keys: SecretReference | None = None
    """Secret whose values are API keys, one of which clients must send as a bearer token. Changes
    are taken over live."""
    body_limit: Annotated[Quantity, WithinQuantity("1Ki", "2Gi")] = "16Mi"
    """Largest request body; larger ones get a 413."""
    idle_timeout: Annotated[Duration, Within("1s", "24h")] = HOUR
    """How long a request or an answer may be silent."""
    resources: Resources = Resources(
        requests={"cpu": "100m", "memory": "128Mi"}, limits={"memory": "512Mi"}
    )
    """CPU and memory of an Envoy Pod."""
    relay: Relay = Relay()
    """The stream relay."""
    pod_template: PodOverlay = {}
    """Overlay of the gateway's Pods (metadata, spec), merged as kubectl patch --type=strategic
    does."""


class InferencePool(Object):
    """The pool for gateways that speak the Gateway API Inference Extension."""

    enabled: bool = True
    """Make an InferencePool if its CRD is installed."""
