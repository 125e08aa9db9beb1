"""Prometheus metrics of the scheduler: counters and histograms as things happen, gauges of the
instances taken when asked."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ecoserve.proto.v1 import session_pb2

# 1 ms to 100 s, about four to a decade and finer where promises are made.
SECONDS = (
    0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75,
    1.0, 1.5, 2.0, 3.0, 5.0, 7.5, 10.0, 15.0, 20.0, 30.0, 50.0, 75.0, 100.0,
)  # fmt: skip
PICK_SECONDS = (
    0.00005, 0.0001, 0.0002, 0.0003, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.05, 0.1, 1.0,
)  # fmt: skip
# The status of a call whose client went away.
CLIENT_GONE = 499
BY_INSTANCE = ("cluster", "macro_instance", "instance")


class Metrics:
    """All that is counted, in a registry of its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

        def histogram(
            name: str, text: str, labels: tuple[str, ...], buckets: tuple[float, ...] = SECONDS
        ) -> Histogram:
            return Histogram(name, text, labels, buckets=buckets, registry=self.registry)

        def counter(name: str, text: str, labels: tuple[str, ...]) -> Counter:
            return Counter(name, text, labels, registry=self.registry)

        self._ttft = histogram(
            "ecoserve_ttft_seconds", "Time to first token, from arrival at the picker", BY_INSTANCE
        )
        self._tpot = histogram(
            "ecoserve_tpot_seconds", "Time per output token after the first", BY_INSTANCE
        )
        self._wait = histogram(
            "ecoserve_queue_wait_seconds", "Wait at the picker until routed", BY_INSTANCE
        )
        self._pick = histogram(
            "ecoserve_pick_seconds",
            "The picker's own time for a request, without its wait",
            ("cluster",),
            PICK_SECONDS,
        )
        self._requests = counter(
            "ecoserve_requests", "Requests that ended, by outcome", (*BY_INSTANCE, "outcome")
        )
        self._violations = counter(
            "ecoserve_slo_violations",
            "Answered requests that missed their SLO: ttft, tpot, or either (joint)",
            (*BY_INSTANCE, "kind"),
        )
        self._routed = counter("ecoserve_routed", "Requests routed", BY_INSTANCE)
        self._late = counter(
            "ecoserve_late", "Requests routed when their TTFT could no longer be met", BY_INSTANCE
        )
        self._moved = counter(
            "ecoserve_retries_moved", "Requests that arrived at another instance", BY_INSTANCE
        )
        self._hit = counter(
            "ecoserve_prefix_hit_tokens", "Prompt tokens found in a prefix cache", BY_INSTANCE
        )
        self._asked = counter(
            "ecoserve_prefix_asked_tokens", "Prompt tokens of ended requests", BY_INSTANCE
        )
        self._expected = counter(
            "ecoserve_prefix_expected_tokens",
            "Prompt tokens that the picker thought to be held where it routed to",
            BY_INSTANCE,
        )
        self._sheds = counter(
            "ecoserve_sheds", "Requests turned away with 429", ("cluster", "macro_instance")
        )
        self._opened = counter(
            "ecoserve_breaker_opened", "Times that an instance was left alone", BY_INSTANCE
        )
        self._routes: dict[tuple[str, str, str], tuple[Counter, Histogram]] = {}
        self._picks: dict[str, Histogram] = {}
        self._by_instance = (
            self._ttft, self._tpot, self._wait, self._requests, self._violations, self._routed,
            self._late, self._moved, self._hit, self._asked, self._expected, self._opened,
        )  # fmt: skip

    def declare(self, cluster: str, macro: str, instances: Iterable[str]) -> None:
        """Instances belong to a macro instance: what is counted of them begins at 0, so that a
        count of nothing is told from one that is missing."""
        self._sheds.labels(cluster, macro)
        for instance in instances:
            labels = (cluster, macro, instance)
            for metric in (self._ttft, self._tpot, self._wait, self._routed):
                metric.labels(*labels)
            self._requests.labels(*labels, "ok")
            for kind in ("ttft", "tpot", "joint"):
                self._violations.labels(*labels, kind)

    def routed(
        self,
        cluster: str,
        macro: str,
        instance: str,
        *,
        waited: float,
        late: bool,
        held: int,
        prompt: int,
    ) -> None:
        """A request goes to an instance."""
        key = (cluster, macro, instance)
        series = self._routes.get(key)
        if series is None:
            # To look a series up by its labels costs more than to count in it.
            series = self._routes[key] = (self._routed.labels(*key), self._wait.labels(*key))
        series[0].inc()
        series[1].observe(waited)
        if held:
            self._expected.labels(cluster, macro, instance).inc(min(held, prompt))
        if late:
            self._late.labels(cluster, macro, instance).inc()

    def shed(self, cluster: str, macro: str) -> None:
        """A request is turned away with 429."""
        self._sheds.labels(cluster, macro).inc()

    def moved(self, cluster: str, macro: str, instance: str) -> None:
        """A request that was routed elsewhere has arrived at this instance."""
        self._moved.labels(cluster, macro, instance).inc()

    def opened(self, cluster: str, macro: str, instance: str) -> None:
        """The circuit breaker of an instance opened."""
        self._opened.labels(cluster, macro, instance).inc()

    def picked(self, cluster: str, seconds: float) -> None:
        """The picker has decided, or decided that the request waits."""
        series = self._picks.get(cluster)
        if series is None:
            series = self._picks[cluster] = self._pick.labels(cluster)
        series.observe(seconds)

    def finished(self, cluster: str, macro: str, instance: str, done: session_pb2.Finished) -> None:
        """A request has ended at an instance."""
        labels = (cluster, macro, instance)
        self._requests.labels(*labels, _outcome(done)).inc()
        self._asked.labels(*labels).inc(done.prompt_tokens)
        self._hit.labels(*labels).inc(done.cached_tokens)
        if done.ttft_s > 0:
            self._ttft.labels(*labels).observe(done.ttft_s)
        if done.tpot_s > 0:
            self._tpot.labels(*labels).observe(done.tpot_s)
        late = 0 < done.ttft_slo_s < done.ttft_s
        slow = 0 < done.tpot_slo_s < done.tpot_s
        for kind, violated in (("ttft", late), ("tpot", slow), ("joint", late or slow)):
            if violated:
                self._violations.labels(*labels, kind).inc()

    def forget(self, cluster: str, instance: str) -> None:
        """Drops the series of an instance that is gone."""
        for key in [k for k in self._routes if k[0] == cluster and k[2] == instance]:
            del self._routes[key]
        for metric in self._by_instance:
            metric.remove_by_labels({"cluster": cluster, "instance": instance})

    def forget_cluster(self, cluster: str) -> None:
        """Drops what is left of a cluster whose instances were forgotten."""
        self._picks.pop(cluster, None)
        for metric in (self._pick, self._sheds):
            metric.remove_by_labels({"cluster": cluster})

    def exposition(self, gauges: Gauges) -> bytes:
        """All metrics in Prometheus' text format. Any thread may call this."""
        return generate_latest(_Both(self.registry, gauges))


