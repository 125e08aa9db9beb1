"""docs/metrics.md lists each metric of ours with its labels and what it is, and no other."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from ecoserve_operator import metrics as controller
from ecoserve_worker.ledger import Ledger
from ecoserve_worker.messages import DecodeState, FromEngine, State
from ecoserve_worker.metrics import WorkerCollector
from prometheus_client.metrics_core import Metric

from ecoserve.policy.state import SLO
from ecoserve.scheduler.metrics import BY_INSTANCE, TEXTS, Gauges, Metrics

DOCUMENT = Path(__file__).parents[2] / "docs" / "metrics.md"
KINDS = {"counter": "counter", "gauge": "gauge", "histogram": "histogram"}


def row(metric: Metric, labels: Iterable[str]) -> str:
    name = metric.name + "_total" * (metric.type == "counter")
    text = metric.documentation.removesuffix(".")
    return f"| `{name}` | {KINDS[metric.type]} | {', '.join(labels)} | {text} |"


def scheduler() -> Iterator[str]:
    metrics = Metrics()
    labels = {m._name: m._labelnames for m in {*metrics.registry._collector_to_names}}
    for metric in metrics.registry.collect():
        yield row(metric, labels[metric.name])
    instance = {name: 1.0 for name in TEXTS if name.startswith("instance_")}
    macro = {name: 1.0 for name in TEXTS if name.startswith("macro_")}
    for metric in Gauges([(("c", "m", "i"), instance)], [(("c", "m"), macro)]).collect():
        yield row(metric, BY_INSTANCE[: len(metric.samples[0].labels)])


def worker() -> Iterator[str]:
    ledger = Ledger(SLO(1, 1), tell=lambda _: None, engine_dead=lambda: False)
    decode = DecodeState("eco-1", 9, 1, 0.1, 0.1, False)
    numbers = [0] * 3
    state = State(0, "decode", 0, [], [decode], 9, 0, 0, "decode", 0, 8, *numbers, (1.0,) * 8)
    ledger.received(FromEngine(state=state))
    for metric in WorkerCollector(ledger).collect():
        yield row(metric, metric.samples[0].labels)


def operator() -> Iterator[str]:
    for made in (controller.CALLS, controller.RECONCILE, controller.QUEUE):
        for metric in made.describe():
            yield row(metric, made._labelnames)


def test_the_document_has_each_metric_and_no_other() -> None:
    found = sorted([*scheduler(), *worker(), *operator()])
    told = re.findall(r"^\| `ecoserve_.*$", DOCUMENT.read_text(), re.MULTILINE)
    assert sorted(told) == found
