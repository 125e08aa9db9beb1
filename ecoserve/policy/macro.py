"""The queue in front of a macro instance: what waits, what is late, what goes where.

A request is routed to the first instance, in the policy's order, that passes the policy's check;
else it waits and is tried again. One that can no longer meet its TTFT anywhere is *late*: it gives
way to all that can, and is served when nothing else waits and an instance has no prefill pending,
or after ``late_wait`` in any case; or it is shed at once, as configured. A late prompt that alone
takes more than half its TTFT SLO closes its instance to those that come behind it, so at most half
of the instances (one at least) compute such prompts at once. Only a full queue sheds otherwise, the
costliest late request first.

Several tenants share the instances by ``fair``: the one that was given least is asked first, and
what none of its requests can use goes to the next. A tenant that was given more than another is
not served late beyond what the instances have room for, but shed, and it is from the tenant with
most in the queue that a full queue sheds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from ecoserve.policy.admission import fits
from ecoserve.policy.base import Policy
from ecoserve.policy.fair import Flow, Shares
from ecoserve.policy.latency import LatencyModel
from ecoserve.policy.line import allowed
from ecoserve.policy.routing import lightest, load
from ecoserve.policy.state import InstanceView, MacroView, Request

Late = Literal["serve", "shed"]

# A dispatch gives up after this many requests in a row that nobody can take: what is full for
# sixty-four is full for the next, and a long queue must not make each report cost a scan of it.
SCAN_LIMIT = 64
# How soon to try again when nothing else calls: slack and residues move with time alone.
RETRY_EVERY = 0.02
FALLBACKS = 2


@dataclass(frozen=True, slots=True)
class Routed:
    """A request and where it goes; ``fallbacks`` are tried in order if that instance fails."""

    request: Request
    instance: str
    fallbacks: tuple[str, ...]
    late: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Shed:
    """A request that is turned away; ``retry_after`` in seconds."""

    request: Request
    reason: str
    retry_after: float


@dataclass(slots=True)
class _Turn:
    """A dispatch under way: the view with what was routed in it, and the decisions so far; ``over``
    once nothing more may be routed."""

    view: MacroView
    decisions: list[Routed | Shed]
    over: bool = False


class MacroScheduler:
    """Routes the requests of one macro instance. Deterministic; the clock is the view's."""

    def __init__(
        self,
        policy: Policy,
        *,
        late: Late = "serve",
        queue_limit: int = 1024,
        late_wait: float = 30.0,
    ) -> None:
        if queue_limit < 1:
            raise ValueError(f"queue_limit must be at least 1, not {queue_limit}")
        if late_wait < 0:
            raise ValueError(f"late_wait must be 0 s or more, not {late_wait}")
        if late not in ("serve", "shed"):
            raise ValueError(f"late must be 'serve' or 'shed', not {late!r}")
        self.policy = policy
        self.late_mode: Late = late
        self.queue_limit = queue_limit
        self.late_wait = late_wait
        self.last: str | None = None
        self._waiting: dict[str, Request] = {}
        self._late: dict[str, Request] = {}
        self._shares = Shares()
        self._overflow: list[Request] = []
        # Until when no late request has waited too long.
        self._calm_until = math.inf
        # Instances that compute a long late prompt.
        self._closed: set[str] = set()
        self._models: tuple[tuple[str, LatencyModel], ...] = ()

    @property
    def waiting(self) -> tuple[Request, ...]:
        """Requests that may still be on time, in order of arrival."""
        return tuple(self._waiting.values())

    @property
    def late(self) -> tuple[Request, ...]:
        """Requests that cannot be on time any more, in the order in which that was found."""
        return tuple(self._late.values())

    def __len__(self) -> int:
        return len(self._waiting) + len(self._late) + len(self._overflow)

    def offer(self, request: Request) -> None:
        """Takes a request in; the next ``dispatch`` routes it, keeps it or sheds it."""
        if request.id in self._waiting or request.id in self._late:
            raise ValueError(f"request {request.id} waits already")
        self._waiting[request.id] = request
        self._shares.wait(request)
        if len(self._waiting) + len(self._late) > self.queue_limit:
            victim = self._victim(request)
            self.cancel(victim.id)
            self._overflow.append(victim)

    def _victim(self, newcomer: Request) -> Request:
        """Of the tenant with most in the queue the costliest late request, else the newest."""
        fullest = max(self._shares.busy, key=lambda f: (len(f), f.tenant == newcomer.tenant))
        if len(fullest.late):
            return max(fullest.late, key=lambda r: r.prompt_tokens)
        return next(r for r in reversed(self._waiting.values()) if r.tenant == fullest.tenant)

    def cancel(self, request_id: str) -> bool:
        """Forgets a request whose client went away; False if it does not wait here."""
        request = self._waiting.pop(request_id, None) or self._late.pop(request_id, None)
        if request is None:
            return False
        self._shares.remove(request)
        return True

    def is_ahead(self, request: Request, now: float) -> bool:
        """Whether the request's tenant was given more than another that is there."""
        return self._shares.is_ahead(request.tenant, now - self.late_wait)

    def charge(self, tenant: str, tokens: float) -> None:
        """A tenant's requests took so many weighted tokens more than was thought."""
        self._shares.charge(tenant, tokens)

    def next_wakeup(self, now: float) -> float | None:
        """When to dispatch again if no report and no request comes before; None: no need."""
        return now + RETRY_EVERY if len(self) else None

    def dispatch(self, view: MacroView) -> list[Routed | Shed]:
        """Decides whatever can be decided now."""
        decisions: list[Routed | Shed] = [
            Shed(request, "the queue is full", self._retry_after(view))
            for request in self._overflow
        ]
        self._overflow.clear()
        view = MacroView(view.now, view.instances, self.last)
        view = self._dispatch_waiting(view, decisions)
        self._dispatch_late(view, decisions)
        return decisions

    def _dispatch_waiting(self, view: MacroView, decisions: list[Routed | Shed]) -> MacroView:
        turn = _Turn(view, decisions)
        models = self._same_models(view)
        scans = {flow: self._scan(flow, turn, models) for flow in self._shares.busy}
        while scans and not turn.over:
            flow = min(scans, key=lambda f: f.served)
            found = next(scans[flow], None)
            if found is None:
                del scans[flow]
                continue
            request, chosen = found
            del self._waiting[request.id]
            self._shares.serve(request, chosen.name)
            self.last = chosen.name
            others = allowed(request, turn.view.instances)
            decisions.append(_routed(request, chosen, others, late=False, reason="admitted"))
            if len(self):
                turn.view = _after(turn.view, chosen, request)
        return turn.view

    def _scan(
        self, flow: Flow, turn: _Turn, models: object
    ) -> Iterator[tuple[Request, InstanceView]]:
        """Those of a tenant's requests that can be routed, one by one, each with the instance; it
        is to be routed before the next is asked for."""
        failures = 0
        for block in flow.waiting.blocks:
            view = turn.view
            shortest = block.shortest(view.instances, models)
            # One request alone is as soon asked about as its block.
            able = view.instances if len(block) == 1 else self._able(block.easiest, view)
            if not able and not block.is_pressed(view.now):
                failures += len(block)
                if failures >= SCAN_LIMIT:
                    return
                continue
            names = None if len(block) == 1 else frozenset(i.name for i in able)
            for request in list(block.requests.values()):
                if turn.view.now + shortest[request.id] > request.deadline:
                    self._too_late(request, turn)
                    continue
                chosen = self._first_that_passes(request, turn.view, names)
                if chosen is not None:
                    yield request, chosen
                    continue
                failures += 1
                # A request whose time runs out is not overtaken: what frees up next is its own.
                # That lasts for its own prefill time at most, then it is routed or late.
                if request.deadline - turn.view.now < 2 * shortest[request.id]:
                    flow.held_back_for = request.id
                    turn.over = True
                    return
                if failures >= SCAN_LIMIT:
                    return

    def _same_models(self, view: MacroView) -> object:
        """The same object as long as the instances and their latency models are the same."""
        models = tuple((i.name, i.latency) for i in view.instances)
        if models != self._models:
            self._models = models
        return self._models

    def _able(self, request: Request, view: MacroView) -> tuple[InstanceView, ...]:
        check = self.policy.check
        return tuple(i for i in view.instances if check(request, i, view.now).admitted)

    def _too_late(self, request: Request, turn: _Turn) -> None:
        del self._waiting[request.id]
        if self.late_mode == "shed":
            self._shares.remove(request)
            reason = "its TTFT can no longer be met"
            turn.decisions.append(Shed(request, reason, self._retry_after(turn.view)))
        else:
            self._late[request.id] = request
            self._shares.make_late(request)
            self._calm_until = min(self._calm_until, request.deadline + self.late_wait)

    def _first_that_passes(
        self, request: Request, view: MacroView, names: frozenset[str] | None
    ) -> InstanceView | None:
        """The policy's first choice of those that can take it; ``names``: no other can."""
        instances = allowed(request, view.instances)
        check, now = self.policy.check, view.now
        if names is not None:
            able = [i for i in instances if i.name in names]
            names = frozenset(i.name for i in able if check(request, i, now).admitted)
            if not names:
                return None
        for instance in self.policy.order(request, MacroView(now, instances, view.last)):
            if names is not None:
                if instance.name in names:
                    return instance
            elif check(request, instance, now).admitted:
                return instance
        return None

    def _dispatch_late(self, view: MacroView, decisions: list[Routed | Shed]) -> None:
        self._closed = {i.name for i in view.instances if i.name in self._closed and i.backlog > 0}
        if not self._late:
            return
        turn = _Turn(view, decisions)
        scans = {flow: self._scan_late(flow, turn) for flow in self._shares.busy if len(flow.late)}
        while scans:
            flow = min(scans, key=lambda f: f.served)
            found = next(scans[flow], None)
            if found is None:
                del scans[flow]
                continue
            request, chosen, reason = found
            del self._late[request.id]
            self._shares.serve(request, chosen.name)
            if _closes(request, chosen):
                self._closed.add(chosen.name)
            able = allowed(request, turn.view.instances)
            decisions.append(_routed(request, chosen, able, late=True, reason=reason))
            turn.view = _after(turn.view, chosen, request)
        if view.now >= self._calm_until:
            self._calm_until = min(
                (r.deadline + self.late_wait for r in self._late.values()), default=math.inf
            )

    def _scan_late(self, flow: Flow, turn: _Turn) -> Iterator[tuple[Request, InstanceView, str]]:
        """Those of a tenant's late requests that are served now, each with the instance and why."""
        now = turn.view.now
        for block in flow.late.blocks:
            instances = turn.view.instances
            idle = () if self._waiting else tuple(i for i in instances if i.backlog <= 0)
            if now < self._calm_until:
                if not idle:
                    return
                if not any(_idle_enough(block.easiest, i) for i in idle):
                    continue
            for request in list(block.requests.values()):
                able = allowed(request, turn.view.instances)
                if not self._waiting:
                    free = [i for i in able if _idle_enough(request, i)]
                    room = len(self._closed) < max(len(instances) // 2, 1)
                    if not room:
                        free = [i for i in free if not _closes(request, i)]
                    if free:
                        yield request, min(free, key=load), "late, and nothing else waits"
                        continue
                if now < request.deadline + self.late_wait:
                    continue
                if able and not self.is_ahead(request, now):
                    yield request, min(able, key=load), "late, and has waited long enough"
                    continue
                self.cancel(request.id)
                reason = "others wait for their share" if able else "no instance"
                turn.decisions.append(Shed(request, reason, self._retry_after(turn.view)))

    def _retry_after(self, view: MacroView) -> float:
        """Seconds until the prefills pending and waiting are through, 1 to 60."""
        if not view.instances:
            return 1.0
        pending = sum(i.backlog for i in view.instances)
        pending += self._shares.prefill_seconds(view.instances[0].latency)
        return min(max(pending / len(view.instances), 1.0), 60.0)


def _idle_enough(request: Request, instance: InstanceView) -> bool:
    # No prompt would be delayed by a late one; an idle instance takes even what can never fit, so
    # that the engine says so.
    if instance.backlog > 0:
        return False
    return instance.decodes.count == 0 or fits(request, instance).admitted


def _closes(request: Request, instance: InstanceView) -> bool:
    """Whether a late request leaves those behind it on the instance no time to speak of."""
    return instance.prefill_seconds(request) > request.slo.ttft / 2


def _after(view: MacroView, chosen: InstanceView, request: Request) -> MacroView:
    taken = chosen.take(request)
    instances = tuple(taken if i.name == chosen.name else i for i in view.instances)
    return MacroView(view.now, instances, chosen.name)


def _routed(
    request: Request,
    chosen: InstanceView,
    able: Iterable[InstanceView],
    *,
    late: bool,
    reason: str,
) -> Routed:
    others = tuple(i for i in able if i.name != chosen.name)
    fallbacks = tuple(i.name for i in lightest(others)[:FALLBACKS])
    return Routed(request, chosen.name, fallbacks, late, reason)
