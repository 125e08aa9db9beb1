"""Our Prometheus metrics beside vLLM's, read from the ledger when they are scraped.

vLLM's ``/metrics`` exposes the process-wide registry as long as one process serves (it turns to
prometheus_client's multi-process files only with several API servers), so a collector in that
registry is all it takes.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import REGISTRY, Collector

from ecoserve.policy.latency import LatencyModel
from ecoserve_worker.ledger import Ledger

_PREFIX = "ecoserve_worker_"


class WorkerCollector(Collector):
    """Phase, steps by kind, use, busy share, batch limit and the latency model's quality."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def collect(self) -> Iterator[Metric]:
        ledger = self._ledger
        yield _gauge("accepted", "1 once the scheduler has accepted the worker", ledger.accepted)
        yield _gauge("draining", "1 while the worker drains", ledger.draining)
        yield _gauge("present_requests", "Requests under way", len(ledger.present))
        if ledger.latency is not None:
            model = LatencyModel(*ledger.latency)
            text = "What mixing prompts and decodes in one step costs beyond the ideal (ratio)"
            yield _gauge("mixing_penalty", text, model.mixing)
            text = "Relative error of the latency model's own predictions (one sigma)"
            yield _gauge("latency_model_error", text, model.error)
        state = ledger.state
        if state is None:
            return
        phase = GaugeMetricFamily(_PREFIX + "phase", "1 for the current phase", labels=["phase"])
        for name in ("prefill", "decode"):
            phase.add_metric([name], float(state.phase == name))
        yield phase
        text = "Engine steps by what they held"
        steps = CounterMetricFamily(_PREFIX + "steps", text, labels=["kind"])
        steps.add_metric(["prefill"], state.steps_prefill)
        steps.add_metric(["decode"], state.steps_decode)
        steps.add_metric(["mixed"], state.steps_mixed)
        yield steps
        use, busy = ledger.load
        yield _gauge("use", "Load as a share of what the instance can serve", use)
        yield _gauge("busy", "Share of the last seconds in which a step ran", busy)
        yield _gauge("batch_limit", "Dynamic batch size in force (sequences)", state.batch_limit)
        yield _gauge("free_kv_tokens", "KV cache that is free (tokens)", state.free_kv)
        yield _gauge("waiting_prompts", "Sequences with prompt left", len(state.waiting))
        yield _gauge("running_decodes", "Sequences that decode", len(state.running))
        if state.running:
            least = min(decode.slack for decode in state.running)
            yield _gauge("least_slack_seconds", "Least saved TPOT of the running decodes", least)


def register(ledger: Ledger) -> None:
    """Adds the worker's metrics to the registry that vLLM's ``/metrics`` shows."""
    REGISTRY.register(WorkerCollector(ledger))


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(_PREFIX + name, text, value=float(value))
