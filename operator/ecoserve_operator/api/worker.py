"""What a worker is, what it computes on and where it runs."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from ecoserve import engine_args
from ecoserve.engine_args import Reserved
from ecoserve_operator.api.common import (
    MINUTE,
    Image,
    Labels,
    LocalReference,
    PullPolicy,
    Resources,
)
from ecoserve_operator.fields import Duration, Object, Quantity, Rule, Within, immutable

# Options of vLLM that engine.args must not have. Here the API server refuses them; abbreviations,
# and what was stored before, the builder of the Pod.
RESERVED = (
    Reserved(engine_args.TENSOR, "set spec.parallelism.tensor"),
    Reserved(engine_args.PIPELINE, "set spec.parallelism.pipeline"),
    Reserved(engine_args.DATA, "an instance is one engine; set spec.replicas"),
    Reserved(engine_args.MODEL, "set spec.model.source"),
    Reserved(engine_args.SERVED_NAME, "set spec.model.name"),
    Reserved(engine_args.PREFIX_CACHING, "set spec.kvTiers.warm"),
    Reserved(engine_args.API_KEY, "set spec.gateway.apiKeys"),
    Reserved(engine_args.END, "set spec.drain.timeout"),
    Reserved(engine_args.SCHEDULER, "the engine's scheduler is EcoServe's own; set spec.policy"),
    *engine_args.EVERYWHERE,
)


def _not_reserved(reserved: Reserved) -> dict[str, str]:
    options = ", ".join(reserved.options)
    message = f"must not be given here ({options}): {reserved.instead}"
    return Rule(f"!self.matches('{reserved.pattern}')", message).schema()


class EnvVar(Object):
    """An environment variable with a plain value; for valueFrom use podTemplate."""

    name: Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_.-]*$", max_length=253)]
    """Name of the variable."""
    value: Annotated[str, StringConstraints(max_length=8192)] = ""
    """Its value."""


class Engine(Object):
    """The vLLM engine of a worker."""

    image: Image | None = None
    """The worker image. Unset: the one that the operator was installed with."""
    image_pull_policy: PullPolicy = "IfNotPresent"
    """When the worker image is pulled."""
    image_pull_secrets: Annotated[list[LocalReference], Field(max_length=16)] = []
    """Secrets with the credentials of private registries."""
    args: Annotated[
        list[
            Annotated[
                str,
                StringConstraints(max_length=4096),
                Field(
                    json_schema_extra={
                        "x-kubernetes-validations": [_not_reserved(item) for item in RESERVED]
                    }
                ),
            ]
        ],
        Field(max_length=128),
    ] = []
    """Further arguments of vLLM, e.g. ["--max-model-len", "8192"]. What has a field of its own,
    such as parallel sizes and the model, is refused here."""
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
