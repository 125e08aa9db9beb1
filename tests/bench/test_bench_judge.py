"""Latencies, attainment, throughput and failures from outcomes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ecoserve.bench.judge import Spread, Window, failure, summarise, summarise_all
from ecoserve.bench.load import Call, Outcome
from ecoserve.policy.state import SLO

PROMISE = SLO(ttft=1.0, tpot=0.1)


def outcome(due: float, ttft: float = 0.5, tpot: float = 0.05, tokens: int = 11) -> Outcome:
    first = due + ttft
    return Outcome(
        call=Call(due, {}),
        sent=due + 0.01,
        first=first,
        end=first + tpot * (tokens - 1),
        tokens=tokens,
        status=200,
        whole=True,
        prompt_tokens=100,
        gaps=(tpot,) * (tokens - 1),
    )


def test_latencies() -> None:
    found = summarise([outcome(i, ttft=0.1 * (i + 1)) for i in range(10)], Window(0, 100), PROMISE)
    assert found.ttft.mean == pytest.approx(0.55)
    assert found.ttft.p50 == pytest.approx(0.55)
    assert found.ttft.most == pytest.approx(1.0)
    assert found.tpot.p99 == pytest.approx(0.05)
    assert found.itl.mean == pytest.approx(0.05)
    assert found.e2e.p50 == pytest.approx(1.05)
    assert found.lateness.most == pytest.approx(0.01)
    assert (found.prompt_tokens, found.output_tokens) == (100, 11)


def test_attainment_is_joint_and_failures_miss() -> None:
    calls = [
        outcome(0),
        outcome(1, ttft=1.5),
        outcome(2, tpot=0.2),
        replace(outcome(3), whole=False),
    ]
    found = summarise(calls, Window(0, 10), PROMISE)
    assert (found.attained, found.ttft_attained, found.tpot_attained) == (0.25, 0.5, 0.5)
    assert (found.calls, found.failed) == (4, 1)


def test_what_was_due_in_the_warm_up_does_not_count_and_the_drain_does() -> None:
    slow = outcome(9.0, ttft=30)
    found = summarise([outcome(1.0), outcome(6.0), slow], Window(5, 10), PROMISE)
    assert found.calls == 2
    assert found.attained == 0.5
    assert found.drain == pytest.approx(slow.end - 10)


def test_throughput_is_of_what_ended_within_the_window() -> None:
    # One is due before and ends within, one is due within and ends after.
    calls = [outcome(4.5, ttft=1.0), outcome(6.0), outcome(9.9)]
    found = summarise(calls, Window(5, 10), PROMISE)
    assert found.requests_per_s == pytest.approx(2 / 5)
    assert found.output_tokens_per_s == pytest.approx(22 / 5)
    assert found.prompt_tokens_per_s == pytest.approx(200 / 5)


def test_runs_are_pooled() -> None:
    good, bad = [outcome(i) for i in range(3)], [outcome(0, ttft=9)]
    found = summarise_all([(good, Window(0, 10)), (bad, Window(0, 10))], PROMISE)
    assert (found.calls, found.attained) == (4, 0.75)
    assert found.requests_per_s == pytest.approx(4 / 20)


def test_no_slo_no_attainment() -> None:
    assert summarise([outcome(0)], Window(0, 10), None).attained is None


def test_nothing() -> None:
    found = summarise([], Window(0, 10), PROMISE)
    assert (found.calls, found.attained, found.ttft) == (0, None, Spread(0, 0, 0, 0, 0, 0))


def test_an_answer_of_one_token_has_no_tpot() -> None:
    found = summarise([outcome(0, tokens=1), outcome(1)], Window(0, 10), PROMISE)
    assert found.tpot.mean == pytest.approx(0.05)
    assert found.attained == 1.0


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"status": 429, "error": '{"code": "rate_limit_exceeded"}'}, "HTTP 429 rate_limit_exc"),
        ({"status": 500, "error": "Internal Server Error"}, "HTTP 500"),
        ({"whole": False}, "the stream ended without"),
        ({"cancelled": True, "whole": False}, "no answer in time"),
        ({"status": 0, "error": "ClientOSError: port 8000"}, "ClientOSError: port N"),
    ],
)
def test_failures_are_told_apart(fields: dict[str, object], words: str) -> None:
    assert words in failure(replace(outcome(0), **fields))


def test_failures_are_counted_by_kind() -> None:
    broken = replace(outcome(1), whole=False)
    refused = replace(outcome(2), status=429, error='{"code": "full"}', whole=False)
    found = summarise([broken, refused, refused], Window(0, 10), PROMISE)
    assert found.errors == {"HTTP 429 full": 2, "the stream ended without [DONE]": 1}
