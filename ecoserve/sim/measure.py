"""What is measured of a simulation: attainment, percentiles, stability, cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ecoserve.sim.records import Outcome


@dataclass(frozen=True, slots=True)
class Summary:
    """Figures of a run over the requests that arrived after the warm-up; times in seconds.

    Percentiles are dicts by percent (50, 90, 99) over the requests that ended; shares are of all.
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
    switch_wait: dict[int, float]
    ended: float
    late: float
    shed: float
    preemptions: int
    throughput: float
    """Requests that ended within the measured time, a second."""
    output_tokens: float
    """Tokens generated for them, a second."""
    stable: bool


def summarise(outcomes: Sequence[Outcome], warmup: float = 0.0) -> Summary:
    """Figures of the outcomes (in order of arrival), those of the first ``warmup`` seconds of
    arrivals left out."""
    raise NotImplementedError


def cost_per_request(rate: float, devices: int, price: float) -> float:
    """Price of a request at ``rate`` requests a second on ``devices`` at ``price`` an hour each."""
    return devices * price / 3600 / rate
