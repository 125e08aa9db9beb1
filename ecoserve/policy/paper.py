"""`paper`: the published algorithm (arXiv 2504.18154), verbatim, as the reference."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from ecoserve.policy.admission import algorithm1
from ecoserve.policy.base import Verdict
from ecoserve.policy.phases import forced, prefill_step
from ecoserve.policy.routing import cycle
from ecoserve.policy.state import EngineView, InstanceView, MacroView, Request, StepPlan


@dataclass(frozen=True, slots=True)
class Paper:
    """Prefills first, in steps of their own; Algorithm 1 admits and routes.

    Chosen where the paper is silent: a blocked queue lets the decodes run; no prefix affinity.
    """

    name: ClassVar[str] = "paper"
    mixes: ClassVar[bool] = False

    def step(self, view: EngineView) -> StepPlan:
        """Whatever waits is prefilled before anything decodes."""
        return forced(view) or prefill_step(view, "a prompt waits")

    def check(self, request: Request, instance: InstanceView, now: float) -> Verdict:
        """Algorithm 1's three constraints."""
        return algorithm1(request, instance)

    def order(self, request: Request, view: MacroView) -> Iterable[InstanceView]:
        """The instance that took the previous request, then the others in cyclic order."""
        return cycle(view)
