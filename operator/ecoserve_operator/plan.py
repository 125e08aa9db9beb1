"""What to do next for one EcoServeCluster: ``plan(desired, observed)``.

Level-triggered: only what is there counts, never what happened. The plan holds the actions of the
first stage that has any; whoever carries them out looks again afterwards, and may stop anywhere
between, for each stage is derived anew from what is there:

- ``Roster`` holds what was decided: the macro instances with their sizes, and the next index. It
  changes in one write, so a split or a merge is decided at once and whole; moving Pods until they
  agree with it is all the rest.
- A Pod belongs to a macro instance by label and owner, which one patch changes together.
- A Pod that retires carries a mark, so that it is retired by whoever comes next too.
- Indices are reserved before they are used.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from ecoserve.policy import mitosis
from ecoserve.policy.mitosis import (
    Change,
    Layout,
    MoveInstance,
    Snapshot,
    State,
    arrange,
    regroup,
)
from ecoserve_operator.actions import (
    Action,
    ApplyMacro,
    CreatePod,
    DeleteMacro,
    DeletePod,
    Drain,
    FillReplicas,
    MarkLeaving,
    MovePod,
    Resume,
    SetGate,
    Unmark,
    WriteRoster,
)
from ecoserve_operator.names import pod_name
from ecoserve_operator.states import Desired, Instance, Macro, Observed, Pod, Roster

# A Pod that no node has had room for, for so long, is taken to wait for another's GPUs.
NO_ROOM_S = 20.0
# A Pod that is still there so long after its grace period is on a node that nobody hears of.
LOST_S = 60.0
_STOPPING = ("draining", "drained")


@dataclass(frozen=True, slots=True)
class Plan:
    """``actions`` in their order; look again when something changes, or at ``wake_at`` if nothing
    does. ``waits`` says what a retirement waits for, if not for the instance itself."""

    actions: tuple[Action, ...]
    wake_at: float | None = None
    waits: str = ""


def plan(desired: Desired, observed: Observed) -> Plan:
    """The next actions; none when all is as it should be or has to be waited for."""
    return _Planner(desired, observed).plan()


class View:
    """What is there, sorted: ``alive`` are the Pods that count, oldest first."""

    def __init__(self, desired: Desired, observed: Observed) -> None:
        self.desired = desired
        self.observed = observed
        self.roster = repaired(desired, observed)
        self.macros: dict[str, Macro] = {m.name: m for m in observed.macros if not m.terminating}
        self._owners = {macro.uid: macro.name for macro in observed.macros if not macro.terminating}
        pods = sorted(observed.pods, key=lambda pod: pod.index)
        self.failed = [pod for pod in pods if pod.failed and not pod.terminating]
        # The garbage collector takes a Pod whose owner is gone.
        standing = [
            pod
            for pod in pods
            if not (pod.failed or pod.terminating)
            and (pod.owner is None or pod.owner in self._owners)
        ]
        self.leaving = [pod for pod in standing if pod.leaving]
        self.alive = [pod for pod in standing if not pod.leaving]
        self.current = [pod for pod in self.alive if pod.revision == desired.revision]
        self.outdated = [pod for pod in self.alive if pod.revision != desired.revision]

    def members(self, macro: str) -> list[Pod]:
        """The Pods that count, of one macro instance."""
        return [pod for pod in self.alive if pod.macro == macro]

    def owned(self, pod: Pod) -> bool:
        """Whether label and owner agree."""
        return pod.owner is not None and self._owners.get(pod.owner) == pod.macro

    def instance(self, pod: Pod) -> Instance | None:
        """The Pod's instance in the scheduler, None: not known."""
        return (self.observed.instances or {}).get(pod.name)

    def serves(self, pod: Pod) -> bool:
        """Whether requests may be routed to it, as far as is known."""
        instance = self.instance(pod)
        return pod.accepted is not None or (
            instance is not None and instance.state in ("accepted", *_STOPPING)
        )

    @property
    def excess(self) -> int:
        """Pods that count beyond those decided on; negative: Pods that are missing."""
        return len(self.alive) - self.roster.total

    @property
    def misplaced(self) -> list[tuple[Pod, str]]:
        """Pods that have to change their macro instance or owner, and to which."""
        pods = {pod.name: pod for pod in self.alive}
        moves = [
            (pods[action.instance], action.group)
            for action in arrange(self.snapshot)
            if isinstance(action, MoveInstance)
        ]
        moved = {pod.name for pod, _ in moves}
        sizes = self.roster.sizes
        return moves + [
            (pod, pod.macro)
            for pod in self.alive
            if pod.name not in moved and pod.macro in sizes and not self.owned(pod)
        ]

    @property
    def snapshot(self) -> Snapshot:
        """What mitosis sees of it."""
        instances = []
        for pod in self.alive:
            instance = self.instance(pod)
            load = float(instance.requests) if instance is not None else 0.0
            state: State = "serving" if self.serves(pod) else "starting"
            instances.append(mitosis.Instance(pod.name, pod.macro, load, state))
        return Snapshot(self.roster.layout, frozenset(self.macros), tuple(instances))

    @property
    def loading(self) -> list[Pod]:
        """Pods of the current template that are not ready and need no other Pod's room for it."""
        return [pod for pod in self.current if not pod.ready and not self.needs_room(pod)]

    def needs_room(self, pod: Pod) -> bool:
        """Whether no node has had room for the Pod for long enough to be believed, and another may
        be retired for its sake."""
        since = pod.no_room_since
        if pod.ready or since is None or self.desired.strategy == "Surge":
            return False
        return self.observed.now - since >= NO_ROOM_S

    @property
    def rolling(self) -> bool:
        """Whether instances of an old template are being replaced."""
        return bool(self.outdated) and not self.desired.paused


