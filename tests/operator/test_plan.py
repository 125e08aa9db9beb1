"""The plan converges from anywhere, may be cut anywhere, and loses and doubles nothing."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from ecoserve_operator import actions as act
from ecoserve_operator.plan import LOST_S, plan
from ecoserve_operator.states import Macro, Pod, Roster
from hypothesis import given, settings
from hypothesis import strategies as st

from ecoserve.policy.mitosis import Layout
from tests.operator.plan_world import START, World, desired


def settled(replicas: int, **fields: object) -> World:
    world = World(desired(replicas, **fields))
    world.settle()
    world.check_settled()
    return world


def scale(world: World, replicas: int) -> None:
    world.wanted = replace(world.wanted, replicas=replicas)
    world.settle()
    world.check_settled()


def uids(world: World) -> dict[str, str]:
    return {pod.name: pod.uid for pod in world.pods.values()}


def test_sizes_of_macro_instances_as_replicas_change() -> None:
    world = settled(2)
    assert world.sizes == [2]
    for replicas, sizes in ((5, [5]), (7, [4, 3]), (13, [6, 4, 3])):
        before = uids(world)
        scale(world, replicas)
        assert sorted(world.sizes, reverse=True) == sizes
        assert before.items() <= uids(world).items(), "nothing that served was replaced"
    before = uids(world)
    scale(world, 3)
    assert world.sizes == [3]
    assert uids(world).items() <= before.items()


def test_replicas_that_are_not_set_are_filled_in() -> None:
    world = World(desired(None, minimum=2))
    assert world.next() == (act.FillReplicas(2),)
    world.settle()
    world.check_settled()


@pytest.mark.parametrize(("replicas", "count"), [(0, 2), (9, 4), (3, 3)])
def test_replicas_are_clamped(replicas: int, count: int) -> None:
    assert len(settled(replicas, minimum=2, maximum=4).pods) == count


def test_scale_in_retires_the_least_loaded_and_deletes_it_when_drained() -> None:
    world = settled(3)
    world.requests = {"c-0": 5, "c-1": 1, "c-2": 3}
    world.wanted = replace(world.wanted, replicas=2)
    marks = []
    while not marks:
        for action in world.next():
            world.carry_out(action)
        marks = [a for a in world.done if isinstance(a, act.MarkLeaving)]
    assert marks[0].name == "c-1"
    assert "1 requests" in marks[0].message
    world.carry_out(*world.next())  # closes the gate
    assert world.pods["c-1"].accepted is False
    (drain,) = world.next()
    assert drain == act.Drain("c-1", 600.0)
    world.carry_out(drain)
    assert world.next() == (), "it has requests to finish"
    world.states["c-1"] = "drained"
    (delete,) = world.next()
    assert isinstance(delete, act.DeletePod)
    assert (delete.name, delete.event) == ("c-1", "Drained")


def test_a_drain_ends_at_its_deadline() -> None:
    world = settled(2)
    world.wanted = replace(world.wanted, replicas=1)
    while not any(isinstance(a, act.Drain) for a in world.done):
        for action in world.next():
            world.carry_out(action)
    assert world.next() == ()
    world.now += 599
    assert world.next() == ()
    world.now += 1
    (delete,) = world.next()
    assert isinstance(delete, act.DeletePod)
    assert delete.event == "DrainTimeout"


def test_nothing_that_serves_is_retired_while_the_scheduler_is_silent() -> None:
    world = settled(3)
    world.scheduler_answers = False
    world.wanted = replace(world.wanted, replicas=2)
    for _ in range(50):
        for action in world.next():
            world.carry_out(action)
        world.live()
    assert len(world.serving) == 3
    assert not world.deleted
    world.scheduler_answers = True
    world.settle()
    world.check_settled()


def test_an_instance_that_drains_is_kept_when_it_is_needed_again() -> None:
    world = settled(3)
    before = uids(world)
    world.wanted = replace(world.wanted, replicas=2)
    while not any(isinstance(a, act.Drain) for a in world.done):
        for action in world.next():
            world.carry_out(action)
    scale(world, 3)
    assert uids(world) == before


def test_pods_that_fail_are_replaced_and_their_names_are_not_used_again() -> None:
    world = settled(3)
    world.pods["c-1"] = replace(world.pods["c-1"], failed=True, ready=False, running=False)
    world.settle()
    world.check_settled()
    assert set(world.pods) == {"c-0", "c-2", "c-3"}


def test_a_pod_that_is_being_deleted_is_replaced_at_once() -> None:
    world = settled(3)
    world.pods["c-0"] = replace(world.pods["c-0"], terminating=True, ready=False)
    made = [a for a in world.next() if isinstance(a, act.CreatePod)]
    assert [a.name for a in made] == ["c-3"]


def test_a_macro_instance_that_is_deleted_by_hand_is_replaced() -> None:
    world = settled(7)
    doomed = {p.name for p in world.pods.values() if p.macro == list(world.roster.sizes)[1]}  # type: ignore[union-attr]
    del world.macros[list(world.roster.sizes)[1]]  # type: ignore[union-attr]
    world.settle()
    world.check_settled()
    assert not doomed & set(world.pods)


def test_pods_without_an_owner_are_adopted() -> None:
    world = settled(3)
    before = uids(world)
    world.pods = {name: replace(pod, owner=None) for name, pod in world.pods.items()}
    world.settle()
    world.check_settled()
    assert uids(world) == before


def test_no_more_pods_are_made_while_they_fail_at_once() -> None:
    world = settled(2)
    world.wanted = replace(world.wanted, replicas=3)
    observed = world.observe()
    actions = []
    held = plan(
        world.wanted,
        replace(observed, roster=Roster(2, Layout((("c-m0", 3),))), hold_until=world.now + 9),
    )
    actions += held.actions
    assert [type(a) for a in actions] == [act.ApplyMacro]
    world.carry_out(actions[0])
    held = plan(
        world.wanted,
        replace(
            world.observe(), roster=Roster(2, Layout((("c-m0", 3),))), hold_until=world.now + 9
        ),
    )
    assert held.actions == ()
    assert held.wake_at == world.now + 9


class TestRollout:
    def roll(self, world: World, **fields: object) -> list[int]:
        """Changes the template; returns how many served after each action."""
        world.wanted = replace(world.wanted, revision="r2", **fields)  # type: ignore[arg-type]
        served, quiet = [], 0
        for _ in range(2000):
            actions = world.next()
            for action in actions:
                world.carry_out(action)
                new = [p for p in world.standing if p.revision == "r2" and not p.ready]
                assert len(new) <= 1, "more than one at a time"
                served.append(len(world.serving))
            before = dict(world.pods), dict(world.states)
            world.live()
            still = not actions and before == (world.pods, world.states) and not world.next()
            quiet = quiet + 1 if still else 0
            if quiet > 20:
                break
        return served

    def test_surge_replaces_one_at_a_time_and_never_has_less(self) -> None:
        world = settled(7)
        served = self.roll(world, strategy="Surge")
        world.settle()
        world.check_settled()
        assert min(served) == 7

    def test_drain_first_never_has_more_pods(self) -> None:
        world = settled(4)
        world.capacity = 4
        served = self.roll(world, strategy="DrainFirst")
        world.settle()
        assert min(served) == 3
        assert {p.revision for p in world.pods.values()} == {"r2"}

    def test_auto_drains_first_when_there_is_no_room(self) -> None:
        world = settled(4)
        world.capacity = 4
        served = self.roll(world, strategy="Auto")
        world.settle()
        assert min(served) == 3
        assert {p.revision for p in world.pods.values()} == {"r2"}
        assert len(world.pods) == 4

    def test_surge_waits_for_room(self) -> None:
        world = settled(4)
        world.capacity = 4
        served = self.roll(world, strategy="Surge")
        assert min(served) == 4
        world.capacity = 5
        world.settle()
        assert {p.revision for p in world.pods.values()} == {"r2"}

    @pytest.mark.parametrize("strategy", ["Surge", "Auto", "DrainFirst"])
    def test_it_stops_when_the_new_one_does_not_become_ready(self, strategy: str) -> None:
        world = settled(5)
        world.bad = frozenset({"r2"})
        served = self.roll(world, strategy=strategy)
        assert min(served) == (4 if strategy == "DrainFirst" else 5)
        assert sum(p.revision == "r2" for p in world.pods.values()) == 1
        # The way back, and the way on.
        world.wanted = replace(world.wanted, revision="r3")
        world.settle()
        world.check_settled()

    @pytest.mark.parametrize("strategy", ["Auto", "DrainFirst"])
    def test_it_stops_when_the_new_one_finds_no_node_at_all(self, strategy: str) -> None:
        world = settled(5)
        world.capacity = 0  # nothing new fits anywhere, whatever is given up
        served = self.roll(world, strategy=strategy)
        assert min(served) >= 4
        assert len(world.serving) == 4

    def test_it_does_not_wait_for_a_pod_of_a_lost_node(self) -> None:
        """One that is being deleted stays until its node is heard of again, or taken away."""
        world = settled(3)
        world.live()  # a moment later, so that the grace period is over
        gone = replace(world.pods["c-0"], name="c-9", index=9, uid="lost", terminating=True)
        world.wanted = replace(world.wanted, revision="r2")
        going = replace(world.observe(), pods=(*world.pods.values(), replace(gone, ends=world.now)))
        roster = Roster(10, going.roster.layout if going.roster is not None else Layout())
        waits = plan(world.wanted, replace(going, roster=roster))
        assert waits.actions == ()
        assert waits.wake_at == world.now + LOST_S
        late = replace(going, roster=roster, now=world.now + LOST_S)
        assert any(isinstance(a, act.CreatePod) for a in plan(world.wanted, late).actions)

    def test_paused(self) -> None:
        world = settled(3)
        before = uids(world)
        self.roll(world, paused=True)
        assert uids(world) == before

    def test_scale_in_takes_old_ones_first(self) -> None:
        world = settled(4)
        world.bad = frozenset({"r2"})
        self.roll(world, strategy="Surge")
        world.wanted = replace(world.wanted, replicas=2)
        for _ in range(200):
            for action in world.next():
                world.carry_out(action)
            world.live()
        assert len(world.serving) == 2


@st.composite
def worlds(draw: st.DrawFn) -> World:
    """Any state at all: Pods of any macro instance, owner, revision and mark; the roster too may be
    lost or disagree."""
    lower = draw(st.integers(1, 4))
    wanted = desired(
        draw(st.none() | st.integers(0, 20)),
        minimum=draw(st.integers(0, 3)),
        maximum=draw(st.integers(3, 16)),
        lower=lower,
        upper=draw(st.integers(2 * lower - 1, 9)),
        strategy=draw(st.sampled_from(["Auto", "Surge", "DrainFirst"])),
    )
    world = World(wanted)
    names = [f"c-m{i}" for i in range(draw(st.integers(0, 4)))]
    for name in names:
        if draw(st.integers(0, 4)):
            terminating = draw(st.integers(0, 5)) == 0
            replicas = draw(st.integers(0, 8))
            world.macros[name] = Macro(name, world.uid(), replicas, terminating)
    owners = [None, "gone", *(macro.uid for macro in world.macros.values())]
    for index in range(draw(st.integers(0, 14))):
        running = draw(st.booleans())
        accepted = draw(st.sampled_from([None, True, False])) if running else None
        pod = Pod(
            name=f"c-{index}",
            index=index,
            uid=world.uid(),
            macro=draw(st.sampled_from([*names, "c-m9", ""])),
            owner=draw(st.sampled_from(owners)),
            revision=draw(st.sampled_from(["r0", "r1"])),
            created=START - 100,
            accepted=accepted,
            ready=bool(accepted) and running and draw(st.booleans()),
            running=running,
            failed=not running and draw(st.booleans()),
            terminating=draw(st.integers(0, 5)) == 0,
            leaving_since=START - 50 if draw(st.integers(0, 4)) == 0 else None,
            leaving_reason=draw(st.sampled_from(["ScaleIn", "Rollout"])),
        )
        world.pods[pod.name] = pod
        world.used_names.add(pod.name)
        if running:
            world.states[pod.name] = draw(st.sampled_from(["connected", "accepted"]))
            if pod.leaving and not pod.accepted and draw(st.booleans()):
                world.states[pod.name] = "draining"
    if draw(st.booleans()):
        groups = [(name, draw(st.integers(0, wanted.upper))) for name in names]
        kept = tuple(g for g in groups if g[1] and draw(st.booleans()))
        world.roster = Roster(len(world.pods), Layout(kept))
    return world


# What is cut is up to a generator of its own: it must not be cut to nothing for ever.
seeds = st.integers(0, 10**6)


@given(worlds(), seeds)
@settings(deadline=None)
def test_converges_from_any_state_cut_anywhere(world: World, seed: int) -> None:
    world.settle(cut=random.Random(seed))
    world.check_settled()


@given(st.lists(st.integers(0, 16), min_size=1, max_size=5), seeds)
@settings(deadline=None)
def test_scaling_loses_nothing_that_it_need_not(counts: list[int], seed: int) -> None:
    rng = random.Random(seed)
    world = World(desired(counts[0]))
    world.settle(cut=rng)
    for count in counts[1:]:
        before = uids(world)
        world.wanted = replace(world.wanted, replicas=count)
        world.settle(cut=rng)
        world.check_settled()
        kept = before.items() & uids(world).items()
        assert len(kept) == min(len(before), count)


@given(worlds())
@settings(deadline=None)
def test_a_plan_is_pure_and_a_repeated_action_changes_nothing(world: World) -> None:
    actions = world.next()
    assert actions == world.next()
    for action in actions:
        world.carry_out(action)
        if isinstance(action, act.WriteRoster | act.ApplyMacro | act.MovePod | act.SetGate):
            state = (dict(world.pods), dict(world.macros), world.roster)
            world.carry_out(action)
            assert state == (world.pods, world.macros, world.roster)
