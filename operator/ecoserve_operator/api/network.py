"""Who may connect to what, and by which certificates."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from ecoserve_operator.api.common import HOUR, Labels
from ecoserve_operator.fields import Duration, Object, ObjectName, Rule, Within, immutable


class Requirement(Object):
    """A requirement of a label selector."""

    key: Annotated[str, StringConstraints(min_length=1, max_length=317)]
    """The label."""
    operator: Literal["In", "NotIn", "Exists", "DoesNotExist"]
    """How it is compared with the values."""
    values: Annotated[
        list[Annotated[str, StringConstraints(max_length=63)]], Field(max_length=64)
    ] = []
    """Values for In and NotIn."""


class Selector(Object):
    """A label selector; an empty one selects everything."""

    match_labels: Labels = {}
    """Labels with their values."""
    match_expressions: Annotated[list[Requirement], Field(max_length=16)] = []
    """Further requirements."""


class Peer(Object):
    """Pods by namespace and label."""

    rules = (
        Rule(
            "has(self.namespaceSelector) || has(self.podSelector)",
            "namespaceSelector or podSelector must be set",
            lambda self: self.namespace_selector is not None or self.pod_selector is not None,
        ),
    )

    namespace_selector: Selector | None = None
    """Namespaces of the Pods. Unset: the cluster's own."""
    pod_selector: Selector | None = None
    """The Pods. Unset: all of those namespaces."""


Peers = Annotated[list[Peer], Field(max_length=16)]


class NetworkPolicy(Object):
    """Who may connect to what. Without further peers: gateways to workers, both to the scheduler,
    anyone to the gateway, nobody to the metrics."""

    enabled: bool = True
    """Make NetworkPolicies."""
    prometheus: Peers = []
    """Pods that may reach the metrics ports."""
    gateways: Peers = []
    """Foreign gateways that may reach workers, e.g. those that use the InferencePool."""
    clients: Peers = []
    """Pods that may reach the gateway. Empty: anyone."""


class MTLS(Object):
    """Mutual TLS between gateway, scheduler and workers."""

    enabled: Annotated[
        bool,
        Field(
            json_schema_extra={
                "x-kubernetes-validations": [
                    immutable("running workers could not be reached; make a new one").schema()
                ]
            }
        ),
    ] = True
    """Encrypt and authenticate both ways. Immutable."""
    gateway_secret: ObjectName | None = None
    """Secret with tls.crt, tls.key and ca.crt for the gateways, e.g. of cert-manager; its DNS name
    must be gateway.<cluster>.<namespace>.svc. It is copied, and changes of it are taken over live.
    Unset: issued by the operator."""
    worker_secret: ObjectName | None = None
    """The same for the workers, with the DNS name worker.<cluster>.<namespace>.svc."""
    lifetime: Annotated[Duration, Within("1h", "87600h")] = 2160 * HOUR
    """Validity of the certificates that the operator issues; they are renewed after two thirds of
    it, live."""

    rules = (
        Rule(
            "has(self.gatewaySecret) == has(self.workerSecret)",
            "gatewaySecret and workerSecret must be set together",
            lambda self: (self.gateway_secret is None) == (self.worker_secret is None),
        ),
    )
