"""Clusters that grow and shrink in the simulator: by load, in macro instances, losing nothing."""

from __future__ import annotations

import math

import pytest
from plain import Plain

from ecoserve.policy.mitosis import Bounds
from ecoserve.policy.signals import Contract, Expand, Settings
from ecoserve.policy.state import SLO
from ecoserve.sim import scale, workload
from ecoserve.sim.dynamic import Dynamic, Moment
from ecoserve.sim.engine import simulate
from ecoserve.sim.records import Arrival, Cluster, Options, Outcome, Wire

PROMISE = SLO(1.0, 0.1)
WIRE = Wire(1e9, 1.0, 0.0)
SETTINGS = Settings(
    Expand(violations_for=30, use_for=30, waiting_for=30, ttft_for=30, cooldown=30, max_step=1),
    Contract(use_for=60, idle_for=60, cooldown=30),
)


def cluster() -> Cluster:
    # Some five of the requests below a second.
    return Cluster(Plain(token=1e-3), 4, per_node=1, pcie=WIRE, network=WIRE)


def load(*stages: tuple[float, float]) -> list[Arrival]:
    """Requests of 150 prompt and 20 output tokens at even distances: (rate, seconds) in turn."""
    at, found = 0.0, []
    for rate, seconds in stages:
        for _ in range(int(rate * seconds)):
            at += 1 / rate
            found.append(Arrival(at, 150, 20))
    return found


def play(system: Dynamic, arrivals: list[Arrival]) -> list[Outcome]:
    return simulate(system, cluster(), arrivals, PROMISE, Options(seed=1)).outcomes


def test_it_grows_splits_shrinks_and_merges_and_loses_nothing() -> None:
    moments: list[Moment] = []
    system = Dynamic(1, Bounds(1, 2, 30), SETTINGS, startup=10, moments=moments)
    outcomes = play(system, load((2, 60), (14, 120), (1, 420)))
    assert all(math.isfinite(outcome.end) for outcome in outcomes)
    assert not any(outcome.shed for outcome in outcomes)
    sizes = [moment.sizes for moment in moments]
    assert sizes[0] == (1,)
    assert max(map(sum, sizes)) >= 3
    assert any(len(some) == 2 for some in sizes)
    assert sizes[-1] == (1,)
    assert all(size <= 2 for some in sizes for size in some)
    assert all(moment.serving <= 4 for moment in moments)
    # Each step is explained.
    grown = [moment.done for moment in moments if moment.done]
    assert grown[0].startswith("from 1 to 2 instances: ")
    assert any("use stayed below 40 %" in text or "idle" in text for text in grown)


def test_it_keeps_more_promises_than_without() -> None:
    arrivals = load((3, 60), (9, 240))
    alone = play(Dynamic(1, Bounds(1, 4)), arrivals)
    grown = play(Dynamic(1, Bounds(1, 4), SETTINGS, startup=10), arrivals)
    share = [sum(o.met for o in some) / len(some) for some in (alone, grown)]
    assert share[0] < 0.5
    assert share[1] > share[0] + 0.2


def test_stages_set_the_rates() -> None:
    work = workload.load("sharegpt", slo=None, cv=None)
    plan = scale.stages([10, 30], 100)
    found = [arrival.at for arrival in scale.arrivals(work, plan, 3)]
    assert found == sorted(found)
    assert sum(at < 100 for at in found) == pytest.approx(1000, rel=0.1)
    assert sum(at >= 100 for at in found) == pytest.approx(3000, rel=0.1)
    assert found[-1] < 200
    with pytest.raises(ValueError, match="positive"):
        scale.stages([10, 0], 100)


def test_a_start_beyond_the_cluster_is_told() -> None:
    with pytest.raises(ValueError, match=r"dynamic\.start must be 1 to 4, not 5"):
        play(Dynamic(5, Bounds(1, 4)), load((1, 5)))
