"""`paced`: steps sized by time against the least slack, mixed where mixing is cheaper."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import ClassVar

from ecoserve.policy.admission import sustained
from ecoserve.policy.base import Verdict
from ecoserve.policy.phases import forced, next_step_seconds, tokens_for_work
from ecoserve.policy.routing import soonest
from ecoserve.policy.settings import at_least
from ecoserve.policy.state import EngineView, InstanceView, MacroView, Request, StepPlan
from ecoserve.policy.window import Window


@dataclass(frozen=True, slots=True)
class Paced:
    """Fills each step with as many prompt tokens as the least-ahead decode has time for.

    A mixed step may last as long as that slack, less ``guard`` seconds and the model's error, and
    no longer than the TPOT SLO. Whether to mix at all is decided step by step by the latency model,
    whose mixed-batch penalty is measured on the engine at hand, and by what waits; where separate
    steps are cheaper the prefill windows of `window` are used. Chunks below ``chunk`` tokens are
    not worth a mix.
    """

    guard: float = 0.005
    worth: float = 0.2
    longest: float = 1.0
    chunk: int = 16

    name: ClassVar[str] = "paced"
    mixes: ClassVar[bool] = True
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
        work = time / (1 + latency.mixing) - cost
        tokens = tokens_for_work(view, work)
        if tokens >= min(self.chunk, head.tokens) and self._mixing_is_cheaper(view, work, cost):
            return StepPlan("mixed", tokens, f"mixed, {tokens} prompt tokens in {time:.3f} s")
        return self._window.step(view)

    def _mixing_is_cheaper(self, view: EngineView, work: float, cost: float) -> bool:
        """Whether ``work`` seconds of prompts cost less beside a decode step of ``cost`` than in
        the prefill step that would hold as much as waits now.

        Mixed, they take (1 + p)(cost + work) - cost. Separate, they take their work and their share
        of that step's fixed cost: all of it if nothing else waits, little if much does. So the
        same penalty may be worth paying for one prompt and not for a queue.
        """
        latency = view.latency
        step = next_step_seconds(view, view.step_budget) - latency.prefill_fixed
        window = min(step, self.longest)
        if window <= 0:
            return True
        work = min(work, window)
        mixed = (1 + latency.mixing) * (cost + work) - cost
        return mixed < work + latency.prefill_fixed * work / window

    def check(self, request: Request, instance: InstanceView, now: float) -> Verdict:
        """TTFT at the pace that the decodes leave, decode pace, KV memory."""
        return sustained(request, instance, now, self.worth)

    def order(self, request: Request, view: MacroView) -> Iterable[InstanceView]:
        """Where its prefill would end soonest: no phases to roll where steps are mixed."""
        return soonest(request, view.instances)
