from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ecoserve.policy.latency import LatencyFit, LatencyModel, StepSample

CPU = LatencyModel(0.0129, 2.47e-4, 2.2e-7, 0.0123, 3.81e-4, 1.45e-6)
GUESS = LatencyModel(0.03, 1e-4, 1e-8, 0.03, 1e-4, 1e-7)


def samples(
    model: LatencyModel, kind: str, count: int, seed: int, noise: float = 0.03
) -> list[StepSample]:
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        tokens = int(rng.integers(16, 2048)) if kind != "decode" else 0
        before = int(rng.integers(0, 1024))
        batch = int(rng.integers(1, 33)) if kind != "prefill" else 0
        context = batch * int(rng.integers(32, 1500))
        if kind == "prefill":
            seconds = model.prefill(tokens, before)
        elif kind == "decode":
            seconds = model.decode(batch, context)
        else:
            both = model.decode(batch, context) + model.prefill_work(tokens, before)
            seconds = (1 + model.mixing) * both
        seconds *= 1 + noise * rng.standard_normal()
        pairs = tokens * (before + tokens / 2)
        found.append(StepSample(tokens, pairs, batch, context, seconds))
    return found


@given(seconds=st.floats(0, 20), context=st.integers(0, 30_000))
def test_the_longest_chunk_within_a_time_fits_and_one_more_does_not(
    seconds: float, context: int
) -> None:
    tokens = CPU.prefill_tokens_within(seconds, context)
    assert CPU.prefill(tokens, context) <= seconds + 1e-9 or tokens == 0
    assert CPU.prefill(tokens + 1, context) > seconds - 1e-9


@pytest.mark.parametrize("mixing", [-1.0, float("nan"), float("inf")])
def test_a_mixed_step_takes_time(mixing: float) -> None:
    with pytest.raises(ValueError, match=r"latency\.mixing"):
        replace(CPU, mixing=mixing)


def test_a_chunked_prefill_costs_one_fixed_cost_more_than_a_whole_one() -> None:
    whole = CPU.prefill(1000)
    parts = CPU.prefill(400) + CPU.prefill(600, 400)
    assert parts == pytest.approx(whole + CPU.prefill_fixed)


@pytest.mark.parametrize("mixing", [-0.1, 0.0, 0.25])
def test_the_fit_finds_the_model_that_the_steps_follow(mixing: float) -> None:
    true = LatencyModel(0.0129, 2.47e-4, 2.2e-7, 0.0123, 3.81e-4, 1.45e-6, mixing)
    fit = LatencyFit(GUESS, prior=0.02)
    for kind in ("prefill", "decode", "mixed"):
        for sample in samples(true, kind, 200, seed=len(kind)):
            fit.observe(sample)
    for kind in ("prefill", "decode", "mixed"):
        misses = [abs(fit.predict(s) / s.seconds - 1) for s in samples(true, kind, 300, 9, 0)]
        assert np.median(misses) < 0.05, kind
    assert fit.model.mixing == pytest.approx(mixing, abs=0.05)
    assert 0.01 < fit.model.error < 0.08


def test_what_is_not_exercised_keeps_its_figure() -> None:
    fit = LatencyFit(CPU)
    for _ in range(256):
        fit.observe(StepSample(100, 5000, 0, 0, CPU.prefill(100) * 1.5))
    assert fit.model.decode(8, 4000) == pytest.approx(CPU.decode(8, 4000))
    assert fit.model.prefill(100) == pytest.approx(1.5 * CPU.prefill(100), rel=0.1)
    # One length alone says nothing about the split; the whole curve is scaled, not bent away.
    assert 1.0 < fit.model.prefill(1000) / CPU.prefill(1000) < 2.0


def test_small_batches_do_not_bend_what_is_known_of_large_ones() -> None:
    """An hour of batches of one to three whose time says nothing of the batch (what else the
    machine does outweighs it), on a machine that is slower than when it was calibrated."""
    fit = LatencyFit(CPU)
    rng = np.random.default_rng(1)
    for _ in range(10_000):
        batch = int(rng.integers(1, 4))
        seconds = 1.2 * CPU.decode(2, 460) * (1 + 0.1 * rng.standard_normal())
        fit.observe(StepSample(0, 0.0, batch, 230 * batch, seconds))
    for batch in (2, 16):
        expected = 1.2 * CPU.decode(batch, 230 * batch)
        assert fit.model.decode(batch, 230 * batch) == pytest.approx(expected, rel=0.15)


