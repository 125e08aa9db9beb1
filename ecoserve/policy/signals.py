"""What autoscaling goes by: signals, known or not, and the bounds that they are held against."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Literal, TypeAlias

from ecoserve.numbers import WAIT, Allowed

Strategy = Literal["threshold", "predictive"]


# --- what is measured ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Known:
    """A finite value. Raises ``ValueError`` for any other: that is ``Unknown``."""

    value: float

    def __post_init__(self) -> None:
        if not math.isfinite(self.value):
            raise ValueError(f"a known signal must be finite, not {self.value}")


@dataclass(frozen=True, slots=True)
class Unknown:
    """No value to go by. ``why`` is for people, and the same as long as the cause is."""

    why: str


Signal: TypeAlias = Known | Unknown


@dataclass(frozen=True, slots=True)
class Signals:
    """What ``decide`` goes by.

    accepted        instances that take requests, now
    violations      share of requests that missed an SLO or were turned away; least of its window
    use_low         mean use of instances; least of expansion's window
    ttft            mean TTFT over the TTFT SLO; least of its window
    waiting         requests that wait at the scheduler, per instance; least of its window
    use_high        mean use of instances; greatest of contraction's window
    idle            share of instances that are idle; least of its window
    saved           mean saved TPOT of running requests over the TTFT SLO; least of its window,
                    0 when nothing runs
    arrivals        requests a second, now (``predictive``)
    arrivals_high   requests a second; greatest of contraction's window (``predictive``)
    capacity        requests a second that one instance serves at use 1 (``predictive``)
    """

    accepted: Signal
    violations: Signal
    use_low: Signal
    ttft: Signal
    waiting: Signal
    use_high: Signal
    idle: Signal
    saved: Signal
    arrivals: Signal = Unknown("not asked for")
    arrivals_high: Signal = Unknown("not asked for")
    capacity: Signal = Unknown("not asked for")


NAMES = {
    "accepted": "instances that take requests",
    "violations": "SLO violations",
    "use_low": "use",
    "ttft": "TTFT",
    "waiting": "waiting requests",
    "use_high": "use",
    "idle": "idle instances",
    "saved": "saved TPOT",
    "arrivals": "arrival rate",
    "arrivals_high": "arrival rate",
    "capacity": "capacity of an instance",
}
"""Signals as people call them."""


# --- what is configured -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Expand:
    """Bounds above which instances are added, and for how many seconds they must be passed.

    ``violations`` and ``use`` are shares, ``ttft`` is mean TTFT over its SLO, ``waiting`` requests
    per instance. ``cooldown`` is the least time between two steps up, ``max_step`` the most
    instances of one. While instances of the last step still start, no other is taken for
    ``starting`` seconds but by use and arrivals, which count those as there.
    """

    violations: float = 0.05
    violations_for: float = 60.0
    use: float = 0.85
    use_for: float = 300.0
    ttft: float = 1.0
    ttft_for: float = 60.0
    waiting: float = 1.0
    waiting_for: float = 60.0
    cooldown: float = 180.0
    max_step: int = 4
    starting: float = 300.0


@dataclass(frozen=True, slots=True)
class Contract:
    """Bounds of use (below) and idle instances (above) past which instances are removed.

    ``saved`` is a factor on the published bound of saved TPOT: 1 as published, 0: not used.
    ``cooldown`` is the least time after any step before one down.
    """

    use: float = 0.40
    use_for: float = 600.0
    idle: float = 0.60
    idle_for: float = 600.0
    saved: float = 0.0
    saved_for: float = 600.0
    cooldown: float = 600.0
    max_step: int = 1


def _allowed(name: str) -> Allowed:
    """What a bound, a time or a number of instances may be, as in the operator's API."""
    if name == "max_step":
        return Allowed(1, 1024, whole=True)
    if name.endswith("_for") or name in ("cooldown", "starting"):
        return WAIT
    return Allowed(0, 10_000)


@dataclass(frozen=True, slots=True)
class Settings:
    """All that is configured. Raises ``ValueError`` that names the field.

    ``predictive`` expands also when the arrival rate asks for more instances than there are, before
    use shows it, and contracts by the greatest arrival rate of the window.
    """

    expand: Expand = field(default_factory=Expand)
    contract: Contract = field(default_factory=Contract)
    strategy: Strategy = "threshold"

    def __post_init__(self) -> None:
        for part, group in (("expand", self.expand), ("contract", self.contract)):
            for item in fields(group):
                value = getattr(group, item.name)
                _allowed(item.name).check(f"{part}.{item.name}", value)
        if self.contract.use >= self.expand.use:
            raise ValueError(
                f"contract.use must be less than expand.use {self.expand.use}, "
                f"not {self.contract.use}, or the size would swing"
            )

    @property
    def aim(self) -> float:
        """The use that a step is to lead to: half-way between the two bounds."""
        return (self.expand.use + self.contract.use) / 2
