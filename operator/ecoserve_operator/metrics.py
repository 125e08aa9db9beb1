"""What Prometheus can know of the controller itself; served on the port of its health."""

from __future__ import annotations

from prometheus_client import Counter, Histogram

_BUCKETS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)

CALLS = Counter(
    "ecoserve_controller_api_calls",
    "Requests to the API server, its watches not counted",
    ["method"],
)
RECONCILE = Histogram(
    "ecoserve_controller_reconcile_seconds",
    "How long one look at a cluster took, with all that was done",
    ["outcome"],
    buckets=_BUCKETS,
)
QUEUE = Histogram(
    "ecoserve_controller_queue_seconds",
    "How long a cluster that something happened to waited to be looked at",
    buckets=_BUCKETS,
)
