from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ecoserve.local.slo import (
    DECODES,
    LEAST_TPOT,
    LEAST_TTFT,
    PROMPTS,
    Calibrated,
    derive,
    full_decode,
    longest_prefill,
    round_up,
)
from ecoserve.policy.latency import LatencyModel


def seconds(high: float) -> st.SearchStrategy[float]:
    return st.floats(0, high)


latencies = st.builds(
    LatencyModel,
    prefill_fixed=seconds(0.5),
    prefill_token=st.floats(1e-7, 0.01),
    prefill_pair=seconds(1e-6),
    decode_fixed=st.floats(1e-6, 0.5),
    decode_sequence=seconds(0.05),
    decode_context=seconds(1e-5),
)
calibrated = st.builds(
    Calibrated,
    latency=latencies,
    max_model_len=st.integers(1, 32768),
    step_budget=st.integers(1, 16384).map(lambda n: max(n, 64)),
    max_num_seqs=st.integers(1, 256),
)


@given(st.lists(calibrated, min_size=1, max_size=4))
def test_every_instance_keeps_what_is_derived(instances: list[Calibrated]) -> None:
    slo = derive(instances).slo
    for instance in instances:
        assert slo.ttft >= PROMPTS * longest_prefill(instance) * (1 - 1e-6)
        assert slo.tpot >= DECODES * full_decode(instance) * (1 - 1e-6)
    assert slo.ttft >= LEAST_TTFT
    assert slo.tpot >= LEAST_TPOT


@given(st.lists(calibrated, min_size=1, max_size=3), calibrated)
def test_one_more_instance_never_tightens_it(
    instances: list[Calibrated], another: Calibrated
) -> None:
    before, after = derive(instances).slo, derive([*instances, another]).slo
    assert after.ttft >= before.ttft
    assert after.tpot >= before.tpot


@given(calibrated)
def test_prefill_in_steps_does_the_whole_prompt(instance: Calibrated) -> None:
    whole = instance.latency.prefill_work(instance.max_model_len)
    steps = -(-instance.max_model_len // instance.step_budget)
    expected = whole + steps * instance.latency.prefill_fixed
    assert longest_prefill(instance) == pytest.approx(expected)


@given(st.floats(1e-4, 1e4))
def test_rounding_goes_up_by_less_than_a_digit(value: float) -> None:
    rounded = round_up(value)
    assert value * (1 - 1e-8) <= rounded <= value * 1.11
    assert round_up(rounded) == rounded


def test_a_machine_of_two_cores() -> None:
    latency = LatencyModel(0.0129, 2.47e-4, 1.11e-7 * 2, 0.0123, 3.81e-4, 1.45e-6)
    derived = derive([Calibrated(latency, 2048, 2048, 256)])
    assert derived.slo.ttft == 3.0
    assert derived.slo.tpot == 0.043
    assert "2048 tokens" in derived.ttft_reason
    assert "8 x 512 tokens" in derived.tpot_reason


def test_given_figures_stand() -> None:
    latency = LatencyModel(0.01, 1e-4, 0, 0.01, 0, 0)
    derived = derive([Calibrated(latency, 2048, 2048, 256)], ttft=0.25, tpot=0.005)
    assert (derived.slo.ttft, derived.slo.tpot) == (0.25, 0.005)
    assert derived.ttft_reason == derived.tpot_reason == "given"
    with pytest.raises(ValueError, match=r"slo\.ttft"):
        derive([Calibrated(latency, 2048, 2048, 256)], ttft=-1)
    with pytest.raises(ValueError, match="at least one"):
        derive([])
