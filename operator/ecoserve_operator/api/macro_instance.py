"""``MacroInstance``."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, StringConstraints

from ecoserve_operator.api.common import NAME_LENGTH
from ecoserve_operator.api.conditions import Conditions, Count
from ecoserve_operator.api.metadata import Metadata
from ecoserve_operator.fields import NAME, Object, immutable


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
    """Ready, Regrouping, Drained."""


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
