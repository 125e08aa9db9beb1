"""The latency model that an instance begins with: fitted to sampled steps, as a worker does it."""

from __future__ import annotations

import math
from collections.abc import Iterator

from ecoserve.policy.latency import LatencyFit, LatencyModel, StepSample
from ecoserve.sim.records import StepCost

_PROMPTS = (16, 64, 128, 256, 512, 1024, 2048)
_BATCHES = (1, 8, 32, 64, 128, 192, 256)
_CONTEXTS = (128, 512, 2048)
_MIXES = ((8, 64), (32, 128), (64, 256), (128, 512))


def calibrate(cost: StepCost, max_batch: int, step_budget: int) -> LatencyModel:
    """Fits the steps of the pipeline as a whole (see ``instance``)."""
    samples = list(_samples(cost, max_batch, step_budget))
    guess = samples[0].seconds
    start = LatencyModel(guess, guess / 256, guess / 1e6, guess, guess / 256, guess / 1e5)
    fit = LatencyFit(start, window=len(samples), every=len(samples), prior=0.02, outlier=math.inf)
    for sample in samples:
        fit.observe(sample)
    return fit.model


def _samples(cost: StepCost, max_batch: int, step_budget: int) -> Iterator[StepSample]:
    def sample(tokens: int, pairs: float, batch: int, context: int) -> StepSample:
        seconds = cost.stages * cost.step(tokens, pairs, batch, context)
        seconds += (cost.stages - 1) * cost.handoff(tokens + batch)
        return StepSample(tokens, pairs, batch, context, seconds)

    for tokens in {min(prompt, step_budget) for prompt in _PROMPTS}:
        for before in (0, 1024):
            yield sample(tokens, tokens * (before + tokens / 2), 0, 0)
    for batch in {min(batch, max_batch) for batch in _BATCHES}:
        for each in _CONTEXTS:
            if batch * each <= cost.kv_tokens or each == _CONTEXTS[0]:
                yield sample(0, 0.0, batch, batch * each)
    for batch, tokens in _MIXES:
        batch, tokens = min(batch, max_batch), min(tokens, step_budget)
        yield sample(tokens, tokens * tokens / 2, batch, batch * 256)
