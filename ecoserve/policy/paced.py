"""`paced`: steps sized by time against the least slack, mixed where mixing is cheaper."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import ClassVar

from ecoserve.policy.admission import sustained
from ecoserve.policy.base import Verdict
from ecoserve.policy.phases import forced, tokens_for_work
from ecoserve.policy.routing import soonest
from ecoserve.policy.settings import at_least
from ecoserve.policy.state import EngineView, InstanceView, MacroView, Request, StepPlan
from ecoserve.policy.window import Window


@dataclass(frozen=True, slots=True)
class Paced:
    """Fills each step with as many prompt tokens as the least-ahead decode has time for.

    A mixed step may last as long as that slack, less ``guard`` seconds and the model's error, and
    no longer than the TPOT SLO. Whether to mix at all is decided step by step by the latency model,
    whose mixed-batch penalty is measured on the engine at hand; where separate steps are cheaper
    the prefill windows of `window` are used. Chunks below ``chunk`` tokens are not worth a mix.
    """

    guard: float = 0.005
    worth: float = 0.2
    longest: float = 1.0
    chunk: int = 16

    name: ClassVar[str] = "paced"
    _window: Window = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        at_least(self, "chunk", 1)
        window = Window(worth=self.worth, longest=self.longest, guard=self.guard)
        object.__setattr__(self, "_window", window)

    def step(self, view: EngineView) -> StepPlan:
        """Mixed while cheaper and in time, else a window or a decode step."""
        plan = forced(view)
        if plan is not None:
            return plan
        decodes, latency = view.decodes, view.latency
        cost = latency.decode(decodes.count, decodes.context)
        head = view.waiting[0]
        time = min(decodes.least_slack - self.guard, decodes.tpot) / (1 + latency.error)
        tokens = tokens_for_work(view, time / (1 + latency.mixing) - cost)
        if tokens >= min(self.chunk, head.tokens) and latency.mixing_is_cheaper(
            decodes.count, decodes.context, tokens, head.context
        ):
            return StepPlan("mixed", tokens, f"mixed, {tokens} prompt tokens in {time:.3f} s")
        return self._window.step(view)

    def check(self, request: Request, instance: InstanceView, now: float) -> Verdict:
        """TTFT at the pace that the decodes leave, decode pace, KV memory."""
        return sustained(request, instance, now, self.worth)

    def order(self, request: Request, view: MacroView) -> Iterable[InstanceView]:
        """Where its prefill would end soonest: no phases to roll where steps are mixed."""
        return soonest(request, view.instances)
