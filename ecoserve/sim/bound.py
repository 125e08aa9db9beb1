"""The fluid bound: the rate at which the hardware is used up however well it is scheduled.

Requests are a fluid of their mean lengths: n prompt tokens, o - 1 decode steps at a mean context of
c tokens (every step of every request weighed alike). An instance that runs D decodes and m prompt
tokens in steps of T seconds makes D/T decode steps and m/T prompt tokens a second, as long as
T <= TPOT (times PP stages, with D and m a micro-batch's) and D c fits in its KV.

- *mixed*, all instances alike: m = D n/(o - 1), and D/((o - 1) T) is maximised over D. A step's
  cost is convex in its contents, so even steps are best (Jensen).
- *separate*: a round of TPOT or less holds one decode step of D in k micro-batches and the prefills
  that go with it at the best rate of prefill-only steps.
- *any*: instances need not be alike. Of all points (D/T, m/T), the weighted mean that gives the
  highest rate; by linear programming duality that is the minimum over a of the best point's
  a (D/T)/(o - 1) + (1 - a) (m/T)/n.
- *split*: some instances do nothing but prefill, the others nothing but decode.

Attainment below 1 lets a system pass a bound: what it gives up costs nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ecoserve.policy.state import SLO
from ecoserve.sim.records import DEFAULTS, Arrival, Cluster, Options

_CHUNKS = [0, *(round(16 * 2 ** (i / 4)) for i in range(41))]  # 16 to 16,384 tokens


@dataclass(frozen=True, slots=True)
class Bound:
    """Requests a second of the whole cluster.

    ``mixed``: all instances alike, prompts and decodes in the same steps. ``separate``: the same in
    steps of their own. ``any``: instances may differ (disaggregation among them). ``prefill`` and
    ``decode``: requests a second that one instance prefills, or decodes, if it does only that.
    """

    mixed: float
    separate: float
    any: float
    prefill: float
    decode: float

    @property
    def alike(self) -> float:
        """The bound of systems whose instances are all alike."""
        return max(self.mixed, self.separate)

    def split(self, prefill: int, decode: int) -> float:
        """The bound of so many instances that prefill and so many others that decode."""
        return min(prefill * self.prefill, decode * self.decode)


@dataclass(frozen=True, slots=True)
class _Means:
    """Of a request: prompt tokens and attention pairs, decode steps and their context."""

    prompt: float
    pairs: float
    steps: float
    context: float


def fluid_bound(
    cluster: Cluster, arrivals: Sequence[Arrival], slo: SLO, options: Options = DEFAULTS
) -> Bound:
    """The bound for requests of these lengths; when they arrive does not matter.

    ValueError if there are none. All rates are 0 where not one decode keeps the TPOT SLO.
    """
    if not arrivals:
        raise ValueError("arrivals must not be empty")
    means = _means(arrivals)
    cost, stages = cluster.cost, cluster.cost.stages

    def step(tokens: float, batch: int) -> float:
        pairs = tokens * means.pairs / means.prompt
        return cost.step(round(tokens), pairs, batch, round(batch * means.context))

    def stage(tokens: float, batch: float) -> float:
        # A mean batch need not be whole: an instance has now one decode more, now one less.
        low = math.floor(batch)
        part = batch - low
        seconds = step(tokens, low)
        return (1 - part) * seconds + part * step(tokens, low + 1) if part else seconds

    prefill = max(chunk / stage(chunk, 0) for chunk in _CHUNKS[1:])
    if not means.steps:
        rate = cluster.instances * prefill / means.prompt
        return Bound(rate, rate, rate, prefill / means.prompt, math.inf)
    if stages * step(0, 1) > slo.tpot:
        return Bound(0.0, 0.0, 0.0, prefill / means.prompt, 0.0)
    most = min(options.max_num_seqs, cost.kv_tokens / means.context)
    each = means.prompt / means.steps  # prompt tokens that come with a decode step
    mixed = _best(lambda d: stage(d * each, d), slo.tpot / stages, most / stages)
    separate = 0.0
    for groups in range(1, stages + 1):

        def round_of(batch: float, groups: int = groups) -> float:
            alone = stage(0, batch)
            return max(groups * (alone + batch * each / prefill), stages * alone)

        separate = max(separate, groups * _best(round_of, slo.tpot, most / groups))
    points = [(0.0, prefill), *_points(stage, most / stages, slo.tpot / stages)]
    best = _best_mean([(d / means.steps, p / means.prompt) for d, p in points])
    mixed, separate = mixed / means.steps, separate / means.steps
    decode = _best(lambda d: stage(0, d), slo.tpot / stages, most / stages) / means.steps
    n = cluster.instances
    return Bound(
        n * mixed, n * separate, n * max(best, mixed, separate), prefill / means.prompt, decode
    )


def _best(seconds: Callable[[float], float], limit: float, most: float) -> float:
    """The highest batch / seconds(batch) for batches up to ``most`` that take ``limit`` at most."""
    edge = _last(lambda batch: seconds(batch) <= limit, most)
    return max((d / seconds(d) for d in (edge * i / 32 for i in range(1, 33)) if d), default=0.0)


def _last(fine: Callable[[float], bool], most: float) -> float:
    """Up to where something is fine, of which less is better."""
    if fine(most):
        return most
    low, high = 0.0, most
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if fine(middle) else (low, middle)
    return low


def _means(arrivals: Sequence[Arrival]) -> _Means:
    count = len(arrivals)
    steps = sum(a.output - 1 for a in arrivals)
    context = sum((a.output - 1) * (a.prompt + a.output / 2) for a in arrivals)
    return _Means(
        sum(a.prompt for a in arrivals) / count,
        sum(a.prompt**2 / 2 for a in arrivals) / count,
        steps / count,
        context / steps if steps else 0.0,
    )


def _points(
    stage: Callable[[float, float], float], most: float, longest: float
) -> Iterable[tuple[float, float]]:
    """Decode steps and prompt tokens a second of an instance that repeats one kind of step."""
    whole = _last(lambda batch: stage(0, batch) <= longest, most)
    for i in range(1, 65):
        batch = whole * i / 64

        def fine(chunk: float, batch: float = batch) -> bool:
            return stage(chunk, batch) <= longest

        edge = _last(fine, _CHUNKS[-1])
        for chunk in (*(c for c in _CHUNKS if c < edge), edge):
            seconds = stage(chunk, batch)
            yield batch / seconds, chunk / seconds


def _best_mean(points: Sequence[tuple[float, float]]) -> float:
    """The highest x that the weighted mean of the points can reach in both coordinates."""

    def best(share: float) -> float:
        return max(share * d + (1 - share) * p for d, p in points)

    low, high = 0.0, 1.0
    for _ in range(60):
        third = (high - low) / 3
        if best(low + third) < best(high - third):
            high -= third
        else:
            low += third
    return min(best(0.0), best((low + high) / 2), best(1.0))
