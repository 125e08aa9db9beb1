"""An API server in memory, by KMock, for tests of the controller that need no binaries.

KMock keeps objects and streams what happens to them. Added here is what the controller leans on
beyond that: uids, versions that grow and are checked, server-side apply of what is not there yet,
PUT, conditions merged by their types. Schemas, defaults and rights are the real API server's.
"""

from __future__ import annotations

import copy
import time
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp.web
import kmock
import yaml
from attrs import evolve
from ecoserve_operator.cluster_api import CLUSTERS, EVENTS, LEASES, MACROS, PODS, Json, Kind
from ecoserve_operator.objects import KINDS
from ecoserve_operator.views import stamp

# What kopf wants to see among the kinds, though it does not look at any of them.
_CLUSTER_WIDE = (
    Kind("", "v1", "namespaces", "Namespace"),
    Kind("apiextensions.k8s.io", "v1", "customresourcedefinitions", "CustomResourceDefinition"),
)
_RECENT = 20  # requests that are kept
_VERBS = ["get", "list", "watch", "create", "update", "patch", "delete"]


class Emulator(kmock.KubernetesEmulator):
    """``before`` is called ahead of each request, and may raise ``kmock.KubernetesError``."""

    version = 100
    before: Callable[[kmock.Request], None] | None = None

    async def _handle(self, request: kmock.Request) -> aiohttp.web.StreamResponse:
        if self.before is not None:
            self.before(request)
        if request.resource is not None and request.method != kmock.method.GET:
            # Nothing was awaited since it was taken in, so it is the last one.
            self._requests[-1] = request = self._understood(request)
        # KMock looks through all that was ever asked, at each request anew.
        del self._requests[:-_RECENT]
        return await super()._handle(request)

    def _understood(self, request: kmock.Request) -> kmock.Request:
        """The request in terms of what KMock does."""
        if request.action == kmock.action.CREATE:
            return evolve(request, data=self._new(request))
        content = request.headers.get("Content-Type", "")
        key = (request.resource, request.namespace, request.name)
        if key not in self._objects or self._objects[key].deleted:
            if "apply" not in content:
                return request  # there is no such object
            create = {"action": kmock.action.CREATE, "name": None, "subresource": None}
            return evolve(request, **create, data=self._new(request))
        there = self._objects[key]
        old, metadata = there.raw, request.data.get("metadata", {})
        for field in ("uid", "resourceVersion"):
            if metadata.get(field, old["metadata"][field]) != old["metadata"][field]:
                raise kmock.KubernetesError(status=409, reason="Conflict", message=field)
        if request.action == kmock.action.DELETE:
            there.patch({"metadata": {"resourceVersion": self._next()}})
            return request
        changed = copy.deepcopy(request.data)
        if "strategic" in content:
            conditions = {c["type"]: c for c in old.get("status", {}).get("conditions", ())}
            conditions |= {c["type"]: c for c in changed["status"].get("conditions", ())}
            changed["status"]["conditions"] = list(conditions.values())
        kept = {"uid": old["metadata"]["uid"], "resourceVersion": self._next()}
        if changed.get("spec", old.get("spec")) != old.get("spec"):
            kept["generation"] = old["metadata"]["generation"] + 1
        changed |= {"metadata": metadata | kept}
        # A PUT too, which is nothing to KMock.
        return evolve(request, action=kmock.action.UPDATE, data=changed)

    async def _serve_list(self, request: kmock.Request) -> Json:
        answer: Any = await super()._serve_list(request)
        wanted = request.params.get("labelSelector", "").split(",")
        items = [item for item in answer["items"] if all(_has(item, term) for term in wanted)]
        return {"metadata": {"resourceVersion": str(self.version)}, "items": items}

    def change(self, kind: Kind, namespace: str, name: str, changes: Json) -> None:
        """Another's write, of which no watch has told yet."""
        there = self.objects[self.key(kind), namespace, name]
        metadata = {"resourceVersion": self._next()}
        if "spec" in changes:
            metadata["generation"] = there.raw["metadata"]["generation"] + 1
        there.patch(changes | {"metadata": metadata})

    def forget(self, kind: Kind, namespace: str, name: str) -> None:
        """An object is gone, and no watch was told."""
        self.version += 1
        self.objects[self.key(kind), namespace, name].delete()

    async def gone(self, kind: Kind) -> None:
        """Watches of a kind end: they have fallen too far behind ("410 Gone")."""
        error = {"type": "ERROR", "object": {"kind": "Status", "code": 410, "reason": "Expired"}}
        await self._buses[self.key(kind)].put(error)

    @staticmethod
    def key(kind: Kind) -> kmock.resource:
        return kmock.resource(kind.group, kind.version, kind.plural)

    def _new(self, request: kmock.Request) -> Json:
        known = {
            "namespace": request.namespace,
            "uid": str(uuid.uuid4()),
            "resourceVersion": self._next(),
            "generation": 1,
            "creationTimestamp": stamp(time.time()),
        }
        made: Json = request.data | {"metadata": request.data["metadata"] | known}
        if request.resource == self.key(PODS):
            made["status"] = {"phase": "Pending"}
        return made

    def _next(self) -> str:
        self.version += 1
        return str(self.version)


def _has(item: Json, term: str) -> bool:
    label, _, value = term.partition("=")
    labels = item["metadata"].get("labels", {})
    return not term or (label in labels and value in ("", labels[label]))


@asynccontextmanager
async def emulated(folder: Path) -> AsyncIterator[tuple[Emulator, Path]]:
    """Runs one; yields it and a kubeconfig."""
    async with Emulator() as server, kmock.Server(server) as http:
        for kind in (CLUSTERS, MACROS, PODS, EVENTS, LEASES, *KINDS, *_CLUSTER_WIDE):
            server.resources[server.key(kind)] = {
                "kind": kind.name,
                "verbs": _VERBS,
                "namespaced": kind not in _CLUSTER_WIDE,
                "subresources": ["status"],
            }
        file = folder / "kubeconfig"
        file.write_text(
            yaml.safe_dump(
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "clusters": [{"name": "test", "cluster": {"server": str(http.url)}}],
                    "users": [{"name": "test", "user": {"token": "test"}}],
                    "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
                    "current-context": "test",
                }
            )
        )
        yield server, file
