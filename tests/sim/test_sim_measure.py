"""Attainment, stability, goodput and the fluid bound."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from plain import Plain

from ecoserve.policy import POLICIES
from ecoserve.policy.state import SLO
from ecoserve.sim.bound import fluid_bound
from ecoserve.sim.engine import simulate
from ecoserve.sim.goodput import goodput
from ecoserve.sim.measure import cost_per_request, stable, summarise
from ecoserve.sim.records import Arrival, Cluster, Options, Outcome
from ecoserve.sim.systems import VLLM, DistServe, EcoServe, MoonCake, Sarathi, System

NAN = math.nan
HERE = pytest.approx
PROMISE = SLO(1.0, 0.1)


def outcome(
    at: float, first: float, decoding: float, end: float, output: int = 11, **more: bool
) -> Outcome:
    return Outcome(
        Arrival(at, 100, output),
        PROMISE,
        first=first,
        decoding=decoding,
        end=end,
        **more,  # type: ignore[arg-type]
    )


def test_a_summary_worked_out_by_hand() -> None:
    outcomes = [
        outcome(0.0, 0.5, 0.5, 1.0),  # warm-up
        outcome(10.0, 10.5, 10.6, 11.5),  # met: TPOT 100 ms, 90 ms without the wait
        outcome(11.0, 11.9, 12.3, 12.9),  # met; as published TTFT is 1.3 s
        outcome(12.0, 12.5, 13.0, 13.6),  # TPOT 110 ms; as published 1.0 s and 60 ms: met
        outcome(13.0, 14.5, 14.5, 15.0),  # late
        outcome(14.0, NAN, NAN, NAN, shed=True),
        outcome(20.0, 20.2, NAN, 20.2, output=1),
    ]
    summary = summarise(outcomes, warmup=5.0)
    assert summary.requests == 6
    assert summary.attainment == HERE(3 / 6)
    assert summary.attainment_as_published == HERE(3 / 6)
    assert summary.ttft_attainment == HERE(4 / 6)
    assert summary.tpot_attainment == HERE(4 / 6)
    assert summary.late == HERE(2 / 6)
    assert summary.shed == HERE(1 / 6)
    assert summary.ended == HERE(5 / 6)
    assert summary.ttft[50] == HERE(0.5)
    assert summary.ttft_with_switch_wait[50] == HERE(1.0)
    assert summary.tpot[50] == HERE(0.100)
    assert summary.tpot_as_published[50] == HERE(0.060)  # 90, 60, 60 and 50 ms
    assert summary.switch_wait[50] == HERE(0.1)
    assert summary.throughput == HERE(4 / 15)  # the last ends when arrivals have
    assert summary.output_tokens == HERE(44 / 15)


def test_nothing_measured_is_an_error() -> None:
    with pytest.raises(ValueError, match="warmup"):
        summarise([outcome(0.0, 0.5, 0.5, 1.0)], warmup=5.0)


def test_a_summary_of_nothing_that_ended() -> None:
    summary = summarise([outcome(0.0, NAN, NAN, NAN, shed=True)])
    assert summary.attainment == 0
    assert math.isnan(summary.ttft[99])


def queue(
    service: float, rate: float = 10.0, seconds: float = 300.0, **more: bool
) -> list[Outcome]:
    """One server, Poisson arrivals."""
    rng = np.random.default_rng(4)
    at, free = 0.0, 0.0
    found = []
    while at < 300.0:
        at += rng.exponential(1 / rate)
        free = max(free, at) + service
        found.append(outcome(at, free, NAN, free, output=1))
    return found


def test_a_queue_that_grows_is_not_stable() -> None:
    assert stable(queue(0.09))
    assert not stable(queue(0.12))


def test_prefilled_requests_that_pile_up_before_their_decode_are_not_stable() -> None:
    """All on time by both SLOs, but each waits longer than the one before."""
    for growth, verdict in ((0.0, True), (0.05, False)):
        found = [
            outcome(0.1 * i, 0.1 * i + 0.1, 0.1 * i + 0.1 + growth * i, 0.1 * i + 10, output=1000)
            for i in range(150)
        ]
        assert all(o.met for o in found)
        assert stable(found) is verdict


def test_late_requests_that_pile_up_are_not_stable() -> None:
    """Nine of ten at once, the tenth never."""
    rng = np.random.default_rng(1)
    found = []
    for at in np.sort(rng.uniform(0, 1000, 10_000)).tolist():
        first = at + 0.1 if rng.random() < 0.9 else NAN
        found.append(outcome(at, first, NAN, first, output=1))
    assert not stable(found)
    # Turned away instead, they do not wait.
    for one in found:
        one.shed = math.isnan(one.first)
    assert stable(found)


def test_lateness_that_grows_is_not_stable() -> None:
    found = []
    for i in range(4000):
        late = i % 10 == 0 if i < 1000 else i % (10 - 2 * (i // 1000)) == 0
        first = 0.1 * i + (1.5 if late else 0.1)
        found.append(outcome(0.1 * i, first, NAN, first, output=1))
    assert not stable(found)


def test_the_cost_of_a_request() -> None:
    assert cost_per_request(rate=2.0, devices=8, price=0.9) == HERE(8 * 0.9 / 7200)


# --- goodput


def ones(prompt: int = 100, output: int = 1):  # type: ignore[no-untyped-def]
    def workload(seed: int, count: int) -> list[Arrival]:
        gaps = np.random.default_rng(seed).exponential(1.0, count)
        return [Arrival(at, prompt, output) for at in gaps.cumsum().tolist()]

    return workload


def lindley(seed: int, target: float, seconds: float, warmup: float) -> float:
    """Goodput of 20 ms a request and a TTFT of 0.2 s, by trying every rate."""
    best = 0.0
    for rate in np.arange(30.0, 50.0, 0.05):
        times = ones()(seed, math.ceil(rate * (seconds + warmup)))
        free = 0.0
        kept = []
        for arrival in times:
            at = arrival.at / rate
            free = max(free, at) + 0.020
            if at >= warmup:
                kept.append(free - at <= 0.2)
        if np.mean(kept) >= target:
            best = max(best, rate)
    return best


def test_goodput_of_a_queue_that_can_be_computed() -> None:
    seen: list[tuple[int, float, bool]] = []
    found = goodput(
        VLLM(budget=100),
        Cluster(Plain(), 1),
        ones(),
        SLO(0.2, 0.1),
        target=0.9,
        guess=70.0,
        seeds=(1, 2),
        seconds=80.0,
        warmup=10.0,
        progress=lambda *run: seen.append(run),
    )
    for rate, seed in zip(found.rates, (1, 2), strict=True):
        assert rate == pytest.approx(lindley(seed, 0.9, 80.0, 10.0), rel=0.012)
    assert found.rate == HERE(sum(found.rates) / 2)
    # Two seeds: 12.706 times their deviation over the root of two.
    half = 12.706 * abs(found.rates[0] - found.rates[1]) / 2
    assert (found.low, found.high) == HERE((max(found.rate - half, 0), found.rate + half))
    assert all(kept == (rate <= found.rates[seed - 1]) for seed, rate, kept in seen)


@pytest.mark.parametrize(
    ("system", "published"),
    [(VLLM(), True), (DistServe(1), True), (DistServe(1), False), (EcoServe("paced"), True)],
    ids=str,
)
def test_ending_a_run_early_does_not_change_its_verdict(system: System, published: bool) -> None:
    def workload(seed: int, count: int) -> list[Arrival]:
        rng = np.random.default_rng(seed)
        gaps = rng.exponential(1.0, 4000).cumsum().tolist()
        lengths = rng.integers(1, 300, (2, 4000)).tolist()
        return [Arrival(*request) for request in zip(gaps, *lengths, strict=True)][:count]

    cluster, slo, seconds, warmup, target = Cluster(Plain(), 2), SLO(0.5, 0.05), 20.0, 5.0, 0.95
    runs: list[tuple[int, float, bool]] = []
    goodput(
        system,
        cluster,
        workload,
        slo,
        target=target,
        guess=10.0,
        seeds=(1,),
        seconds=seconds,
        warmup=warmup,
        resolution=0.05,
        published=published,
        progress=lambda *run: runs.append(run),
    )
    assert {kept for *_, kept in runs} == {True, False}
    for seed, rate, kept in runs:
        come = [
            replace(a, at=a.at / rate) for a in workload(seed, math.ceil(rate * (seconds + warmup)))
        ]
        outcomes = simulate(system, cluster, come, slo, Options(seed=seed)).outcomes
        summary = summarise(outcomes, warmup)
        met = summary.attainment_as_published if published else summary.attainment
        assert kept == (met >= target and summary.stable), rate


def test_what_is_below_the_least_of_interest_counts_as_nothing() -> None:
    def found(least: float) -> float:
        cluster = Cluster(Plain(), 1)
        of = {"guess": 70.0, "seeds": (1,), "seconds": 80.0, "warmup": 10.0}
        return goodput(VLLM(budget=100), cluster, ones(), SLO(0.2, 0.1), least=least, **of).rate

    rate = found(0.0)
    assert rate > 0
    assert found(0.98 * rate) == pytest.approx(rate, rel=0.02)
    assert found(1.02 * rate) == 0.0


# A run of a second shows no request at all at the lowest rates that are tried.
@pytest.mark.parametrize(("guess", "seconds"), [(40.0, 60.0), (1.0, 1.0)])
def test_no_rate_keeps_what_cannot_be_kept(guess: float, seconds: float) -> None:
    found = goodput(
        VLLM(),
        Cluster(Plain(), 1),
        ones(output=5),
        SLO(1.0, 0.005),
        guess=guess,
        seeds=(1,),
        seconds=seconds,
        warmup=5.0,
    )
    assert found.rate == found.low == found.high == 0.0


@pytest.mark.parametrize(
    ("field", "value"), [("target", 0.0), ("resolution", 1.0), ("guess", 0.0), ("seeds", ())]
)
def test_bad_searches_are_named(field: str, value: object) -> None:
    settings = {"guess": 1.0, field: value}
    with pytest.raises(ValueError, match=field):
        goodput(VLLM(), Cluster(Plain(), 1), ones(), PROMISE, **settings)  # type: ignore[arg-type]


# --- the bound


def test_the_bound_worked_out_by_hand() -> None:
    """100 prompt tokens and 10 decode steps: a mixed step of D holds 10 D prompt tokens."""
    bound = fluid_bound(Cluster(Plain(), 2), [Arrival(0.0, 100, 11)], PROMISE)
    # 10 ms + 2 ms D = 100 ms: D = 45.
    assert bound.mixed == HERE(2 * 45 / 0.1 / 10)
    # Prefill alone at its best: 16,384 tokens in 10 ms + 1.6384 s.
    each = 10 * (0.01 + 1.6384) / 16384
    assert bound.separate == HERE(2 * 0.09 / (0.001 + each) / 0.1 / 10)
    # An instance for decode alone, D = 90, does 90 a second, one for prefill 99.
    split = 2 / (10 * 0.1 / 90 + 100 * (0.01 + 1.6384) / 16384)
    assert bound.any == pytest.approx(split, rel=1e-3)
    assert bound.decode == HERE(90 / 0.1 / 10)
    assert bound.split(3, 2) == HERE(min(3 * 16384 / (0.01 + 1.6384) / 100, 2 * 90))
    assert bound.split(1, 2) == HERE(16384 / (0.01 + 1.6384) / 100)
    assert bound.alike == bound.mixed


def test_the_bound_by_memory() -> None:
    """Contexts of 105.5 on average: room for ten decodes."""
    bound = fluid_bound(Cluster(Plain(kv_tokens=1055), 1), [Arrival(0.0, 100, 11)], PROMISE)
    assert bound.mixed == HERE(10 / 0.03 / 10)


def test_the_bound_without_decodes_and_without_hope() -> None:
    cluster = Cluster(Plain(), 1)
    alone = fluid_bound(cluster, [Arrival(0.0, 100, 1)], PROMISE)
    assert alone.mixed == alone.any == HERE(16384 / (0.01 + 1.6384) / 100)
    hopeless = fluid_bound(cluster, [Arrival(0.0, 100, 2)], SLO(1.0, 0.01))
    assert hopeless.alike == hopeless.any == 0.0
    with pytest.raises(ValueError, match="arrivals"):
        fluid_bound(cluster, [], PROMISE)


def test_two_stages_are_bound_as_two_instances_at_half_the_tpot() -> None:
    come = [Arrival(0.0, 100, 11)]
    piped = fluid_bound(Cluster(Plain(stages=2), 1), come, PROMISE)
    half = fluid_bound(Cluster(Plain(), 1), come, SLO(1.0, 0.05))
    assert piped.mixed == HERE(half.mixed)
    assert piped.separate >= half.separate


@pytest.mark.parametrize(
    "system",
    [
        VLLM(),
        Sarathi(128),
        Sarathi(512),
        DistServe(1),
        MoonCake(1),
        *(EcoServe(policy) for policy in POLICIES),
    ],
    ids=lambda s: s.name,
)
def test_no_system_passes_the_bound(system: System) -> None:
    def workload(seed: int, count: int) -> list[Arrival]:
        rng = np.random.default_rng(seed)
        gaps = rng.exponential(1.0, 20_000)[:count].cumsum().tolist()
        prompts = rng.integers(20, 400, 20_000)[:count].tolist()
        outputs = rng.integers(5, 120, 20_000)[:count].tolist()
        return [Arrival(*request) for request in zip(gaps, prompts, outputs, strict=True)]

    slo = SLO(2.0, 0.06)
    cluster = Cluster(Plain(), 2)
    bound = fluid_bound(cluster, workload(1, 5000), slo)
    found = goodput(
        system,
        cluster,
        workload,
        slo,
        target=0.99,
        guess=bound.alike,
        seeds=(1,),
        seconds=90.0,
        warmup=20.0,
        resolution=0.03,
    )
    # What is given up, one in a hundred, costs nothing.
    ceiling = bound.any if isinstance(system, DistServe | MoonCake) else bound.alike
    assert 0 < found.rate <= ceiling / 0.99
