"""What the tests of the CRDs ask the API server."""

from __future__ import annotations

from typing import Any

import httpx
from ecoserve_operator.api import API_VERSION, EcoServeCluster, MacroInstance
from pydantic import ValidationError

from tests.operator.kube_api import ApiServer

CLUSTERS, MACROS = "ecoserveclusters", "macroinstances"


def url(plural: str, namespace: str = "default", name: str = "", more: str = "") -> str:
    """The path of a collection or of an object."""
    parts = ("/apis", API_VERSION, "namespaces", namespace, plural, name, more)
    return "/".join(part for part in parts if part)


def create(kube: ApiServer, body: dict[str, Any], **query: str) -> httpx.Response:
    """Asks the API server whether it would take the object; nothing is stored."""
    plural = CLUSTERS if body["kind"] == "EcoServeCluster" else MACROS
    params = {"dryRun": "All", "fieldValidation": "Strict"} | query
    return kube.client.post(url(plural), json=body, params=params)


def model_takes(body: dict[str, Any]) -> bool:
    """Whether the pydantic model takes it."""
    kind = EcoServeCluster if body["kind"] == "EcoServeCluster" else MacroInstance
    try:
        kind.model_validate(body)
    except ValidationError:
        return False
    return True
