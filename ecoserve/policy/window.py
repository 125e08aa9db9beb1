"""`window`: each instance's prefill windows planned against the least slack of its decodes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from ecoserve.policy.admission import sustained
from ecoserve.policy.base import Verdict
from ecoserve.policy.phases import (
    decode_step,
    forced,
    prefill_step,
    time_to_spare,
    tokens_within,
    waiting_seconds,
)
from ecoserve.policy.routing import soonest
from ecoserve.policy.settings import at_least
from ecoserve.policy.state import EngineView, InstanceView, MacroView, Request, StepPlan


@dataclass(frozen=True, slots=True)
class Window:
    """Separate steps; a prefill window opens when it is worth it and the decodes can spare it.

    The window is what the least-ahead decode can wait, less its next decode step and a guard of
    ``guard`` seconds plus the model's own error; at most ``longest``. It opens when everything that
    waits fits in it, or when it is at least ``worth`` seconds (prefills are batched; the slack
    of their TTFT is used to wait for that), or when the first prompt can wait no longer, can still
    be on time, and ``chunk`` of its tokens fit. What is late already is no reason to break another
    promise, nor to pay a step's fixed cost for a small chunk: it takes worthwhile windows. Only
    beside decodes that never gain slack, whose promises are broken in any case, a prompt overdue by
    its whole TTFT SLO gets ``chunk`` tokens after each decode step, or it would wait for ever.
    """

    worth: float = 0.2
    longest: float = 1.0
    guard: float = 0.005
    chunk: int = 64

    name: ClassVar[str] = "window"
    mixes: ClassVar[bool] = False

    def __post_init__(self) -> None:
        at_least(self, "worth", 0.01)
        at_least(self, "longest", self.worth)
        at_least(self, "guard", 0.0)
        at_least(self, "chunk", 1)

    def step(self, view: EngineView) -> StepPlan:
        """Opens, continues or closes a prefill window."""
        plan = forced(view)
        if plan is not None:
            return plan
        decodes, latency = view.decodes, view.latency
        cost = latency.decode(decodes.count, decodes.context)
        guard = self.guard + latency.error * cost
        window = min(decodes.least_slack - cost - guard, self.longest)
        head = view.waiting[0]
        tokens = tokens_within(view, window / (1 + latency.error))
        if tokens > 0:
            need = waiting_seconds(view, self.longest)
            if window >= need:
                return prefill_step(view, f"window {window:.3f} s holds all that waits", tokens)
            if window >= self.worth:
                return prefill_step(view, f"window {window:.3f} s is worth it", tokens)
            # Windows come back only as fast as decodes gain slack, so a prompt of several windows
            # must begin that much earlier.
            gain = max(1 - cost / decodes.tpot, 0.05)
            need = latency.prefill(head.tokens, head.context)
            spare = time_to_spare(view, head)
            pressed = 0 <= spare <= need * (1 / gain - 1)
            if pressed and tokens >= min(self.chunk, head.tokens):
                return prefill_step(view, "the first prompt can wait no longer", tokens)
        overdue = view.now > head.deadline + head.patience
        if overdue and cost >= decodes.tpot and view.phase == "decode":
            return prefill_step(view, "the first prompt is long overdue", self.chunk)
        return decode_step(f"window {window:.3f} s is too short")

    def check(self, request: Request, instance: InstanceView, now: float) -> Verdict:
        """TTFT at the pace that the decodes leave, decode pace, KV memory."""
        return sustained(request, instance, now, self.worth)

    def order(self, request: Request, view: MacroView) -> Iterable[InstanceView]:
        """Where its prefill would end soonest: an instance whose windows are planned has no use for
        prompts gathered on it, and gathering costs them their TTFT."""
        return soonest(request, view.instances)
