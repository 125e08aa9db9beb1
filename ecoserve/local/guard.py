"""Ends what a launcher started when the launcher itself is killed.

A SIGKILL leaves a launcher no time to stop its children, and ``PR_SET_PDEATHSIG`` reaches neither
grandchildren (an engine's own processes) nor lets anything finish. So one small process of its own
session reads the launcher's process groups from a pipe, and the pipe's end, which comes however the
launcher dies, is the sign to stop them and to remove their temporary files. It imports nothing but
the standard library.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterable
from pathlib import Path

# Each child carries this variable, so that one whose group was not yet told is found as well.
MARK = "ECOSERVE_RUN"
GRACE = 10.0  # seconds between SIGTERM and SIGKILL


def members(groups: Iterable[int], mark: str) -> set[int]:
    """The living processes of these process groups or with ``MARK`` = ``mark``, without our own."""
    wanted, entry = set(groups), f"{MARK}={mark}".encode()
    found = set()
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit() or int(folder.name) == os.getpid():
            continue
        try:
            # After the command's name in brackets: state, parent, process group.
            state, _, group = (folder / "stat").read_text().rpartition(")")[2].split()[:3]
            marked = int(group) in wanted or entry in (folder / "environ").read_bytes().split(b"\0")
        except (OSError, ValueError):
            continue  # it ended meanwhile, or is not ours to read
        if marked and state != "Z":
            found.add(int(folder.name))
    return found


def end(groups: Iterable[int], mark: str, grace: float) -> None:
    """Sends SIGTERM, and after ``grace`` seconds SIGKILL to those that are left."""
    groups = set(groups)
    deadline = time.monotonic() + grace
    told: set[int] = set()
    while (alive := members(groups, mark)) and time.monotonic() < deadline:
        _signal(alive - told, signal.SIGTERM)
        told |= alive
        time.sleep(0.05)
    while alive := members(groups, mark):
        _signal(alive, signal.SIGKILL)
        time.sleep(0.05)


def _signal(pids: Iterable[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def main() -> None:
    """Reads ``+GROUP`` and ``-GROUP`` lines until the pipe ends."""
    mark, grace, temporary = sys.argv[1], float(sys.argv[2]), sys.argv[3]
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    groups: set[int] = set()
    for line in sys.stdin:
        group = int(line[1:])
        if line[0] == "+":
            groups.add(group)
        else:
            groups.discard(group)
    end(groups, mark, grace)
    shutil.rmtree(temporary, ignore_errors=True)


if __name__ == "__main__":
    main()
