"""One cluster for all end-to-end tests; `test_up` comes last and ends it."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e.harness import Running, until
from ecoserve.local.machine import free_ports

# Those on a Kubernetes cluster are `make e2e`'s.
collect_ignore = ["kube"]


@pytest.fixture(scope="session")
def up(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Two workers behind a free port, as the default model is served, in debug mode."""
    port = free_ports(1)[0]
    command = [sys.executable, "-m", "ecoserve", "up", "--port", str(port), "--logs"]
    command += ["--debug_mode", "--run-dir", str(tmp_path_factory.mktemp("run"))]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    running = Running(process, port)
    reader = threading.Thread(target=running.read, daemon=True)
    reader.start()
    try:
        until(lambda: any("Ctrl-C stops" in li for li in running.lines) or process.poll(), 300)
        assert process.poll() is None, "\n".join(running.lines)
        yield running
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(120)
        reader.join(10)
