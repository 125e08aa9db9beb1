"""A call on its way through the scheduler."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ecoserve.policy.state import Request
from ecoserve.scheduler.work import Work


@dataclass(frozen=True, slots=True)
class Picked:
    """Where a call goes: ``addresses`` in the order in which they are to be tried."""

    instance: str
    addresses: tuple[str, ...]
    waited: float
    late: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Turned:
    """A call that is turned away; ``retry_after`` in seconds, None when trying again is no use."""

    status: int
    kind: str
    message: str
    retry_after: float | None = None
    param: str | None = None


Outcome = Picked | Turned


@dataclass(slots=True)
class Ticket:
    """A call that has been offered; ``outcome`` is set once, and then ``decided`` is called.

    ``serve_by`` is when the gateway's patience ends. ``macro`` is the macro instance whose queue
    it is in, None while it is in none. ``key`` names its conversation.
    """

    request: Request
    work: Work
    key: bytes
    serve_by: float
    output: float  # expected tokens a sequence
    macro: str | None = None
    outcome: Outcome | None = None
    decided: Callable[[], None] | None = None

    def decide(self, outcome: Outcome) -> None:
        self.outcome = outcome
        if self.decided is not None:
            self.decided()
