"""Which workers a launcher runs, in which macro instances: mitosis on one machine.

Pure of I/O: ``advance`` is told what the scheduler sees of each worker and says what to do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ecoserve.policy import mitosis
from ecoserve.policy.mitosis import AddInstance, Bounds, DeleteInstance, DrainInstance

PREFIX = "local-"


@dataclass(frozen=True, slots=True)
class Seen:
    """A worker as the scheduler sees it; ``requests`` are those that it has."""

    state: str
    requests: int = 0


@dataclass(frozen=True, slots=True)
class Start:
    """Start this worker."""

    name: str


@dataclass(frozen=True, slots=True)
class Drain:
    """Route nothing to this worker any more."""

    name: str


@dataclass(frozen=True, slots=True)
class Resume:
    """Route to this worker again."""

    name: str


@dataclass(frozen=True, slots=True)
class Stop:
    """End this worker, which has nothing left to do."""

    name: str


Task = Start | Drain | Resume | Stop


class Fleet:
    """Of the workers ``names`` the first ``count`` run, in as many macro instances as ``bounds``
    call for; ``wanted`` may be changed."""

    def __init__(self, names: Sequence[str], count: int, bounds: Bounds) -> None:
        self.wanted = count
        self._bounds = bounds
        self._spare = list(names)
        self._homes: dict[str, str] = {}
        self._draining: set[str] = set()
        self._groups: list[str] = []
        self._layout = mitosis.Layout()
        self.advance({}, 0.0)

    @property
    def groups(self) -> dict[str, list[str]]:
        """The workers of each macro instance, those that drain included."""
        return {
            group: [name for name, home in self._homes.items() if home == group]
            for group in self._groups
        }

    @property
    def running(self) -> list[str]:
        """All workers that are to be there, those that drain included."""
        return list(self._homes)

    def advance(self, seen: Mapping[str, Seen], now: float) -> list[Task]:
        """Decides and moves until nothing is left to decide now; what is then to be done, in order.
        Times in seconds. ``groups`` must be declared before the first task and after the last."""
        # Said again until it is so: a scheduler that was restarted has forgotten it.
        tasks: list[Task] = [
            Drain(name)
            for name in sorted(self._draining)
            if seen.get(name, Seen("lost")).state == "accepted"
        ]
        while True:
            snapshot = mitosis.Snapshot(
                self._layout,
                frozenset(self._groups),
                tuple(self._instance(name, seen) for name in self._homes),
            )
            plan = mitosis.plan(snapshot, self.wanted, self._bounds, now, prefix=PREFIX)
            if plan.layout != self._layout:
                self._layout = plan.layout
                continue
            # One that drains holds its place until it is gone; a new one may have to wait for it.
            able = [a for a in plan.actions if self._spare or not isinstance(a, AddInstance)]
            for action in able[:1]:
                tasks += self._do(action)
            if not able:
                return tasks

    def _instance(self, name: str, seen: Mapping[str, Seen]) -> mitosis.Instance:
        found = seen.get(name, Seen("lost"))
        state: mitosis.State = "serving" if found.state == "accepted" else "starting"
        if name in self._draining:
            # Of one that is lost nothing is left to finish.
            state = "drained" if found.state in ("drained", "lost") else "draining"
        return mitosis.Instance(name, self._homes[name], found.requests, state)

    def _do(self, action: mitosis.Action) -> list[Task]:
        match action:
            case mitosis.CreateGroup(group):
                self._groups.append(group)
            case mitosis.RemoveGroup(group):
                self._groups.remove(group)
            case mitosis.MoveInstance(name, _, group):
                self._homes[name] = group
            case AddInstance(group, _):
                name = self._spare.pop(0)
                self._homes[name] = group
                return [Start(name)]
            case DrainInstance(name):
                self._draining.add(name)
                return [Drain(name)]
            case mitosis.ResumeInstance(name):
                self._draining.discard(name)
                return [Resume(name)]
            case DeleteInstance(name):
                del self._homes[name]
                self._draining.discard(name)
                self._spare.insert(0, name)
                return [Stop(name)]
        return []
