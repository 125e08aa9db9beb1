"""What is still read of an object that was stored before a rule or a bound was set."""

from __future__ import annotations

from typing import Any

import pytest
from ecoserve_operator.api import EcoServeCluster
from ecoserve_operator.fields import salvaged
from pydantic import ValidationError

from tests.operator.manifests import GONE, manifest


def test_of_a_valid_object_it_is_all() -> None:
    item = manifest(maxReplicas=7, macro={"lower": 3, "upper": 6})
    assert salvaged(EcoServeCluster, item) == EcoServeCluster.model_validate(item)


@pytest.mark.parametrize(
    ("changes", "still"),
    [
        # Rules between fields.
        (
            (("spec.minReplicas", 5), ("spec.maxReplicas", 2)),
            {"min_replicas": 5, "max_replicas": 2},
        ),
        ((("spec.macro", {"lower": 3, "upper": 4}),), {}),
        # Bounds and forms of fields, nested and in a list.
        ((("spec.drain", {"timeout": "9000h"}), ("spec.maxReplicas", 9)), {"max_replicas": 9}),
        ((("spec.minReplicas", "many"), ("spec.device", {"type": "tpu"})), {"min_replicas": 1}),
        ((("spec.placement", {"tolerations": [{"effect": "no"}, {}, {"effect": "no"}]}),), {}),
    ],
)
def test_fields_that_are_not_valid_any_more(changes: Any, still: dict[str, Any]) -> None:
    item = manifest(*changes)
    with pytest.raises(ValidationError):
        EcoServeCluster.model_validate(item)
    found = salvaged(EcoServeCluster, item)
    assert found is not None
    assert found.spec.model.name == "demo"
    assert found.spec.slo.ttft == 5.0
    for name, value in still.items():
        assert getattr(found.spec, name) == value
    assert item == manifest(*changes), "what was given has changed"


@pytest.mark.parametrize("needed", ["spec.model", "spec.slo", "spec.slo.ttft"])
def test_nothing_where_a_field_is_needed(needed: str) -> None:
    assert salvaged(EcoServeCluster, manifest((needed, GONE))) is None
