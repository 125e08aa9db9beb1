"""What the user sees, and that it does not matter when nobody looks any more."""

from __future__ import annotations

import os
import subprocess
import sys

_SOURCE = """
import sys
from ecoserve.local.display import Display, terminal
display = Display(terminal())
print("ready", file=sys.stderr, flush=True)
sys.stdin.readline()
for number in range(3):
    display.warn(f"stopping {number}")
with display.step("drained"):
    display.detail("all of it")
print("ended well", file=sys.stderr)
"""


def test_a_reader_that_goes_does_not_end_it() -> None:
    read, write = os.pipe()
    with subprocess.Popen(
        [sys.executable, "-c", _SOURCE],
        stdin=subprocess.PIPE,
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        os.close(write)
        assert process.stderr is not None
        assert process.stderr.readline() == "ready\n"
        os.close(read)
        _, told = process.communicate("\n", timeout=60)
    assert told == "ended well\n"
    assert process.returncode == 0


def test_a_reader_that_stays_sees_it_all() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _SOURCE], input="\n", capture_output=True, text=True, timeout=60
    )
    assert [f"! stopping {number}" for number in range(3)] == done.stdout.splitlines()[:3]
    assert "✓ drained" in done.stdout
