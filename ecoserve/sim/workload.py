"""What arrives: the published data sets by their moments, Poisson and Gamma gaps, recorded traces.

A seed fixes the lengths and the shape of the gaps at every rate: a higher rate only shortens the
gaps, and a longer run begins as a shorter one. Systems and rates are so compared on common random
numbers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import NormalDist
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ecoserve.policy.state import SLO
from ecoserve.sim.records import Arrival
from ecoserve.sim.tracefile import Trace, read

Tokens = NDArray[np.int64]


class Lengths(Protocol):
    """A distribution of lengths in tokens."""

    def draw(self, rng: np.random.Generator, count: int) -> Tokens:
        """``count`` lengths, one at least each; the first k are the same for every count >= k."""
        ...


@dataclass(frozen=True)
class Lognormal:
    """Lognormal lengths of that median and mean; what is drawn longer than ``cap`` counts ``cap``.

    ``sigma`` is such that the mean holds with the cap: plainly it were sqrt(2 ln(mean / median)).
    """

    median: float
    mean: float
    cap: int

    @cached_property
    def sigma(self) -> float:
        """Standard deviation of the logarithm."""
        low, high = 0.0, 4.0
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if self._mean(middle) < self.mean else (low, middle)
        return high

    def _mean(self, sigma: float) -> float:
        """E[min(X, cap)] for a lognormal X of that sigma."""
        normal = NormalDist()
        if sigma == 0:
            return min(self.median, self.cap)
        edge = (math.log(self.cap) - math.log(self.median)) / sigma
        below = self.median * math.exp(sigma**2 / 2) * normal.cdf(edge - sigma)
        return below + self.cap * (1 - normal.cdf(edge))

    def draw(self, rng: np.random.Generator, count: int) -> Tokens:
        return _tokens(rng.lognormal(math.log(self.median), self.sigma, count), self.cap)


@dataclass(frozen=True)
class Beta:
    """Lengths in [1, ``most``], ``most`` x Beta(``a``, ``b``): left-skewed for a > b."""

    a: float
    b: float
    most: int

    def draw(self, rng: np.random.Generator, count: int) -> Tokens:
        return _tokens(self.most * rng.beta(self.a, self.b, count), self.most)


def _tokens(values: NDArray[np.float64], most: int) -> Tokens:
    return np.clip(np.rint(values), 1, most).astype(np.int64)


class Workload(Protocol):
    """Requests of one kind with the SLOs that they are promised."""

    @property
    def name(self) -> str: ...

    @property
    def slo(self) -> SLO: ...

    def arrivals(self, rate: float, count: int, seed: int) -> list[Arrival]:
        """``count`` requests in order of arrival at ``rate`` a second on average.

        Raises ``ValueError`` for a rate or a count that is not positive.
        """
        ...


@dataclass(frozen=True)
class Synthetic:
    """Lengths drawn independently, gaps from a Gamma distribution.

    ``cv`` is the coefficient of variation of the gaps: 1 is a Poisson process, more is burstier.
    """

    name: str
    slo: SLO
    prompt: Lengths
    output: Lengths
    cv: float = 1.0

    def arrivals(self, rate: float, count: int, seed: int) -> list[Arrival]:
        times = gaps(count, seed, self.cv, rate).cumsum()
        prompts = self.prompt.draw(_stream(seed, "prompt"), count)
        outputs = self.output.draw(_stream(seed, "output"), count)
        return [
            Arrival(at, prompt, output)
            for at, prompt, output in zip(
                times.tolist(), prompts.tolist(), outputs.tolist(), strict=True
            )
        ]


@dataclass(frozen=True)
class Recorded:
    """A recorded trace, begun at a place that the seed picks and repeated as long as needed.

    The recorded gaps are kept in shape and scaled to the rate; a file without times gets Gamma gaps
    of ``cv``, and so does any trace if ``cv`` is given.
    """

    name: str
    slo: SLO
    trace: Trace
    cv: float | None = None

    def arrivals(self, rate: float, count: int, seed: int) -> list[Arrival]:
        size = len(self.trace)
        start = int(_stream(seed, "start").integers(size)) if seed else 0
        order = [(start + i) % size for i in range(count)]
        if self.trace.times is None or self.cv is not None:
            times = gaps(count, seed, self.cv or 1.0, rate).cumsum().tolist()
        else:
            _check(rate, count)
            times = np.cumsum(self._gaps[order] / rate).tolist()
        return [
            Arrival(at, self.trace.prompts[i], self.trace.outputs[i], self.trace.blocks[i])
            for at, i in zip(times, order, strict=True)
        ]

    @cached_property
    def _gaps(self) -> NDArray[np.float64]:
        """Gaps before the requests, 1 on average; the first request's is the average."""
        assert self.trace.times is not None
        between = np.diff(np.array(self.trace.times))
        average = between.mean() if len(between) else 1.0
        if average == 0:
            raise ValueError(f"{self.name}: all requests arrive at once, so no rate can be set")
        return np.concatenate(([1.0], between / average))


def gaps(count: int, seed: int, cv: float, rate: float) -> NDArray[np.float64]:
    """Gaps in seconds between arrivals: Gamma, 1/``rate`` on average, ``cv`` relative spread."""
    _check(rate, count)
    if not 0 < cv < math.inf:
        raise ValueError(f"cv must be a positive number, not {cv!r}")
    shape = 1 / cv**2
    return _stream(seed, "gaps").gamma(shape, 1 / shape, count) / rate


def _check(rate: float, count: int) -> None:
    if not 0 < rate < math.inf:
        raise ValueError(f"rate must be a positive number of requests a second, not {rate!r}")
    if count < 1:
        raise ValueError(f"requests must be 1 or more, not {count!r}")


def _stream(seed: int, use: str) -> np.random.Generator:
    """A stream of random numbers for one use, so that none shifts another."""
    if seed < 0:
        raise ValueError(f"seed must be a whole number from 0, not {seed!r}")
    return np.random.default_rng([seed, *use.encode()])


# Means, medians and SLOs as published; caps are ours. LongBench's prompts are left-skewed (the
# median is above the mean). Of the scaled Beta distributions that have both, this one follows the
# quantiles of public arXiv-summarization prompts best: within 4 % on average from P5 to P95.
DATASETS: Mapping[str, Synthetic] = {
    w.name: w
    for w in (
        Synthetic("alpaca", SLO(1.0, 0.1), Lognormal(17, 20.6, 2048), Lognormal(119, 163.8, 2048)),
        Synthetic(
            "sharegpt", SLO(5.0, 0.1), Lognormal(148, 343.8, 8192), Lognormal(152, 237.2, 2048)
        ),
        Synthetic(
            "longbench", SLO(15.0, 0.1), Beta(3.229, 2.299, 4600), Lognormal(19, 101.8, 2048)
        ),
    )
}


def load(data: str, *, slo: SLO | None = None, cv: float | None = None) -> Synthetic | Recorded:
    """The workload of that name, or of the trace file at that path.

    ``slo`` takes the place of the data set's own; a trace needs one. ``cv`` makes the gaps Gamma.
    Raises ``ValueError`` with what is wrong.
    """
    if data in DATASETS:
        known = DATASETS[data]
        return replace(known, slo=slo or known.slo, cv=1.0 if cv is None else cv)
    path = Path(data)
    if not path.exists():
        raise ValueError(f"data must be one of {', '.join(DATASETS)} or a file, not {data!r}")
    if slo is None:
        raise ValueError(f"data {data}: a trace needs SLOs, ttft and tpot in seconds")
    return Recorded(path.name, slo, read(path), cv)
