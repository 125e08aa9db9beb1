"""The custom resources, ``ecoserve.io/v1alpha1``: ``EcoServeCluster`` and ``MacroInstance``.

The CRDs in ``crds/`` are generated from these models (``make crds``), the docstrings included: they
are what ``kubectl explain`` shows. Durations are strings outside ("10m") and seconds in Python.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, StringConstraints

from ecoserve.policy import DEFAULT, POLICIES
from ecoserve_operator.fields import (
    NAME,
    Duration,
    Object,
    ObjectName,
    PodOverlay,
    Quantity,
    Rule,
    Within,
    WithinQuantity,
    immutable,
)

MINUTE, HOUR = 60.0, 3600.0

GROUP = "ecoserve.io"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"

# Pods are named <cluster>-<index>, macro instances <cluster>-<suffix>: both must fit in a label.
NAME_LENGTH = 40

Labels = Annotated[
    dict[str, Annotated[str, StringConstraints(max_length=63)]], Field(max_length=64)
]
Percent = Annotated[int, Field(ge=0, le=100)]
Port = Annotated[int, Field(ge=1, le=65535)]
Path = Annotated[str, StringConstraints(pattern=r"^/[^:]*$", max_length=1024)]
Image = Annotated[str, StringConstraints(min_length=1, max_length=1024, pattern=r"^\S+$")]
PullPolicy = Literal["Always", "IfNotPresent", "Never"]


# --- model -------------------------------------------------------------------------------------


class ClaimSource(Object):
    """A PersistentVolumeClaim that holds the weights."""

    claim_name: ObjectName
    """Name of the PersistentVolumeClaim, in the cluster's namespace. Several nodes must be able to
    mount it (ReadOnlyMany or ReadWriteMany) if workers are to run on several nodes."""
    path: Path = "/"
    """Directory of the model inside the volume."""


class WorkerImageSource(Object):
    """A directory of the worker image that holds the weights."""

    path: Path
    """Directory of the model inside the worker image (spec.engine.image)."""


class ImageVolumeSource(Object):
    """An OCI image with the weights, mounted as a volume. Needs Kubernetes 1.33 or later with image
    volumes switched on."""

    reference: Image
    """The OCI image that holds the weights."""
    pull_policy: PullPolicy = "IfNotPresent"
    """When the image is pulled."""
    path: Path = "/"
    """Directory of the model inside the image."""


class ModelSource(Object):
    """Where the weights are. Exactly one of the fields must be set."""

    rules = (
        Rule(
            "[has(self.pvc), has(self.image), has(self.imageVolume)].filter(x, x).size() == 1",
            "exactly one of pvc, image, imageVolume must be set",
            lambda self: sum(x is not None for x in (self.pvc, self.image, self.image_volume)) == 1,
        ),
    )

    pvc: ClaimSource | None = None
    """Weights in a PersistentVolumeClaim."""
    image: WorkerImageSource | None = None
    """Weights in the worker image itself."""
    image_volume: ImageVolumeSource | None = None
    """Weights in an OCI image of their own, mounted as a volume."""


class Model(Object):
    """The model to serve."""

    name: Annotated[
        str,
        StringConstraints(min_length=1, max_length=253, pattern=r"^[A-Za-z0-9][-A-Za-z0-9._/:]*$"),
        Field(
            json_schema_extra={
                "x-kubernetes-validations": [
                    immutable("clients call the model by it; make a new EcoServeCluster").schema()
                ]
            }
        ),
    ]
    """What clients call the model in their requests. Immutable."""
    source: ModelSource
    """Where the weights are."""


# --- workers -----------------------------------------------------------------------------------


class EnvVar(Object):
    """An environment variable with a plain value; for valueFrom use podTemplate."""

    name: Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_.-]*$", max_length=253)]
    """Name of the variable."""
    value: Annotated[str, StringConstraints(max_length=8192)] = ""
    """Its value."""


class LocalReference(Object):
    """A reference to an object in the same namespace."""

    name: ObjectName
    """Name of the object."""


class Resources(Object):
    """Compute resources of a container. GPUs are added by the operator."""

    requests: Annotated[dict[str, Quantity], Field(max_length=16)] = {}
    """What is reserved, by resource name (cpu, memory, ephemeral-storage, ...)."""
    limits: Annotated[dict[str, Quantity], Field(max_length=16)] = {}
    """What may be used at most, by resource name."""


class Engine(Object):
    """The vLLM engine of a worker."""

    image: Image | None = None
    """The worker image. Unset: the one that the operator was installed with."""
    image_pull_policy: PullPolicy = "IfNotPresent"
    """When the worker image is pulled."""
    image_pull_secrets: Annotated[list[LocalReference], Field(max_length=16)] = []
    """Secrets with the credentials of private registries."""
    args: Annotated[
        list[Annotated[str, StringConstraints(max_length=4096)]], Field(max_length=128)
    ] = []
    """Further arguments of vLLM, e.g. ["--max-model-len", "8192"]. Parallel sizes and the model
    come from their own fields."""
    env: Annotated[list[EnvVar], Field(max_length=128)] = []
    """Further environment variables of the worker."""
    resources: Resources = Resources()
    """CPU and memory of the worker container. GPUs come from spec.parallelism and spec.device."""
    shared_memory: Quantity = "8Gi"
    """Upper bound of /dev/shm, which the processes of an engine share; it counts as memory of the
    Pod as far as it is used."""
    start_timeout: Annotated[Duration, Within("1m", "24h")] = 30 * MINUTE
    """How long a worker may take to load its weights before it is restarted."""


class Device(Object):
    """What the engine computes on."""

    type: Annotated[
        Literal["gpu", "cpu"],
        Field(
            json_schema_extra={
                "x-kubernetes-validations": [immutable("make a new EcoServeCluster").schema()]
            }
        ),
    ] = "gpu"
    """gpu or cpu. Immutable."""
    resource_name: Annotated[
        str, StringConstraints(pattern=r"^[a-z0-9.-]+/[A-Za-z0-9._-]+$", max_length=253)
    ] = "nvidia.com/gpu"
    """The extended resource that stands for one GPU."""
    per_node: Annotated[int, Field(ge=1, le=64)] = 8
    """GPUs of a node. An instance must fit in one node."""


class Parallelism(Object):
    """How an instance is spread over the GPUs of its node; it takes tensor x pipeline of them."""

    tensor: Annotated[int, Field(ge=1, le=64)] = 1
    """Tensor-parallel size (TP)."""
    pipeline: Annotated[int, Field(ge=1, le=64)] = 1
    """Pipeline-parallel size (PP)."""


class Toleration(Object):
    """A taint that workers tolerate."""

    key: Annotated[str, StringConstraints(max_length=316)] | None = None
    """Key of the taint; unset with operator Exists: any."""
    operator: Literal["Equal", "Exists"] = "Equal"
    """How the value is compared."""
    value: Annotated[str, StringConstraints(max_length=63)] | None = None
    """Value of the taint, for operator Equal."""
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    """Effect of the taint; unset: all."""
    toleration_seconds: Annotated[int, Field(ge=0)] | None = None
    """How long NoExecute is tolerated; unset: for ever."""


class Placement(Object):
    """Where workers run. Affinity and topology spread go into podTemplate."""

    node_selector: Labels = {}
    """Labels that a worker's node must have."""
    tolerations: Annotated[list[Toleration], Field(max_length=32)] = []
    """Taints that workers tolerate."""
    priority_class_name: Annotated[str, StringConstraints(max_length=253)] | None = None
    """PriorityClass of the workers."""
    runtime_class_name: Annotated[str, StringConstraints(max_length=253)] | None = None
    """RuntimeClass of the workers, e.g. nvidia."""


