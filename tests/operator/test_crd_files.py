"""The CRDs in ``crds/`` are those of the models, and every field says what it is."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ecoserve_operator.crd import crds, dump

DIRECTORY = Path(__file__).parents[2] / "crds"


@pytest.mark.parametrize(("name", "document"), crds().items(), ids=list(crds()))
def test_files_are_up_to_date(name: str, document: dict[str, Any]) -> None:
    assert (DIRECTORY / name).read_text(encoding="utf-8") == dump(document), "run `make crds`"


def test_there_are_no_other_files() -> None:
    assert {path.name for path in DIRECTORY.iterdir()} == set(crds())


def fields(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every field of a schema with its path."""
    for name, field in schema.get("properties", {}).items():
        yield f"{path}.{name}", field
        yield from fields(field, f"{path}.{name}")
        yield from fields(field.get("items", {}), f"{path}.{name}[]")


@pytest.mark.parametrize("document", crds().values(), ids=list(crds()))
def test_every_field_is_documented(document: dict[str, Any]) -> None:
    schema = document["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    found = dict(fields(schema))
    assert len(found) > 20
    del found[".metadata"]
    assert [path for path, field in found.items() if len(field.get("description", "")) < 5] == []


@pytest.mark.parametrize("document", crds().values(), ids=list(crds()))
def test_every_spec_list_and_map_is_bounded(document: dict[str, Any]) -> None:
    """The API server estimates the cost of rules by these bounds."""
    schema = document["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    for path, field in fields(schema):
        if field.get("type") == "array":
            assert "maxItems" in field, path
        if "additionalProperties" in field:
            assert "maxProperties" in field, path
