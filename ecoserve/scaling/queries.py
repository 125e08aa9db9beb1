"""What is asked of the scheduler's metrics, and the form in which it is answered.

A query is a metric of one cluster: a gauge as it is, or a counter's rate. Its answer is a table of
values at evenly spaced times. Whoever answers (Prometheus, or a process that reads the metrics
itself) leaves out values that are not fresh, so what is missing at a time was missing then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal, Protocol

POINTS = 40  # of a window, as far as the times are no more than ``COARSEST`` apart
COARSEST = 60.0


@dataclass(frozen=True, slots=True)
class Query:
    """A metric of a cluster. ``per_instance``: one row an instance, else one row for all, the sum.

    ``labels`` narrow it down. The rate of a counter is per second, over ``Source.fresh`` seconds.
    """

    metric: str
    kind: Literal["gauge", "rate"]
    per_instance: bool = False
    labels: tuple[tuple[str, str], ...] = ()


ACCEPTED = Query("ecoserve_instance_accepted", "gauge", per_instance=True)
USE = Query("ecoserve_instance_use", "gauge", per_instance=True)
SAVED = Query("ecoserve_instance_mean_slack_seconds", "gauge", per_instance=True)
WAITING = Query("ecoserve_macro_waiting", "gauge")
LATE = Query("ecoserve_macro_late", "gauge")
ANSWERED = Query("ecoserve_ttft_seconds_count", "rate")
TTFT = Query("ecoserve_ttft_seconds_sum", "rate")
VIOLATED = Query("ecoserve_slo_violations_total", "rate", labels=(("kind", "joint"),))
SHED = Query("ecoserve_sheds_total", "rate")
ROUTED = Query("ecoserve_routed_total", "rate")
QUERIES = (ACCEPTED, USE, SAVED, WAITING, LATE, ANSWERED, TTFT, VIOLATED, SHED, ROUTED)


@dataclass(frozen=True, slots=True)
class Table:
    """``rows`` by instance (or "" alone) hold a value for each of ``times``; None where there was
    none. Times are seconds since the epoch, ascending."""

    times: Sequence[float]
    rows: Mapping[str, Sequence[float | None]]


class Unavailable(Exception):
    """The queries cannot be answered at all; says why, in words that stay the same."""


class Source(Protocol):
    """Whoever answers queries about one cluster, all of them as of one moment.

    ``fresh`` is how many seconds a value counts, and what rates are taken over.
    """

    @property
    def fresh(self) -> float: ...

    def table(self, query: Query, window: float) -> Table:
        """Values over the last ``window`` seconds. Raises ``Unavailable``."""
        ...


def times(now: float, window: float, finest: float) -> list[float]:
    """The times of a table: from ``window`` ago to the last multiple of their distance before
    ``now``, so that the same times come again when ``now`` has moved on a little."""
    step = min(max(finest, window / POINTS), max(COARSEST, finest))
    last = now // step * step
    return [last - step * n for n in range(int(window // step), -1, -1)]


def clock(at: float) -> str:
    """A moment as people read it."""
    return datetime.fromtimestamp(at, UTC).strftime("%H:%M:%SZ")
