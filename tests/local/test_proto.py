from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROTO = Path("ecoserve/proto/v1")


@pytest.mark.parametrize("name", ["session", "admin"])
def test_generated_stubs_are_up_to_date(tmp_path: Path, name: str) -> None:
    """`make proto` makes them so."""
    outs = [f"--{kind}_out={tmp_path}" for kind in ("python", "pyi", "grpc_python")]
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{ROOT}", *outs]
    subprocess.run([*command, str(PROTO / f"{name}.proto")], cwd=ROOT, check=True, timeout=60)
    made = sorted((tmp_path / PROTO).iterdir())
    assert len(made) == 3
    for file in made:
        assert file.read_text() == (ROOT / PROTO / file.name).read_text(), file.name
