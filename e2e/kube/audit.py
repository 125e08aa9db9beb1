"""Rights: what roles grant, and what an API server's audit log says was made use of."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path

from e2e.kube.kube import Json

Right = tuple[str, str, str]  # group, resource, verb

# What the API server is to write down.
POLICY = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived"],
    "rules": [{"level": "Metadata", "userGroups": ["system:serviceaccounts"]}, {"level": "None"}],
}


def granted(objects: Iterable[Json]) -> set[Right]:
    """What the roles among the objects allow."""
    return {
        (group, resource, verb)
        for item in objects
        if item["kind"] in ("Role", "ClusterRole")
        for rule in item["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def used(log: Path, account: str) -> tuple[set[Right], set[str]]:
    """The rights that service accounts made use of, and what they were refused.

    ``account`` is a pattern of their whole names, ``system:serviceaccount:NAMESPACE:NAME``.
    """
    rights: set[Right] = set()
    refused: set[str] = set()
    with log.open(encoding="utf-8") as lines:
        for line in lines:
            event = json.loads(line)
            if not re.fullmatch(account, event["user"]["username"]) or "objectRef" not in event:
                continue
            what, verb, code = event["objectRef"], event["verb"], event["responseStatus"]["code"]
            resource = "/".join(filter(None, (what["resource"], what.get("subresource"))))
            right = (what.get("apiGroup", ""), resource, verb)
            if code == 403:
                refused.add(f"{verb} {event['requestURI']}")
            rights.add(right)
            if verb == "patch" and code == 201:
                # An apply that makes the object needs both.
                rights.add((*right[:2], "create"))
    return rights, refused
