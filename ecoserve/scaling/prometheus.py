"""Queries answered by a Prometheus server."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any
from urllib.parse import urlsplit

import requests
from prometheus_api_client import PrometheusApiClientException, PrometheusConnect
from urllib3.util.retry import Retry

from ecoserve.scaling.queries import Query, Table, Unavailable, times

TIMEOUT_S = 5


class Prometheus:
    """One cluster's metrics as one Prometheus has them, as of the moment when this is made.

    The moment is the server's, whose clock also stamps what it scrapes. ``fresh`` must be a few
    scrapes, ``step`` about one. Credentials may be part of ``url``; no message repeats them. Blocks
    while it asks: call it off an event loop. Raises ``Unavailable``.
    """

    def __init__(self, url: str, cluster: str, *, fresh: float = 60.0, step: float = 15.0) -> None:
        self.fresh = fresh
        self._step = step
        self._cluster = cluster
        parts = urlsplit(url)
        self._called = f"Prometheus at {parts.hostname}" + (f":{parts.port}" if parts.port else "")
        # A query that fails is asked again with the next decision, not before.
        self._api = PrometheusConnect(
            url.rstrip("/"), retry=Retry(total=0, redirect=3), timeout=TIMEOUT_S, method="GET"
        )
        answer = self._ask(self._api.custom_query, "time()")
        try:
            self.now = float(answer[1])
        except (LookupError, TypeError, ValueError):
            raise Unavailable(f"{self._called} gives no time") from None

    def __enter__(self) -> Prometheus:
        return self

    def __exit__(self, *_: object) -> None:
        self._api.close()

    def table(self, query: Query, window: float) -> Table:
        grid = times(self.now, window, self._step)
        step = grid[1] - grid[0] if len(grid) > 1 else self._step
        answer = self._ask(
            self._api.custom_query_range,
            promql(query, f'cluster="{self._cluster}"', self.fresh),
            start_time=datetime.fromtimestamp(grid[0], UTC),
            end_time=datetime.fromtimestamp(grid[-1], UTC),
            step=f"{step:g}",
        )
        rows: dict[str, list[float | None]] = {}
        try:
            for series in answer:
                row: list[float | None] = [None] * len(grid)
                for at, value in series["values"]:
                    row[round((float(at) - grid[0]) / step)] = float(value)
                rows[series["metric"].get("instance", "")] = row
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise Unavailable(f"{self._called} answers in no form that is known") from error
        return Table(grid, rows)

    def _ask(self, method: Any, query: str, **arguments: Any) -> Any:
        try:
            return method(query, **arguments)
        except requests.Timeout:
            why = f"does not answer within {TIMEOUT_S} s"
        except requests.ConnectionError:
            why = "cannot be reached"
        except PrometheusApiClientException as error:
            why = f"refuses: {str(error)[:200]}"
        except (requests.RequestException, LookupError, ValueError) as error:
            why = f"answers in no form that is known ({type(error).__name__})"
        raise Unavailable(f"{self._called} {why}")


def promql(query: Query, selector: str, fresh: float, by: str = "") -> str:
    """The query in PromQL, of the series that ``selector`` names; ``by`` are further labels to
    keep, as recording rules for all clusters need."""
    labels = ",".join([selector, *(f'{name}="{value}"' for name, value in query.labels)])
    series = f"{query.metric}{{{labels.strip(',')}}}"
    window = f"{fresh:g}s"
    if query.kind == "rate":
        values = f"rate({series}[{window}])"
    else:
        # A selector alone would take values of up to five minutes ago for the present.
        values = f"({series} and time() - timestamp({series}) <= {fresh:g})"
    kept = ", ".join(filter(None, (by, "instance" if query.per_instance else "")))
    # An instance that moves to another macro instance has two series for a moment.
    how = "max" if query.per_instance else "sum"
    return f"{how} by ({kept}) {_bracketed(values)}" if kept else f"{how}{_bracketed(values)}"


def _bracketed(text: str) -> str:
    return text if text.startswith("(") else f"({text})"
