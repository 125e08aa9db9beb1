"""``EcoServeCluster``."""

from __future__ import annotations

import re
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from ecoserve_operator.api.common import NAME_LENGTH
from ecoserve_operator.api.conditions import Conditions, Count, Time
from ecoserve_operator.api.gateway import Gateway, InferencePool
from ecoserve_operator.api.metadata import Metadata
from ecoserve_operator.api.model import Model
from ecoserve_operator.api.network import MTLS, NetworkPolicy
from ecoserve_operator.api.operation import Disruption, Drain, Monitoring, Rollout
from ecoserve_operator.api.scaling import Autoscaling, Macro
from ecoserve_operator.api.scheduling import SLO, Policy
from ecoserve_operator.api.worker import Device, Engine, KVTiers, Parallelism, Placement
from ecoserve_operator.fields import NAME, Object, PodOverlay, Rule


class EcoServeClusterSpec(Object):
    """What the cluster should be."""

    rules = (
        Rule(
            "self.minReplicas <= self.maxReplicas",
            "must not be more than maxReplicas",
            lambda self: self.min_replicas <= self.max_replicas,
            ".minReplicas",
        ),
        Rule(
            "self.device.type != 'gpu' || "
            "self.parallelism.tensor * self.parallelism.pipeline <= self.device.perNode",
            "tensor x pipeline must not be more than device.perNode: an instance is one Pod on one "
            "node",
            lambda self: self.device.type != "gpu" or self.gpus <= self.device.per_node,
            ".parallelism",
        ),
        Rule(
            "self.device.type != 'cpu' || self.parallelism.tensor * self.parallelism.pipeline == 1",
            "tensor and pipeline must be 1 where device.type is cpu",
            lambda self: (
                self.device.type != "cpu"
                or self.parallelism.tensor * self.parallelism.pipeline == 1
            ),
            ".parallelism",
        ),
    )

    model: Model
    """The model to serve."""
    slo: SLO
    """What is promised to each request."""
    engine: Engine = Engine()
    """The vLLM engine of a worker."""
    device: Device = Device()
    """What the engine computes on."""
    parallelism: Parallelism = Parallelism()
    """How an instance is spread over the GPUs of its node."""
    replicas: Annotated[int, Field(ge=0, le=1024)] | None = None
    """Instances. Written by kubectl scale, an HPA or spec.autoscaling; outside of minReplicas to
    maxReplicas it is clamped. Unset: minReplicas."""
    min_replicas: Annotated[int, Field(ge=0, le=1024)] = 1
    """The least number of instances."""
    max_replicas: Annotated[int, Field(ge=1, le=1024)] = 64
    """The greatest number of instances."""
    macro: Macro = Macro()
    """Bounds of a macro instance's size."""
    autoscaling: Autoscaling = Autoscaling()
    """Scaling by what Prometheus reports."""
    policy: Policy = Policy()
    """How requests are scheduled."""
    kv_tiers: KVTiers = KVTiers()
    """Tiers of the KV cache."""
    placement: Placement = Placement()
    """Where workers run."""
    pod_template: PodOverlay = {}
    """Overlay of the workers' Pods (metadata, spec), merged as kubectl patch --type=strategic does.
    The worker's container is named worker."""
    gateway: Gateway = Gateway()
    """The Envoy that clients talk to."""
    inference_pool: InferencePool = InferencePool()
    """The pool for gateways that speak the Gateway API Inference Extension."""
    network_policy: NetworkPolicy = NetworkPolicy()
    """Who may connect to what."""
    mtls: MTLS = MTLS()
    """Mutual TLS between gateway, scheduler and workers."""
    drain: Drain = Drain()
    """How an instance is retired."""
    rollout: Rollout = Rollout()
    """How a changed template reaches the instances."""
    disruption: Disruption = Disruption()
    """The PodDisruptionBudget of the workers."""
    monitoring: Monitoring = Monitoring()
    """Objects for the Prometheus operator."""

    @property
    def gpus(self) -> int:
        """GPUs of an instance; 0 on CPUs."""
        if self.device.type == "cpu":
            return 0
        return self.parallelism.tensor * self.parallelism.pipeline

    @property
    def desired(self) -> int:
        """Instances wanted: ``replicas`` within its bounds."""
        wanted = self.min_replicas if self.replicas is None else self.replicas
        return min(max(wanted, self.min_replicas), self.max_replicas)


class Decision(Object):
    """A step of the autoscaler."""

    time: Time
    """When it was taken."""
    before: Count
    """Instances before."""
    after: Count
    """Instances after."""
    reason: str
    """Why, for people."""
    dry_run: bool = False
    """Decided only: spec.autoscaling.dryRun was set."""


class GroupStatus(Object):
    """A macro instance and its size, as decided."""

    name: str
    """Name of the macro instance."""
    replicas: Count
    """Instances that it is to have."""


class EcoServeClusterStatus(Object):
    """What the cluster is."""

    observed_generation: Count | None = None
    """The metadata.generation that the status is about."""
    replicas: Count = 0
    """Instances that exist, those that drain left out."""
    ready_replicas: Count = 0
    """Instances that take requests."""
    updated_replicas: Count = 0
    """Instances of the current template."""
    draining_replicas: Count = 0
    """Instances that finish their last requests."""
    macro_instances: Count = 0
    """Macro instances."""
    selector: str | None = None
    """Label selector of the workers, for the scale subresource."""
    revision: str | None = None
    """Hash of the current template."""
    next_index: Count = 0
    """The index of the next worker Pod; none is used twice."""
    groups: Annotated[
        list[GroupStatus],
        Field(
            json_schema_extra={
                "x-kubernetes-list-type": "map",
                "x-kubernetes-list-map-keys": ["name"],
            }
        ),
    ] = []
    """The macro instances that were decided on, with their sizes. A split or a merge changes this
    in one write; MacroInstances and Pods follow."""
    macro_lower: Count | None = None
    """N_l in force."""
    macro_upper: Count | None = None
    """N_u in force."""
    url: str | None = None
    """Base URL of the OpenAI-compatible API, inside of Kubernetes."""
    last_split_time: Time | None = None
    """When a macro instance was last split."""
    last_merge_time: Time | None = None
    """When macro instances were last merged."""
    scaling: Annotated[list[Decision], Field(max_length=10)] = []
    """The latest decisions of the autoscaler, newest first."""
    conditions: Conditions = []
    """Ready, Available, Progressing, Degraded, ReplicasClamped, Drained, Autoscaling."""


_NAME_RULE = Rule(
    f"self.metadata.name.size() <= {NAME_LENGTH} && self.metadata.name.matches('{NAME}')",
    f"metadata.name must be at most {NAME_LENGTH} lower-case letters, digits and dashes, and "
    "begin with a letter: Services and Pods are named after it",
    lambda self: (
        len(self.metadata.name) <= NAME_LENGTH
        and re.fullmatch(NAME, self.metadata.name) is not None
    ),
)


class EcoServeCluster(Object):
    """A model served within latency promises by instances that take turns at prefill."""

    plural: ClassVar[str] = "ecoserveclusters"
    rules = (_NAME_RULE,)

    api_version: Literal["ecoserve.io/v1alpha1"] = "ecoserve.io/v1alpha1"
    kind: Literal["EcoServeCluster"] = "EcoServeCluster"
    metadata: Metadata
    spec: EcoServeClusterSpec
    status: EcoServeClusterStatus = EcoServeClusterStatus()