# --- scheduling of requests --------------------------------------------------------------------


class SLO(Object):
    """What is promised to each request; a request may bring its own in headers."""

    ttft: Annotated[Duration, Within("1ms", "1h")]
    """Time to first token, e.g. 5s."""
    tpot: Annotated[Duration, Within("1ms", "1m")]
    """Time per output token after the first, e.g. 100ms."""


def _policy_rule(name: str) -> Rule:
    allowed = sorted(f.name for f in dataclasses.fields(POLICIES[name]) if f.init)  # type: ignore[arg-type]
    return Rule(
        f"self.name != '{name}' || !has(self.settings) || self.settings.all(k, k in {allowed})",
        f"must be settings of policy {name}, which has: {', '.join(allowed) or 'none'}",
        lambda self: self.name != name or set(self.settings) <= set(allowed),
        ".settings",
    )


def _known_policy(name: str) -> str:
    if name not in POLICIES:
        raise ValueError(f"must be one of {', '.join(POLICIES)}, not {name!r}")
    return name


class Policy(Object):
    """How requests are scheduled."""

    rules = tuple(map(_policy_rule, POLICIES))

    name: Annotated[
        str, AfterValidator(_known_policy), Field(json_schema_extra={"enum": list(POLICIES)})
    ] = DEFAULT
    """The scheduling policy."""
    settings: Annotated[dict[str, float], Field(max_length=16)] = {}
    """Settings of the policy by name, e.g. backlog, busy and margin of padg: the thresholds between
    prefill and decode."""
    late: Literal["serve", "shed"] = "serve"
    """What becomes of a request whose TTFT can no longer be met: served when there is room, or
    answered with 429."""
    late_wait: Annotated[Duration, Within("0s", "24h")] | None = None
    """A late request is served at the latest after this time; unset: the scheduler's default."""
    queue_limit: Annotated[int, Field(ge=1, le=1_000_000)] = 1024
    """Requests that may wait; of more, one is answered with 429."""
    ramp: Annotated[Duration, Within("0s", "1h")] = 20.0
    """Time over which a new instance's share of the requests rises to full."""
    debug: bool = False
    """Log each phase switch with its reason."""


