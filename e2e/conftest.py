"""One cluster for all end-to-end tests; `test_up` comes last and ends it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e.harness import Running, started

# Those on a Kubernetes cluster are `make e2e`'s.
collect_ignore = ["kube"]


@pytest.fixture(scope="session")
def up(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Two workers behind a free port, as the default model is served, in debug mode."""
    with started(tmp_path_factory.mktemp("run")) as running:
        yield running
