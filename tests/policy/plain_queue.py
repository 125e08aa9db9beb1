"""The queue of a macro instance as it would be told: every request asked about on every instance.

``MacroScheduler`` asks far less often, and has to decide the same. One tenant only.
"""

from __future__ import annotations

from ecoserve.policy.base import Policy
from ecoserve.policy.macro import SCAN_LIMIT, _after, _closes, _idle_enough
from ecoserve.policy.routing import load
from ecoserve.policy.state import InstanceView, MacroView, Request

Decision = tuple[str, str]
"""A request's id and the instance that it goes to, or "shed"."""


class PlainQueue:
    def __init__(self, policy: Policy, *, late: str, queue_limit: int, late_wait: float) -> None:
        self.policy = policy
        self.late_mode = late
        self.queue_limit = queue_limit
        self.late_wait = late_wait
        self.last: str | None = None
        self.waiting: dict[str, Request] = {}
        self.late: dict[str, Request] = {}
        self.overflow: list[Request] = []
        self.closed: set[str] = set()

    def offer(self, request: Request) -> None:
        self.waiting[request.id] = request
        if len(self.waiting) + len(self.late) > self.queue_limit:
            victim = max(self.late.values(), key=lambda r: r.prompt_tokens, default=request)
            self.cancel(victim.id)
            self.overflow.append(victim)

    def cancel(self, request_id: str) -> None:
        self.waiting.pop(request_id, None)
        self.late.pop(request_id, None)

    def dispatch(self, view: MacroView) -> list[Decision]:
        decisions = [(request.id, "shed") for request in self.overflow]
        self.overflow.clear()
        view = MacroView(view.now, view.instances, self.last)
        view = self._dispatch_waiting(view, decisions)
        self._dispatch_late(view, decisions)
        return decisions

    def _dispatch_waiting(self, view: MacroView, decisions: list[Decision]) -> MacroView:
        failures = 0
        for request in list(self.waiting.values()):
            able = _able(request, view)
            shortest = min((i.prefill_seconds(request) for i in able), default=0.0)
            if view.now + shortest > request.deadline:
                del self.waiting[request.id]
                if self.late_mode == "shed":
                    decisions.append((request.id, "shed"))
                else:
                    self.late[request.id] = request
                continue
            chosen = self._first(request, MacroView(view.now, able, view.last))
            if chosen is not None:
                del self.waiting[request.id]
                self.last = chosen.name
                decisions.append((request.id, chosen.name))
                view = _after(view, chosen, request)
                continue
            failures += 1
            if failures >= SCAN_LIMIT or request.deadline - view.now < 2 * shortest:
                break
        return view

    def _first(self, request: Request, view: MacroView) -> InstanceView | None:
        for instance in self.policy.order(request, view):
            if self.policy.check(request, instance, view.now).admitted:
                return instance
        return None

    def _dispatch_late(self, view: MacroView, decisions: list[Decision]) -> None:
        self.closed &= {i.name for i in view.instances if i.backlog > 0}
        for request in list(self.late.values()):
            able = _able(request, view)
            overdue = view.now >= request.deadline + self.late_wait
            chosen: InstanceView | None = None
            if not self.waiting:
                room = len(self.closed) < max(1, len(view.instances) // 2)
                idle = (
                    i
                    for i in able
                    if _idle_enough(request, i) and (room or not _closes(request, i))
                )
                chosen = min(idle, key=load, default=None)
            if chosen is None and overdue:
                chosen = min(able, key=load, default=None)
            if chosen is not None:
                del self.late[request.id]
                decisions.append((request.id, chosen.name))
                if _closes(request, chosen):
                    self.closed.add(chosen.name)
                view = _after(view, chosen, request)
            elif overdue:
                del self.late[request.id]
                decisions.append((request.id, "shed"))


def _able(request: Request, view: MacroView) -> tuple[InstanceView, ...]:
    if request.allowed is None:
        return view.instances
    return tuple(i for i in view.instances if i.name in request.allowed)