# --- mitosis and scaling -----------------------------------------------------------------------


class Macro(Object):
    """Bounds of a macro instance's size. Unset: chosen by the GPUs of the cluster."""

    rules = (
        Rule(
            "!has(self.lower) || has(self.upper)",
            "must be set when lower is",
            lambda self: self.lower is None or self.upper is not None,
            ".upper",
        ),
        Rule(
            "!has(self.lower) || !has(self.upper) || self.upper + 1 >= 2 * self.lower",
            "must be at least 2 x lower - 1, or a split would leave less than lower",
            lambda self: (
                self.lower is None or self.upper is None or self.upper + 1 >= 2 * self.lower
            ),
            ".upper",
        ),
    )

    lower: Annotated[int, Field(ge=1, le=512)] | None = None
    """N_l: instances that a split gives to the new macro instance; below it a macro instance is
    merged with another. Unset: half of upper, rounded up."""
    upper: Annotated[int, Field(ge=1, le=1023)] | None = None
    """N_u: the most instances of a macro instance; one more, and it is split. Unset: 4 up to 16
    GPUs, 8 up to 64, 16 above."""
    merge_cooldown: Annotated[Duration, Within("0s", "24h")] = 5 * MINUTE
    """Least time after a split or a merge before the next merge."""


class Expand(Object):
    """When instances are added: any threshold, for as long as it says."""

    violation_percent: Percent = 5
    """Share of requests that break an SLO, in percent, above which the cluster grows."""
    violation_for: Annotated[Duration, Within("0s", "24h")] = MINUTE
    """How long it must stay above."""
    use_percent: Percent = 85
    """Device use in percent above which the cluster grows. Use is load as a share of the goodput
    within the SLOs."""
    use_for: Annotated[Duration, Within("0s", "24h")] = 5 * MINUTE
    """How long it must stay above."""
    ttft_percent: Annotated[int, Field(ge=0, le=10000)] = 100
    """Mean TTFT in percent of its SLO above which the cluster grows."""
    ttft_for: Annotated[Duration, Within("0s", "24h")] = MINUTE
    """How long it must stay above."""
    waiting: Annotated[int, Field(ge=0, le=10000)] = 1
    """Requests per instance that wait for room, above which the cluster grows."""
    waiting_for: Annotated[Duration, Within("0s", "24h")] = MINUTE
    """How long they must be more."""
    cooldown: Annotated[Duration, Within("0s", "24h")] = 3 * MINUTE
    """Least time after a step up before the next one."""
    starting_for: Annotated[Duration, Within("0s", "24h")] = 5 * MINUTE
    """Most time that a step up waits for the instances of the last one, while they start."""
    max_step: Annotated[int, Field(ge=1, le=512)] = 4
    """The most instances that one step adds."""


class Contract(Object):
    """When instances are removed: any threshold, for as long as it says, and nothing unknown."""

    use_percent: Percent = 40
    """Device use in percent below which the cluster shrinks."""
    use_for: Annotated[Duration, Within("0s", "24h")] = 10 * MINUTE
    """How long it must stay below."""
    idle_percent: Percent = 60
    """Share of idle instances, in percent, above which the cluster shrinks."""
    idle_for: Annotated[Duration, Within("0s", "24h")] = 10 * MINUTE
    """How long it must stay above."""
    saved_percent: Annotated[int, Field(ge=0, le=10000)] = 0
    """Mean saved TPOT of running requests, in percent of TTFT SLO x (n + 1) / n with n instances,
    above which the cluster shrinks. 100 is the published bound; 0: not used."""
    saved_for: Annotated[Duration, Within("0s", "24h")] = 10 * MINUTE
    """How long it must stay above."""
    cooldown: Annotated[Duration, Within("0s", "24h")] = 10 * MINUTE
    """Least time after any step before the next one down."""
    max_step: Annotated[int, Field(ge=1, le=512)] = 1
    """The most instances that one step removes."""


