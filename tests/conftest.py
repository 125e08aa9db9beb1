"""Fixtures that all tests share."""

from __future__ import annotations

from pathlib import Path

import pytest

from ecoserve.local.model import default_cache_dir, prepare_smollm2


@pytest.fixture(scope="session")
def model_dir() -> Path:
    """SmolLM2-135M-Instruct as a directory; the first run downloads and converts it (a minute)."""
    return prepare_smollm2(default_cache_dir())
