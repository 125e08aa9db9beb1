"""One instance as the scheduler knows it: its session, its last report, what was routed since.

All times are seconds of the scheduler's own monotonic clock, passed in; reports carry durations
only, and ``reported_at`` is when the last one came.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, cast

from ecoserve.policy.breaker import Breaker
from ecoserve.policy.latency import LatencyModel
from ecoserve.policy.state import Decodes, InstanceView, Phase, Request
from ecoserve.proto.v1 import session_pb2
from ecoserve.scheduler.hello import BadHello, Hello, latency_model
from ecoserve.scheduler.prefixes import PrefixCache

State = Literal["connected", "warming", "accepted", "draining", "drained", "lost"]

# A reservation that nobody has heard of for so long is of a request that never arrived.
RESERVATION_S = 5.0
# Within so long after a break of the session alone, the instance comes back as what it was.
RETURN_S = 3.0
# One that has not reported for so long has missed three reports, which come once a second at least.
SILENT_S = 3.0
# The least share of its capacity that a new instance is offered.
FIRST_WEIGHT = 0.1
SWITCHES_KEPT = 512


@dataclass(slots=True)
class Reservation:
    """What a routed request will take, until a report covers it.

    ``output`` is its expected output in tokens a sequence; ``seen`` when it was routed or last
    named by a report's ``present``; ``left`` are the instances at which it was tried before.
    """

    request: Request
    seconds: float
    kv: int
    output: float
    seen: float
    left: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class PhaseSwitch:
    """A phase that began at ``at`` on the scheduler's clock."""

    at: float
    phase: str
    reason: str


@dataclass(frozen=True, slots=True)
class Reported:
    """A report, summed up once when it comes.

    ``backlog`` and ``recent_backlog`` are seconds of prefill of the waiting prompts, all and those
    since the last switch. Slacks are as of the report. ``free_kv`` has the waiting prompts' and the
    running requests' expected needs taken off.
    """

    phase: Phase
    since_switch: float
    backlog: float
    recent_backlog: float
    decodes: Decodes
    settled_slack: float
    step_kind: str
    step_estimated: float
    step_elapsed: float
    kv_free: int
    free_kv: int
    waiting: int
    running: int
    batch_limit: int
    use: float
    busy: float
    draining: bool
    engine_dead: bool
    idle: bool


