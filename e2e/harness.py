"""A running `ecoserve up`, and looking at its processes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx

from ecoserve.local.machine import free_ports

NAME = "SmolLM2-135M-Instruct"


@dataclass
class Running:
    """A running `ecoserve up` and all that it has printed."""

    process: subprocess.Popen[str]
    port: int
    lines: list[str] = field(default_factory=list)

    def read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    @property
    def commands(self) -> list[str]:
        return [line.strip() for line in self.lines if line.startswith("  curl ")]

    def address(self, name: str) -> str:
        """What stands behind a name in the greeting."""
        pattern = re.compile(rf"  {name} +(\S+)")
        return next(found[1] for line in self.lines if (found := pattern.fullmatch(line)))

    def log(self, name: str) -> list[str]:
        """What a process has logged, lines that are whole."""
        (folder,) = (li.removeprefix("· Logs in ") for li in self.lines if li.startswith("· Logs"))
        return (Path(folder) / f"{name}.log").read_text().split("\n")[:-1]

    def answered(self) -> list[dict[str, Any]]:
        """Envoy's access log; it is some seconds behind."""
        return [json.loads(line) for line in self.log("envoy") if line.startswith("{")]

    def said(self, mark: str) -> list[float]:
        """When the scheduler logged the lines with ``mark`` in them, seconds since the epoch."""
        return [
            datetime.strptime(line[:23], "%Y-%m-%d %H:%M:%S,%f").timestamp()
            for line in self.log("scheduler")
            if mark in line
        ]

    def state(self) -> dict[str, Any]:
        """The scheduler's state; empty while it is away."""
        try:
            return dict(httpx.get(self.address("State"), timeout=5).json())
        except httpx.HTTPError:
            return {}

    def instances(self) -> dict[str, dict[str, Any]]:
        """The instances by name, as the scheduler has them now; empty while it is away."""
        local = self.state().get("clusters", {}).get("local", {})
        macros = local.get("macro_instances", {})
        return {i["name"]: i for macro in macros.values() for i in macro["instances"]}


@contextmanager
def started(run_dir: Path, *options: str) -> Iterator[Running]:
    """An `ecoserve up` of its own behind a free port, in debug mode, that has come up."""
    port = free_ports(1)[0]
    command = [sys.executable, "-m", "ecoserve", "up", "--port", str(port), "--logs"]
    command += ["--debug_mode", "--run-dir", str(run_dir), *options]
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


def seen(what: Callable[[], object], seconds: float) -> bool:
    """Whether it comes within that time."""
    deadline = time.monotonic() + seconds
    while not what():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def until(what: Callable[[], object], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.05)


def descendants(root: int) -> dict[int, str]:
    """All processes below ``root``, with their command lines."""
    parents, commands = {}, {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        pid = int(stat.parent.name)
        try:
            parents[pid] = int(stat.read_text().rpartition(")")[2].split()[1])
            commands[pid] = (stat.parent / "cmdline").read_text().replace("\0", " ")
        except (FileNotFoundError, ProcessLookupError):
            continue
    found = {root}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return {pid: commands[pid] for pid in found - {root} if pid in commands}


def only(running: Running, part: str) -> int:
    """The one process of the run whose command line has ``part`` in it."""
    (pid,) = [p for p, line in descendants(running.process.pid).items() if part in line]
    return pid


def engine_core(running: Running, instance: str) -> int:
    """The EngineCore of a worker: the child that vLLM forks from its front end."""
    (pid,) = descendants(only(running, f"--instance {instance} "))
    return pid


def accepted(running: Running) -> bool:
    """Whether all instances are routed to and nothing is left over from what came before."""
    found = running.instances().values()
    return len(found) == 2 and all(i["state"] == "accepted" for i in found)


def at_rest(running: Running) -> bool:
    """Whether nothing runs, waits or is reserved anywhere."""
    found = running.instances().values()
    return accepted(running) and not any(
        i.get("running") or i.get("waiting") or i["reservations"] for i in found
    )
