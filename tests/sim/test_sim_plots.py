"""Pictures: what they hold, and in what shape."""

from __future__ import annotations

import struct
from pathlib import Path

from ecoserve.sim import plots
from ecoserve.sim.report import Sweep


def size(path: Path) -> tuple[int, int]:
    """Width and height of a PNG, in pixels."""
    header = path.read_bytes()[:24]
    assert header.startswith(b"\x89PNG")
    width, height = struct.unpack(">II", header[16:])
    return width, height


def test_experiments_of_one_panel_stand_two_in_a_row(tmp_path: Path) -> None:
    rows = [
        [Sweep(f"experiment {n}", "setting", ["0", "1"], {"vllm": [1.0, None], f"{n}": [2.0, 3.0]})]
        for n in range(5)
    ]
    plots.sweeps(rows[:2], tmp_path / "two.png", title="two")
    plots.sweeps(rows, tmp_path / "five.png", title="five")
    narrow, low = size(tmp_path / "two.png")
    wide, high = size(tmp_path / "five.png")
    assert wide == 2 * narrow
    assert low < high < 2 * low
