"""Fixtures that all tests share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings

from ecoserve.local.model import default_cache_dir, prepare_smollm2

# No deadline: on a machine shared with engines one example may take any time.
settings.register_profile("ecoserve", deadline=None)
settings.register_profile("soak", settings.get_profile("ecoserve"), max_examples=5000)
settings.load_profile("ecoserve")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes too long for each run is left to `make soak`."""
    if not os.environ.get("ECOSERVE_SOAK"):
        for item in items:
            if item.get_closest_marker("soak"):
                item.add_marker(pytest.mark.skip(reason="takes long; `make soak` runs it"))


@pytest.fixture(scope="session")
def model_dir() -> Path:
    """SmolLM2-135M-Instruct as a directory; the first run downloads and converts it (a minute)."""
    return prepare_smollm2(default_cache_dir())
