"""What the autoscaler does not do."""

from __future__ import annotations

from typing import Any

import pytest
from ecoserve_operator import autoscaler
from ecoserve_operator.autoscaler import Autoscaler
from ecoserve_operator.cluster_api import CLUSTERS
from ecoserve_operator.store import Store

from tests.operator.manifests import manifest


def test_a_cluster_that_is_not_scaled_costs_next_to_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is looked at four times a second, so it is not even read."""
    store = Store()
    body = manifest(("metadata.uid", "1"), ("metadata.resourceVersion", "1"))
    store.put(CLUSTERS, body | {"spec": body["spec"] | {"autoscaling": {"enabled": False}}})
    scaler = Autoscaler(None, store, None, None)  # type: ignore[arg-type]

    def read(_: Any) -> None:
        raise AssertionError("it was read")

    monkeypatch.setattr(autoscaler.EcoServeCluster, "model_validate", read)
    scaler._start()
    store.put(
        CLUSTERS,
        manifest(
            ("metadata.uid", "2"),
            ("metadata.name", "scaled"),
            ("metadata.resourceVersion", "2"),
            ("spec.autoscaling.enabled", True),
        ),
    )
    with pytest.raises(AssertionError, match="it was read"):
        scaler._start()
