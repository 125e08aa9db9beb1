"""The Kubernetes API, as the controller uses it: plain dictionaries in and out.

Built on the official client's asyncio part, which knows kubeconfig files, service account tokens
and their renewal. Its generated models are left alone: objects stay what the API server sent.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import aiohttp
from kubernetes.aio import client, config

from ecoserve_operator.metrics import CALLS

Json: TypeAlias = dict[str, Any]

MANAGER = "ecoserve-operator"
TIMEOUT_S = 15.0
_TOKEN = "/var/run/secrets/kubernetes.io/serviceaccount/token"
_APPLY = "application/apply-patch+yaml"
_MERGE = "application/merge-patch+json"
_STRATEGIC = "application/strategic-merge-patch+json"


@dataclass(frozen=True, slots=True)
class Kind:
    """A namespaced kind of objects; ``group`` is empty for the core group."""

    group: str
    version: str
    plural: str
    name: str

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version

    def path(self, namespace: str | None, name: str = "", subresource: str = "") -> str:
        """The path of an object, or of the list without a name."""
        root = f"/apis/{self.group}" if self.group else "/api"
        parts = [root, self.version]
        if namespace is not None:
            parts += ["namespaces", namespace]
        return "/".join(part for part in (*parts, self.plural, name, subresource) if part)


CLUSTERS = Kind("ecoserve.io", "v1alpha1", "ecoserveclusters", "EcoServeCluster")
MACROS = Kind("ecoserve.io", "v1alpha1", "macroinstances", "MacroInstance")
PODS = Kind("", "v1", "pods", "Pod")
SECRETS = Kind("", "v1", "secrets", "Secret")
EVENTS = Kind("", "v1", "events", "Event")
LEASES = Kind("coordination.k8s.io", "v1", "leases", "Lease")


class ApiError(Exception):
    """The API server refused; ``status`` is HTTP's, 0 if it could not be reached."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(message or reason or f"status {status}")
        self.status = status
        self.reason = reason

    @property
    def is_final(self) -> bool:
        """Whether the request was understood and refused, so that nothing was changed by it and
        asking again changes nothing either."""
        return self.status in (400, 403, 404, 405, 409, 410, 413, 415, 422)