def test_a_proportion_that_the_steps_do_tell_is_followed() -> None:
    fit = LatencyFit(CPU)
    changed = LatencyModel(0.0129, 2.47e-4, 2.2e-7, 0.0123, 3 * 3.81e-4, 1.45e-6)
    for s in samples(changed, "decode", 1000, seed=5):
        fit.observe(s)
    for batch in (1, 16, 32):
        expected = changed.decode(batch, 500 * batch)
        assert fit.model.decode(batch, 500 * batch) == pytest.approx(expected, rel=0.1)


def test_a_hiccup_is_left_out_and_a_lasting_change_is_followed() -> None:
    fit = LatencyFit(CPU)
    steps = samples(CPU, "decode", 320, seed=3, noise=0.0)
    for i, s in enumerate(steps):
        hiccup = 50.0 if i % 16 == 0 else 1.0
        fit.observe(StepSample(s.tokens, s.pairs, s.batch, s.context, s.seconds * hiccup))
    assert fit.model.decode(8, 4000) == pytest.approx(CPU.decode(8, 4000), rel=0.02)
    for s in samples(CPU, "decode", 400, seed=4, noise=0.0):
        fit.observe(StepSample(s.tokens, s.pairs, s.batch, s.context, s.seconds * 6))
    assert fit.model.decode(8, 4000) == pytest.approx(6 * CPU.decode(8, 4000), rel=0.1)


@pytest.mark.parametrize("slower", [5.0, 10.0, 0.1])
def test_prefills_that_are_predicted_wrong_are_soon_predicted_right(slower: float) -> None:
    """An instance that has just started: few prompts, and decodes in between that are as known."""
    fit = LatencyFit(CPU)
    for i in range(4):
        [prefill] = samples(CPU, "prefill", 1, seed=i)
        fit.observe(replace(prefill, seconds=prefill.seconds * slower))
        for decode in samples(CPU, "decode", 5, seed=i):
            fit.observe(decode)
    for tokens in (100, 1000):
        expected = slower * CPU.prefill(tokens)
        assert fit.model.prefill(tokens) == pytest.approx(expected, rel=0.25)
    assert fit.model.decode(8, 4000) == pytest.approx(CPU.decode(8, 4000), rel=0.05)


def test_the_error_is_that_of_the_steps_that_are_predicted_worst() -> None:
    """Decode steps are many and even; mixed ones few and, with a GPU's tiles, off by some
    percent."""
    fit = LatencyFit(CPU)
    for i in range(320):
        for kind, noise in (("decode", 0.0), *([("mixed", 0.1)] if i % 8 == 0 else [])):
            for s in samples(CPU, kind, 1, seed=i, noise=noise):
                fit.observe(s)
    assert 0.05 < fit.model.error < 0.2


def test_what_some_steps_take_longer_each_time_is_in_the_error_and_hiccups_are_not() -> None:
    """One in five takes a tenth more, as those of a tile more do; or one in ten twice as long."""

    def error(often: int, longer: float) -> float:
        fit = LatencyFit(CPU, every=64, prior=0.02)
        for number, sample in enumerate(samples(CPU, "mixed", 256, seed=5, noise=0.0)):
            slower = longer if number % often == 0 else 1.0
            fit.observe(replace(sample, seconds=slower * sample.seconds))
        return fit.model.error

    assert error(5, 1.1) == pytest.approx(0.1, abs=0.01)
    assert error(10, 2.0) < 0.01


@given(
    st.lists(
        st.tuples(
            st.integers(0, 4096), st.integers(0, 64), st.integers(0, 4096), st.floats(1e-5, 60)
        ).filter(lambda row: row[0] + row[1] > 0),
        max_size=120,
    )
)
def test_whatever_is_measured_the_model_stays_a_model(
    rows: list[tuple[int, int, int, float]],
) -> None:
    fit = LatencyFit(CPU, every=8)
    for tokens, batch, mean, seconds in rows:
        fit.observe(StepSample(tokens, tokens * tokens / 2, batch, batch * mean, seconds))
    model = fit.model
    assert model.prefill(100) > 0
    assert model.decode(1, 100) > 0
    assert model.prefill(200) > model.prefill(100)
    assert 0 <= model.error <= 1


@pytest.mark.parametrize("field", ["prefill_fixed", "decode_context", "error"])
def test_a_negative_figure_is_refused_by_name(field: str) -> None:
    values = {"prefill_fixed": 0.1, "prefill_token": 1e-4, "prefill_pair": 0.0}
    values |= {"decode_fixed": 0.01, "decode_sequence": 0.0, "decode_context": 0.0}
    with pytest.raises(ValueError, match=field):
        LatencyModel(**(values | {field: -1.0}))
