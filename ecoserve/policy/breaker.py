"""A circuit breaker: an instance whose answers fail is left alone, then tried with one request.

Closed, until ``FAILURES`` requests in a row have failed; then open for a backoff, in which it gets
nothing; then half-open: the next request is its trial. If that succeeds it is closed again, else
open for twice as long.
"""

from __future__ import annotations

from typing import Literal

FAILURES = 3
FIRST_BACKOFF_S = 1.0
MOST_BACKOFF_S = 30.0
# A trial that nobody has heard the end of is followed by another.
TRIAL_S = 30.0


class Breaker:
    """State of one instance's breaker; times are seconds on the caller's clock."""

    def __init__(self) -> None:
        self.state: Literal["closed", "open", "half-open"] = "closed"
        self.until = 0.0
        self._failures = 0
        self._backoff = FIRST_BACKOFF_S
        self._trial: str | None = None

    @property
    def blocks(self) -> bool:
        """Whether nothing is to be routed to the instance now."""
        return self.state == "open" or self._trial is not None

    def routed(self, request_id: str, now: float) -> None:
        """A request goes to the instance."""
        if self.state == "half-open":
            self._trial = request_id
            self.until = now + TRIAL_S

    def succeeded(self, request_id: str) -> None:
        """The instance has begun to answer a request, or has answered it."""
        if self.state == "closed":
            self._failures = 0
        elif request_id == self._trial:
            self.state = "closed"
            self._failures = 0
            self._backoff = FIRST_BACKOFF_S
            self._trial = None

    def failed(self, request_id: str, now: float, *, may_open: bool = True) -> bool:
        """A request failed at the instance; True if that opens the breaker. What was routed before
        it opened says nothing new."""
        if self.state == "closed":
            self._failures += 1
            if self._failures < FAILURES or not may_open:
                return False
        elif request_id != self._trial:
            return False
        else:
            self._backoff = min(2 * self._backoff, MOST_BACKOFF_S)
        self.state = "open"
        self.until = now + self._backoff
        self._trial = None
        return True

    def forget(self, request_id: str) -> None:
        """A request ended without saying anything of the instance: its client went away."""
        if request_id == self._trial:
            self._trial = None

    def tick(self, now: float) -> bool:
        """Time has passed; True if the instance may have a request that it might not before."""
        if now < self.until or not self.blocks:
            return False
        self.state = "half-open"
        self._trial = None
        return True
