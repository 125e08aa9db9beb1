"""Signals from a real Prometheus: right values, and unknown for whatever cannot be relied on."""

from __future__ import annotations

import math
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from ecoserve.policy.autoscale import Decision, decide
from ecoserve.policy.signals import Contract, Known, Settings, Signals, Unknown
from ecoserve.scaling.prometheus import Prometheus
from ecoserve.scaling.queries import QUERIES, ROUTED, USE, Unavailable
from ecoserve.scaling.recorder import Recorder, parse
from ecoserve.scaling.signals import POSSIBLE, read
from ecoserve.scheduler.metrics import Gauges, Metrics
from tests.scaling.prometheus_server import SCRAPE, History, prometheus
from tests.scaling.recorded import Load, from_to, level, until

TTFT_SLO = 5.0
SETTINGS = Settings()
PREDICTIVE = Settings(strategy="predictive")

CLUSTERS = {
    "calm": Load(),
    "late": Load(violated=2.0),
    "shedding": Load(shed=2.5),
    "silent": Load(answered=0.0, saved=None, use=level(0.0)),
    "busy": Load(use=level(0.91)),
    "just-busy": Load(use=from_to(0.5, -120, 0.95)),
    "slow": Load(ttft=6.0),
    "crowded": Load(waiting=6.0, late=2.0),
    "low": Load(use=level(0.2)),
    "just-low": Load(use=from_to(0.7, -300, 0.2)),
    "idle": Load(use=level(0.01), only={("ecoserve_instance_use", "i-0"): level(0.9)}),
    "young": Load(use=lambda at: 0.2 if at > -400 else None),
    "gone": Load(use=until(-400, 0.95)),
    "gap": Load(use=lambda at: None if -400 < at < -120 else 0.2),
    "nan": Load(only={("ecoserve_instance_use", "i-2"): level(math.nan)}),
    "negative": Load(only={("ecoserve_instance_use", "i-2"): level(-0.1)}),
    "too-much": Load(only={("ecoserve_instance_use", "i-2"): level(42.0)}),
    "one-dead": Load(only={("ecoserve_instance_use", "i-2"): until(-180, 0.2)}, use=level(0.2)),
    "odd": Load(answered=1.0, violated=5.0),
    "no-counts": Load(use=level(0.2), change={"ecoserve_slo_violations_total": level(None)}),
    "endless": Load(use=level(0.2), change={"ecoserve_macro_waiting": level(math.inf)}),
}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A Prometheus that has scraped all ``CLUSTERS``."""
    folder = tmp_path_factory.mktemp("prometheus")
    history = History()
    for name, load in CLUSTERS.items():
        load.write(history, f"ns/{name}")
    history.write(folder)
    with prometheus(folder) as where:
        yield where


def signals(url: str, cluster: str, settings: Settings = SETTINGS) -> Signals:
    with Prometheus(url, f"ns/{cluster}") as source:
        return read(source, TTFT_SLO, settings)


def decision(url: str, cluster: str, settings: Settings = SETTINGS) -> Decision:
    return decide(signals(url, cluster, settings), 4, 1, 16, settings, (), 0.0)


def value(signal: Known | Unknown) -> float:
    assert isinstance(signal, Known), signal
    return signal.value


def test_each_signal_has_its_value(url: str) -> None:
    found = signals(url, "calm", Settings(contract=Contract(saved=1.0)))
    assert value(found.accepted) == 4
    assert value(found.violations) == 0
    assert value(found.use_low) == value(found.use_high) == pytest.approx(0.6)
    assert value(found.ttft) == pytest.approx(1.0 / TTFT_SLO)
    assert value(found.waiting) == 0
    assert value(found.idle) == 0
    assert value(found.saved) == pytest.approx(5.0 / TTFT_SLO)
    assert isinstance(found.arrivals, Unknown)
    assert value(signals(url, "late").violations) == pytest.approx(0.2, rel=0.02)
    assert value(signals(url, "shedding").violations) == pytest.approx(0.2, rel=0.02)
    assert value(signals(url, "crowded").waiting) == pytest.approx(2.0)
    assert value(signals(url, "idle").idle) == pytest.approx(0.75)


def test_the_capacity_of_an_instance_is_what_use_says(url: str) -> None:
    found = signals(url, "calm", PREDICTIVE)
    assert value(found.arrivals) == value(found.arrivals_high) == pytest.approx(10.0, rel=0.02)
    assert value(found.capacity) == pytest.approx(10.0 / (4 * 0.6), rel=0.02)
    # Without load there is nothing to measure, and no capacity is needed to know that.
    assert decision(url, "silent", PREDICTIVE).action == "contract"


@pytest.mark.parametrize(
    ("cluster", "cause", "after"),
    [
        ("calm", "WithinBounds", 4),
        ("late", "SloViolations", 5),
        ("shedding", "SloViolations", 5),
        ("busy", "Use", 6),
        ("just-busy", "WithinBounds", 4),
        ("slow", "Ttft", 5),
        ("crowded", "Waiting", 5),
        ("low", "LowUse", 3),
        ("just-low", "WithinBounds", 4),
        ("silent", "LowUse", 3),
        ("idle", "LowUse", 3),
    ],
)
def test_what_is_done(url: str, cluster: str, cause: str, after: int) -> None:
    found = decision(url, cluster)
    assert (found.cause, found.after) == (cause, after), found


def test_no_requests_are_no_violations(url: str) -> None:
    found = signals(url, "silent")
    assert value(found.violations) == value(found.ttft) == 0


@pytest.mark.parametrize(
    ("cluster", "words"),
    [
        ("young", ["use: no data before", "less than 600 s ago"]),
        ("gone", ["use: nothing newer than"]),
        ("gap", ["use: data of the last 600 s has gaps"]),
        ("nan", ["ecoserve_instance_use of i-2 is nan, which cannot be"]),
        ("negative", ["ecoserve_instance_use of i-2 is -0.1, which cannot be"]),
        ("too-much", ["ecoserve_instance_use of i-2 is 42, which cannot be"]),
        ("one-dead", ["use: nothing newer than"]),
        ("odd", ["SLO violations: there are more violations than answers"]),
        ("no-counts", ["SLO violations: no data"]),
        ("endless", ["waiting requests: ecoserve_macro_waiting is inf"]),
        ("never-heard-of", ["use: no data", "SLO violations: no data", "TTFT: no data"]),
    ],
)
def test_what_cannot_be_relied_on_is_unknown(url: str, cluster: str, words: list[str]) -> None:
    found = decision(url, cluster)
    assert found.action == "hold"
    assert found.cause == "SignalsUnknown"
    for text in words:
        assert text in found.reason


def test_the_words_stay_the_same_while_the_cause_does(url: str) -> None:
    with Prometheus(url, "ns/gone") as first, Prometheus(url, "ns/gone") as second:
        second.now = first.now + 7
        assert read(first, TTFT_SLO, SETTINGS) == read(second, TTFT_SLO, SETTINGS)


@pytest.mark.parametrize(("step", "window"), [(3.75, 20.0), (15.0, 660.0), (22.5, 600.0)])
def test_times_between_whole_seconds_are_answered(url: str, step: float, window: float) -> None:
    with Prometheus(url, "ns/calm", step=step) as source:
        began = source.now
        for n in range(8):
            source.now = began + n * step
            table = source.table(USE, window)
            assert table.rows["i-0"] == [0.6] * len(table.times)


def test_a_prometheus_that_is_not_there_is_told() -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
        with pytest.raises(Unavailable, match=f"127.0.0.1:{port} cannot be reached") as raised:
            Prometheus(f"http://me:secret@127.0.0.1:{port}", "ns/calm")
        assert "secret" not in str(raised.value)


def test_a_server_that_is_no_prometheus_is_told(url: str) -> None:
    with pytest.raises(Unavailable, match="refuses: HTTP Status Code 404"):
        Prometheus(f"{url}/metrics", "ns/calm")


def test_what_is_asked_for_is_what_the_scheduler_exposes(tmp_path: Path) -> None:
    """Right after a cluster is declared, before any request."""
    metrics = Metrics()
    metrics.declare("ns/new", "m-0", ["i-0"])
    names = ("instance_accepted", "instance_use", "instance_mean_slack_seconds")
    gauges = dict.fromkeys(names, 0.5)
    queues = {"macro_waiting": 0.0, "macro_late": 0.0}
    exposed = metrics.exposition(
        Gauges([(("ns/new", "m-0", "i-0"), gauges)], [(("ns/new", "m-0"), queues)])
    ).decode()
    assert set(QUERIES) == set(POSSIBLE)
    for query in QUERIES:
        wanted = [f'{name}="{label}"' for name, label in query.labels]
        wanted += ["instance="] if query.per_instance else []
        assert any(
            line.startswith(f"{query.metric}{{") and all(text in line for text in wanted)
            for line in exposed.splitlines()
        ), query


@pytest.mark.parametrize("cluster", sorted(set(CLUSTERS) - {"one-dead"}))
def test_it_decides_alike_from_samples_of_its_own(url: str, cluster: str) -> None:
    """As the launcher and the simulator do, without a Prometheus."""
    history = History()
    CLUSTERS[cluster].write(history, f"ns/{cluster}")
    recorder = Recorder(SCRAPE, SETTINGS.contract.use_for)
    for at, exposition in history.scrapes():
        recorder.take(at, parse(exposition, f"ns/{cluster}", QUERIES))
    mine = decide(read(recorder, TTFT_SLO, SETTINGS), 4, 1, 16, SETTINGS, (), 0.0)
    theirs = decision(url, cluster)
    assert (mine.cause, mine.after) == (theirs.cause, theirs.after), (mine, theirs)


def test_a_counter_that_begins_anew_is_no_fall() -> None:
    recorder = Recorder(10.0, 60.0)
    for n, value in enumerate([100.0, 110.0, 5.0, 15.0, 25.0]):
        recorder.take(10.0 * n, {ROUTED: {("i-0",): value, ("i-1",): 7.0}})
    # Over the last 40 s: 15 of the first life are seen no more, 25 of the second are.
    assert recorder.table(ROUTED, 0).rows[""] == [pytest.approx(25 / 30)]
    assert recorder.table(USE, 0).rows == {}
