"""What a run shows: latencies, throughput, attainment and failures within its steady window."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from ecoserve.policy.state import SLO

if TYPE_CHECKING:
    from ecoserve.bench.load import Outcome

QUANTILES = (50, 90, 95, 99)


def attainment(outcomes: Sequence[Outcome], slo: SLO) -> float:
    """Share of the calls that met both promises; failures count as misses."""
    return sum(o.meets(slo) for o in outcomes) / len(outcomes) if outcomes else 1.0


def percentile(values: Sequence[float], q: float) -> float:
    """The q-th percentile (0 to 100), 0 of nothing."""
    return float(np.percentile(values, q)) if len(values) else 0.0


@dataclass(frozen=True, slots=True)
class Spread:
    """Mean and percentiles of a latency, seconds; all 0 of nothing."""

    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    most: float

    @staticmethod
    def of(values: Sequence[float]) -> Spread:
        if not values:
            return Spread(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
        p50, p90, p95, p99 = (float(v) for v in np.percentile(values, QUANTILES))
        return Spread(float(np.mean(values)), p50, p90, p95, p99, float(np.max(values)))


@dataclass(frozen=True, slots=True)
class Window:
    """What of a run is judged: the calls due within [``start``, ``end``), seconds after its start.

    What was due before is warm-up. What ends after counts like the rest: a run is waited for.
    """

    start: float
    end: float

    def judged(self, outcomes: Sequence[Outcome]) -> list[Outcome]:
        """The outcomes that count."""
        return [o for o in outcomes if self.start <= o.call.due < self.end]


@dataclass(frozen=True, slots=True)
class Summary:
    """What was found in a window.

    Latencies are of whole answers. ``attained`` is the share of all calls judged that met both
    SLOs, ``ttft_attained`` and ``tpot_attained`` one each; failures miss all; None without SLOs.
    ``requests_per_s``, ``output_tokens_per_s`` and ``prompt_tokens_per_s`` count the calls that
    ended within the window. ``lateness`` is how long after they were due calls went out, ``drain``
    how many seconds after the window's end the last answer ended.
    """

    calls: int
    failed: int
    errors: dict[str, int]
    attained: float | None
    ttft_attained: float | None
    tpot_attained: float | None
    ttft: Spread
    tpot: Spread
    itl: Spread
    e2e: Spread
    requests_per_s: float
    output_tokens_per_s: float
    prompt_tokens_per_s: float
    prompt_tokens: float
    output_tokens: float
    lateness: Spread
    drain: float


def summarise(outcomes: Sequence[Outcome], window: Window, slo: SLO | None) -> Summary:
    """Judges a run; ``outcomes`` are all of its calls, the warm-up included."""
    return summarise_all([(outcomes, window)], slo)


def summarise_all(runs: Sequence[tuple[Sequence[Outcome], Window]], slo: SLO | None) -> Summary:
    """Judges several runs of the same load as one."""
    calls = [o for outcomes, window in runs for o in window.judged(outcomes)]
    whole = [o for o in calls if o.ok]
    ended = [o for outcomes, w in runs for o in outcomes if o.ok and w.start <= o.end < w.end]
    span = sum(max(w.end - w.start, 1e-9) for _, w in runs)

    def share(met: int) -> float | None:
        return None if slo is None or not calls else met / len(calls)

    ttft_slo, tpot_slo = (slo.ttft, slo.tpot) if slo is not None else (0.0, 0.0)
    return Summary(
        calls=len(calls),
        failed=len(calls) - len(whole),
        errors=dict(Counter(failure(o) for o in calls if not o.ok).most_common()),
        attained=share(sum(slo is not None and o.meets(slo) for o in calls)),
        ttft_attained=share(sum(o.ttft <= ttft_slo for o in whole)),
        tpot_attained=share(sum(o.tpot <= tpot_slo for o in whole)),
        ttft=Spread.of([o.ttft for o in whole]),
        # An answer of one token has no TPOT.
        tpot=Spread.of([o.tpot for o in whole if o.tokens > 1]),
        itl=Spread.of([gap for o in whole for gap in o.gaps]),
        e2e=Spread.of([o.e2e for o in whole]),
        requests_per_s=len(ended) / span,
        output_tokens_per_s=sum(o.tokens for o in ended) / span,
        prompt_tokens_per_s=sum(o.prompt_tokens for o in ended) / span,
        prompt_tokens=sum(o.prompt_tokens for o in whole) / max(len(whole), 1),
        output_tokens=sum(o.tokens for o in whole) / max(len(whole), 1),
        lateness=Spread.of([o.late for o in calls]),
        drain=max((o.end - w.end for outcomes, w in runs for o in outcomes), default=0.0),
    )


def failure(outcome: Outcome) -> str:
    """In a few words why a call failed, the same for all calls that failed so."""
    if outcome.cancelled:
        return "no answer in time"
    if outcome.status not in (0, 200):
        code = _code(outcome.error)
        return f"HTTP {outcome.status} {code}".rstrip()
    if outcome.error:
        # Addresses and counts differ from call to call.
        return re.sub(r"\d+", "N", outcome.error.splitlines()[0])[:120]
    return "the stream ended without [DONE]"


def _code(error: str) -> str:
    try:
        told = msgspec.json.decode(error)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return ""
    if not isinstance(told, dict):
        return ""
    return str(told.get("code") or told.get("type") or "")
