"""Generates the CRDs from the models: ``python -m ecoserve_operator.crd [DIRECTORY]``.

The API server wants *structural* schemas: no references, no alternatives, every default valid where
it stands.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema

from ecoserve_operator.api import GROUP, VERSION, EcoServeCluster, MacroInstance
from ecoserve_operator.fields import Object, format_duration

_HEADER = "# Generated from operator/ecoserve_operator/api by `make crds`; edit that instead.\n"

_STANDARD = {
    "apiVersion": "Version of the schema of this object: ecoserve.io/v1alpha1.",
    "kind": "Kind of this object.",
}

_AGE = {"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp"}


def _column(name: str, path: str, description: str, kind: str = "string", **more: Any) -> Any:
    return {"name": name, "type": kind, "jsonPath": path, "description": description, **more}


def _condition(type: str, field: str) -> str:
    return f'.status.conditions[?(@.type=="{type}")].{field}'


_CLUSTER_COLUMNS = [
    _column("Model", ".spec.model.name", "What clients call the model."),
    _column("Desired", ".spec.replicas", "Instances wanted.", "integer"),
    _column("Ready", ".status.readyReplicas", "Instances that take requests.", "integer"),
    _column("Updated", ".status.updatedReplicas", "Of the current template.", "integer"),
    _column("Macros", ".status.macroInstances", "Macro instances.", "integer"),
    _column("Available", _condition("Available", "status"), "Whether requests are served."),
    _column("Reason", _condition("Available", "reason"), "Why."),
    _column("URL", ".status.url", "Base URL of the API.", priority=1),
    _column("Message", _condition("Ready", "message"), "How many do.", priority=1),
    _AGE,
]

_MACRO_COLUMNS = [
    _column("Cluster", ".spec.cluster", "The EcoServeCluster that it belongs to."),
    _column("Desired", ".spec.replicas", "Instances wanted.", "integer"),
    _column("Current", ".status.replicas", "Instances that exist.", "integer"),
    _column("Ready", ".status.readyReplicas", "Instances that take requests.", "integer"),
    _column("Draining", ".status.drainingReplicas", "Instances that finish.", "integer"),
    _column("Complete", _condition("Ready", "status"), "Whether all take requests."),
    _AGE,
]


class _Schema(GenerateJsonSchema):
    """Defaults as they are written in a manifest.

    Those of objects in full, since the API server checks a default's rules before it would fill in
    the defaults inside. Empty lists and maps are no defaults: they would only clutter every object.
    """

    def default_schema(self, schema: core_schema.WithDefaultSchema) -> JsonSchemaValue:
        result = super().default_schema(schema)
        if result.get("default") in ([], {}):
            del result["default"]
        if result.get("format") == "duration":
            result["default"] = format_duration(result["default"])
        return result

    def encode_default(self, dft: Any) -> Any:
        return _full(dft.dump()) if isinstance(dft, Object) else super().encode_default(dft)


def _full(value: dict[str, Any]) -> dict[str, Any]:
    """Without what is empty, all the way down."""
    inner = {k: _full(v) if isinstance(v, dict) else v for k, v in value.items()}
    return {k: v for k, v in inner.items() if v not in ([], {})}


def structural(model: type[Object]) -> dict[str, Any]:
    """The structural schema of a model."""
    schema = model.model_json_schema(schema_generator=_Schema)
    root: dict[str, Any] = _inline(schema, schema.get("$defs", {}))
    properties = root["properties"]
    for name, description in _STANDARD.items():
        properties[name] = {"type": "string", "description": description}
    properties["metadata"] = {"type": "object"}
    # Status is empty until the operator writes it.
    del properties["status"]["default"]
    root["required"] = ["metadata", "spec"]
    return root


def _inline(node: Any, definitions: Mapping[str, Any]) -> Any:
    """Replaces references, "or null" and what only JSON Schema knows."""
    if isinstance(node, list):
        return [_inline(item, definitions) for item in node]
    if not isinstance(node, dict):
        return node
    node = dict(node)
    if "$ref" in node:
        node = definitions[node.pop("$ref").rpartition("/")[2]] | node
    variants = [v for v in node.get("anyOf", []) if v != {"type": "null"}]
    if len(variants) == 1:
        # A field that may be unset has no default; null is not a value of the API.
        del node["anyOf"]
        node.pop("default", None)
        return _inline(variants[0] | node, definitions)
    if "const" in node:
        node["enum"] = [node.pop("const")]
    if "description" in node:
        node["description"] = " ".join(node["description"].split())
    result = {}
    for key, value in node.items():
        if key == "properties":
            result[key] = {name: _inline(field, definitions) for name, field in value.items()}
        elif key == "default":
            result[key] = value
        elif key not in ("$defs", "title"):
            result[key] = _inline(value, definitions)
    return result


def crd(
    model: type[EcoServeCluster] | type[MacroInstance],
    short: str,
    columns: list[Any],
    subresources: dict[str, Any],
) -> dict[str, Any]:
    """The CustomResourceDefinition of a model."""
    kind = model.__name__
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{model.plural}.{GROUP}"},
        "spec": {
            "group": GROUP,
            "names": {
                "kind": kind,
                "listKind": f"{kind}List",
                "plural": model.plural,
                "singular": kind.lower(),
                "shortNames": [short],
                "categories": ["all", "ecoserve"],
            },
            "scope": "Namespaced",
            "versions": [
                {
                    "name": VERSION,
                    "served": True,
                    "storage": True,
                    "additionalPrinterColumns": columns,
                    "schema": {"openAPIV3Schema": structural(model)},
                    "subresources": subresources,
                }
            ],
        },
    }


def crds() -> dict[str, dict[str, Any]]:
    """All CRDs by the name of their file."""
    scale = {
        "specReplicasPath": ".spec.replicas",
        "statusReplicasPath": ".status.replicas",
        "labelSelectorPath": ".status.selector",
    }
    # No scale for MacroInstance: only the operator decides how instances are spread.
    return {
        f"{GROUP}_{EcoServeCluster.plural}.yaml": crd(
            EcoServeCluster, "esc", _CLUSTER_COLUMNS, {"status": {}, "scale": scale}
        ),
        f"{GROUP}_{MacroInstance.plural}.yaml": crd(
            MacroInstance, "mi", _MACRO_COLUMNS, {"status": {}}
        ),
    }


def dump(document: Mapping[str, Any]) -> str:
    """A CRD as the text of its file."""
    return _HEADER + yaml.safe_dump(document, sort_keys=False, width=100, allow_unicode=True)


def main(arguments: list[str]) -> int:
    """Writes the CRDs into a directory (default: crds)."""
    directory = Path(arguments[0] if arguments else "crds")
    directory.mkdir(parents=True, exist_ok=True)
    for name, document in crds().items():
        (directory / name).write_text(dump(document), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
