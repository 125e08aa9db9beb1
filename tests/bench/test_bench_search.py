"""The bisection finds the rate at which a load stops being good enough."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ecoserve.bench.search import Bisection, sealed


def run(search: Bisection, goodput: float) -> None:
    while (rate := search.next) is not None:
        search.tell(rate, rate <= goodput)


@given(
    goodput=st.floats(0.01, 1000),
    first=st.floats(0.01, 1000),
    precision=st.floats(0.01, 0.5),
)
def test_the_bracket_holds_the_goodput(goodput: float, first: float, precision: float) -> None:
    search = Bisection(first, precision, most=60)
    run(search, goodput)
    if first / 2**11 < goodput < first * 2**11:
        assert search.bracketed
        assert search.low <= goodput < search.high
        assert search.high - search.low <= precision * search.high


def test_rates_double_until_one_fails_then_close_in() -> None:
    search = Bisection(1.0, 0.3)
    run(search, 5.0)
    rates = [rate for rate, _ in search.tried]
    assert rates[:4] == [1.0, 2.0, 4.0, 8.0]
    assert rates[4] == pytest.approx(math.sqrt(32))


def test_no_more_rates_than_allowed() -> None:
    search = Bisection(1.0, 0.001, most=7)
    run(search, 5.0)
    assert len(search.tried) == 7


def test_what_never_fails_ends_the_search_unbracketed() -> None:
    search = Bisection(1.0, most=100)
    run(search, math.inf)
    assert not search.bracketed
    assert search.low == 2**12


def test_what_never_passes_ends_the_search_without_a_goodput() -> None:
    search = Bisection(1.0, most=100)
    run(search, 0.0)
    assert (search.low, search.bracketed) == (0, False)


def test_a_rate_that_passes_above_one_that_failed_is_luck() -> None:
    search = Bisection(1.0)
    search.tell(2.0, False)
    search.tell(3.0, True)
    search.tell(1.0, True)
    assert (search.low, search.high) == (1.0, 2.0)


@pytest.mark.parametrize(
    ("field", "value"),
    [("first", 0.0), ("first", math.inf), ("precision", 0.0), ("precision", 1.0), ("most", 0)],
)
def test_wrong_settings_are_named(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=field):
        Bisection(**{"first": 1.0, field: value})


@given(calls=st.integers(1, 500), target=st.floats(0.5, 0.99), data=st.data())
def test_a_sealed_run_fails_whatever_comes(calls: int, target: float, data: st.DataObject) -> None:
    missed = data.draw(st.integers(0, calls))
    best = (calls - missed) / calls
    if sealed(missed, calls, target):
        assert best < target
    else:
        assert best >= target - 1e-6
