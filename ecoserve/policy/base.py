"""What a policy is: three decisions behind one interface.

``step`` is made inside the engine before each step, ``check`` and ``order`` by the macro scheduler
for each request. All are pure: the same view gives the same answer.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, Protocol

from ecoserve.policy.state import EngineView, InstanceView, MacroView, Request, StepPlan


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether an instance can take a request within all that was promised, and if not, why."""

    admitted: bool
    reason: str = ""


ADMITTED = Verdict(True)


class Policy(Protocol):
    """A scheduling policy; implementations are frozen dataclasses whose fields are its settings."""

    name: ClassVar[str]
    mixes: ClassVar[bool]
    """Whether it makes steps that hold prompt tokens beside decodes."""

    def step(self, view: EngineView) -> StepPlan:
        """What the instance's next step holds."""
        ...

    def check(self, request: Request, instance: InstanceView, now: float) -> Verdict:
        """Whether ``instance`` can take ``request`` without breaking a promise.

        Monotone: a request that is easier in every respect (fewer tokens and sequences, a later
        deadline, looser SLOs) is admitted wherever a harder one is.
        """
        ...

    def order(self, request: Request, view: MacroView) -> Iterable[InstanceView]:
        """The instances to check, first choice first; the first that passes gets the request.

        ``view.instances`` holds those that may be given work. What is not yielded is not asked.
        """
        ...
