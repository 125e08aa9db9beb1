"""The cheap client of the benches under ``bench/``: what its latencies hold."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[2] / "bench"))
import wire

HERE = pytest.approx


class Virtual(asyncio.SelectorEventLoop):
    """A loop whose clock goes on to the next timer as soon as nothing else is to be done."""

    now = 0.0

    def time(self) -> float:
        return self.now

    def _run_once(self) -> None:
        if not self._ready and self._scheduled:  # type: ignore[attr-defined]
            self.now = max(self.now, self._scheduled[0].when())  # type: ignore[attr-defined]
        super()._run_once()  # type: ignore[misc]


class Slow(wire.Connection):
    """Answers after so many seconds."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    async def ask(self, request: bytes) -> None:
        await asyncio.sleep(self.seconds)


def test_an_open_loop_counts_each_wait_for_a_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """One connection of 50 ms, a request every 25 ms: each waits 25 ms longer than the last."""
    loop = Virtual()
    clock: Any = type("Clock", (), {"perf_counter": staticmethod(loop.time)})
    monkeypatch.setattr(wire, "time", clock)
    pool = wire.Pool([Slow(0.05)], [b""])
    try:
        found = loop.run_until_complete(pool.open_loop(rate=40.0, seconds=0.15))
    finally:
        loop.close()
    assert found == HERE([0.05, 0.075, 0.1, 0.125, 0.15, 0.175])
