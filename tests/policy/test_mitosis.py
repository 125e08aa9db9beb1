"""Mitosis: sizes, and that it may stop anywhere: nothing is lost, doubled, or too much."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ecoserve.policy.mitosis import (
    Action,
    AddInstance,
    Bounds,
    CreateGroup,
    Decision,
    DeleteInstance,
    DrainInstance,
    Instance,
    Layout,
    Level,
    Merge,
    MoveInstance,
    Plan,
    RemoveGroup,
    ResumeInstance,
    Snapshot,
    Split,
    arrange,
    default_sizes,
    found,
    plan,
    regroup,
)

AT_ONCE = Bounds(3, 6, merge_cooldown=0)
PAPER = Bounds(6, 11, merge_cooldown=120)


@dataclass
class World:
    """Carries out actions one at a time, as an executor that may die between any two does."""

    layout: Layout = field(default_factory=Layout)
    groups: set[str] = field(default_factory=set)
    instances: dict[str, Instance] = field(default_factory=dict)
    born: int = 0
    deleted: list[str] = field(default_factory=list)
    decisions: list[tuple[float, Decision]] = field(default_factory=list)

    def snapshot(self) -> Snapshot:
        return Snapshot(self.layout, frozenset(self.groups), tuple(self.instances.values()))

    def plan(self, wanted: int, bounds: Bounds, now: float = 0.0) -> Plan:
        return plan(self.snapshot(), wanted, bounds, now)

    def sizes(self) -> dict[str, int]:
        """What takes requests or will, by group."""
        return dict(Counter(i.group for i in self.instances.values() if i.counts))

    def do(self, action: Action) -> None:
        match action:
            case CreateGroup(group):
                self.groups.add(group)
            case RemoveGroup(group):
                assert all(i.group != group for i in self.instances.values()), "not empty"
                self.groups.discard(group)
            case AddInstance(group, count):
                assert group in self.groups
                if self.sizes().get(group, 0) < count:
                    self.instances[f"i{self.born}"] = Instance(
                        f"i{self.born}", group, state="starting"
                    )
                    self.born += 1
            case MoveInstance(name, _, group):
                assert group in self.groups
                self.instances[name] = replace(self.instances[name], group=group)
            case DrainInstance(name):
                self._state(name, "draining")
            case ResumeInstance(name):
                self._state(name, "serving")
            case DeleteInstance(name):
                assert self.instances.pop(name).state == "drained", f"{name} was not drained"
                self.deleted.append(name)

    def _state(self, name: str, state: str) -> None:
        self.instances[name] = replace(self.instances[name], state=state)  # type: ignore[arg-type]

    def pass_time(self) -> None:
        """Whatever starts is up, whatever drains is drained."""
        for name, instance in self.instances.items():
            if instance.state == "starting":
                self._state(name, "serving")
            elif instance.state == "draining":
                self._state(name, "drained")

    def converge(self, wanted: int, bounds: Bounds, now: float = 0.0) -> dict[str, int]:
        """Plans and carries out until there is nothing to do; returns the sizes by group."""
        for _ in range(1000):
            step = self.plan(wanted, bounds, now)
            if step.layout != self.layout:
                self.layout = step.layout
                if step.decision is not None:
                    self.decisions.append((now, step.decision))
            elif step.actions:
                for action in step.actions:
                    self.do(action)
            elif any(i.state in ("starting", "draining") for i in self.instances.values()):
                self.pass_time()
            else:
                assert self.sizes() == self.layout.sizes
                assert self.groups == set(self.layout.sizes)
                return self.sizes()
        raise AssertionError("it does not end")


def world(sizes: dict[str, int], loads: dict[str, float] | None = None) -> World:
    """A world at rest with groups of these sizes."""
    made = World(Layout(tuple(sizes.items())), set(sizes))
    for group, size in sizes.items():
        for _ in range(size):
            name = f"i{made.born}"
            made.instances[name] = Instance(name, group, (loads or {}).get(name, 0.0))
            made.born += 1
    return made


def by_size(sizes: dict[str, int]) -> list[int]:
    return sorted(sizes.values(), reverse=True)


# --- sizes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bounds", "wanted", "sizes"),
    [
        (AT_ONCE, 0, []),
        (AT_ONCE, 2, [2]),
        (AT_ONCE, 5, [5]),
        (AT_ONCE, 6, [6]),
        (AT_ONCE, 7, [4, 3]),
        (AT_ONCE, 13, [6, 4, 3]),
        (PAPER, 11, [11]),
        (PAPER, 12, [6, 6]),
        (PAPER, 16, [10, 6]),
        (PAPER, 22, [11, 11]),
        (PAPER, 23, [11, 6, 6]),
    ],
)
@pytest.mark.parametrize("step", ["one", "all"])
def test_sizes_of_expansion(bounds: Bounds, wanted: int, sizes: list[int], step: str) -> None:
    made = World()
    for number in range(wanted + 1) if step == "one" else [wanted]:
        made.converge(number, bounds)
    assert by_size(made.sizes()) == sizes
    assert made.deleted == []


def test_contraction_takes_from_the_smallest_then_from_a_full_one_and_merges() -> None:
    made = World()
    made.converge(13, AT_ONCE)
    seen = [by_size(made.converge(number, AT_ONCE)) for number in range(12, -1, -1)]
    assert seen == [
        [5, 4, 3],
        [4, 4, 3],
        [6, 4],
        [6, 3],
        [5, 3],
        [4, 3],
        [6],
        [5],
        [4],
        [3],
        [2],
        [1],
        [],
    ]


def test_an_instance_that_stays_is_the_same_one() -> None:
    made = World()
    for wanted, sizes in ((2, [2]), (5, [5]), (13, [6, 4, 3]), (3, [3])):
        before = set(made.instances)
        made.converge(wanted, AT_ONCE, now=1000.0 * wanted)
        assert by_size(made.sizes()) == sizes
        assert len(before & set(made.instances)) == min(len(before), wanted)
    assert made.born == 13


@pytest.mark.parametrize(
    ("gpus", "sizes"),
    [(1, (2, 4)), (16, (2, 4)), (17, (4, 8)), (64, (4, 8)), (65, (8, 16)), (1024, (8, 16))],
)
def test_default_sizes(gpus: int, sizes: tuple[int, int]) -> None:
    assert default_sizes(gpus) == sizes
    Bounds(*sizes)


@pytest.mark.parametrize(
    ("lower", "upper", "cooldown", "message"),
    [
        (0, 5, 1.0, "lower must be at least 1, not 0"),
        (4, 6, 1.0, "upper must be at least 2 x lower - 1 = 7, not 6"),
        (2, 4, -1.0, "merge_cooldown must not be negative"),
        (2, 4, float("nan"), "merge_cooldown must not be negative"),
    ],
)
def test_bad_bounds_are_told(lower: int, upper: int, cooldown: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Bounds(lower, upper, cooldown)


def test_a_negative_number_is_told() -> None:
    with pytest.raises(ValueError, match="wanted must not be negative, not -1"):
        regroup(Layout(), -1, AT_ONCE, 0.0)


# --- split ---------------------------------------------------------------------------------------


def test_a_split_moves_no_more_than_it_must_and_comes_before_the_new_instance() -> None:
    made = world({"a": 6})
    decided = made.plan(7, AT_ONCE)
    assert decided.decision == Split("a", "macro-0", 3)
    assert decided.layout.groups == (("a", 4), ("macro-0", 3))
    assert decided.actions == ()
    made.layout = decided.layout
    create, *moves, add = made.plan(7, AT_ONCE).actions
    assert create == CreateGroup("macro-0")
    assert [type(move) for move in moves] == [MoveInstance, MoveInstance]
    assert add == AddInstance("macro-0", 3)


def test_both_parts_of_a_split_carry_as_much_per_instance() -> None:
    loads = {f"i{n}": float(n) for n in range(11)}
    made = world({"a": 11}, loads)
    made.converge(12, Bounds(6, 11))
    load = Counter[str]()
    for instance in made.instances.values():
        load[instance.group] += int(instance.load)
    assert abs(load["a"] - load["macro-0"]) <= 10, "no further apart than one instance"


def test_a_second_split_waits_for_the_first() -> None:
    made = world({"a": 20})
    first = made.plan(20, AT_ONCE)
    assert first.decision == Split("a", "macro-0", 6)
    made.layout = first.layout
    moves = [a for a in made.plan(20, AT_ONCE).actions if isinstance(a, MoveInstance)]
    made.do(CreateGroup("macro-0"))
    for move in moves:
        waiting = made.plan(20, AT_ONCE)
        assert (waiting.layout, waiting.decision) == (first.layout, None)
        made.do(move)
    assert made.plan(20, AT_ONCE).decision == Split("a", "macro-1", 6)


def test_a_lowered_upper_bound_splits() -> None:
    made = world({"a": 20})
    assert by_size(made.converge(20, AT_ONCE)) == [6, 6, 5, 3]
    assert made.born == 20


# --- merge ---------------------------------------------------------------------------------------


def test_of_groups_that_fit_the_lightest_takes_the_smallest_in() -> None:
    made = world({"a": 4, "b": 4, "c": 3}, {"i0": 5.0, "i4": 1.0})
    assert made.plan(11, Bounds(3, 7, 0)).decision == Merge("c", "b")


def test_a_group_below_the_lower_bound_that_fits_with_none_is_filled() -> None:
    made = world({"a": 6, "b": 1})
    assert made.plan(7, AT_ONCE).decision == Level("b", "a", 2)
    assert made.converge(7, AT_ONCE) == {"a": 4, "b": 3}
    assert (made.born, made.deleted) == (7, [])


def test_a_merge_waits_for_the_cooldown_and_says_so() -> None:
    made = world({"a": 6, "b": 6})
    made.layout = replace(made.layout, last_split=100.0)
    made.converge(11, PAPER, now=150.0)
    assert by_size(made.sizes()) == [6, 5]
    waiting = made.plan(11, PAPER, now=150.0)
    assert (waiting.marked, waiting.wake_at) == ("b", 220.0)
    assert made.plan(11, PAPER, now=219.9).decision is None
    assert made.plan(11, PAPER, now=220.0).decision == Merge("b", "a")


def test_a_lone_group_may_be_small() -> None:
    made = world({"a": 1})
    assert made.plan(1, AT_ONCE) == Plan(made.layout)


# --- retirement ----------------------------------------------------------------------------------


def test_the_least_loaded_is_retired_one_that_starts_before_it() -> None:
    made = world({"a": 4}, {"i0": 3.0, "i1": 1.0, "i2": 2.0, "i3": 5.0})
    made.instances["i3"] = replace(made.instances["i3"], state="starting")
    made.layout = made.plan(2, AT_ONCE).layout
    assert made.plan(2, AT_ONCE).actions == (DrainInstance("i3"), DrainInstance("i1"))


def test_an_instance_that_drains_comes_back_before_another_is_started() -> None:
    made = world({"a": 4})
    made.instances["i1"] = replace(made.instances["i1"], state="draining", load=1.0)
    made.instances["i2"] = replace(made.instances["i2"], state="drained")
    assert made.plan(3, AT_ONCE).layout.groups == (("a", 3),)
    made.layout = Layout((("a", 3),))
    assert set(made.plan(3, AT_ONCE).actions) == {ResumeInstance("i1"), DeleteInstance("i2")}


def test_one_that_is_drained_comes_back_too_and_is_not_deleted() -> None:
    made = world({"a": 4})
    made.instances["i1"] = replace(made.instances["i1"], state="drained")
    assert made.plan(4, AT_ONCE).actions == (ResumeInstance("i1"),)


def test_none_comes_back_to_a_full_group() -> None:
    made = world({"a": 7, "b": 5})
    made.instances["i1"] = replace(made.instances["i1"], state="draining")
    made.layout = Layout((("a", 6), ("b", 6)))
    assert made.plan(12, AT_ONCE).actions == (AddInstance("b", 6),)


def test_a_group_that_drains_is_kept_until_it_is_empty() -> None:
    made = world({"a": 3, "b": 3})
    made.layout = Layout((("a", 3),))
    for action in made.plan(3, AT_ONCE).actions:
        made.do(action)
    assert made.plan(3, AT_ONCE).actions == ()
    assert made.groups == {"a", "b"}
    made.pass_time()
    for action in made.plan(3, AT_ONCE).actions:
        made.do(action)
    assert made.plan(3, AT_ONCE).actions == (RemoveGroup("b"),)


# --- properties ----------------------------------------------------------------------------------


@st.composite
def bounds_and_numbers(draw: st.DrawFn) -> tuple[Bounds, list[int]]:
    lower = draw(st.integers(1, 5))
    upper = draw(st.integers(max(2 * lower - 1, 1), 12))
    cooldown = draw(st.sampled_from([0.0, 10.0]))
    return Bounds(lower, upper, cooldown), draw(st.lists(st.integers(0, 30), max_size=6))


def check_at_rest(sizes: dict[str, int], wanted: int, bounds: Bounds) -> None:
    assert sum(sizes.values()) == wanted
    assert all(size <= bounds.upper for size in sizes.values())
    if len(sizes) > 1:
        assert all(size >= bounds.lower for size in sizes.values())
        least, next_least = sorted(sizes.values())[:2]
        assert least + next_least > bounds.upper, "two that fit together were not merged"


@given(bounds_and_numbers())
def test_any_number_of_instances_ends_in_sizes_within_the_bounds(
    case: tuple[Bounds, list[int]],
) -> None:
    bounds, numbers = case
    made = World()
    now = 0.0
    for wanted in numbers:
        now += 1.0
        made.converge(wanted, bounds, now)
        assert sum(made.sizes().values()) == wanted
        for _ in range(100):  # until every cooldown has passed
            waiting = made.plan(wanted, bounds, now)
            if waiting.wake_at is None:
                break
            now = waiting.wake_at
            made.converge(wanted, bounds, now)
        check_at_rest(made.sizes(), wanted, bounds)


@given(bounds_and_numbers(), st.booleans())
def test_no_layout_holds_too_large_a_group_or_too_many_instances(
    case: tuple[Bounds, list[int]], settled: bool
) -> None:
    bounds, numbers = case
    layout = Layout()
    for now, wanted in enumerate(numbers):
        change = regroup(layout, wanted, bounds, float(now), taken={"macro-1"}, settled=settled)
        assert all(0 < size <= bounds.upper for size in change.layout.sizes.values())
        assert change.layout.total <= wanted
        assert settled or change.decision is None
        if isinstance(change.decision, Split):
            assert change.decision.new not in {*layout.sizes, "macro-1", change.decision.group}
        layout = change.layout


@given(bounds_and_numbers(), st.data())
def test_it_may_stop_anywhere(case: tuple[Bounds, list[int]], data: st.DataObject) -> None:
    """Any action of a plan, at any time, with other numbers wanted in between, instances that fail,
    plans that are out of date: what must never be never is, and it ends where it should."""
    bounds, numbers = case
    made = World()
    now, seen = 0.0, 0
    for wanted in numbers:
        for _ in range(data.draw(st.integers(0, 12))):
            now += data.draw(st.sampled_from([0.0, 1.0, 5.0]))
            step = made.plan(wanted, bounds, now)
            if step.decision is not None:
                to_do = arrange(made.snapshot())
                assert not any(isinstance(action, MoveInstance) for action in to_do), (
                    "a split or a merge before the last one was done"
                )
            if step.layout != made.layout:
                if data.draw(st.booleans()):  # else it stopped before the layout was kept
                    made.layout = step.layout
            elif step.actions:
                action = data.draw(st.sampled_from(step.actions))
                if isinstance(action, AddInstance | MoveInstance) and (
                    action.group not in made.groups
                ):
                    action = CreateGroup(action.group)
                for _ in range(data.draw(st.integers(1, 2))):  # twice is as good as once
                    if not (isinstance(action, DeleteInstance) and action.instance in made.deleted):
                        made.do(action)
            match data.draw(st.sampled_from(["", "", "time", "failure"])):
                case "time":
                    made.pass_time()
                case "failure" if made.instances:
                    made.instances.pop(data.draw(st.sampled_from(sorted(made.instances))))
                    seen += 1
            assert all(size <= bounds.upper for size in made.sizes().values())
            assert {i.group for i in made.instances.values()} <= made.groups
            assert len(made.instances) + len(made.deleted) + seen == made.born, "lost or doubled"
    wanted = numbers[-1] if numbers else 0
    now += bounds.merge_cooldown
    for _ in range(100):
        made.converge(wanted, bounds, now)
        waiting = made.plan(wanted, bounds, now)
        if waiting.wake_at is None:
            break
        now = waiting.wake_at
    check_at_rest(made.sizes(), wanted, bounds)


@given(st.integers(0, 30), st.integers(0, 30), st.data())
def test_stopped_anywhere_it_ends_at_the_same_sizes(
    first: int, second: int, data: st.DataObject
) -> None:
    """An executor that dies after each of its steps and starts anew ends where one does that
    lives."""
    lives, dies = World(), World()
    bounds = Bounds(3, 6, 10.0)
    for made in (lives, dies):
        made.converge(first, bounds, 100.0)
    lives.converge(second, bounds, 200.0)
    for _ in range(1000):
        step = dies.plan(second, bounds, 200.0)
        if step.layout != dies.layout:
            dies.layout = step.layout
            continue
        doable = [
            action
            for action in step.actions
            if not isinstance(action, AddInstance | MoveInstance) or action.group in dies.groups
        ]
        if doable:
            dies.do(data.draw(st.sampled_from(doable)))
        elif all(i.state == "serving" for i in dies.instances.values()):
            break
        else:
            dies.pass_time()
    assert dies.layout == lives.layout
    assert dies.sizes() == lives.sizes()


@given(bounds_and_numbers(), st.data())
def test_a_lost_layout_is_found_again(case: tuple[Bounds, list[int]], data: st.DataObject) -> None:
    bounds, numbers = case
    made = World()
    for now, wanted in enumerate(numbers):
        made.converge(wanted, bounds, float(now))
    wanted = numbers[-1] if numbers else 0
    names = set(made.instances)
    made.layout = found(made.instances.values())
    made.converge(wanted, replace(bounds, merge_cooldown=0.0), 100.0)
    check_at_rest(made.sizes(), wanted, bounds)
    assert set(made.instances) == names, "nothing was restarted"


@given(
    st.lists(st.tuples(st.sampled_from([11, 12]), st.floats(0.0, 40.0)), min_size=2, max_size=60)
)
def test_a_number_that_swings_splits_and_merges_once_a_cooldown_at_most(
    swings: list[tuple[int, float]],
) -> None:
    made, now = World(), 0.0
    made.converge(11, PAPER, now)
    for wanted, wait in swings:
        now += wait
        assert sum(made.converge(wanted, PAPER, now).values()) == wanted
    for kind in (Split, Merge):
        moments = [at for at, decision in made.decisions if isinstance(decision, kind)]
        gaps = [later - earlier for earlier, later in pairwise(moments)]
        assert all(gap >= PAPER.merge_cooldown - 1e-6 for gap in gaps), kind


def test_a_long_swing_does_split_and_merge() -> None:
    made = World()
    for minute in range(60):
        made.converge(11 + minute % 2, PAPER, 60.0 * minute)
    kinds = Counter(type(decision) for _, decision in made.decisions)
    # Split at 12 in minute 1, merged at the first 11 from two minutes later on, in minute 4.
    assert kinds == {Split: 15, Merge: 14}


@given(st.integers(0, 40), st.integers(0, 40))
def test_the_same_snapshot_gives_the_same_plan(first: int, second: int) -> None:
    made = World()
    made.converge(first, AT_ONCE)
    assert made.plan(second, AT_ONCE) == made.plan(second, AT_ONCE)
