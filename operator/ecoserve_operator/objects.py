"""Applies what else belongs to a cluster: the gateway, policies, monitoring.

An object is applied when what it should be has changed, or when somebody else has changed it.
"""

from __future__ import annotations

import hashlib
import json

from ecoserve_operator.cluster_api import SECRETS, ApiError, ClusterApi, Json, Kind
from ecoserve_operator.names import CLUSTER_LABEL
from ecoserve_operator.status import Problem
from ecoserve_operator.store import Key, Store

SERVICES = Kind("", "v1", "services", "Service")
DEPLOYMENTS = Kind("apps", "v1", "deployments", "Deployment")

# What is made of these is watched, so that it is repaired when it is changed or removed.
KINDS: tuple[Kind, ...] = (
    Kind("", "v1", "serviceaccounts", "ServiceAccount"),
    Kind("", "v1", "configmaps", "ConfigMap"),
    SERVICES,
    DEPLOYMENTS,
    Kind("policy", "v1", "poddisruptionbudgets", "PodDisruptionBudget"),
    Kind("networking.k8s.io", "v1", "networkpolicies", "NetworkPolicy"),
    SECRETS,
)
# The same, where they are installed.
OPTIONAL: tuple[Kind, ...] = (
    Kind("monitoring.coreos.com", "v1", "podmonitors", "PodMonitor"),
    Kind("monitoring.coreos.com", "v1", "prometheusrules", "PrometheusRule"),
    Kind("inference.networking.k8s.io", "v1", "inferencepools", "InferencePool"),
    Kind("discovery.k8s.io", "v1", "endpointslices", "EndpointSlice"),  # goes with the pool
)


class Objects:
    """The objects of all clusters. ``kinds`` are those that can be applied here."""

    def __init__(self, api: ClusterApi, store: Store) -> None:
        self._api, self._store = api, store
        self.kinds: tuple[Kind, ...] = KINDS
        self._applied: dict[Key, dict[tuple[Kind, str], tuple[str, str]]] = {}

    def forget(self, key: Key) -> None:
        """The cluster is no more."""
        self._applied.pop(key, None)

    async def sync(self, key: Key, wanted: list[Json], *, whole: bool = True) -> list[Problem]:
        """Applies what is not as it should be, and deletes what should not be any more; unless
        ``wanted`` is the ``whole``, nothing is deleted."""
        kinds = {(kind.api_version, kind.name): kind for kind in self.kinds}
        applied = self._applied.setdefault(key, {})
        problems = []
        names = set()
        for body in wanted:
            kind = kinds.get((body["apiVersion"], body["kind"]))
            if kind is None:
                continue
            name = body["metadata"]["name"]
            names.add((kind, name))
            known = self._store.find(kind, key, name)
            digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
            if known is not None and applied.get((kind, name)) == (digest, _state(known)):
                continue
            try:
                if known is None and await self._is_taken(kind, key, name):
                    message = f"{kind.name} {name} is there already, and is not this cluster's"
                    problems.append(Problem("NameTaken", message))
                    continue
                answer = await self._api.apply(kind, body)
            except ApiError as error:
                problems.append(_refused(kind, name, error))
                continue
            self._store.put(kind, answer)
            applied[kind, name] = (digest, _state(answer))
        owner = self._owner(key)
        for kind in self.kinds if whole else ():
            for item in self._store.of(kind, key):
                name = item["metadata"]["name"]
                # Pods cannot start without their Secrets, which go with the cluster.
                if kind == SECRETS or (kind, name) in names or not _is_of(item, owner):
                    continue
                try:
                    await self._api.delete(kind, key[0], name, item["metadata"]["uid"])
                except ApiError as error:
                    problems.append(_refused(kind, name, error))
                else:
                    self._store.drop(kind, item)
        return problems

    async def _is_taken(self, kind: Kind, key: Key, name: str) -> bool:
        """Whether somebody else has an object of that name: watches tell of those alone that have
        our label."""
        found = await self._api.get(kind, key[0], name)
        if found is None or _is_of(found, self._owner(key)):
            return False
        return bool(found["metadata"].get("labels", {}).get(CLUSTER_LABEL) != key[1])

    def _owner(self, key: Key) -> str:
        cluster = self._store.cluster(key)
        return cluster["metadata"]["uid"] if cluster is not None else ""


def _refused(kind: Kind, name: str, error: ApiError) -> Problem:
    """What to tell of a request that was refused; raises it where it should be made again."""
    if not error.is_final:
        raise error
    return Problem("ObjectRefused", f"{kind.name} {name}: {error}")


def _is_of(item: Json, owner: str) -> bool:
    """Whether it belongs to this very cluster; the garbage collector takes what was another's."""
    metadata = item["metadata"]
    return "deletionTimestamp" not in metadata and any(
        reference["uid"] == owner and reference.get("controller")
        for reference in metadata.get("ownerReferences", ())
    )


def _state(item: Json) -> str:
    # A status changes the version, but not the generation, where there is one.
    metadata = item["metadata"]
    changed = metadata.get("generation") or metadata["resourceVersion"]
    return f"{metadata['uid']} {changed}"
