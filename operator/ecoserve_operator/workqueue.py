"""Keys that have something to do, each worked on by one task at a time."""

from __future__ import annotations

import asyncio
from collections import Counter

from ecoserve_operator.metrics import QUEUE, RECONCILE
from ecoserve_operator.store import Key


class WorkQueue:
    """Hands out keys when they are due. A key that is added while it is worked on comes again
    afterwards. Times are of the running loop, seconds."""

    def __init__(self) -> None:
        self._due: dict[Key, float] = {}
        self._active: dict[Key, float] = {}
        self._failures: Counter[Key] = Counter()
        self._wake = asyncio.Event()
        self._beat: float | None = None

    def add(self, key: Key, delay: float = 0.0) -> None:
        """Has a key worked on in ``delay`` seconds at the latest."""
        due = _now() + delay
        if due < self._due.get(key, float("inf")):
            self._due[key] = due
            self._wake.set()

    async def take(self) -> Key:
        """The next key that is due; waits for it."""
        while True:
            self._beat = now = _now()
            ready = [(due, key) for key, due in self._due.items() if key not in self._active]
            due, key = min(ready, default=(now + 5.0, ("", "")))
            if due <= now:
                del self._due[key]
                self._active[key] = now
                QUEUE.observe(now - due)
                return key
            self._wake.clear()
            try:
                async with asyncio.timeout(min(due - now, 5.0)):
                    await self._wake.wait()
            except TimeoutError:
                pass

    def done(self, key: Key) -> None:
        """All that could be done for a key now has been."""
        self._ended(key, "done")
        self._failures.pop(key, None)
        self._wake.set()

    def failed(self, key: Key, first: float = 0.25, most: float = 30.0) -> float:
        """It has failed and is tried again, later each time; returns after how many seconds."""
        self._ended(key, "failed")
        delay = min(first * 2.0 ** self._failures[key], most)
        self._failures[key] = min(self._failures[key] + 1, 30)
        self._due[key] = _now() + delay
        self._wake.set()
        return delay

    def _ended(self, key: Key, outcome: str) -> None:
        RECONCILE.labels(outcome).observe(_now() - self._active.pop(key))

    @property
    def age(self) -> float:
        """Seconds since the work last went on: the longest that a key is worked on, or how long ago
        somebody last asked for one. 0 before the work begins."""
        if self._beat is None:
            return 0.0
        now = _now()
        return max([now - self._beat, *(now - started for started in self._active.values())])


def _now() -> float:
    return asyncio.get_running_loop().time()
