"""From tables of metrics to signals, each with its window; whatever cannot be right is unknown."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import cache

from ecoserve.policy.signals import Known, Settings, Signal, Signals, Unknown
from ecoserve.scaling.queries import (
    ACCEPTED,
    ANSWERED,
    LATE,
    ROUTED,
    SAVED,
    SHED,
    TTFT,
    USE,
    VIOLATED,
    WAITING,
    Query,
    Source,
    Table,
    clock,
)

IDLE_USE = 0.05
"""An instance below this use is idle."""
COVERED = 0.9
"""Share of a window's times that must have a value."""
LEAST_LOAD = 0.05
"""Instances' worth of load below which the capacity of one is not measured but bounded."""

# What a value can be. Use passes 1 under overload, since engines batch more than the SLO allows.
POSSIBLE: dict[Query, tuple[float, float]] = {
    ACCEPTED: (0.0, 1.0),
    USE: (0.0, 20.0),
    SAVED: (-86_400.0, 86_400.0),
    WAITING: (0.0, 1e6),
    LATE: (0.0, 1e6),
    ANSWERED: (0.0, 1e6),
    TTFT: (0.0, 1e9),
    VIOLATED: (0.0, 1e6),
    SHED: (0.0, 1e6),
    ROUTED: (0.0, 1e6),
}

Row = Sequence[float | None]


class _Absurd(Exception):
    """A value that cannot be."""


def read(
    source: Source, ttft_slo: float, settings: Settings, *, capacity: float | None = None
) -> Signals:
    """The signals of the cluster that ``source`` is about. Raises ``Unavailable``.

    ``ttft_slo`` is the cluster's TTFT SLO in seconds, ``capacity`` the requests a second that one
    instance serves, None to measure it.
    """
    reader = _Reader(source, ttft_slo)
    expand, contract = settings.expand, settings.contract
    predictive = settings.strategy == "predictive"
    other = Unknown("not asked for")
    served: Signal = other
    if capacity is not None:
        served = Known(capacity)
    elif predictive:
        served = _signal(expand.use_for, _last, reader.capacity)
    return Signals(
        accepted=_signal(0, _last, reader.accepted),
        violations=_signal(expand.violations_for, min, reader.violations),
        use_low=_signal(expand.use_for, min, reader.use),
        ttft=_signal(expand.ttft_for, min, reader.ttft),
        waiting=_signal(expand.waiting_for, min, reader.waiting),
        use_high=_signal(contract.use_for, max, reader.use),
        idle=_signal(contract.idle_for, min, reader.idle),
        saved=_signal(contract.saved_for, min, reader.saved) if contract.saved else other,
        arrivals=_signal(0, _last, reader.arrivals) if predictive else other,
        arrivals_high=_signal(contract.use_for, max, reader.arrivals) if predictive else other,
        capacity=served,
    )


def _last(values: Sequence[float]) -> float:
    return values[-1]


def _signal(
    window: float,
    choose: Callable[[Sequence[float]], float],
    points: Callable[[float], tuple[Sequence[float], Row]],
) -> Signal:
    """One value for the window, if enough of it is known, the newest moment included."""
    try:
        times, row = points(window)
    except _Absurd as error:
        return Unknown(str(error))
    known = [(at, value) for at, value in zip(times, row, strict=True) if value is not None]
    if not known:
        return Unknown("no data")
    if row[-1] is None:
        return Unknown(f"nothing newer than {clock(known[-1][0])}")
    if len(known) < COVERED * len(row):
        since = known[0][0]
        if len(known) >= COVERED * sum(at >= since for at in times):
            return Unknown(f"no data before {clock(since)}, less than {window:g} s ago")
        return Unknown(f"data of the last {window:g} s has gaps")
    return Known(choose([value for _, value in known]))


