"""A launcher's workers: how many, in which macro instances, and that none is lost on the way."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ecoserve.local.fleet import Drain, Fleet, Resume, Seen, Start, Stop
from ecoserve.policy.mitosis import Bounds

NAMES = [f"worker-{n}" for n in range(6)]


class Machine:
    """Does at once what a fleet asks for; ``busy`` workers have requests."""

    def __init__(self, count: int, bounds: Bounds) -> None:
        self.fleet = Fleet(NAMES, count, bounds)
        self.states = dict.fromkeys(self.fleet.running, "accepted")
        self.busy: set[str] = set()
        self.now = 0.0

    def turn(self) -> list[object]:
        self.now += 1
        seen = {n: Seen(state, int(n in self.busy)) for n, state in self.states.items()}
        tasks = self.fleet.advance(seen, self.now)
        for task in tasks:
            match task:
                case Start(name):
                    assert name not in self.states
                    self.states[name] = "accepted"
                case Drain(name):
                    self.states[name] = "draining" if name in self.busy else "drained"
                case Resume(name):
                    self.states[name] = "accepted"
                case Stop(name):
                    assert self.states.pop(name) in ("drained", "lost")
        return list(tasks)

    def settle(self) -> None:
        for _ in range(100):
            for name, state in self.states.items():
                if state == "draining" and name not in self.busy:
                    self.states[name] = "drained"
            groups = self.fleet.groups
            if not self.turn() and self.fleet.groups == groups:
                return
        raise AssertionError("it does not come to rest")

    def sizes(self) -> list[int]:
        return sorted((len(some) for some in self.fleet.groups.values()), reverse=True)


def test_all_begin_as_one_macro_instance() -> None:
    fleet = Fleet(NAMES, 2, Bounds(1, 2))
    assert fleet.groups == {"local-0": ["worker-0", "worker-1"]}


def test_it_grows_splits_shrinks_and_merges() -> None:
    machine = Machine(2, Bounds(1, 2, merge_cooldown=0))
    machine.fleet.wanted = 3
    machine.settle()
    assert machine.sizes() == [2, 1]
    machine.fleet.wanted = 2
    machine.settle()
    assert machine.sizes() == [2]
    assert len(machine.states) == 2


def test_a_worker_drains_before_it_is_stopped() -> None:
    machine = Machine(2, Bounds(1, 2))
    machine.busy = set(machine.states)
    machine.fleet.wanted = 1
    assert [type(task) for task in machine.turn()] == [Drain]
    assert machine.turn() == []
    machine.busy.clear()
    machine.settle()
    assert len(machine.states) == 1


def test_a_scheduler_that_has_forgotten_is_told_again() -> None:
    machine = Machine(2, Bounds(1, 2))
    machine.busy = set(machine.states)
    machine.fleet.wanted = 1
    (drain,) = machine.turn()
    assert isinstance(drain, Drain)
    machine.states[drain.name] = "accepted"
    assert machine.turn() == [drain]


def test_one_that_drains_is_taken_back() -> None:
    machine = Machine(2, Bounds(1, 2))
    machine.busy = set(machine.states)
    machine.fleet.wanted = 1
    (drain,) = machine.turn()
    assert isinstance(drain, Drain)
    machine.fleet.wanted = 2
    assert machine.turn() == [Resume(drain.name)]
    assert machine.states[drain.name] == "accepted"


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(0, 4)), max_size=8), st.integers(1, 3))
def test_it_always_comes_to_what_is_wanted(wishes: list[tuple[int, int]], upper: int) -> None:
    machine = Machine(1, Bounds((upper + 1) // 2, upper, merge_cooldown=0))
    for wanted, turns in wishes:
        machine.fleet.wanted = wanted
        for _ in range(turns):
            machine.turn()
            assert all(
                sum(machine.states.get(name) == "accepted" for name in some) <= upper
                for some in machine.fleet.groups.values()
            )
    machine.settle()
    assert len(machine.states) == machine.fleet.wanted
    assert sum(machine.sizes()) == machine.fleet.wanted
