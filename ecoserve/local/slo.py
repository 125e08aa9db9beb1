"""SLOs that a machine can keep, from what its engines were measured to take.

A first user has no figures for a machine that was never measured, and an SLO that it cannot keep
makes every request late. So the promise is derived from the calibrated latency models:

- TTFT = ``PROMPTS`` x the prefill of the longest prompt that the model takes, cut into steps as the
  engine cuts it. The longest prompt is then on time even when it comes to an instance that has
  others to prefill and decodes to keep going.
- TPOT = ``DECODES`` x a decode step of ``BATCH`` sequences of ``CONTEXT`` tokens each. Half of the
  time is then left for the prefills of others.

The slowest instance counts, and results are rounded up to two digits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ecoserve.policy.latency import LatencyModel
from ecoserve.policy.state import SLO

PROMPTS = 3
DECODES = 2
BATCH = 8
CONTEXT = 512
# Below these a human notices nothing, and the noise of a shared machine takes over.
LEAST_TTFT = 1.0
LEAST_TPOT = 0.02


@dataclass(frozen=True, slots=True)
class Calibrated:
    """What is known of an instance: its latency model and limits (tokens, sequences)."""

    latency: LatencyModel
    max_model_len: int
    step_budget: int
    max_num_seqs: int


@dataclass(frozen=True, slots=True)
class Derived:
    """An SLO with how it was come by, a line for each part."""

    slo: SLO
    ttft_reason: str
    tpot_reason: str


def longest_prefill(instance: Calibrated) -> float:
    """Seconds to prefill the longest prompt alone, in steps of the engine's budget."""
    seconds, done = 0.0, 0
    step = max(1, instance.step_budget)
    while done < instance.max_model_len:
        tokens = min(step, instance.max_model_len - done)
        seconds += instance.latency.prefill(tokens, done)
        done += tokens
    return seconds


def full_decode(instance: Calibrated) -> float:
    """Seconds of a decode step of a well-filled batch."""
    batch = max(1, min(BATCH, instance.max_num_seqs))
    context = min(CONTEXT, instance.max_model_len)
    return instance.latency.decode(batch, batch * context)


def derive(
    instances: Sequence[Calibrated], *, ttft: float | None = None, tpot: float | None = None
) -> Derived:
    """The SLO of a cluster of ``instances``; ``ttft`` and ``tpot`` (seconds) stand where given.

    Raises ``ValueError`` without instances, or for a given figure that is no positive number.
    """
    if not instances:
        raise ValueError("an SLO is derived from at least one calibrated instance")
    ttft_reason = tpot_reason = "given"
    if ttft is None:
        slowest = max(instances, key=longest_prefill)
        seconds = longest_prefill(slowest)
        ttft = round_up(max(LEAST_TTFT, PROMPTS * seconds))
        ttft_reason = (
            f"{PROMPTS} x {seconds:.3g} s, the prefill of {slowest.max_model_len} tokens, "
            f"at least {LEAST_TTFT:g} s"
        )
    if tpot is None:
        slowest = max(instances, key=full_decode)
        seconds = full_decode(slowest)
        tpot = round_up(max(LEAST_TPOT, DECODES * seconds))
        tpot_reason = (
            f"{DECODES} x {1000 * seconds:.3g} ms, a decode step of {BATCH} x {CONTEXT} tokens, "
            f"at least {1000 * LEAST_TPOT:g} ms"
        )
    return Derived(SLO(ttft, tpot), ttft_reason, tpot_reason)


def round_up(seconds: float) -> float:
    """The next number of two digits."""
    step = 10.0 ** (math.floor(math.log10(seconds)) - 1)
    # The division may land a hair above a whole number, which must not cost a whole step.
    return float(f"{math.ceil(seconds / step - 1e-9) * step:.6g}")
