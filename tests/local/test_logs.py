"""Logs that are shown as they grow, and that do not grow for ever."""

from __future__ import annotations

import asyncio
import io
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from ecoserve.local import logs

# Writes lines until it is told to stop, as a process that was started with the log as its output.
_TALKER = """
import itertools, sys, time
for number in itertools.count():
    print(f"line {number:06}", flush=True)
    time.sleep(0.0005)
"""


async def test_a_long_log_is_begun_anew_while_it_is_written_and_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "_LONGEST", 2000)
    monkeypatch.setattr(logs, "_LOOK", 0.01)
    monkeypatch.setattr(logs, "_POLL", 0.01)
    log, before = tmp_path / "worker.log", tmp_path / "worker.old.log"
    shown = io.StringIO()
    tasks = [
        asyncio.create_task(logs.bound([log, tmp_path / "none.log"])),
        asyncio.create_task(logs.follow({"worker": log}, Console(file=shown, width=200))),
    ]
    with (
        log.open("ab") as file,
        subprocess.Popen([sys.executable, "-c", _TALKER], stdout=file) as talker,  # noqa: ASYNC220
    ):
        try:
            async with asyncio.timeout(60):
                while shown.getvalue().count("line") < 1000:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
        finally:
            talker.kill()
    assert log.stat().st_size < 1000 * len("line 000000\n")
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    # Each is whole: what is appended begins at the beginning of the file.
    assert {len(line) for line in before.read_text().splitlines()} == {len("line 000000")}
    assert b"\0" not in log.read_bytes()


def test_a_disk_that_is_full_is_freed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(logs.shutil, "copyfile", full)
    log = tmp_path / "worker.log"
    log.write_text("x" * 100)
    logs._begin_anew(log)
    assert log.stat().st_size == 0