class Autoscaling(Object):
    """Scaling by what Prometheus reports. A missing metric never scales anything."""

    rules = (
        Rule(
            "!self.enabled || has(self.prometheus)",
            "must be set when autoscaling is enabled",
            lambda self: not self.enabled or self.prometheus is not None,
            ".prometheus",
        ),
        Rule(
            "self.contract.usePercent < self.expand.usePercent",
            "contract.usePercent must be less than expand.usePercent, or the size would swing",
            lambda self: self.contract.use_percent < self.expand.use_percent,
        ),
    )

    enabled: bool = False
    """Whether the operator sets spec.replicas. Off for kubectl scale or an HPA."""
    dry_run: bool = False
    """Decide and tell in the status, but do not scale."""
    strategy: Literal["Threshold", "Predictive"] = "Threshold"
    """Threshold: the bounds below. Predictive: also the fewest instances that serve the arrival
    rate within expand.usePercent, before use shows it."""
    capacity: Annotated[float, Field(ge=0.001, le=1e6)] | None = None
    """Requests a second that one instance serves within the SLOs, as `ecoserve plan` finds it, for
    Predictive. Unset: measured, from the arrival rate and the use that it makes."""
    prometheus: (
        Annotated[str, StringConstraints(pattern=r"^https?://[^\s/]+(/\S*)?$", max_length=2048)]
        | None
    ) = None
    """URL of the Prometheus server that scrapes the operator's scheduler, e.g.
    http://prometheus.monitoring:9090."""
    stale_after: Annotated[Duration, Within("10s", "15m")] = MINUTE
    """Age at which a sample no longer counts, and what rates are taken over: four scrapes or more.
    """
    interval: Annotated[Duration, Within("5s", "1h")] = 15.0
    """Time between two decisions."""
    expand: Expand = Expand()
    """When instances are added."""
    contract: Contract = Contract()
    """When instances are removed."""


# --- KV cache ----------------------------------------------------------------------------------


class ColdTier(Object):
    """Finished prefixes in host memory, compressed."""

    enabled: bool = False
    """Whether blocks that device memory evicts are kept in host memory. This version does not act
    on it."""
    capacity: Quantity = "16Gi"
    """Host memory of each instance for cold blocks; add it to the memory that workers request."""
    codec: Literal["Lossless", "Int8", "Compact"] = "Compact"
    """Lossless: exact. Int8: half the size. Compact: at least 3.2 times smaller at no visible
    loss."""
    prefetch: bool = True
    """Bring cold blocks back while earlier requests run."""


class KVTiers(Object):
    """Tiers of the KV cache below the blocks of running requests."""

    warm: bool = True
    """Keep finished prefixes in device memory until their blocks are needed (prefix caching)."""
    cold: ColdTier = ColdTier()
    """Finished prefixes in host memory."""


# --- gateway and network -----------------------------------------------------------------------


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


# --- operation ---------------------------------------------------------------------------------


class Drain(Object):
    """How an instance is retired."""

    timeout: Annotated[Duration, Within("1s", "24h")] = 10 * MINUTE
    """How long requests under way may take to finish before the Pod is deleted all the same. It is
    the grace period of the Pods too."""


class Rollout(Object):
    """How a changed template reaches the instances: one at a time."""

    strategy: Literal["Auto", "Surge", "DrainFirst"] = "Auto"
    """Surge: start the new instance first. DrainFirst: retire the old one first. Auto: Surge, but
    DrainFirst when the new Pod finds no node."""
    ready_timeout: Annotated[Duration, Within("10s", "24h")] = 30 * MINUTE
    """How long a new instance may take to become ready before the rollout stops."""
    paused: bool = False
    """Replace no instance for a changed template."""


class Disruption(Object):
    """The PodDisruptionBudget of the workers."""

    max_unavailable: Annotated[int, Field(ge=1, le=512)] = 1
    """Workers that a node drain may take away at a time."""


class Monitoring(Object):
    """Objects for the Prometheus operator, made where its CRDs are installed."""

    enabled: bool = True
    """Make a PodMonitor and a PrometheusRule."""
    interval: Annotated[Duration, Within("1s", "10m")] = 15.0
    """Scrape interval."""
    labels: Labels = {}
    """Further labels of both, by which a Prometheus selects them."""


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


# --- status ------------------------------------------------------------------------------------