def _outcome(done: session_pb2.Finished) -> str:
    if done.status == CLIENT_GONE:
        return "client_gone"
    if done.broken:
        return "broken"
    if done.status >= 500:
        return "error"
    return "rejected" if done.status >= 400 else "ok"


class _Both(Collector):
    def __init__(self, one: Collector, other: Collector) -> None:
        self._both = one, other

    def collect(self) -> Iterator[Metric]:
        return chain.from_iterable(one.collect() for one in self._both)


Row = tuple[tuple[str, ...], dict[str, float]]
"""Labels, and figures by name."""


class Gauges(Collector):
    """Gauges as they were at one moment: ``rows`` of the instances that are present, and ``queues``
    of the macro instances."""

    def __init__(self, rows: Sequence[Row], queues: Sequence[Row]) -> None:
        self._rows = rows
        self._queues = queues

    def collect(self) -> Iterator[Metric]:
        families: dict[str, GaugeMetricFamily] = {}
        for source, labels in ((self._rows, BY_INSTANCE), (self._queues, BY_INSTANCE[:2])):
            for values, figures in source:
                for name, figure in figures.items():
                    family = families.get(name)
                    if family is None:
                        text = TEXTS[name]
                        family = GaugeMetricFamily(f"ecoserve_{name}", text, labels=labels)
                        families[name] = family
                    family.add_metric(values, figure)
        yield from families.values()


TEXTS = {
    "instance_accepted": "1 while the instance is routed to",
    "instance_prefill": "1 in the prefill phase, 0 in the decode phase",
    "instance_backlog_seconds": "Prefill time of all its pending prompts",
    "instance_least_slack_seconds": "Least saved TPOT of its running requests; absent for none",
    "instance_mean_slack_seconds": "Mean saved TPOT of its running requests; absent for none",
    "instance_use": "Load against the best that keeps the SLO",
    "instance_busy": "Share of time in which a step ran",
    "instance_free_kv_tokens": "Free KV tokens as reported",
    "instance_kv_tokens": "KV capacity in tokens",
    "instance_running": "Running sequences",
    "instance_waiting": "Sequences waiting in the engine",
    "instance_batch_limit": "Dynamic batch size in force",
    "instance_mixing_penalty": "What a mixed step costs beyond the ideal, as a share",
    "instance_reservations": "Requests routed and not yet reported",
    "macro_waiting": "Requests that wait at the picker and may still be on time",
    "macro_late": "Requests that wait at the picker and are late",
}