class ClusterApi:
    """A connection to one API server. ``guard`` is called before each write and may raise."""

    def __init__(
        self, configuration: client.Configuration, *, guard: Callable[[], None] = lambda: None
    ) -> None:
        self._client = client.ApiClient(configuration)
        self._guard = guard
        self.calls = 0

    async def __aenter__(self) -> ClusterApi:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.close()  # type: ignore[no-untyped-call]

    # -- reading ----------------------------------------------------------------------------------

    async def get(self, kind: Kind, namespace: str, name: str) -> Json | None:
        """An object, None if there is none."""
        try:
            return await self._call("GET", kind.path(namespace, name))
        except ApiError as error:
            if error.status == 404:
                return None
            raise

    async def list_all(
        self, kind: Kind, namespace: str | None, selector: str = ""
    ) -> tuple[list[Json], int]:
        """All objects, and the version of the list."""
        items: list[Json] = []
        query = {"limit": "500"} | ({"labelSelector": selector} if selector else {})
        while True:
            page = await self._call("GET", kind.path(namespace), query)
            known = {"apiVersion": kind.api_version, "kind": kind.name}
            items += [known | item for item in page["items"]]
            metadata = page["metadata"]
            if not metadata.get("continue"):
                return items, int(metadata["resourceVersion"])
            query["continue"] = metadata["continue"]

    async def served(self, group: str, version: str) -> set[str]:
        """The plural names of the kinds that the API server knows in a group."""
        try:
            found = await self._call("GET", f"/apis/{group}/{version}")
        except ApiError as error:
            if error.status == 404:
                return set()
            raise
        return {item["name"] for item in found["resources"]}

    # -- writing ----------------------------------------------------------------------------------

    async def create(self, kind: Kind, body: Json) -> Json:
        query = {"fieldManager": MANAGER, "fieldValidation": "Strict"}
        return await self._write("POST", kind.path(body["metadata"]["namespace"]), query, body)

    async def apply(self, kind: Kind, body: Json, subresource: str = "") -> Json:
        """Server-side apply under our field manager; what others set at our fields gives way."""
        whole: Json = {"apiVersion": kind.api_version, "kind": kind.name, **body}
        metadata = whole["metadata"]
        query = {"fieldManager": MANAGER, "force": "true", "fieldValidation": "Strict"}
        path = kind.path(metadata["namespace"], metadata["name"], subresource)
        return await self._write("PATCH", path, query, whole, _APPLY)

    async def patch(self, kind: Kind, namespace: str, name: str, body: Json) -> Json:
        """A merge patch: lists are replaced. A ``metadata.uid`` in it must be the object's."""
        path = kind.path(namespace, name)
        return await self._write("PATCH", path, {"fieldManager": MANAGER}, body, _MERGE)

    async def patch_status(self, kind: Kind, namespace: str, name: str, body: Json) -> Json:
        """A strategic merge patch of the status, of built-in kinds only: conditions are merged by
        their types."""
        path = kind.path(namespace, name, "status")
        return await self._write("PATCH", path, {"fieldManager": MANAGER}, body, _STRATEGIC)

    async def replace(self, kind: Kind, body: Json) -> Json:
        """Replaces an object if it still has the ``resourceVersion`` that the body says."""
        metadata = body["metadata"]
        path = kind.path(metadata["namespace"], metadata["name"])
        return await self._write("PUT", path, {"fieldManager": MANAGER}, body)

    async def delete(
        self, kind: Kind, namespace: str, name: str, uid: str, *, grace: int | None = None
    ) -> Json | None:
        """Deletes this very object, not one of the same name; returns it if it is still there, on
        its way out. ``grace`` in seconds."""
        body: Json = {"preconditions": {"uid": uid}, "propagationPolicy": "Background"}
        if grace is not None:
            body["gracePeriodSeconds"] = grace
        try:
            answer = await self._write("DELETE", kind.path(namespace, name), {}, body)
        except ApiError as error:
            if error.status in (404, 409):
                return None
            raise
        return answer if answer.get("kind") != "Status" else None

    async def _write(
        self, method: str, path: str, query: dict[str, str], body: Json, content: str = ""
    ) -> Json:
        self._guard()
        return await self._call(method, path, query, body, content)

    async def _call(
        self,
        method: str,
        path: str,
        query: dict[str, str] | None = None,
        body: Json | None = None,
        content: str = "",
    ) -> Json:
        self.calls += 1
        CALLS.labels(method).inc()
        headers = {"Accept": "application/json", "Content-Type": content or "application/json"}
        try:
            request = await self._client.param_serialize(
                method,
                path,
                query_params=list((query or {}).items()),
                header_params=headers,
                body=body,
                auth_settings=["BearerToken"],
            )
            response = await self._client.call_api(*request, _request_timeout=TIMEOUT_S)
            data = await response.read()  # type: ignore[no-untyped-call]
        except (aiohttp.ClientError, OSError, TimeoutError, asyncio.IncompleteReadError) as error:
            raise ApiError(0, "Unreachable", f"{method} {path}: {error or type(error)}") from error
        try:
            answer: Json = json.loads(data)
        except ValueError:
            answer = {"message": data.decode(errors="replace")[:500]}
        if not 200 <= response.status < 300:
            raise ApiError(response.status, answer.get("reason", ""), answer.get("message", ""))
        return answer


async def configured() -> client.Configuration:
    """What ``KUBECONFIG`` says, or the service account of this Pod."""
    configuration = client.Configuration()
    if "KUBECONFIG" not in os.environ and os.path.exists(_TOKEN):  # noqa: ASYNC240 a local file
        config.load_incluster_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
    else:
        await config.load_kube_config(  # type: ignore[no-untyped-call]
            # Said here: the library reads the variable once only, when it is imported.
            config_file=os.environ.get("KUBECONFIG"),
            client_configuration=configuration,
            persist_config=False,
        )
    # The controller retries by planning anew.
    configuration.retries = None
    return configuration


async def connect(guard: Callable[[], None]) -> ClusterApi:
    """A connection as configured; ``guard`` is called before each write and may raise."""
    return ClusterApi(await configured(), guard=guard)
