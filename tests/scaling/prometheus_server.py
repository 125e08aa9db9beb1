"""A Prometheus of the tests' own, with history that is written, not waited for."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

SCRAPE = 15.0
PAST, FUTURE = 1500.0, 900.0
DEADLINE = 60.0
HOW = "prometheus and promtool are not installed; on Debian: apt-get install prometheus"


def binary(name: str) -> str:
    """The path of prometheus or promtool; skips the test where there is none, or fails it in CI."""
    found = shutil.which(name)
    if found is None:
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(HOW)
    return found


class History:
    """Series as if scraped every ``SCRAPE`` seconds, from ``PAST`` seconds ago on. They go on into
    the future, so that a test may take its time."""

    def __init__(self) -> None:
        self.now = time.time()
        self._lines: list[tuple[float, str]] = []

    def add(self, metric: str, value: Callable[[float], float | None], **labels: str) -> None:
        """``value`` takes seconds from now, and gives None where nothing was scraped."""
        text = ",".join(f'{name}="{label}"' for name, label in labels.items())
        for n in range(int((PAST + FUTURE) / SCRAPE)):
            at = n * SCRAPE - PAST
            if (v := value(at)) is not None:
                self._lines.append((at, f"{metric}{{{text}}} {v}"))

    def scrapes(self) -> Iterator[tuple[float, str]]:
        """What each scrape until now found, with its time, in order."""
        found: dict[float, list[str]] = {}
        for at, line in self._lines:
            found.setdefault(at, []).append(line)
        for at, lines in sorted(found.items()):
            if at <= 0:
                yield self.now + at, "\n".join(lines) + "\n"

    def write(self, folder: Path) -> None:
        """Makes it the data of a Prometheus."""
        source = folder / "history.txt"
        stamped = (f"{line} {self.now + at:.3f}" for at, line in self._lines)
        source.write_text("\n".join([*stamped, "# EOF\n"]))
        done = subprocess.run(
            [binary("promtool"), "tsdb", "create-blocks-from", "openmetrics", "-q", source, folder],
            capture_output=True,
            text=True,
            timeout=DEADLINE,
        )
        assert done.returncode == 0, done.stderr + done.stdout


@contextmanager
def prometheus(folder: Path, config: str = "") -> Iterator[str]:
    """Runs Prometheus on the data in ``folder``; gives its URL."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    (folder / "prometheus.yml").write_text(config)
    log = folder / "prometheus.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [
                # It must not outlive a run that is killed. (To say so in the child, before it is
                # replaced, may hang where gRPC has threads.)
                *("setpriv", "--pdeathsig", "KILL"),
                binary("prometheus"),
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder}",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=out,
            stderr=subprocess.STDOUT,
        )
    url = f"http://127.0.0.1:{port}"
    try:
        _await(url, process, log)
        yield url
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _await(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + DEADLINE
    while process.poll() is None and time.monotonic() < end:
        try:
            if httpx.get(f"{url}/-/ready", trust_env=False).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.05)
    raise AssertionError(f"prometheus is not ready:\n{log.read_text()[-2000:]}")