class _Reader:
    """Series of the cluster, point by point, each table asked for once."""

    def __init__(self, source: Source, ttft_slo: float) -> None:
        self._ttft_slo = ttft_slo
        self._table = cache(source.table)

    def accepted(self, window: float) -> tuple[Sequence[float], Row]:
        table = self._rows(ACCEPTED, window)
        return table.times, [_sum(values) for values in _columns(table)]

    def violations(self, window: float) -> tuple[Sequence[float], Row]:
        times, violated = self._row(VIOLATED, window)
        _, answered = self._row(ANSWERED, window)
        _, shed = self._row(SHED, window)
        return times, [_share(*v) for v in zip(violated, answered, shed, strict=True)]

    def ttft(self, window: float) -> tuple[Sequence[float], Row]:
        times, total = self._row(TTFT, window)
        _, answered = self._row(ANSWERED, window)
        return times, [
            None if t is None or a is None else t / a / self._ttft_slo if a else 0.0
            for t, a in zip(total, answered, strict=True)
        ]

    def waiting(self, window: float) -> tuple[Sequence[float], Row]:
        times, waiting = self._row(WAITING, window)
        _, late = self._row(LATE, window)
        _, accepted = self.accepted(window)
        return times, [
            None if w is None or x is None or n is None else (w + x) / max(n, 1.0)
            for w, x, n in zip(waiting, late, accepted, strict=True)
        ]

    def use(self, window: float) -> tuple[Sequence[float], Row]:
        times = self._rows(USE, window).times
        return times, [sum(u) / len(u) if u else None for u in self._uses(window)]

    def idle(self, window: float) -> tuple[Sequence[float], Row]:
        times = self._rows(USE, window).times
        return times, [
            sum(value < IDLE_USE for value in u) / len(u) if u else None for u in self._uses(window)
        ]

    def saved(self, window: float) -> tuple[Sequence[float], Row]:
        """Over the instances where something runs; 0 if nothing runs anywhere."""
        table = self._rows(SAVED, window)
        times, accepted = self.accepted(window)
        if not table.rows:
            return times, [None if n is None else 0.0 for n in accepted]
        means = []
        for values in _columns(table):
            found = [value for value in values if value is not None]
            means.append(sum(found) / len(found) / self._ttft_slo if found else 0.0)
        return times, [None if n is None else mean for n, mean in zip(accepted, means, strict=True)]

    def arrivals(self, window: float) -> tuple[Sequence[float], Row]:
        times, routed = self._row(ROUTED, window)
        _, shed = self._row(SHED, window)
        return times, [
            None if r is None or s is None else r + s for r, s in zip(routed, shed, strict=True)
        ]

    def capacity(self, window: float) -> tuple[Sequence[float], Row]:
        """What was routed over the use that it made: requests a second of an instance at use 1.

        Use is what the latency model makes of the tokens, so this is the model's word. It is a
        lower bound when there is hardly any load. The same at each time that has a value.
        """
        times, routed = self._row(ROUTED, window)
        pairs = [
            (rate, sum(uses))
            for rate, uses in zip(routed, self._uses(window), strict=True)
            if rate is not None and uses
        ]
        load = sum(used for _, used in pairs)
        capacity = sum(rate for rate, _ in pairs) / max(load, LEAST_LOAD * max(len(pairs), 1))
        return times, [None if rate is None else capacity for rate in routed]

    def _uses(self, window: float) -> list[list[float]]:
        """At each time the use of the instances that took requests; none where that of one of them
        is not known."""
        uses, accepted = self._rows(USE, window), self._rows(ACCEPTED, window)
        columns = []
        for n in range(len(uses.times)):
            taking = [name for name, row in accepted.rows.items() if row[n] == 1.0]
            found = [uses.rows[name][n] if name in uses.rows else None for name in taking]
            known = [value for value in found if value is not None]
            columns.append(known if len(known) == len(taking) else [])
        return columns

    def _row(self, query: Query, window: float) -> tuple[Sequence[float], Row]:
        table = self._rows(query, window)
        return table.times, table.rows.get("", [None] * len(table.times))

    def _rows(self, query: Query, window: float) -> Table:
        table = self._table(query, window)
        low, high = POSSIBLE[query]
        for name, row in table.rows.items():
            for value in row:
                if value is not None and not low <= value <= high:
                    whose = f" of {name}" if name else ""
                    raise _Absurd(f"{query.metric}{whose} is {value:g}, which cannot be")
        return table


def _columns(table: Table) -> Iterator[list[float | None]]:
    for n in range(len(table.times)):
        yield [row[n] for row in table.rows.values()]


def _sum(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _share(violated: float | None, answered: float | None, shed: float | None) -> float | None:
    """Requests that missed an SLO or were turned away, of all that ended; no requests, no
    violations."""
    if violated is None or answered is None or shed is None:
        return None
    # Rates of two counters are extrapolated a little differently.
    if violated > 1.1 * answered and not math.isclose(violated, answered, abs_tol=1e-6):
        raise _Absurd("there are more violations than answers, which cannot be")
    asked = answered + shed
    return min((violated + shed) / asked, 1.0) if asked else 0.0
