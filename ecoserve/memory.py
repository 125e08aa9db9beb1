"""Memory that was freed, and that the C library keeps for what may come."""

from __future__ import annotations

import ctypes

# glibc's own; other C libraries return by themselves what they do not need.
_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)


class GivesBack:
    """Returns freed memory to the system, at most every ``seconds``.

    It takes under a millisecond where there is little to return, some 20 for 150 MB.
    """

    def __init__(self, seconds: float = 10.0) -> None:
        self._seconds = seconds
        self._last = float("-inf")

    def at(self, now: float) -> bool:
        """Returns it unless that was done within the last ``seconds``; whether it was its time."""
        if now - self._last < self._seconds:
            return False
        self._last = now
        if _trim is not None:
            _trim(0)
        return True