class Condition(Object):
    """One aspect of the object's state."""

    type: Annotated[
        str, StringConstraints(min_length=1, max_length=316, pattern=r"^[A-Za-z][A-Za-z0-9.-]*$")
    ]
    """Name of the aspect, e.g. Ready."""
    status: Literal["True", "False", "Unknown"]
    """Whether it holds."""
    reason: Annotated[
        str, StringConstraints(min_length=1, max_length=1024, pattern=r"^[A-Za-z][A-Za-z0-9_]*$")
    ]
    """Why, in one CamelCase word."""
    message: Annotated[str, StringConstraints(max_length=32768)] = ""
    """Why, for people."""
    last_transition_time: Annotated[str, Field(json_schema_extra={"format": "date-time"})]
    """When the status last changed."""
    observed_generation: Annotated[int, Field(ge=0)] | None = None
    """The metadata.generation that the condition is about."""


Count = Annotated[int, Field(ge=0)]
Time = Annotated[str, Field(json_schema_extra={"format": "date-time"})]
Conditions = Annotated[
    list[Condition],
    Field(
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]}
    ),
]


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
    """Ready, Progressing, Degraded, Autoscaling, and what else there is to tell."""


class MacroInstanceSpec(Object):
    """What the macro instance should be. Written by the operator only."""

    cluster: Annotated[
        str,
        StringConstraints(pattern=NAME, max_length=NAME_LENGTH),
        Field(
            json_schema_extra={
                "x-kubernetes-validations": [immutable("it names the owner").schema()]
            }
        ),
    ]
    """The EcoServeCluster that it belongs to. Immutable."""
    replicas: Annotated[int, Field(ge=0, le=1024)] = 0
    """Instances that it should have."""
    split_from: ObjectName | None = None
    """The macro instance that instances still have to be moved from, while a split is under way."""
    merge_into: ObjectName | None = None
    """The macro instance that its instances are to be moved to, while a merge is under way."""

    rules = (
        Rule(
            "!(has(self.splitFrom) && has(self.mergeInto))",
            "splitFrom and mergeInto must not be set together",
            lambda self: self.split_from is None or self.merge_into is None,
        ),
    )


class InstanceStatus(Object):
    """An instance, as the scheduler last reported it."""

    name: str
    """Name of its Pod."""
    state: str
    """connected, warming, accepted, draining, drained, lost, or pending for a Pod that the
    scheduler does not know yet."""
    node: str | None = None
    """The node that it runs on."""
    revision: str | None = None
    """Hash of the template that it was made of."""


class MacroInstanceStatus(Object):
    """What the macro instance is."""

    observed_generation: Count | None = None
    """The metadata.generation that the status is about."""
    replicas: Count = 0
    """Instances that exist, those that drain left out."""
    ready_replicas: Count = 0
    """Instances that take requests."""
    draining_replicas: Count = 0
    """Instances that finish their last requests."""
    selector: str | None = None
    """Label selector of its worker Pods."""
    instances: Annotated[
        list[InstanceStatus],
        Field(
            json_schema_extra={
                "x-kubernetes-list-type": "map",
                "x-kubernetes-list-map-keys": ["name"],
            }
        ),
    ] = []
    """Its instances."""
    conditions: Conditions = []
    """Ready, Splitting, Merging, Draining."""


# --- the objects -------------------------------------------------------------------------------


class OwnerReference(Object):
    """An owner, as Kubernetes' garbage collector knows it."""

    api_version: str
    kind: str
    name: str
    uid: str
    controller: bool | None = None
    block_owner_deletion: bool | None = None


class Metadata(Object):
    """What is used of the standard metadata."""

    name: str
    namespace: str | None = None
    uid: str | None = None
    generation: int | None = None
    resource_version: str | None = None
    creation_timestamp: str | None = None
    deletion_timestamp: str | None = None
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}
    owner_references: list[OwnerReference] = []


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


class MacroInstance(Object):
    """A group of instances of an EcoServeCluster among which prefill rolls. The operator makes,
    splits, merges and removes macro instances; deleting one by hand drains it, and another takes
    its place."""

    plural: ClassVar[str] = "macroinstances"

    api_version: Literal["ecoserve.io/v1alpha1"] = "ecoserve.io/v1alpha1"
    kind: Literal["MacroInstance"] = "MacroInstance"
    metadata: Metadata
    spec: MacroInstanceSpec
    status: MacroInstanceStatus = MacroInstanceStatus()


def example(**spec: Any) -> dict[str, Any]:
    """The least that makes an EcoServeCluster, with more fields of its spec given."""
    return {
        "apiVersion": API_VERSION,
        "kind": "EcoServeCluster",
        "metadata": {"name": "demo", "namespace": "default"},
        "spec": {
            "model": {"name": "demo", "source": {"image": {"path": "/model"}}},
            "slo": {"ttft": "5s", "tpot": "100ms"},
            **spec,
        },
    }