class Instance:
    """State of one instance, over its incarnations."""

    def __init__(self, name: str, touched: Callable[[Instance], None] = lambda _: None) -> None:
        """``touched`` is called after whatever may change its load or whether it is routable."""
        self.name = name
        self._touched = touched
        self.hello: Hello | None = None
        self.latency: LatencyModel | None = None
        self.connected = False
        self.refused = "has not connected"
        self.warming = False
        self.accepted = False
        self.accepted_at = 0.0
        self.ramp_s = 0.0
        self.drain_wanted = False
        self.resume_wanted = False
        self.drain_timeout_s = 0.0
        self.lost_at: float | None = None
        self.reported: Reported | None = None
        self.reported_at = 0.0
        self.finished_seen = 0
        self.silent = False
        self.breaker = Breaker()
        self.reservations: dict[str, Reservation] = {}
        self.expected_output: dict[str, float] = {}
        self.prefixes = PrefixCache()
        self.switches: deque[PhaseSwitch] = deque(maxlen=SWITCHES_KEPT)
        self._reserved_seconds = 0.0
        self._reserved_kv = 0
        self._reserved_sequences = 0

    # -- the session ----------------------------------------------------------------------------

    def connect(self, hello: Hello) -> None:
        """A session began. An incarnation not known before knows nothing."""
        known = self.hello is not None and self.hello.incarnation == hello.incarnation
        if not known:
            self.accepted = False
            self.resume_wanted = False
            self.finished_seen = 0
            self.latency = hello.latency
            self.expected_output.clear()
            self.release_all()
            self.prefixes = PrefixCache()
            self.breaker = Breaker()
        # What it was comes back into force when it reports again.
        self.reported = None
        self.hello = hello
        self.connected = True
        self.warming = False
        self.lost_at = None
        self.refused = ""
        self._touched(self)

    def disconnect(self, now: float) -> None:
        """The session broke. What was reserved stays until it expires."""
        self.connected = False
        self.warming = False
        self.lost_at = now
        self.refused = "its session is gone"
        self._touched(self)

    def refuse(self, reason: str) -> None:
        """Not to be routed to until accepted (again)."""
        self.accepted = False
        self.warming = False
        self.refused = reason
        self._touched(self)

    def accept(self, now: float, ramp_s: float) -> None:
        """Routed to from now on; its share rises to full over ``ramp_s``."""
        self.accepted = True
        self.warming = False
        self.refused = ""
        self.accepted_at = now
        self.ramp_s = ramp_s
        self._touched(self)

    def drain(self, timeout_s: float) -> None:
        """To be given nothing more, and to end what it has within so long; 0: as declared."""
        self.drain_wanted = True
        self.resume_wanted = False
        self.drain_timeout_s = timeout_s
        self._touched(self)

    def resume(self) -> None:
        """To be given requests again. It may drain by word of a scheduler that is no more."""
        self.resume_wanted = self.draining
        self.drain_wanted = False
        self._touched(self)

    @property
    def draining(self) -> bool:
        """Whether it takes no new requests because it was told to stop, by us or by a signal."""
        if self.drain_wanted:
            return True
        if self.reported is not None:
            return self.reported.draining
        return self.hello is not None and self.hello.draining

    @property
    def state(self) -> State:
        """Where it is in the life of a session."""
        if self.hello is None or not self.connected:
            return "lost"
        if self.reported is not None and self.reported.engine_dead:
            return "lost"
        if self.draining:
            done = self.reported.idle if self.reported is not None else not self.accepted
            return "drained" if done and not self.reservations else "draining"
        if self.accepted:
            return "accepted"
        return "warming" if self.warming else "connected"

    @property
    def reason(self) -> str:
        """Why it is not routed to, empty if it is."""
        if self.reported is not None and self.reported.engine_dead:
            return "its engine is dead"
        if self.silent:
            return f"it has not reported for {SILENT_S:g} s"
        if self.breaker.blocks:
            return f"its answers failed; its circuit breaker is {self.breaker.state}"
        return self.refused

    @property
    def routable(self) -> bool:
        """Accepted, with a state known that is not old, and not failing: ``state`` is "accepted"
        and ``reason`` empty."""
        reported = self.reported
        return (
            reported is not None
            and self.accepted
            and self.connected
            and not self.drain_wanted
            and not self.silent
            and not self.breaker.blocks
            and not reported.draining
            and not reported.engine_dead
        )

    def returning(self, now: float) -> bool:
        """Whether it may be back at any moment: its session has just broken, or it is warming."""
        if self.lost_at is not None and not self.connected:
            return self.accepted and now - self.lost_at <= RETURN_S
        if self.silent:
            return now - self.reported_at <= SILENT_S + RETURN_S
        return self.warming or (self.connected and self.accepted and self.reported is None)

    # -- reports --------------------------------------------------------------------------------

    def report(self, message: session_pb2.Report, now: float, usual_output: float) -> None:
        """Takes a report in. ``usual_output`` is expected of requests that nobody estimated."""
        if message.HasField("latency"):
            # The last good model is better than none; the worker's own log has the rest.
            with contextlib.suppress(BadHello):
                self.latency = latency_model(message.latency, "report.latency")
        model = self.latency
        assert model is not None
        backlog = recent = 0.0
        demand = 0.0
        for prompt in message.waiting:
            seconds = model.prefill(prompt.tokens, prompt.context)
            backlog += seconds
            if prompt.since_switch:
                recent += seconds
            demand += prompt.tokens + self.expected_output.get(prompt.id, usual_output)
        context = settled = 0
        least = tpot = float("inf")
        slack_sum = settled_sum = 0.0
        for decode in message.running:
            context += decode.context
            slack_sum += decode.slack_s
            least = min(least, decode.slack_s)
            tpot = min(tpot, decode.tpot_s or float("inf"))
            if not decode.since_switch:
                settled += 1
                settled_sum += decode.slack_s
            left = self.expected_output.get(decode.id, usual_output) - decode.generated
            demand += max(left, 0.0)
        count = len(message.running)
        self.reported = Reported(
            phase=cast("Phase", message.phase if message.phase == "decode" else "prefill"),
            since_switch=message.since_switch_s,
            backlog=backlog,
            recent_backlog=recent,
            decodes=(
                Decodes(count, context, least, slack_sum / count, tpot) if count else Decodes()
            ),
            settled_slack=settled_sum / settled if settled else float("inf"),
            step_kind=message.step.kind,
            step_estimated=message.step.estimated_s,
            step_elapsed=message.step.elapsed_s,
            kv_free=message.kv_free_tokens,
            free_kv=int(message.kv_free_tokens - demand),
            waiting=len(message.waiting),
            running=count,
            batch_limit=message.batch_limit,
            use=message.use,
            busy=message.busy,
            draining=message.draining,
            engine_dead=message.engine_dead,
            idle=not (message.waiting or message.running or message.present),
        )
        self.reported_at = now
        self.silent = False
        for switch in message.switches:
            self.switches.append(PhaseSwitch(now - switch.age_s, switch.phase, switch.reason))
        self._touched(self)

    # -- reservations ---------------------------------------------------------------------------

    def reserve(
        self, request: Request, now: float, output: float, left: frozenset[str] = frozenset()
    ) -> None:
        """Lays a routed request over the reported state."""
        self.release(request.id)
        self.breaker.routed(request.id, now)
        seconds = self._prefill_seconds(request)
        kv = request.kv_tokens(self.name)
        self.reservations[request.id] = Reservation(request, seconds, kv, output, now, left)
        self._reserved_seconds += seconds
        self._reserved_kv += kv
        self._reserved_sequences += request.sequences
        self._touched(self)

    def release(self, request_id: str) -> Reservation | None:
        """Takes a reservation away, if there is one."""
        reservation = self.reservations.pop(request_id, None)
        if reservation is not None:
            self._reserved_kv -= reservation.kv
            self._reserved_sequences -= reservation.request.sequences
            # Summed anew, so that no rounding is left behind.
            self._reserved_seconds = sum(r.seconds for r in self.reservations.values())
            self._touched(self)
        return reservation

    def release_all(self) -> None:
        """Takes all reservations away."""
        for request_id in list(self.reservations):
            self.release(request_id)

    def tick(self, now: float) -> None:
        """Time has passed: it may have fallen silent, or be tried again."""
        reported = self.reported is not None and self.connected
        silent = reported and now - self.reported_at > SILENT_S
        if self.breaker.tick(now) or silent != self.silent:
            self.silent = silent
            self._touched(self)

    def failed(self, request_id: str, now: float, *, may_open: bool) -> bool:
        """A request failed at it; True if it is given none from now on."""
        opened = self.breaker.failed(request_id, now, may_open=may_open)
        if opened:
            self._touched(self)
        return opened

    def expired(self, now: float) -> list[str]:
        """Requests that no report has named for too long. One that does not come to report may have
        them all the same."""
        told = self.reported_at if self.connected else now
        return [
            request_id
            for request_id, reservation in self.reservations.items()
            if told - reservation.seen > RESERVATION_S
        ]

    def _prefill_seconds(self, request: Request) -> float:
        assert self.latency is not None
        uncached = request.uncached(self.name)
        return self.latency.prefill(uncached, request.prompt_tokens - uncached)

    # -- what the policy sees -------------------------------------------------------------------

    def weight(self, now: float) -> float:
        """The share of its capacity that is offered while it warms up."""
        if self.ramp_s <= 0:
            return 1.0
        return min(max((now - self.accepted_at) / self.ramp_s, FIRST_WEIGHT), 1.0)

    def view(self, now: float) -> InstanceView:
        """The last report, aged to ``now``, with the reservations laid over it."""
        reported, hello, model = self.reported, self.hello, self.latency
        assert reported is not None
        assert hello is not None
        assert model is not None
        age = now - self.reported_at
        elapsed = reported.step_elapsed + age
        # What the step under way has done of its prompts is no longer pending.
        done = (
            min(elapsed, reported.step_estimated, reported.backlog)
            if reported.step_kind in ("prefill", "mixed")
            else 0.0
        )
        backlog = reported.backlog - done
        decodes = reported.decodes
        if decodes.count:
            decodes = Decodes(
                decodes.count,
                decodes.context,
                decodes.least_slack - age,
                decodes.mean_slack - age,
                decodes.tpot,
            )
        limit = reported.batch_limit or hello.limits.max_num_seqs
        return InstanceView(
            name=self.name,
            phase=reported.phase,
            since_switch=reported.since_switch + age,
            backlog=backlog + self._reserved_seconds,
            backlog_since_switch=min(reported.recent_backlog, backlog) + self._reserved_seconds,
            decodes=decodes,
            settled_slack=reported.settled_slack - age,
            residue=max(0.0, reported.step_estimated - elapsed) if reported.step_kind else 0.0,
            free_kv=reported.free_kv - self._reserved_kv,
            room=limit - reported.waiting - reported.running - self._reserved_sequences,
            use=reported.use,
            latency=model,
            weight=self.weight(now),
        )

    @property
    def load(self) -> int:
        """Requests that it has or is about to have."""
        reported = self.reported
        held = reported.waiting + reported.running if reported is not None else 0
        return held + len(self.reservations)
