"""Queries answered by a Prometheus server."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any
from urllib.parse import urlsplit

import requests
from prometheus_api_client import PrometheusApiClientException, PrometheusConnect
from urllib3.util.retry import Retry

from ecoserve.scaling.promql import promql
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
        start, end = grid[0], grid[-1] + step / 2  # the last time is asked for, however it rounds
        answer = self._ask(
            self._api.custom_query_range,
            promql(query, f'cluster="{self._cluster}"', self.fresh),
            start_time=datetime.fromtimestamp(start, UTC),
            end_time=datetime.fromtimestamp(end, UTC),
            step=f"{step:g}",
            # Said again, since the client rounds both to whole seconds.
            params={"start": start, "end": end},
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
