from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ideal import GPU

from ecoserve.policy.batching import next_limit
from ecoserve.policy.latency import StepSample
from ecoserve.policy.use import UseMeter, best_batch


def play(meter: UseMeter, rate: float, seconds: float = 10.0) -> float:
    """Feeds the steps of an engine that serves ``rate`` requests/s (400 in, 200 out); its use."""
    now = 0.0
    batch = max(1, round(rate * 200 * 0.05))
    step = GPU.decode(batch, batch * 500)
    steps = int(rate * 200 * seconds / batch)
    for _ in range(steps):
        now += seconds / steps
        meter.add(now, StepSample(0, 0.0, batch, batch * 500, step))
    for _ in range(round(rate * seconds)):
        meter.add(now, StepSample(400, 400 * 200.0, 0, 0, GPU.prefill(400)))
    return meter.use(now, GPU, tpot=0.1, max_batch=256, kv_tokens=200_000, step_budget=2048)


def test_use_rises_evenly_with_the_rate_up_to_one_at_capacity() -> None:
    found = {rate: play(UseMeter(0.0), rate) for rate in (0.3, 0.5, 1.0, 1.5, 2.0)}
    per_request = {rate: use / rate for rate, use in found.items()}
    assert max(per_request.values()) < 1.1 * min(per_request.values())
    # What the hardware can do with these lengths: one TPOT holds a decode step and the prefills
    # that replace what finishes.
    prefill = GPU.prefill_work(400) + GPU.prefill_fixed * 400 / 2048
    batch = best_batch(
        GPU,
        tpot=0.1,
        mean_context=500,
        prefill_per_token=prefill / 200,
        max_batch=256,
        kv_tokens=200_000,
    )
    capacity = batch / 0.1 / 200
    assert play(UseMeter(0.0), capacity) == pytest.approx(1.0, rel=0.1)


def test_one_request_keeps_an_engine_busy_but_hardly_used() -> None:
    meter, now = UseMeter(0.0), 0.0
    while now < 10:
        step = GPU.decode(1, 500)
        now += step
        meter.add(now, StepSample(0, 0.0, 1, 500, step))
    assert meter.busy(now) > 0.95
    use = meter.use(now, GPU, tpot=0.1, max_batch=256, kv_tokens=200_000, step_budget=2048)
    assert use < 0.05


def test_an_idle_window_is_forgotten() -> None:
    meter = UseMeter(0.0)
    play(meter, 2.0)
    assert meter.use(30.0, GPU, tpot=0.1, max_batch=8, kv_tokens=9999, step_budget=512) == 0
    assert meter.busy(30.0) == 0


def test_a_limit_that_is_reached_grows_however_low_use_is() -> None:
    """Short prompts: at the lowest limit use never gets above its threshold."""
    limit = 64
    for _ in range(10):
        limit = next_limit(limit, 0.45, 64, 256, running=limit)
    assert limit == 256
    assert next_limit(100, 0.45, 64, 256, running=99) == 90


@given(st.integers(1, 256), st.floats(0, 3), st.integers(1, 16), st.integers(16, 256))
def test_the_batch_limit_moves_by_the_rule_and_within_its_bounds(
    limit: int, use: float, low: int, high: int
) -> None:
    new = next_limit(limit, use, low, high)
    assert low <= new <= high
    if 0.6 <= use <= 0.8 and low <= limit <= high:
        assert new == limit
    if use > 0.8 and low <= limit < high:
        assert limit < new <= limit * 1.2 + 1
    if use < 0.6 and low < limit <= high:
        assert limit * 0.9 - 1 <= new < limit
