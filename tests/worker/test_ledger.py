"""The front end's books."""

from __future__ import annotations

from typing import Any

from ecoserve_worker.ledger import _KEPT_OUTCOMES, Ledger
from ecoserve_worker.messages import (
    Command,
    DecodeState,
    Forget,
    FromEngine,
    SequenceDone,
    State,
)

from ecoserve.policy.state import SLO

ID = "eco-0123456789abcdef"


class Clock:
    def __init__(self) -> None:
        self.now = 10.0

    def __call__(self) -> float:
        return self.now


def _ledger() -> tuple[Ledger, Clock, list[Command]]:
    clock, told = Clock(), []  # type: ignore[var-annotated]
    return Ledger(SLO(1.0, 0.1), tell=told.append, clock=clock), clock, told


def _state(*running: str) -> State:
    decodes = [DecodeState(id, 9, 1, 0.1, 0.1, False) for id in running]
    return State(0, "decode", 0, [], decodes, 9, 0, 0, "decode", 0, 8, *(0 for _ in range(3)))


def _done(id: str = ID, **change: Any) -> SequenceDone:
    fields = {"ttft": 0.5, "tpot": 0.02, "generated": 5} | change
    return SequenceDone(
        id, 7, 2, fields["generated"], fields["ttft"], fields["tpot"], 1.0, 0.1, False
    )


def test_a_request_is_settled_when_both_sides_have_ended() -> None:
    ledger, _, told = _ledger()
    call = ledger.begin(ID, 0.0, None, 0.05)
    ledger.received(FromEngine(state=_state(ID)))
    ledger.end(call, 200, broken=False)
    assert not ledger.finished
    assert not ledger.idle
    ledger.received(FromEngine(state=_state(), done=[_done()]))
    (outcome,) = ledger.finished
    assert (outcome.id, outcome.status, outcome.prompt_tokens, outcome.cached_tokens) == (
        ID,
        200,
        7,
        2,
    )
    assert outcome.slo == SLO(1.0, 0.05)
    assert told[-1] == Forget(ID)
    assert ledger.idle


def test_the_engine_may_account_first() -> None:
    ledger, _, _ = _ledger()
    call = ledger.begin(ID, 0.0, None, None)
    ledger.received(FromEngine(done=[_done()]))
    ledger.end(call, 200, broken=False)
    assert len(ledger.finished) == 1


def test_several_sequences_make_one_request_as_late_as_the_latest() -> None:
    ledger, _, _ = _ledger()
    call = ledger.begin(ID, 0.0, None, None)
    ledger.received(FromEngine(state=_state(ID), done=[_done(ttft=0.2, tpot=0.03)]))
    ledger.end(call, 200, broken=False)
    assert not ledger.finished
    ledger.received(FromEngine(state=_state(), done=[_done(ttft=0.4, tpot=0.01)]))
    (outcome,) = ledger.finished
    assert (outcome.generated, outcome.ttft, outcome.tpot) == (10, 0.4, 0.03)


def test_what_never_reached_the_engine_is_settled_at_once() -> None:
    ledger, _, _ = _ledger()
    ledger.end(ledger.begin(ID, 0.0, None, None), 400, broken=False)
    assert ledger.finished[0].status == 400


def test_an_engine_that_says_nothing_is_not_waited_for_for_ever() -> None:
    ledger, clock, _ = _ledger()
    ledger.end(ledger.begin(ID, 0.0, None, None), 200, broken=True)
    clock.now += 5
    ledger.settle()
    assert ledger.finished[0].broken


def test_outcomes_are_kept_until_acknowledged() -> None:
    ledger, _, _ = _ledger()
    for _ in range(3):
        ledger.end(ledger.begin(ID, 0.0, None, None), 400, broken=False)
    ledger.acknowledged(2)
    assert [outcome.number for outcome in ledger.finished] == [3]


def test_outcomes_that_nobody_acknowledges_do_not_pile_up() -> None:
    ledger, _, _ = _ledger()
    for _ in range(_KEPT_OUTCOMES + 5):
        ledger.end(ledger.begin(ID, 0.0, None, None), 400, broken=False)
    assert len(ledger.finished) == _KEPT_OUTCOMES
    assert ledger.finished[-1].number == _KEPT_OUTCOMES + 5
    ledger.acknowledged(_KEPT_OUTCOMES)
    assert [outcome.number - _KEPT_OUTCOMES for outcome in ledger.finished] == [1, 2, 3, 4, 5]


def test_a_retry_under_the_same_id_is_a_call_of_its_own() -> None:
    ledger, _, told = _ledger()
    first = ledger.begin(ID, 0.0, None, None)
    second = ledger.begin(ID, 0.0, None, None)
    ledger.end(first, 400, broken=False)
    assert ledger.present == [ID]
    assert Forget(ID) not in told
    ledger.end(second, 400, broken=False)
    assert ledger.present == []
    assert told[-1] == Forget(ID)
