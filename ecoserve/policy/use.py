"""Device use: how much of an instance's capacity under its SLO the recent work took.

An engine that loops over steps is busy all the time with one request, so the busy share is no
measure of load. Use is the time that the latency model needs for the window's tokens at the best
batch that keeps the SLO, over the window.

The best batch B solves decode(B) + r B = TPOT, where r is the prefill time that comes with each
generated token: then one TPOT's worth of time holds one decode step of B and the prefills that
replace what finishes. It is bounded by the engine's batch and by KV memory. Prefills count with
their own work and one fixed cost a full step budget.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from ecoserve.policy.latency import LatencyModel, StepSample

_BUCKETS = 20


@dataclass(slots=True)
class _Bucket:
    start: float
    tokens: int = 0
    pairs: float = 0.0
    generated: int = 0
    context: int = 0
    seconds: float = 0.0


class UseMeter:
    """Sums up steps over a sliding window of ``window`` seconds, in twentieths of it."""

    def __init__(self, now: float, window: float = 10.0) -> None:
        self._window = window
        self._started = now
        self._buckets: deque[_Bucket] = deque()

    def add(self, now: float, step: StepSample) -> None:
        """Takes a step that ended at ``now``."""
        width = self._window / _BUCKETS
        if not self._buckets or now - self._buckets[-1].start >= width:
            self._buckets.append(_Bucket(now))
            self._expire(now)
        bucket = self._buckets[-1]
        bucket.tokens += step.tokens
        bucket.pairs += step.pairs
        bucket.generated += step.batch
        bucket.context += step.context
        bucket.seconds += step.seconds

    def busy(self, now: float) -> float:
        """Share of the window in which a step ran, 0 to 1."""
        self._expire(now)
        return min(sum(b.seconds for b in self._buckets) / self._span(now), 1.0)

    def use(
        self,
        now: float,
        latency: LatencyModel,
        *,
        tpot: float,
        max_batch: int,
        kv_tokens: int,
        step_budget: int,
    ) -> float:
        """Use over the window: 0 idle, 1 at what the SLO allows, above when overloaded."""
        self._expire(now)
        tokens = sum(b.tokens for b in self._buckets)
        pairs = sum(b.pairs for b in self._buckets)
        generated = sum(b.generated for b in self._buckets)
        prefill = (
            latency.prefill_token * tokens
            + latency.prefill_pair * pairs
            + latency.prefill_fixed * tokens / step_budget
        )
        decode = 0.0
        if generated:
            mean_context = sum(b.context for b in self._buckets) / generated
            batch = best_batch(
                latency,
                tpot=tpot,
                mean_context=mean_context,
                prefill_per_token=prefill / generated,
                max_batch=max_batch,
                kv_tokens=kv_tokens,
            )
            step = latency.decode_fixed + batch * (
                latency.decode_sequence + latency.decode_context * mean_context
            )
            decode = generated * step / batch
        return (prefill + decode) / self._span(now)

    def _span(self, now: float) -> float:
        return max(min(now - self._started, self._window), self._window / _BUCKETS)

    def _expire(self, now: float) -> None:
        while self._buckets and now - self._buckets[0].start > self._window:
            self._buckets.popleft()


def best_batch(
    latency: LatencyModel,
    *,
    tpot: float,
    mean_context: float,
    prefill_per_token: float,
    max_batch: int,
    kv_tokens: int,
) -> float:
    """The largest batch (a real number, 1 at least) that keeps ``tpot`` with its prefills."""
    each = latency.decode_sequence + latency.decode_context * mean_context + prefill_per_token
    by_time = (tpot - latency.decode_fixed) / each if each > 0 else max_batch
    by_memory = kv_tokens / mean_context if mean_context > 0 else max_batch
    return max(min(by_time, by_memory, max_batch), 1.0)
