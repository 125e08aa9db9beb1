"""A cluster for the planner's tests: an API server, a node, a garbage collector and a scheduler, as
plain values. It refuses what must never be asked for."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ecoserve_operator import actions as act
from ecoserve_operator.actions import Action
from ecoserve_operator.plan import plan
from ecoserve_operator.states import Desired, Instance, Macro, Observed, Pod, Roster

START = 1_000_000.0


def desired(replicas: int | None = 3, **fields: object) -> Desired:
    base = Desired(
        name="c",
        replicas=replicas,
        minimum=0,
        maximum=64,
        lower=3,
        upper=6,
        revision="r1",
        merge_cooldown=60.0,
        drain_timeout=600.0,
    )
    return replace(base, **fields)  # type: ignore[arg-type]


@dataclass
class World:
    """``capacity`` is how many Pods find room; ``bad`` are revisions that never become ready."""

    wanted: Desired
    capacity: int = 64
    bad: frozenset[str] = frozenset()
    now: float = START
    roster: Roster | None = None
    pods: dict[str, Pod] = field(default_factory=dict)
    macros: dict[str, Macro] = field(default_factory=dict)
    states: dict[str, str] = field(default_factory=dict)
    requests: dict[str, int] = field(default_factory=dict)
    scheduler_answers: bool = True
    used_names: set[str] = field(default_factory=set)
    deleted: list[str] = field(default_factory=list)
    done: list[Action] = field(default_factory=list)
    _uids: int = 0

    def observe(self) -> Observed:
        instances = {
            name: Instance(state, self.requests.get(name, 0)) for name, state in self.states.items()
        }
        return Observed(
            now=self.now,
            roster=self.roster,
            pods=tuple(self.pods.values()),
            macros=tuple(self.macros.values()),
            instances=instances if self.scheduler_answers else None,
        )

    def next(self) -> tuple[Action, ...]:
        return plan(self.wanted, self.observe()).actions

    def uid(self) -> str:
        self._uids += 1
        return f"uid-{self._uids}"

    # -- what the controller does -----------------------------------------------------------------

    def carry_out(self, action: Action) -> None:
        self.done.append(action)
        match action:
            case act.FillReplicas(replicas):
                self.wanted = replace(self.wanted, replicas=replicas)
            case act.WriteRoster(roster):
                if self.roster is not None:
                    assert roster.next_index >= self.roster.next_index
                self.roster = roster
            case act.ApplyMacro(name, replicas):
                old = self.macros.get(name)
                assert old is None or not old.terminating
                self.macros[name] = Macro(name, old.uid if old else self.uid(), replicas)
            case act.DeleteMacro(name, uid):
                assert self.macros[name].uid == uid
                owned = [p for p in self.pods.values() if p.owner == uid and not p.terminating]
                assert not owned, "the garbage collector would take them"
                del self.macros[name]
            case act.CreatePod(name, index, macro):
                assert name not in self.used_names, "a name is used twice"
                assert self.roster is not None
                assert index < self.roster.next_index, "an index was not reserved"
                self.used_names.add(name)
                self.pods[name] = Pod(
                    name=name,
                    index=index,
                    uid=self.uid(),
                    macro=macro,
                    owner=self.macros[macro].uid,
                    revision=self.wanted.revision,
                    created=self.now,
                )
            case act.MovePod(name, uid, macro):
                assert self.pods[name].uid == uid
                home = self.macros[macro]
                assert not home.terminating
                self.pods[name] = replace(self.pods[name], macro=macro, owner=home.uid)
            case act.MarkLeaving(name, uid, reason):
                assert self.pods[name].uid == uid
                self.pods[name] = replace(
                    self.pods[name], leaving_since=self.now, leaving_reason=reason
                )
            case act.Unmark(name, uid):
                assert self.pods[name].uid == uid
                self.pods[name] = replace(self.pods[name], leaving_since=None)
            case act.Drain(name, timeout):
                assert timeout > 0
                assert self.pods[name].leaving
                assert not self.pods[name].accepted, "drained before its gate was closed"
                if self.states.get(name) in ("accepted", "connected"):
                    self.states[name] = "draining"
            case act.Resume(name):
                assert not self.pods[name].leaving
                self.states[name] = "accepted"
            case act.DeletePod(name, uid, _):
                pod = self.pods[name]
                assert pod.uid == uid
                assert pod.failed or pod.leaving
                if (
                    not pod.failed
                    and pod.running
                    and self.states.get(name)
                    in (
                        "accepted",
                        "draining",
                    )
                ):
                    assert pod.leaving_since is not None
                    late = self.now >= pod.leaving_since + self.wanted.drain_timeout
                    assert late, f"{name} is deleted with requests under way"
                self.deleted.append(name)
                self.pods[name] = replace(pod, terminating=True)
            case act.SetGate(name, uid, accepted):
                assert self.pods[name].uid == uid
                pod = self.pods[name]
                self.pods[name] = replace(pod, accepted=accepted, ready=accepted and pod.running)

    # -- what the rest does -----------------------------------------------------------------------

    def live(self, rng: random.Random | None = None, seconds: float = 5.0) -> None:
        """Time passes: nodes, scheduler and garbage collector do some of what they can, or all of
        it without ``rng``."""
        self.now += seconds

        def happens() -> bool:
            return rng is None or rng.random() < 0.7

        uids = {macro.uid for macro in self.macros.values()}
        for name, macro in list(self.macros.items()):
            if macro.terminating and happens():
                del self.macros[name]
        for name, pod in list(self.pods.items()):
            if pod.terminating:
                if happens():
                    del self.pods[name]
                    self.states.pop(name, None)
                    if self.roster is None:
                        # Nobody can know of it any more.
                        self.used_names.discard(name)
                continue
            if pod.owner is not None and pod.owner not in uids:
                self.pods[name] = replace(pod, terminating=True)
                continue
            if pod.failed or not happens():
                continue
            if not pod.running:
                if sum(p.running for p in self.pods.values()) < self.capacity:
                    pod = replace(pod, running=True, no_room_since=None)
                    self.states[name] = "connected"
                else:
                    pod = replace(pod, no_room_since=pod.no_room_since or self.now)
                self.pods[name] = pod
                continue
            state = self.states.get(name)
            if state == "connected" and pod.revision not in self.bad:
                self.states[name] = "accepted"
            elif state == "draining":
                self.states[name] = "drained"
            if pod.accepted and not pod.ready and pod.revision not in self.bad:
                self.pods[name] = replace(pod, ready=True)

    # -- checks -----------------------------------------------------------------------------------

    @property
    def standing(self) -> list[Pod]:
        return [p for p in self.pods.values() if not (p.failed or p.terminating or p.leaving)]

    @property
    def serving(self) -> set[str]:
        return {p.name for p in self.pods.values() if p.ready and not p.terminating}

    @property
    def sizes(self) -> list[int]:
        assert self.roster is not None
        return list(self.roster.sizes.values())

    def settle(self, rounds: int = 600, cut: random.Random | None = None) -> None:
        """Plans and lives until nothing is left to do; with ``cut``, the controller dies at random
        in the midst of its actions."""
        quiet = 0
        for _ in range(rounds):
            actions: Sequence[Action] = self.next()
            if cut is not None and actions:
                actions = actions[: cut.randint(0, len(actions))]
            for action in actions:
                self.carry_out(action)
                self.check()
            before = (dict(self.pods), dict(self.states), dict(self.macros))
            self.live(cut)
            still = before == (self.pods, self.states, self.macros)
            quiet = quiet + 1 if still and not self.next() else 0
            if quiet > 30:
                return
        raise AssertionError(f"it does not settle: {self.next()}")

    def check(self) -> None:
        """What holds at any time."""
        assert self.roster is None or all(p.index < 10**6 for p in self.pods.values())

    def check_settled(self) -> None:
        """What holds when nothing is left to do."""
        wanted = self.wanted.wanted
        assert self.roster is not None
        assert self.roster.total == wanted
        assert {m.name: m.replicas for m in self.macros.values()} == self.roster.sizes
        assert set(self.pods) == {p.name for p in self.standing}
        assert len(self.pods) == wanted
        for name, size in self.roster.sizes.items():
            members = [p for p in self.pods.values() if p.macro == name]
            assert len(members) == size
            assert all(p.owner == self.macros[name].uid for p in members)
        if self.capacity > wanted and self.wanted.revision not in self.bad:
            assert all(p.ready for p in self.pods.values())
            assert all(p.revision == self.wanted.revision for p in self.pods.values())
