"""The circuit breaker of an instance."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ecoserve.policy.breaker import (
    FAILURES,
    FIRST_BACKOFF_S,
    MOST_BACKOFF_S,
    TRIAL_S,
    Breaker,
)


def opened() -> Breaker:
    breaker = Breaker()
    results = [breaker.failed(f"r{i}", 10.0) for i in range(FAILURES)]
    assert results == [False] * (FAILURES - 1) + [True]
    assert breaker.blocks
    return breaker


def test_opens_only_for_failures_in_a_row() -> None:
    breaker = Breaker()
    for i in range(10):
        for j in range(FAILURES - 1):
            assert not breaker.failed(f"r{i}-{j}", 0.0)
        breaker.succeeded(f"s{i}")
    assert not breaker.blocks


def test_after_its_backoff_one_request_is_a_trial_and_success_closes_it() -> None:
    breaker = opened()
    assert not breaker.tick(10.0 + FIRST_BACKOFF_S - 0.01)
    assert breaker.blocks
    assert breaker.tick(10.0 + FIRST_BACKOFF_S)
    assert not breaker.blocks
    breaker.routed("trial", 12.0)
    assert breaker.blocks
    breaker.succeeded("r0")  # of those before: says nothing
    assert breaker.blocks
    breaker.succeeded("trial")
    assert breaker.state == "closed"
    assert not breaker.blocks


def test_a_trial_that_fails_doubles_the_backoff_up_to_the_most() -> None:
    breaker, now, backoffs = opened(), 10.0, []
    for i in range(8):
        backoffs.append(breaker.until - now)
        now = breaker.until
        assert breaker.tick(now)
        breaker.routed(f"t{i}", now)
        assert not breaker.failed("somebody else's", now)
        assert breaker.failed(f"t{i}", now)
    assert backoffs[:3] == [1.0, 2.0, 4.0]
    assert backoffs[-1] == MOST_BACKOFF_S


def test_a_trial_without_an_end_is_followed_by_another() -> None:
    for how in ("client gone", "never heard of"):
        breaker = opened()
        breaker.tick(20.0)
        breaker.routed("trial", 20.0)
        if how == "client gone":
            breaker.forget("trial")
        else:
            assert not breaker.tick(20.0 + TRIAL_S / 2)
            assert breaker.tick(20.0 + TRIAL_S)
        assert not breaker.blocks
        assert breaker.state == "half-open"


@given(st.lists(st.tuples(st.sampled_from("fsgrt"), st.integers(0, 3), st.floats(0, 40))))
def test_an_instance_that_answers_again_is_never_shut_out_for_good(events) -> None:
    breaker, now = Breaker(), 0.0
    for kind, number, passed in events:
        now += passed
        name = f"r{number}"
        if kind == "f":
            breaker.failed(name, now)
        elif kind == "s":
            breaker.succeeded(name)
        elif kind == "g":
            breaker.forget(name)
        elif kind == "r" and not breaker.blocks:
            breaker.routed(name, now)
        else:
            breaker.tick(now)
    breaker.tick(now + MOST_BACKOFF_S + TRIAL_S)
    assert not breaker.blocks
    breaker.routed("last", now + MOST_BACKOFF_S + TRIAL_S)
    breaker.succeeded("last")
    assert breaker.state == "closed"
