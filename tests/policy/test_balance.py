"""Rendezvous hashing bounded by load."""

from __future__ import annotations

import math
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from ecoserve.policy.balance import FACTOR, Group, choose, ranked

keys = st.binary(max_size=12)
groups = st.lists(st.tuples(st.integers(0, 8), st.integers(0, 50)), min_size=1, max_size=8).map(
    lambda rows: [Group(f"m{i}", float(s), float(n)) for i, (s, n) in enumerate(rows)]
)


@given(keys, groups)
def test_chosen_is_within_its_bound(key, groups) -> None:
    chosen = choose(key, groups)
    able = [g for g in groups if g.size > 0]
    if not able:
        assert chosen is None
        return
    group = next(g for g in able if g.name == chosen)
    total = sum(g.load for g in able) + 1
    share = group.size / sum(g.size for g in able)
    assert group.load + 1 <= math.ceil(FACTOR * total * share)


@given(keys, groups, st.data())
def test_one_that_goes_moves_only_its_own(key, groups, data) -> None:
    order = ranked(key, groups)
    if len(order) < 2:
        return
    gone = data.draw(st.sampled_from(order))
    rest = ranked(key, [g for g in groups if g != gone])
    assert rest == [g for g in order if g != gone]


@given(keys, groups)
def test_order_of_groups_does_not_matter(key, groups) -> None:
    assert choose(key, groups) == choose(key, groups[::-1])


def test_shares_follow_sizes() -> None:
    groups = [Group("small", 1, 0), Group("large", 3, 0)]
    first = Counter(ranked(str(i).encode(), groups)[0].name for i in range(4000))
    assert 0.7 < first["large"] / 4000 < 0.8


def test_load_evens_out() -> None:
    loads = {"a": 0, "b": 0, "c": 0}
    for i in range(300):
        groups = [Group(name, 1, load) for name, load in loads.items()]
        chosen = choose(str(i % 2).encode(), groups)
        assert chosen is not None
        loads[chosen] += 1
    assert max(loads.values()) <= math.ceil(FACTOR * 100) + 1
