"""A fixed share of the CPUs for a tree of processes: a Linux control group of version 1 or 2."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
# Short, so that a process that has used its share waits no longer than a step takes.
_PERIOD_US = 10_000
# The most there is: other processes of the machine must not eat into the share.
_WEIGHT, _SHARES = 10_000, 262_144
_ENDS_S = 30.0


@contextlib.contextmanager
def group(name: str, cores: float) -> Iterator[Path]:
    """Makes a group whose processes get ``cores`` of CPU time together; yields its folder.

    Raises ``OSError`` where groups cannot be made (no root, or a container that forbids it).
    """
    first = (_ROOT / "cgroup.controllers").exists()
    folder = (_ROOT if first else _ROOT / "cpu") / f"ecoserve-bench-{os.getpid()}-{name}"
    quota = round(cores * _PERIOD_US)
    folder.mkdir()
    try:
        if first:
            (folder / "cpu.max").write_text(f"{quota} {_PERIOD_US}")
            (folder / "cpu.weight").write_text(str(_WEIGHT))
        else:
            (folder / "cpu.cfs_period_us").write_text(str(_PERIOD_US))
            (folder / "cpu.cfs_quota_us").write_text(str(quota))
            (folder / "cpu.shares").write_text(str(_SHARES))
        yield folder
    finally:
        end = time.monotonic() + _ENDS_S
        while pids := (folder / "cgroup.procs").read_text().split():
            if time.monotonic() > end:  # told to end, and did not
                for pid in map(int, pids):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            time.sleep(0.1)
        folder.rmdir()


def pin(pid: int, cpus: set[int]) -> None:
    """Has a process with all its threads run on those CPUs only."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(int(task.name), cpus)


def move(folder: Path, pid: int) -> None:
    """Puts a process with all that it starts from now on into the group."""
    (folder / "cgroup.procs").write_text(str(pid))
