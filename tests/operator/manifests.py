"""Manifests of the custom resources, as the tests need them."""

from __future__ import annotations

import copy
from typing import Any

from ecoserve_operator.api import API_VERSION
from ecoserve_operator.cluster_api import Kind

GONE = object()  # as a value: the field is left out


def example(**spec: Any) -> dict[str, Any]:
    """The least that makes an EcoServeCluster, with more fields of its spec given."""
    return {
        "apiVersion": API_VERSION,
        "kind": "EcoServeCluster",
        "metadata": {"name": "demo", "namespace": "default"},
        "spec": {
            "model": {"name": "demo", "source": {"image": {"path": "/model"}}},
            "slo": {"ttft": "5s", "tpot": "100ms"},
            **spec,
        },
    }


def manifest(*changes: tuple[str, Any], **spec: Any) -> dict[str, Any]:
    """The least EcoServeCluster with changes, each a path such as "spec.slo.ttft" and a value."""
    made = copy.deepcopy(example(**spec))
    for path, value in changes:
        *folders, last = path.split(".")
        place = made
        for folder in folders:
            place = place.setdefault(folder, {})
        if value is GONE:
            del place[last]
        else:
            place[last] = value
    return made


def macro(**spec: Any) -> dict[str, Any]:
    """A MacroInstance."""
    return {
        "apiVersion": API_VERSION,
        "kind": "MacroInstance",
        "metadata": {"name": "demo-m0"},
        "spec": {"cluster": "demo", **spec},
    }


def foreign_crd(kind: Kind) -> dict[str, Any]:
    """As much of another project's CRD as it takes to make objects of the kind."""
    schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    version = {"name": kind.version, "served": True, "storage": True}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {
            "name": f"{kind.plural}.{kind.group}",
            # Groups of Kubernetes itself want to be approved.
            "annotations": {"api-approved.kubernetes.io": "unapproved, for a test"},
        },
        "spec": {
            "group": kind.group,
            "scope": "Namespaced",
            "names": {"plural": kind.plural, "kind": kind.name, "singular": kind.name.lower()},
            "versions": [version | {"schema": {"openAPIV3Schema": schema}}],
        },
    }
