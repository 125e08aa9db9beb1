"""The objects that the controller knows, from watches and from its own writes.

A write's answer is put in at once, so that what is planned next knows of it; a watch event that is
older than what is known is dropped. That compares resource versions, which Kubernetes has made
comparable within a kind (numbers that grow).
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from math import inf
from typing import TypeAlias

from ecoserve_operator.cluster_api import CLUSTERS, PODS, Json, Kind
from ecoserve_operator.names import CLUSTER_LABEL, WORKERS

Key: TypeAlias = tuple[str, str]
"""Namespace and name of an EcoServeCluster."""


_BURIED_KEPT = 10_000


class Store:
    """Objects by kind and by the EcoServeCluster that they belong to. ``changed`` is called with
    the key of a cluster whenever something of it is different."""

    def __init__(self, changed: Callable[[Key], None] = lambda _: None) -> None:
        self._changed = changed
        self._objects: dict[Kind, dict[Key, dict[str, Json]]] = {}
        self._buried: OrderedDict[str, float] = OrderedDict()

    def cluster(self, key: Key) -> Json | None:
        """An EcoServeCluster."""
        return self._of(CLUSTERS).get(key, {}).get(key[1])

    def clusters(self) -> list[Key]:
        """All that has an EcoServeCluster, or had one and has still something of it."""
        found = {key for kind in self._objects.values() for key, members in kind.items() if members}
        return sorted(found)

    def of(self, kind: Kind, key: Key) -> Iterator[Json]:
        """The objects of a kind that belong to a cluster."""
        return iter(list(self._of(kind).get(key, {}).values()))

    def find(self, kind: Kind, key: Key, name: str) -> Json | None:
        """One of them."""
        return self._of(kind).get(key, {}).get(name)

    def put(self, kind: Kind, item: Json) -> None:
        """Takes an object in, unless what is known is as new, or it is known to be gone."""
        key, metadata = _key(kind, item), item["metadata"]
        if key is None or version(item) <= self._buried.get(metadata["uid"], -1):
            return
        members = self._of(kind)[key]
        known = members.get(metadata["name"])
        if known is not None and version(known) >= version(item):
            return
        members[metadata["name"]] = item
        self._changed(key)

    def drop(self, kind: Kind, item: Json, at: float = inf) -> None:
        """An object is gone as of version ``at``; by default for good. (One that loses its label
        is gone to a watch, and may come back.)"""
        key, metadata = _key(kind, item), item["metadata"]
        self._buried[metadata["uid"]] = max(at, self._buried.get(metadata["uid"], -1))
        if len(self._buried) > _BURIED_KEPT:
            self._buried.popitem(last=False)
        members = self._of(kind).get(key or ("", ""), {})
        known = members.get(metadata["name"])
        if known is not None and known["metadata"]["uid"] == metadata["uid"]:
            del members[metadata["name"]]
        if key is not None:
            self._changed(key)

    def replace(
        self,
        kind: Kind,
        items: list[Json],
        at: int,
        namespace: str | None = None,
        cluster: str | None = None,
    ) -> None:
        """Takes a whole list of version ``at`` in, of a namespace and a cluster or of all: what it
        does not have is gone."""
        listed = {item["metadata"]["uid"] for item in items}
        gone = [
            item
            for (place, name), members in self._of(kind).items()
            if namespace in (None, place) and cluster in (None, name)
            for item in members.values()
            if item["metadata"]["uid"] not in listed and version(item) <= at
        ]
        for item in gone:
            self.drop(kind, item, at)
        for item in items:
            self.put(kind, item)

    def _of(self, kind: Kind) -> dict[Key, dict[str, Json]]:
        return self._objects.setdefault(kind, defaultdict(dict))


def selector_of(kind: Kind) -> str:
    """The label selector of all objects of a kind that are of interest."""
    if kind == CLUSTERS:
        return ""
    return f"{CLUSTER_LABEL},{WORKERS}" if kind == PODS else CLUSTER_LABEL


def version(item: Json) -> int:
    """The resource version."""
    return int(item["metadata"]["resourceVersion"])


def _key(kind: Kind, item: Json) -> Key | None:
    metadata = item["metadata"]
    if kind == CLUSTERS:
        return metadata["namespace"], metadata["name"]
    name = metadata.get("labels", {}).get(CLUSTER_LABEL)
    return (metadata["namespace"], name) if name else None
