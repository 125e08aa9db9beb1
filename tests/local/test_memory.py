"""What was freed goes back to the system."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from ecoserve import memory
from ecoserve.memory import GivesBack

MIB = 1 << 20


def anonymous() -> int:
    """Bytes of memory that are this process's own."""
    (kib,) = (
        int(line.split()[1])
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("RssAnon")
    )
    return kib << 10


@pytest.mark.skipif(memory._trim is None, reason="only glibc keeps what is freed")
def test_what_was_freed_goes_back_to_the_system() -> None:
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    # Too small to be mapped each for itself, and the last stays: nothing above them goes back.
    size, before = 64 << 10, anonymous()
    blocks = [libc.malloc(size) for _ in range(64 * MIB // size)]
    for block in blocks:
        ctypes.memset(block, 1, size)
    last = blocks.pop()
    for block in blocks:
        libc.free(block)
    assert anonymous() - before > 48 * MIB
    assert GivesBack().at(0.0)
    assert anonymous() - before < 16 * MIB
    libc.free(last)


def test_only_so_often() -> None:
    memory = GivesBack(10.0)
    assert [memory.at(now) for now in (0.0, 5.0, 9.9, 10.0, 10.1, 25.0)] == [
        True,
        False,
        False,
        True,
        False,
        True,
    ]
