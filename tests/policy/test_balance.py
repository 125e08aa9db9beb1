"""Rendezvous hashing bounded by load."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ecoserve.policy.balance import FACTOR, Places

keys = st.binary(max_size=12)


@st.composite
def clusters(draw: st.DrawFn) -> dict[str, list[str]]:
    sizes = draw(st.lists(st.integers(0, 8), min_size=1, max_size=8))
    return {f"m{i}": [f"m{i}-{j}" for j in range(size)] for i, size in enumerate(sizes)}


@given(keys, clusters(), st.data())
def test_chosen_is_within_its_bound(key, groups, data) -> None:
    loads = {name: float(data.draw(st.integers(0, 50))) for name in groups}
    chosen = Places(groups).choose(key, list(loads.values()))
    able = [name for name, instances in groups.items() if instances]
    if not able:
        assert chosen is None
        return
    assert chosen in able
    total = sum(loads[name] for name in able) + 1
    share = len(groups[chosen]) / sum(map(len, groups.values()))
    assert loads[chosen] + 1 <= math.ceil(FACTOR * total * share)


@given(keys, clusters(), st.randoms())
def test_the_order_of_names_does_not_matter(key, groups, random) -> None:
    names = list(groups)
    random.shuffle(names)
    shuffled = {name: random.sample(groups[name], len(groups[name])) for name in names}
    assert Places(groups).ranked(key) == Places(shuffled).ranked(key)


MANY = [str(i).encode() for i in range(2000)]


def homes(groups: dict[str, list[str]]) -> list[str]:
    places = Places(groups)
    return [places.ranked(key)[0] for key in MANY]


@pytest.mark.parametrize(("of", "taken"), [(12, 6), (7, 3), (4, 1)])
def test_a_split_moves_the_share_of_what_it_takes_along_and_nothing_else(of, taken) -> None:
    others = {"x": [f"x{i}" for i in range(5)], "y": [f"y{i}" for i in range(8)]}
    every = [f"a{i}" for i in range(of)]
    before = homes({**others, "a": every})
    after = homes({**others, "a": every[:-taken], "b": every[-taken:]})
    moved = {(old, new) for old, new in zip(before, after, strict=True) if old != new}
    assert moved == {("a", "b")}
    share = after.count("b") / before.count("a")
    assert share == pytest.approx(taken / of, abs=0.07)


@given(clusters(), st.data())
def test_a_split_or_a_merge_moves_no_conversation_of_the_others(groups, data) -> None:
    some = [name for name, instances in groups.items() if len(instances) > 1]
    if not some:
        return
    name = data.draw(st.sampled_from(some))
    cut = data.draw(st.integers(1, len(groups[name]) - 1))
    split = {**groups, name: groups[name][:cut], "new": groups[name][cut:]}
    one, two = Places(groups), Places(split)
    for key in MANY[:100]:
        before, after = one.ranked(key), two.ranked(key)
        # Read from left to right a split, from right to left a merge.
        assert [n for n in after if n not in (name, "new")] == [n for n in before if n != name]
        assert after[0] == before[0] or (before[0], after[0]) == (name, "new")


@given(clusters(), st.data())
def test_an_instance_that_comes_or_goes_moves_only_its_own(groups, data) -> None:
    some = [name for name, instances in groups.items() if instances]
    if not some:
        return
    name = data.draw(st.sampled_from(some))
    fewer = {**groups, name: groups[name][:-1]}
    one, two = Places(groups), Places(fewer)
    for key in MANY[:100]:
        with_it, without = one.ranked(key)[:1], two.ranked(key)[:1]
        assert with_it == without or with_it == [name]


def test_shares_follow_sizes() -> None:
    found = Counter(homes({"small": ["s"], "large": ["l1", "l2", "l3"]}))
    assert 0.7 < found["large"] / len(MANY) < 0.8


def test_load_evens_out() -> None:
    loads = {"a": 0, "b": 0, "c": 0}
    places = Places({name: [name] for name in loads})
    for i in range(300):
        chosen = places.choose(str(i % 2).encode(), list(loads.values()))
        assert chosen is not None
        loads[chosen] += 1
    assert max(loads.values()) <= math.ceil(FACTOR * 100) + 1
