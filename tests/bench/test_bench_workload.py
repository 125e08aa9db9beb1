"""Workloads of the load generator: lengths, rates, conversations, traces, text."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ecoserve.bench.prompts import Writer
from ecoserve.bench.workload import Workload, lengths, source
from ecoserve.sim.records import BLOCK, Arrival


def synthetic(prompt: str = "200", output: str = "64", cv: float | None = None) -> Workload:
    return Workload(source(data=None, prompt=prompt, output=output, cv=cv))


def test_fixed_lengths_at_a_rate() -> None:
    load = synthetic().conversations(4.0, 2000, seed=1)
    assert {(c.turns[0].prompt, c.turns[0].output) for c in load} == {(200, 64)}
    assert 2000 / load[-1].turns[0].at == pytest.approx(4.0, rel=0.1)


def test_lognormal_lengths() -> None:
    load = synthetic(prompt="148:344").conversations(1.0, 20_000, seed=1)
    prompts = [c.turns[0].prompt for c in load]
    assert np.median(prompts) == pytest.approx(148, rel=0.05)
    assert np.mean(prompts) == pytest.approx(344, rel=0.1)


def test_gaps_spread_as_asked() -> None:
    load = synthetic(cv=3.0).conversations(1.0, 20_000, seed=1)
    gaps = np.diff([c.turns[0].at for c in load])
    assert np.std(gaps) / np.mean(gaps) == pytest.approx(3.0, rel=0.1)


def test_a_seed_gives_the_same_requests_at_each_rate() -> None:
    slow = synthetic("10:50").conversations(1.0, 50, seed=3)
    fast = synthetic("10:50").conversations(2.0, 50, seed=3)
    for one, other in zip(slow, fast, strict=True):
        assert one.turns[0].prompt == other.turns[0].prompt
        assert one.seed == other.seed
        assert one.turns[0].at == pytest.approx(2 * other.turns[0].at)


def test_conversations_of_several_turns_keep_the_rate_of_requests() -> None:
    workload = replace(synthetic("10:50"), turns=4, think=2.0)
    load = workload.conversations(8.0, 4000, seed=1)
    assert len(load) == 1000
    assert {len(c.turns) for c in load} == {4}
    assert 4000 / load[-1].turns[0].at == pytest.approx(8.0, rel=0.1)


@given(st.integers(40, 400), st.integers(1, 300))
def test_what_does_not_fit_is_left_out(longest: int, count: int) -> None:
    workload = replace(synthetic("10:50", "5"), longest=longest)
    load = workload.conversations(1.0, count, seed=0)
    assert len(load) == count
    assert all(c.turns[0].prompt + 5 <= longest for c in load)
    times = [c.turns[0].at for c in load]
    assert times == sorted(times)
    # The rate is not thinned out by what is left out.
    assert times == [c.turns[0].at for c in synthetic("10:50", "5").conversations(1.0, count, 0)]


def test_nothing_fits() -> None:
    with pytest.raises(ValueError, match="fits into 100 tokens"):
        replace(synthetic("200"), longest=100).conversations(1.0, 5, seed=0)


def test_a_trace_with_shared_blocks(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text(
        '{"timestamp": 0, "input_length": 1100, "output_length": 3, "hash_ids": [7, 8, 9]}\n'
        '{"timestamp": 500, "input_length": 1100, "output_length": 3, "hash_ids": [7, 8, 10]}\n'
        '{"timestamp": 4000, "input_length": 600, "output_length": 3, "hash_ids": [11, 12]}\n'
    )
    workload = Workload(source(data=str(file), prompt="1", output="1", cv=None))
    load = workload.conversations(1.0, 3, seed=0)
    gaps = np.diff([c.turns[0].at for c in load])
    assert gaps[1] / gaps[0] == pytest.approx(7.0)
    writer = Writer("m")
    first, second, third = (writer.text(c.turns[0], c.seed).split() for c in load)
    assert first[: 2 * BLOCK] == second[: 2 * BLOCK]
    assert first[2 * BLOCK :] != second[2 * BLOCK :]
    assert first[:BLOCK] != third[:BLOCK]


@pytest.mark.parametrize("text", ["", "x", "0", "-3", "1.5", "20:10", "20:20", "1:2:3", "nan"])
def test_wrong_lengths_are_named(text: str) -> None:
    with pytest.raises(ValueError, match="--prompt-tokens must be"):
        lengths(text, "--prompt-tokens")


def test_an_unknown_data_set_is_named() -> None:
    with pytest.raises(ValueError, match=r"--data must be one of .*alpaca"):
        source(data="nothing", prompt="1", output="1", cv=None)


@given(st.integers(1, 3000), st.floats(0.5, 3), st.floats(0, 60))
def test_prompts_have_the_tokens_that_are_asked(
    prompt: int, per_word: float, overhead: float
) -> None:
    writer = Writer("m", overhead=overhead, tokens_per_word=per_word)
    blocks = tuple(range(prompt // BLOCK))
    count = len(writer.text(Arrival(0, prompt, 1, blocks), 5).split())
    tokens = count * per_word + overhead
    assert abs(tokens - max(prompt, overhead + per_word)) <= per_word


def test_another_salt_is_another_text() -> None:
    arrival = Arrival(0, 600, 1, (1,))
    texts = {Writer("m", salt=salt).text(arrival, 5)[:60] for salt in range(5)}
    assert len(texts) == 5


def test_bodies() -> None:
    chat = Writer("m", extra={"ignore_eos": True}).body(["a", "b", "c"], 7)
    assert [m["role"] for m in chat["messages"]] == ["user", "assistant", "user"]
    assert (chat["max_tokens"], chat["ignore_eos"], chat["stream"]) == (7, True, True)
    assert chat["stream_options"] == {"include_usage": True}
    plain = Writer("m", "completions", limit_field="max_completion_tokens").body(["a"], 7)
    assert (plain["prompt"], plain["max_completion_tokens"]) == ("a", 7)
