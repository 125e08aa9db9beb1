"""What a plan can ask for. Each is idempotent: asked for twice, it is done once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from ecoserve_operator.states import Reason, Roster


@dataclass(frozen=True, slots=True)
class FillReplicas:
    """Writes spec.replicas of the EcoServeCluster, where it is not set."""

    replicas: int


@dataclass(frozen=True, slots=True)
class WriteRoster:
    """Keeps what was decided, in one write that fails if the object has changed meanwhile.
    ``event`` tells what was decided, None: nothing that anyone would want to know."""

    roster: Roster
    event: str | None = None
    message: str = ""


@dataclass(frozen=True, slots=True)
class ApplyMacro:
    """Makes a MacroInstance, or sets its replicas."""

    name: str
    replicas: int


@dataclass(frozen=True, slots=True)
class DeleteMacro:
    """Removes a MacroInstance that nothing belongs to any more."""

    name: str
    uid: str


@dataclass(frozen=True, slots=True)
class CreatePod:
    """Makes a worker Pod in a macro instance."""

    name: str
    index: int
    macro: str


@dataclass(frozen=True, slots=True)
class MovePod:
    """Gives a Pod the label and the owner of a macro instance, in one patch."""

    name: str
    uid: str
    macro: str


@dataclass(frozen=True, slots=True)
class MarkLeaving:
    """Marks a Pod to be retired."""

    name: str
    uid: str
    reason: Reason
    message: str


@dataclass(frozen=True, slots=True)
class Unmark:
    """Takes the mark away: the Pod is needed after all."""

    name: str
    uid: str


@dataclass(frozen=True, slots=True)
class Drain:
    """Has the scheduler stop routing to an instance; ``timeout`` in seconds."""

    name: str
    timeout: float


@dataclass(frozen=True, slots=True)
class Resume:
    """Has the scheduler route to an instance again."""

    name: str


@dataclass(frozen=True, slots=True)
class DeletePod:
    """Deletes a Pod; ``event`` is the reason in one word."""

    name: str
    uid: str
    event: str
    message: str


@dataclass(frozen=True, slots=True)
class SetGate:
    """Sets a Pod's readiness gate."""

    name: str
    uid: str
    accepted: bool


Action: TypeAlias = (
    FillReplicas
    | WriteRoster
    | ApplyMacro
    | DeleteMacro
    | CreatePod
    | MovePod
    | MarkLeaving
    | Unmark
    | Drain
    | Resume
    | DeletePod
    | SetGate
)
