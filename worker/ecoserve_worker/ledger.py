"""What the front end knows: the requests it has, the engine's last state, what ended and how.

The gate writes requests into it, the channel the engine's messages; agent, health route and metrics
read it. It belongs to the event loop's thread and does no I/O of its own.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from ecoserve.policy.state import SLO
from ecoserve_worker.messages import (
    Calibrate,
    Command,
    Forget,
    FromEngine,
    Meta,
    PhaseSwitch,
    Sample,
    SequenceDone,
    State,
)

CLIENT_GONE = 499

# How long after the end of its HTTP call a request waits for the engine's account of it.
_SETTLE_SECONDS = 1.0
_KEPT_SWITCHES = 256
# Of what ended while no scheduler was there to be told; it is for its figures alone.
_KEPT_OUTCOMES = 10_000
_LOAD_WINDOW = 10.0  # that of ``ecoserve.policy.use.UseMeter``


@dataclass(slots=True)
class Call:
    """A request whose HTTP call has reached this worker."""

    id: str
    arrived: float
    ttft: float | None
    tpot: float | None
    done: list[SequenceDone] = field(default_factory=list)
    ended: float = 0.0  # 0: under way
    status: int = 0
    broken: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """A request that ended; times in seconds, 0 where there is none."""

    number: int
    id: str
    status: int
    prompt_tokens: int
    cached_tokens: int
    generated: int
    ttft: float
    tpot: float
    slo: SLO
    broken: bool


class Ledger:
    """The front end's books.

    ``tell`` sends a command to the engine. ``engine_dead`` says whether the engine is gone.
    """

    def __init__(
        self,
        slo: SLO,
        *,
        accepted: bool = False,
        tell: Callable[[Command], None] = lambda command: None,
        engine_dead: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.slo = slo
        self.accepted = accepted
        self.starting = "starting"  # why it is not accepted yet
        self.draining = False
        self.engine_dead = engine_dead
        self.state: State | None = None
        self.latency: tuple[float, ...] | None = None
        self.switches: deque[PhaseSwitch] = deque(maxlen=_KEPT_SWITCHES)
        self.samples: list[Sample] = []
        # Not acknowledged by the scheduler yet, oldest first.
        self.finished: deque[Outcome] = deque(maxlen=_KEPT_OUTCOMES)
        self.changed = asyncio.Event()
        self._tell = tell
        self._clock = clock
        self._calls: dict[str, Call] = {}
        self._settling: list[Call] = []
        self._open: set[str] = set()
        self._numbers = 0

    @property
    def present(self) -> list[str]:
        """Ids of the requests whose HTTP call is under way."""
        return list(self._calls)

    @property
    def load(self) -> tuple[float, float]:
        """Use and busy share now. An idle engine sends nothing, and both fall to 0 with its
        window."""
        state = self.state
        if state is None:
            return 0.0, 0.0
        left = 1.0
        if not (state.step_kind or state.waiting or state.running):
            left = max(0.0, 1 - (self._clock() - state.at) / _LOAD_WINDOW)
        return state.use * left, state.busy * left

    @property
    def idle(self) -> bool:
        """Whether no request is under way and all that ended are settled."""
        return not self._calls and not self._settling

    def refusal(self) -> str | None:
        """Why new work is not taken, or None."""
        if self.engine_dead():
            return "the engine is dead"
        if self.draining:
            return "draining"
        return None if self.accepted else f"not accepted yet ({self.starting})"

    # --- the gate's side

    def begin(self, id: str, waited: float, ttft: float | None, tpot: float | None) -> Call:
        """A request came that had waited ``waited`` seconds before it was sent here."""
        call = Call(id, self._clock() - waited, ttft, tpot)
        self._calls[id] = call
        self._tell(Meta(id, call.arrived, ttft, tpot))
        self.changed.set()
        return call

    def end(self, call: Call, status: int, *, broken: bool) -> None:
        """The HTTP call ended with this status (499: the client went away)."""
        call.ended = self._clock()
        call.status = status
        call.broken = broken
        if self._calls.get(call.id) is call:
            del self._calls[call.id]
        self._settling.append(call)
        self.settle()
        self.changed.set()

    # --- the engine's side

    def received(self, message: FromEngine) -> None:
        """Takes a message from the engine."""
        if message.samples:
            self.samples += message.samples
        self.switches.extend(message.switches)
        if message.done:
            settling = {call.id: call for call in self._settling}
            for done in message.done:
                call = self._calls.get(done.id) or settling.get(done.id)
                if call is not None:
                    call.done.append(done)
        state = message.state
        if state is not None:
            self.state = state
            if state.latency is not None:
                self.latency = state.latency
            self._open = {p.id for p in state.waiting}
            self._open.update(d.id for d in state.running)
        self.settle()
        self.changed.set()

    def settle(self) -> None:
        """Closes the account of requests that ended at both sides, or that waited long enough."""
        if not self._settling:
            return
        now = self._clock()
        still: list[Call] = []
        for call in self._settling:
            known = bool(call.done) or call.id in self._open
            complete = call.id not in self._open and bool(call.done)
            turned_away = not known and call.status not in (200, CLIENT_GONE)
            if complete or turned_away or now - call.ended > _SETTLE_SECONDS:
                self._close(call)
            else:
                still.append(call)
        self._settling = still

    def acknowledged(self, number: int) -> None:
        """The scheduler has taken every outcome up to ``number``."""
        while self.finished and self.finished[0].number <= number:
            self.finished.popleft()

    def calibrate(self, on: bool) -> None:
        """Has the engine measure its steps, or go back to serving."""
        self._tell(Calibrate(on))

    def _close(self, call: Call) -> None:
        self._numbers += 1
        slo = SLO(call.ttft or self.slo.ttft, call.tpot or self.slo.tpot)
        done = call.done
        self.finished.append(
            Outcome(
                self._numbers,
                call.id,
                call.status,
                sum(d.prompt_tokens for d in done),
                sum(d.cached_tokens for d in done),
                sum(d.generated for d in done),
                # A request is as late as the latest of its sequences.
                max((d.ttft for d in done), default=0.0),
                max((d.tpot for d in done), default=0.0),
                slo,
                call.broken,
            )
        )
        if call.id not in self._calls:
            self._tell(Forget(call.id))