def repaired(desired: Desired, observed: Observed) -> Roster:
    """The roster, put together from what is there if it was lost."""
    roster = observed.roster
    if roster is None:
        macros = sorted((m for m in observed.macros if not m.terminating), key=lambda m: m.name)
        sizes = tuple((macro.name, macro.replicas) for macro in macros if macro.replicas)
        roster = Roster(0, Layout(sizes))
    free = max((pod.index + 1 for pod in observed.pods), default=0)
    return replace(roster, next_index=max(roster.next_index, free))


def _told(change: Change, before: Layout) -> tuple[str, str]:
    """What was decided, in a word and in a sentence."""
    sizes = ", ".join(f"{name} {size}" for name, size in change.layout.groups) or "none"
    match change.decision:
        case mitosis.Split(group, new, count):
            return "Split", f"{count} instances of {group} become {new}; sizes: {sizes}"
        case mitosis.Merge(group, into):
            return "Merged", f"the instances of {group} go to {into}; sizes: {sizes}"
        case mitosis.Level(group, donor, count):
            return "Leveled", f"{count} instances of {donor} go to {group}; sizes: {sizes}"
    return "Scaled", f"from {before.total} to {change.layout.total} instances; sizes: {sizes}"


class _Planner(View):
    def __init__(self, desired: Desired, observed: Observed) -> None:
        super().__init__(desired, observed)
        self._wake: list[float] = []
        self._waits = ""

    def plan(self) -> Plan:
        for stage in (
            self._replicas,
            self._remember,
            self._failed,
            self._groups,
            self._macros,
            self._moves,
            self._keep,
            self._gates,
            self._retire,
            self._missing,
            self._surplus,
            self._roll,
            self._empty_macros,
        ):
            actions = tuple(stage())
            if actions:
                return Plan(actions, waits=self._waits)
        now = self.observed.now
        wake = min((at for at in self._wake if at > now), default=None)
        return Plan((), wake, self._waits)

    def _later(self, at: float) -> None:
        self._wake.append(at)

    # -- what is decided --------------------------------------------------------------------------

    def _replicas(self) -> Iterator[Action]:
        if self.desired.replicas is None:
            yield FillReplicas(self.desired.wanted)

    def _remember(self) -> Iterator[Action]:
        if self.roster != self.observed.roster:
            yield WriteRoster(self.roster)

    def _failed(self) -> Iterator[Action]:
        for pod in self.failed:
            yield DeletePod(
                pod.name, pod.uid, "Failed", "it has failed, and another takes its place"
            )

    def _groups(self) -> Iterator[Action]:
        desired, layout = self.desired, self.roster.layout
        loads: Counter[str] = Counter()
        for instance in self.snapshot.instances:
            loads[instance.group] += int(instance.load)
        used = {macro.name for macro in self.observed.macros}
        used |= {pod.macro for pod in self.observed.pods}
        change = regroup(
            layout,
            desired.wanted,
            desired.bounds,
            self.observed.now,
            prefix=f"{desired.name}-m",
            taken=used,
            loads=loads,
            settled=not self.misplaced and layout.sizes.keys() <= self.macros.keys(),
        )
        if change.layout != layout:
            roster = replace(self.roster, layout=change.layout)
            yield WriteRoster(roster, *_told(change, layout))
        elif change.wake_at is not None:
            self._later(change.wake_at)

    def _macros(self) -> Iterator[Action]:
        gone = {macro.name for macro in self.observed.macros if macro.terminating}
        sizes = self.roster.sizes
        for name, size in sizes.items():
            macro = self.macros.get(name)
            if name not in gone and (macro is None or macro.replicas != size):
                yield ApplyMacro(name, size)
        for macro in self.macros.values():
            if macro.name not in sizes and macro.replicas:
                yield ApplyMacro(macro.name, 0)

    def _moves(self) -> Iterator[Action]:
        for pod, macro in self.misplaced:
            if macro in self.macros:
                yield MovePod(pod.name, pod.uid, macro)

    # -- readiness and retirement -----------------------------------------------------------------

    def _gates(self) -> Iterator[Action]:
        for pod in self.alive:
            instance = self.instance(pod)
            if instance is None or pod.accepted:
                continue
            if instance.state == "accepted":
                yield SetGate(pod.name, pod.uid, True)
            elif instance.state in _STOPPING and pod.accepted is False:
                # Only an instance whose gate was closed before was told to drain by this.
                yield Resume(pod.name)
        for pod in self.leaving:
            if pod.accepted:
                yield SetGate(pod.name, pod.uid, False)

    def _retire(self) -> Iterator[Action]:
        now = self.observed.now
        for pod in self.leaving:
            assert pod.leaving_since is not None
            deadline = pod.leaving_since + self.desired.drain_timeout
            instance = self.instance(pod)
            state = instance.state if instance is not None else "lost"
            if now >= deadline:
                yield DeletePod(
                    pod.name,
                    pod.uid,
                    "DrainTimeout",
                    "its requests did not end within drain.timeout",
                )
            elif not self.serves(pod) and (self.observed.instances is not None or not pod.running):
                yield DeletePod(pod.name, pod.uid, "Retired", "it never took requests")
            elif not pod.running:
                yield DeletePod(pod.name, pod.uid, "Retired", "it does not run")
            elif state == "drained":
                yield DeletePod(pod.name, pod.uid, "Drained", "its last request has ended")
            elif instance is not None and state not in ("lost", "draining"):
                yield Drain(pod.name, deadline - now)
                self._later(deadline)
            else:
                self._later(deadline)

    # -- numbers ----------------------------------------------------------------------------------

    def _keep(self) -> Iterator[Action]:
        missing = -self.excess
        for pod in reversed(self.leaving):
            if missing > 0 and pod.leaving_reason == "ScaleIn" and self._useful(pod):
                missing -= 1
                yield Unmark(pod.name, pod.uid)

    def _missing(self) -> Iterator[Action]:
        if self.excess >= 0:
            return
        if self.observed.now < self.observed.hold_until:
            self._later(self.observed.hold_until)
            return
        places = [
            name
            for name, size in self.roster.sizes.items()
            for _ in range(size - len(self.members(name)))
            if name in self.macros
        ]
        yield from self._create(places[: -self.excess])

    def _useful(self, pod: Pod) -> bool:
        return pod.running and pod.revision == self.desired.revision and self.owned(pod)

    def _create(self, places: list[str]) -> Iterator[Action]:
        first = self.roster.next_index
        if places:
            yield WriteRoster(replace(self.roster, next_index=first + len(places)))
        for index, macro in enumerate(places, first):
            yield CreatePod(pod_name(self.desired.name, index), index, macro)

    def _surplus(self) -> Iterator[Action]:
        excess = self.excess
        rollout = self.rolling and excess == 1
        if self.rolling and self.loading and self.roster.total:
            # One more than decided on is the new instance that an old one makes way for.
            excess -= 1
            self._watch_room()
        over = Counter(pod.macro for pod in self.alive)
        over.subtract(self.roster.sizes)
        for pod in sorted(self.alive, key=self._cost):
            if excess > 0 and over[pod.macro] > 0 and self._may_retire(pod):
                over[pod.macro] -= 1
                excess -= 1
                yield self._mark(pod, rollout)

    def _cost(self, pod: Pod) -> tuple[bool, bool, int, float, int]:
        """The least is retired first: of an old template, not serving, with the fewest requests by
        the scheduler's own count, the youngest."""
        instance = self.instance(pod) or Instance("lost")
        old = pod.revision != self.desired.revision
        return (not (old and self.rolling), pod.ready, instance.requests, instance.use, -pod.index)

    def _may_retire(self, pod: Pod) -> bool:
        """Whether the scheduler is there to name the instance and to stop routing to it, where that
        matters."""
        if self.observed.instances is not None or (pod.accepted is None and not pod.running):
            return True
        self._waits = "the scheduler does not answer, so no instance that serves is retired"
        return False

    def _mark(self, pod: Pod, rollout: bool) -> Action:
        instance = self.instance(pod)
        load = f"{instance.requests if instance else 0} requests"
        if rollout:
            return MarkLeaving(pod.name, pod.uid, "Rollout", f"its template has changed; {load}")
        return MarkLeaving(pod.name, pod.uid, "ScaleIn", f"the least loaded, with {load}")

    def _roll(self) -> Iterator[Action]:
        """Replaces instances of an old template, one at a time; nothing while a new one loads, and
        nothing that serves while one finds no node even in the room of the one before."""
        if not self.rolling or self.excess != 0 or self.leaving or self.loading:
            return
        if going := [p for p in self.observed.pods if p.terminating and not self._lost(p)]:
            for pod in going:
                if pod.ends is not None:
                    self._later(pod.ends + LOST_S)
            return
        victims = sorted((p for p in self.outdated if self._may_retire(p)), key=self._cost)
        if not victims:
            return
        if not victims[0].ready:
            yield self._mark(victims[0], True)
        elif any(not pod.ready for pod in self.current):
            return
        elif self.desired.strategy == "DrainFirst":
            yield self._mark(victims[0], True)
        elif self.observed.now >= self.observed.hold_until:
            yield from self._create([victims[0].macro])
        else:
            self._later(self.observed.hold_until)

    def _lost(self, pod: Pod) -> bool:
        """Whether a Pod that is being deleted is not waited for any longer."""
        return pod.ends is not None and self.observed.now >= pod.ends + LOST_S

    def _watch_room(self) -> None:
        for pod in self.loading:
            self._later(pod.created + self.desired.ready_timeout)
            if pod.no_room_since is not None:
                self._later(pod.no_room_since + NO_ROOM_S)

    def _empty_macros(self) -> Iterator[Action]:
        sizes = self.roster.sizes
        homes = {pod.owner for pod in self.observed.pods if not pod.terminating}
        labels = {pod.macro for pod in self.observed.pods if not pod.terminating}
        for macro in self.macros.values():
            if macro.name not in sizes and macro.uid not in homes and macro.name not in labels:
                yield DeleteMacro(macro.name, macro.uid)
