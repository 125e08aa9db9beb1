"""The standard metadata of an object, as far as it is used."""

from __future__ import annotations

from ecoserve_operator.fields import Object


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
