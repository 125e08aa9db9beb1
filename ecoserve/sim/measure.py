"""What is measured of a simulation: attainment, percentiles, stability, cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ecoserve.sim.records import Outcome

PERCENTS = (50, 90, 99)
# What a queue may grow by over a run that counts as stable: this share of what arrives, and this
# part of the arrivals of a TTFT SLO, the most that a queue of requests on time can hold.
GROWTH = 0.01
GROWTH_OF_TTFT = 0.5
# And what the share of late requests may grow by from the first to the last quarter.
LATE_GROWTH = 0.05


@dataclass(frozen=True, slots=True)
class Summary:
    """Figures of a run over the requests that arrived after the warm-up; times in seconds.

    Percentiles are dicts by percent (50, 90, 99) over the requests that ended (nan if none did);
    shares are of all. ``late`` is the share whose first token came after its TTFT SLO, or never.
    ``stable`` says that the waiting and the late did not become more over the run.
    """

    requests: int
    attainment: float
    attainment_as_published: float
    ttft_attainment: float
    tpot_attainment: float
    ttft: dict[int, float]
    ttft_with_switch_wait: dict[int, float]
    tpot: dict[int, float]
    tpot_as_published: dict[int, float]
    switch_wait: dict[int, float]
    ended: float
    late: float
    shed: float
    preemptions: int
    throughput: float
    """Requests that ended within the measured time, a second."""
    output_tokens: float
    """Tokens of those requests, a second."""
    stable: bool


def summarise(outcomes: Sequence[Outcome], warmup: float = 0.0) -> Summary:
    """Figures of the outcomes (in order of arrival), those of the first ``warmup`` seconds of
    arrivals left out. ValueError if none is left.

    The measured time is from the end of the warm-up to the last arrival: later ends, when the
    system runs empty, do not count to the throughput.
    """
    measured = after(outcomes, warmup)
    if not measured:
        raise ValueError(f"warmup: no request arrived after the first {warmup} s")
    ended = [o for o in measured if o.end == o.end]
    count = len(measured)
    until = measured[-1].arrival.at
    span = max(until - warmup, 1e-9)
    within = [o for o in outcomes if warmup <= o.end <= until]
    return Summary(
        requests=count,
        attainment=sum(o.met for o in measured) / count,
        attainment_as_published=sum(o.met_as_published for o in measured) / count,
        ttft_attainment=sum(o.ttft <= o.slo.ttft for o in measured) / count,
        tpot_attainment=sum(o.tpot <= o.slo.tpot for o in measured) / count,
        ttft=_percentiles([o.ttft for o in ended]),
        ttft_with_switch_wait=_percentiles([o.ttft + o.switch_wait for o in ended]),
        tpot=_percentiles([o.tpot for o in ended if o.arrival.output > 1]),
        tpot_as_published=_percentiles(
            [o.tpot_as_published for o in ended if o.arrival.output > 1]
        ),
        switch_wait=_percentiles([o.switch_wait for o in ended]),
        ended=len(ended) / count,
        late=sum(not o.ttft <= o.slo.ttft for o in measured) / count,
        shed=sum(o.shed for o in measured) / count,
        preemptions=sum(o.preemptions for o in measured),
        throughput=len(within) / span,
        output_tokens=sum(o.arrival.output for o in within) / span,
        stable=stable(outcomes, warmup),
    )


def after(outcomes: Sequence[Outcome], warmup: float) -> list[Outcome]:
    """Those that arrived after the first ``warmup`` seconds."""
    return [outcome for outcome in outcomes if outcome.arrival.at >= warmup]


def stable(outcomes: Sequence[Outcome], warmup: float = 0.0) -> bool:
    """Whether what waits (for its first token or then for its decode, as KV does that no decode
    instance has room for) and the share of late requests grew no more over the run than chance has
    it. Quarters of the measured arrivals are compared; what was shed counts as late, not as
    waiting."""
    at = np.array([o.arrival.at for o in outcomes if not o.shed])
    moments = (o.decoding if o.arrival.output > 1 else o.first for o in outcomes)
    begins = np.sort(np.array([moment for moment in moments if moment == moment]))
    measured = at[at >= warmup]
    if len(measured) < 8:
        return True
    begun = np.searchsorted(begins, measured, side="right")
    waiting = (np.searchsorted(at, measured, side="right") - begun).astype(float)
    first_quarter, *_, last_quarter = _quarters(waiting)
    rate = len(measured) / max(measured[-1] - measured[0], 1e-9)
    ttft = max(o.slo.ttft for o in outcomes)
    allowed = max(GROWTH * 0.75 * len(measured), GROWTH_OF_TTFT * rate * ttft)
    if last_quarter - first_quarter > allowed:
        return False
    late = _quarters(np.array([float(not o.ttft <= o.slo.ttft) for o in after(outcomes, warmup)]))
    return not (late == sorted(late) and late[-1] - late[0] > LATE_GROWTH)


def cost_per_request(rate: float, devices: int, price: float) -> float:
    """Price of a request at ``rate`` requests a second on ``devices`` at ``price`` an hour each."""
    return devices * price / 3600 / rate


def _quarters(values: NDArray[np.float64]) -> list[float]:
    return [float(np.mean(part)) for part in np.array_split(values, 4)]


def _percentiles(values: list[float]) -> dict[int, float]:
    if not values:
        return dict.fromkeys(PERCENTS, float("nan"))
    found = np.percentile(np.array(values), PERCENTS)
    return {percent: float(value) for percent, value in zip(PERCENTS, found, strict=True)}
