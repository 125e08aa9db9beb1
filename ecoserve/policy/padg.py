"""`padg`: Algorithm 1 with thresholds on backlog, use and saved TPOT, and the repairs without which
a prompt could wait for ever.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from ecoserve.policy.admission import promises
from ecoserve.policy.base import Verdict
from ecoserve.policy.phases import (
    decode_step,
    forced,
    next_step_seconds,
    prefill_step,
    time_to_spare,
    tokens_within,
)
from ecoserve.policy.routing import by_held_prefix, rolling
from ecoserve.policy.settings import at_least, within
from ecoserve.policy.state import EngineView, InstanceView, MacroView, Request, StepPlan


@dataclass(frozen=True, slots=True)
class PaDG:
    """Prefill and decode phases with thresholds on backlog, use and saved TPOT.

    prefill -> decode: at most ``backlog`` prompts left, or use above ``busy``.
    decode -> prefill: saved TPOT >= ``margin`` x the estimated prefill time.

    Repairs, each because the bare thresholds stall or overshoot without it:

    - *one step at least*: a prefill phase holds one prefill step before the backlog may end it, or
      a backlog of two flips straight back and is never served;
    - *whole step*: the estimate is of everything that the next step packs, not of its first prompt;
      a step that does not fit the least saved TPOT ends the phase;
    - *deadline*: a prompt whose TTFT is about to be lost is prefilled, ``chunk`` tokens at least,
      even if no slack was saved; the decodes then get a step before the next chunk;
    - *blocked*: when nothing can be admitted the decodes run.
    """

    backlog: int = 2
    busy: float = 0.9
    margin: float = 1.5
    chunk: int = 256

    name: ClassVar[str] = "padg"
    mixes: ClassVar[bool] = False

    def __post_init__(self) -> None:
        at_least(self, "backlog", 0)
        within(self, "busy", 0.0, 1.0)
        at_least(self, "margin", 1.0)
        at_least(self, "chunk", 1)

    def step(self, view: EngineView) -> StepPlan:
        """The next step by the thresholds."""
        plan = forced(view)
        if plan is not None:
            return plan
        slack = view.decodes.least_slack
        seconds = next_step_seconds(view, view.step_budget)
        if view.phase == "prefill" and view.prefill_steps:
            if len(view.waiting) <= self.backlog:
                return decode_step(f"backlog {len(view.waiting)} <= {self.backlog}")
            if view.use > self.busy:
                return decode_step(f"use {view.use:.2f} > {self.busy:.2f}")
            if slack < seconds:
                return decode_step(f"saved TPOT {slack:.3f} s < next prefill {seconds:.3f} s")
            return prefill_step(view, "more prompts wait")
        if slack >= self.margin * seconds:
            return prefill_step(
                view, f"saved TPOT {slack:.3f} s >= {self.margin} x prefill {seconds:.3f} s"
            )
        if time_to_spare(view, view.waiting[0]) <= 0:
            capped = max(self.chunk, tokens_within(view, slack))
            return prefill_step(view, "a prompt's TTFT runs out", capped)
        return decode_step(f"saved TPOT {slack:.3f} s is short of the prefill {seconds:.3f} s")

    def check(self, request: Request, instance: InstanceView, now: float) -> Verdict:
        """TTFT with the wait so far, the least saved TPOT, KV memory."""
        return promises(request, instance, now)

    def order(self, request: Request, view: MacroView) -> Iterable[InstanceView]:
        """Held prefix, then last-used, next, lightest."""
        return by_held_prefix(request, rolling(view))
