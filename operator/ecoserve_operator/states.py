"""What the plan is made from: one EcoServeCluster as wanted and as it is, as plain values.

Times are seconds since the epoch by the controller's clock, durations are seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from ecoserve.policy.mitosis import Bounds, Layout

Strategy = Literal["Auto", "Surge", "DrainFirst"]
Reason = Literal["ScaleIn", "Rollout"]


@dataclass(frozen=True, slots=True)
class Desired:
    """What the spec of an EcoServeCluster asks for.

    ``replicas`` is as written, None if it is not; ``revision`` is the hash of the worker template.
    """

    name: str
    replicas: int | None
    minimum: int
    maximum: int
    lower: int
    upper: int
    revision: str
    merge_cooldown: float
    drain_timeout: float
    strategy: Strategy = "Auto"
    ready_timeout: float = 1800.0
    paused: bool = False
    autoscaled: bool = False

    @property
    def wanted(self) -> int:
        """Instances to have: ``replicas`` within its bounds."""
        wanted = self.minimum if self.replicas is None else self.replicas
        return min(max(wanted, self.minimum), self.maximum)

    @property
    def bounds(self) -> Bounds:
        """What mitosis goes by."""
        return Bounds(self.lower, self.upper, self.merge_cooldown)


@dataclass(frozen=True, slots=True)
class Pod:
    """A worker Pod. ``macro`` is the macro instance by its label, ``owner`` the uid of its
    controller.

    ``accepted`` is its readiness gate: None: never accepted by the scheduler; False: closed again,
    for it drains. ``ends`` is when the grace period of one that is being deleted is over, None: not
    known. ``no_room_since`` is since when no node has room for it, ``leaving_since`` when
    it was marked to be retired. ``trouble`` is what Kubernetes says that keeps it from running.
    """

    name: str
    index: int
    uid: str
    macro: str
    owner: str | None
    revision: str
    created: float
    accepted: bool | None = None
    ready: bool = False
    running: bool = False
    failed: bool = False
    terminating: bool = False
    ends: float | None = None
    no_room_since: float | None = None
    leaving_since: float | None = None
    leaving_reason: Reason = "ScaleIn"
    trouble: str = ""

    @property
    def leaving(self) -> bool:
        """Whether it is being retired, and not yet deleted."""
        return self.leaving_since is not None and not self.terminating


@dataclass(frozen=True, slots=True)
class Macro:
    """A MacroInstance."""

    name: str
    uid: str
    replicas: int
    terminating: bool = False


@dataclass(frozen=True, slots=True)
class Instance:
    """An instance as the scheduler sees it; ``requests`` are those that it has."""

    state: str
    requests: int = 0
    use: float = 0.0


@dataclass(frozen=True, slots=True)
class Roster:
    """What the controller has decided and must not forget: kept in the cluster's status, and
    changed in one write.

    ``layout`` holds the macro instances and how many instances each is to have. No Pod was ever
    given an index of ``next_index`` or more.
    """

    next_index: int
    layout: Layout = field(default_factory=Layout)

    @property
    def sizes(self) -> dict[str, int]:
        """Instances to have, by macro instance."""
        return self.layout.sizes

    @property
    def total(self) -> int:
        """Instances to have in all."""
        return self.layout.total


@dataclass(frozen=True, slots=True)
class Observed:
    """The cluster as it is. ``instances`` are by Pod name, None while the scheduler does not
    answer; ``hold_until``: make no Pods before, for the last ones failed at once."""

    now: float
    roster: Roster | None = None
    pods: tuple[Pod, ...] = ()
    macros: tuple[Macro, ...] = ()
    instances: Mapping[str, Instance] | None = field(default_factory=dict)
    hold_until: float = 0.0
