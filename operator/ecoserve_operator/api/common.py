"""What several parts of the API have in common."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from ecoserve_operator.fields import Object, ObjectName, Quantity

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
