"""Real engines in this process, shared by the tests: stock vLLM and ours, side by side."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from engines import Engine

# As the worker does; see ecoserve_worker/__main__.py. Read when torch is imported.
os.environ.setdefault("GOMP_SPINCOUNT", "2000")


@pytest.fixture(scope="session")
def _vllm_in_process() -> None:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"


@pytest.fixture(scope="session")
def prompts() -> list[str]:
    """64 prompts: short and long, alike and not."""
    tales = ("a cat", "the king of Spain", "an old lamp", "two trees")
    long = "It was a dark and stormy night, and the rain fell in torrents on the roofs. "
    return [
        f"{long * (index % 5)}Tale {index} is about {tales[index % 4]} and begins"
        for index in range(64)
    ]


@pytest.fixture(scope="session")
def stock(model_dir: Path, _vllm_in_process: None) -> Engine:
    return Engine(model_dir, None)


@pytest.fixture(scope="session")
def eco(
    model_dir: Path, _vllm_in_process: None, tmp_path_factory: pytest.TempPathFactory
) -> Engine:
    return Engine(model_dir, tmp_path_factory.mktemp("eco") / "steps")


_TINY: dict[str, Any] = {"num_gpu_blocks_override": 40, "enable_prefix_caching": False}


@pytest.fixture(scope="session")
def tiny_stock(model_dir: Path, _vllm_in_process: None) -> Engine:
    return Engine(model_dir, None, **_TINY)


@pytest.fixture(scope="session")
def tiny_eco(
    model_dir: Path, _vllm_in_process: None, tmp_path_factory: pytest.TempPathFactory
) -> Engine:
    return Engine(model_dir, tmp_path_factory.mktemp("tiny") / "steps", **_TINY)
