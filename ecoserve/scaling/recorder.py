"""Queries answered without a Prometheus, from samples that somebody takes at even times."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping

from prometheus_client.parser import text_string_to_metric_families

from ecoserve.scaling.queries import Query, Table, times

Labels = tuple[str, ...]
Samples = Mapping[Query, Mapping[Labels, float]]
"""Values of each query's series. The labels' first is the instance where a query is per instance;
otherwise any that tell series apart."""


class Recorder:
    """The latest samples of one cluster, for ``keep`` seconds.

    ``step`` is about how far samples are apart, ``fresh`` as in ``Source``: four steps unless
    given. As a Prometheus would, it takes a counter that has become less for one that began anew,
    and one that was not there for one of 0.
    """

    def __init__(self, step: float, keep: float, *, fresh: float | None = None) -> None:
        self.fresh = 4 * step if fresh is None else fresh
        self._step = step
        self._keep = keep + self.fresh + step
        self._times: list[float] = []
        self._samples: list[Samples] = []

    def take(self, at: float, samples: Samples) -> None:
        """Remembers what was found at a moment, seconds; moments ascend."""
        self._times.append(at)
        self._samples.append(samples)
        old = bisect_right(self._times, at - self._keep)
        del self._times[:old], self._samples[:old]
        self.now = at

    def table(self, query: Query, window: float) -> Table:
        """As ``Source.table``; empty before anything was taken."""
        if not self._times:
            return Table([], {})
        grid = times(self.now, window, self._step)
        rows: dict[str, list[float | None]] = {}
        for n, at in enumerate(grid):
            found = self._levels(query, at) if query.kind == "gauge" else self._rate(query, at)
            for name, value in found.items():
                rows.setdefault(name, [None] * len(grid))[n] = value
        return Table(grid, rows)

    def _levels(self, query: Query, at: float) -> dict[str, float]:
        last = bisect_right(self._times, at) - 1
        if last < 0 or at - self._times[last] > self.fresh:
            return {}
        levels: dict[str, float] = {}
        for labels, value in self._samples[last].get(query, {}).items():
            if query.per_instance:
                levels[labels[0]] = max(levels.get(labels[0], value), value)
            else:
                levels[""] = levels.get("", 0.0) + value
        return levels

    def _rate(self, query: Query, at: float) -> dict[str, float]:
        last = bisect_right(self._times, at) - 1
        first = bisect_right(self._times, at - self.fresh)
        if last <= first:
            return {}
        before, after = (self._samples[n].get(query) for n in (first, last))
        if before is None or after is None:
            return {}
        grown = 0.0
        for labels, value in after.items():
            old = before.get(labels, 0.0)
            grown += value - old if value >= old else value
        return {"": grown / (self._times[last] - self._times[first])}


def parse(exposition: str, cluster: str, queries: tuple[Query, ...]) -> Samples:
    """The samples of a cluster in what a scheduler's ``/metrics`` answers."""
    wanted: dict[str, list[Query]] = {}
    for query in queries:
        wanted.setdefault(query.metric, []).append(query)
    found: dict[Query, dict[Labels, float]] = {}
    for family in text_string_to_metric_families(exposition):
        for sample in family.samples:
            if sample.labels.get("cluster") != cluster:
                continue
            for query in wanted.get(sample.name, ()):
                if all(sample.labels.get(name) == value for name, value in query.labels):
                    names = ("instance", "macro_instance")
                    labels = tuple(sample.labels.get(name, "") for name in names)
                    found.setdefault(query, {})[labels] = sample.value
    return found
