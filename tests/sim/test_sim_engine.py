"""The simulator's engine: against hand-worked schedules, a second engine, and its own books."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plain import Alone, Plain, Watched, arrivals

from ecoserve.policy import POLICIES, make
from ecoserve.policy.state import SLO
from ecoserve.sim import engine, workload
from ecoserve.sim.batch import Batch, Sequence
from ecoserve.sim.cost import FittedCost
from ecoserve.sim.engine import simulate
from ecoserve.sim.experiment import Layout, make_cluster
from ecoserve.sim.records import Arrival, Cluster, Options, Outcome
from ecoserve.sim.systems import VLLM, DistServe, EcoServe, MoonCake, Sarathi, System

sys.path.append(str(Path(__file__).parents[1] / "policy"))
import ideal

LOOSE = SLO(5.0, 0.1)
HERE = pytest.approx

SYSTEMS: list[System] = [
    VLLM(),
    VLLM(routing="round-robin", budget=64),
    Sarathi(chunk=48),
    DistServe(prefill=1),
    DistServe(prefill=1, routing="round-robin"),
    MoonCake(prefill=2),
    MoonCake(prefill=1, routing="round-robin", hops=1, layerwise=True),
    *(EcoServe(policy) for policy in POLICIES),
    EcoServe("paced", late="shed", queue_limit=2),
]


def one(cost: Plain | FittedCost) -> Cluster:
    return Cluster(cost, 1)


def test_a_schedule_worked_out_by_hand() -> None:
    """Prefill-first on one instance: 10 ms a step, 0.1 ms a prompt token, 1 ms a decode."""
    come = arrivals((0.0, 100, 3), (0.005, 200, 2), (1.0, 50, 1))
    a, b, c = simulate(VLLM(), one(Plain()), come, LOOSE).outcomes
    # a's prefill 20 ms; b's 30 ms, a waits; a decode step of both, 12 ms; one of a alone, 11 ms.
    assert (a.routed, a.first, a.decoding, a.end) == HERE((0.0, 0.020, 0.050, 0.073))
    assert (b.routed, b.first, b.decoding, b.end) == HERE((0.005, 0.050, 0.050, 0.062))
    assert (c.first, c.end) == HERE((1.015, 1.015))
    assert math.isnan(c.decoding)
    assert a.tpot == HERE((0.073 - 0.020) / 2)
    assert a.switch_wait == HERE(0.030)


def test_chunks_worked_out_by_hand() -> None:
    """A chunk of 100 tokens in all: the decode takes one of them."""
    come = arrivals((0.0, 100, 4), (0.005, 150, 2))
    result = simulate(Sarathi(100), one(Plain()), come, LOOSE, Options(keep_steps=True))
    a, b = result.outcomes
    # 20 ms; then a and 99 tokens, 20.9; a and the last 51, 16.1; both decode, 12.
    assert [(s.kind, s.tokens, s.batch) for s in result.steps] == [
        ("prefill", 100, 0),
        ("mixed", 99, 1),
        ("mixed", 51, 1),
        ("decode", 0, 2),
    ]
    assert (a.first, a.end) == HERE((0.020, 0.020 + 0.0209 + 0.0161 + 0.012))
    assert (b.first, b.end) == HERE((0.057, 0.069))


def test_waiting_times_are_those_of_the_queue() -> None:
    """One token an answer and one prompt a step make an M/D/1 queue (Lindley's recursion)."""
    rng = np.random.default_rng(3)
    times = rng.exponential(1 / 40, 4000).cumsum().tolist()  # 20 ms each: 80 % busy
    come = [Arrival(at, 100, 1) for at in times]
    outcomes = simulate(VLLM(budget=100), one(Plain()), come, LOOSE).outcomes
    free = 0.0
    for outcome in outcomes:
        free = max(free, outcome.arrival.at) + 0.020
        assert outcome.end == HERE(free)
    waits = [outcome.ttft - 0.020 for outcome in outcomes]
    assert np.mean(waits) == pytest.approx(0.8 / (2 * 0.2) * 0.020, rel=0.2)


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("seed", [1, 2])
def test_agrees_with_an_engine_that_keeps_lists(
    policy: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = replace(ideal.GPU, mixing=0.1 if seed == 2 else 0.0)
    monkeypatch.setattr(engine, "calibrate", lambda *_: model)
    rng = np.random.default_rng(seed)
    come = [
        Arrival(at, int(prompt), int(output))
        for at, prompt, output in zip(
            rng.exponential(1 / 2.2, 150).cumsum().tolist(),
            rng.lognormal(5, 1.3, 150).clip(1, 4000),
            rng.lognormal(4, 0.9, 150).clip(1, 600),
            strict=True,
        )
    ]
    tight = SLO(2.0, 0.05)
    slos = [tight if i % 3 == 0 else LOOSE for i in range(len(come))]
    other = ideal.IdealEngine(make(policy), model)
    expected = [
        ideal.Sequence(str(i), a.at, a.prompt, a.output, slo)
        for i, (a, slo) in enumerate(zip(come, slos, strict=True))
    ]
    other.run(expected)
    options = Options(fit_every=1_000_000, keep_steps=True, watermark=0.0)
    result = simulate(Alone(make(policy)), one(FittedCost(model, 200_000)), come, slos, options)
    assert [step.kind for step in result.steps] == other.kinds
    for outcome, sequence in zip(result.outcomes, expected, strict=True):
        assert outcome.ttft == HERE(sequence.ttft, abs=1e-6)
        assert outcome.tpot == HERE(sequence.tpot, abs=1e-6)


# --- books


requests = st.lists(
    st.tuples(
        st.floats(0, 3),
        st.integers(1, 700),
        st.integers(1, 60),
        st.lists(st.integers(1, 3), max_size=1),
    ),
    min_size=1,
    max_size=40,
)


@settings(max_examples=150)
@given(
    requests=requests,
    system=st.sampled_from(SYSTEMS),
    kv=st.sampled_from([800, 2000, 100_000]),
    stages=st.sampled_from([1, 2, 3]),
    packed=st.booleans(),
    noise=st.sampled_from([0.0, 0.2]),
    delay=st.sampled_from([0.0, 0.1]),
    error=st.sampled_from([None, 0.5]),
    sharing=st.booleans(),
    seqs=st.sampled_from([2, 256]),
)
def test_no_request_is_lost_and_no_memory(
    requests: list[tuple[float, int, int, list[int]]],
    system: System,
    kv: int,
    stages: int,
    packed: bool,
    noise: float,
    delay: float,
    error: float | None,
    sharing: bool,
    seqs: int,
) -> None:
    cost = Plain(stages=stages, kv_tokens=kv, hop=0.001, pair=1e-7, each_context=1e-7)
    come = [Arrival(at, prompt, output, tuple(b)) for at, prompt, output, b in requests]
    slos = [SLO(1.0, 0.05 if i % 2 else 0.1) for i in range(len(come))]
    watched = Watched(system)
    options = Options(
        noise=noise,
        report_delay=delay,
        output_error=error,
        prefix_sharing=sharing,
        max_num_seqs=seqs,
        packed=packed,
        keep_steps=True,
    )
    result = simulate(watched, Cluster(cost, 4, per_node=2), come, slos, options)
    assert sorted(o.arrival.at for o in result.outcomes) == sorted(a.at for a in come)
    for outcome in result.outcomes:
        if outcome.shed:
            assert math.isnan(outcome.end)
            continue
        a = outcome.arrival
        assert a.at <= outcome.routed <= outcome.first <= outcome.end <= result.seconds
        if a.output > 1:
            assert outcome.first <= outcome.decoding < outcome.end
    served = [o for o in result.outcomes if not o.shed]
    # Every token is made once; what a preemption throws away is computed again.
    decoded = sum(step.batch for step in result.steps)
    computed = sum(step.tokens for step in result.steps)
    preemptions = sum(o.preemptions for o in served)
    assert decoded == sum(o.arrival.output - 1 for o in served) - preemptions
    if preemptions == 0 and not sharing:
        assert computed == sum(o.arrival.prompt for o in served)
    if not sharing:
        assert cost.most_context <= kv
    for instance in watched.serving.instances:
        assert instance.memory.available == instance.memory.total
        assert instance.active == 0
        assert not instance.queue


def test_memory_that_runs_out_preempts_the_latest() -> None:
    """Two of 160 + 64 tokens in 384: the first keeps going, the second is computed again."""
    come = arrivals((0.0, 160, 64), (0.0, 160, 64))
    cost = Plain(kv_tokens=384)
    a, b = simulate(VLLM(), one(cost), come, LOOSE, Options(watermark=0.0)).outcomes
    assert (a.preemptions, b.preemptions) == (0, 1)
    # Two prefills of 26 ms; 24 blocks hold both up to 192 tokens each, 32 decode steps of 12 ms;
    # then a alone, 31 of 11 ms.
    assert (a.first, b.first) == HERE((0.026, 0.052))
    assert a.end == HERE(0.052 + 32 * 0.012 + 31 * 0.011)
    # b: 193 tokens once a is gone, which gives its 34th token; 30 more.
    assert b.end == HERE(a.end + 0.01 + 0.0193 + 30 * 0.011)


def test_what_can_never_fit_is_shed() -> None:
    come = arrivals((0.0, 900, 1), (0.0, 100, 800), (0.0, 100, 8))
    outcomes = simulate(VLLM(), one(Plain(kv_tokens=800)), come, LOOSE).outcomes
    assert [o.shed for o in outcomes] == [True, True, False]


def test_what_could_not_come_back_after_a_preemption_is_shed() -> None:
    """50 blocks, 5 of them kept free. The second request would be preempted at 47 blocks, and its
    next prefill would so block all behind it for ever."""
    come = arrivals((0.0, 16, 60), (0.0, 700, 60), (0.1, 100, 8))
    options = Options(watermark=0.1)
    a, b, c = simulate(VLLM(), one(Plain(kv_tokens=800)), come, LOOSE, options).outcomes
    assert [o.shed for o in (a, b, c)] == [False, True, False]
    assert math.isfinite(a.end)
    assert math.isfinite(c.end)


def test_first_come_first_served() -> None:
    rng = np.random.default_rng(5)
    come = [
        Arrival(float(at), int(n), 5)
        for at, n in zip(np.sort(rng.uniform(0, 2, 60)), rng.integers(1, 500, 60), strict=True)
    ]
    for system in (VLLM(), Sarathi(64), *(Alone(make(policy)) for policy in POLICIES)):
        outcomes = simulate(system, one(Plain()), come, SLO(60.0, 0.2)).outcomes
        firsts = [o.first for o in outcomes]
        assert firsts == sorted(firsts)


@pytest.mark.parametrize("system", SYSTEMS, ids=lambda s: f"{s.name}-{getattr(s, 'routing', '')}")
def test_the_seed_decides(system: System) -> None:
    rng = np.random.default_rng(1)
    come = [
        Arrival(float(at), int(n), 20)
        for at, n in zip(np.sort(rng.uniform(0, 5, 80)), rng.integers(1, 700, 80), strict=True)
    ]
    cluster = Cluster(Plain(), 4, per_node=2)

    def ends(seed: int) -> list[float]:
        options = Options(seed=seed, noise=0.1, output_error=0.3)
        return [o.end for o in simulate(system, cluster, come, LOOSE, options).outcomes]

    assert ends(1) == pytest.approx(ends(1), abs=0, nan_ok=True)
    assert ends(1) != ends(2)


def test_order_of_arrivals_does_not_matter() -> None:
    come = arrivals((0.5, 100, 5), (0.0, 300, 9), (0.2, 50, 1))
    outcomes = simulate(VLLM(), one(Plain()), come, LOOSE).outcomes
    assert [o.arrival.at for o in outcomes] == [0.0, 0.2, 0.5]


def test_stopping_leaves_the_rest_undone() -> None:
    come = arrivals(*((0.1 * i, 100, 5) for i in range(10)))
    told: list[tuple[float, Outcome]] = []

    def third(now: float, outcome: Outcome) -> bool:
        told.append((now, outcome))
        assert now == (outcome.arrival.at if math.isnan(outcome.end) else outcome.end)
        return sum(not math.isnan(o.end) for _, o in told) == 6  # each was told of twice

    outcomes = simulate(VLLM(), one(Plain()), come, LOOSE, stop=third).outcomes
    assert sum(math.isnan(o.end) for o in outcomes) == 7
    assert [now for now, _ in told] == sorted(now for now, _ in told)


@pytest.mark.parametrize(
    ("field", "come"),
    [
        ("prompt", arrivals((0, 0, 1))),
        ("output", arrivals((0, 1, 0))),
        ("at", arrivals((math.nan, 1, 1))),
    ],
)
def test_bad_arrivals_are_named(field: str, come: list[Arrival]) -> None:
    with pytest.raises(ValueError, match=field):
        simulate(VLLM(), one(Plain()), come, LOOSE)


def test_bad_options_are_named() -> None:
    with pytest.raises(ValueError, match="report_delay"):
        Options(report_delay=-1)
    with pytest.raises(ValueError, match="max_num_seqs"):
        Options(max_num_seqs=0)
    with pytest.raises(ValueError, match="slo"):
        simulate(VLLM(), one(Plain()), arrivals((0, 1, 1)), [])


# --- pipelines


def test_a_pipeline_worked_out_by_hand() -> None:
    """Two stages, 1 ms between them: two prefills of 20 ms a stage overlap."""
    come = arrivals((0.0, 100, 3), (0.0, 100, 2))
    cost = Plain(stages=2, hop=0.001)
    options = Options(packed=False)
    a, b = simulate(VLLM(budget=100), one(cost), come, LOOSE, options).outcomes
    # a is on stage 1 from 0 to 20 and on stage 2 from 21 to 41; b from 20 to 40 and 41 to 61.
    assert (a.first, b.first) == HERE((0.041, 0.061))
    # a decodes: 41 to 52 on stage 1, on stage 2 after b, 61 to 72; again 72 to 83, 84 to 95.
    assert (a.decoding, a.end) == HERE((0.041, 0.095))
    # b decodes: 61 to 72, on stage 2 from 73 to 84.
    assert (b.decoding, b.end) == HERE((0.061, 0.084))


def test_packed_decodes_share_a_micro_batch() -> None:
    """Both are prefilled together, behind a third."""
    come = arrivals((0.0, 400, 1), (0.001, 100, 3), (0.001, 100, 3))
    options = Options(packed=True, keep_steps=True)
    result = simulate(VLLM(budget=200), one(Plain(stages=2)), come, LOOSE, options)
    assert [s.batch for s in result.steps] == [0, 0, 2, 2]
    spread = replace(options, packed=False)
    result = simulate(VLLM(budget=200), one(Plain(stages=2)), come, LOOSE, spread)
    assert [s.batch for s in result.steps] == [0, 0, 1, 1, 1, 1]


def test_a_full_pipeline_prefills_as_many_times_faster() -> None:
    come = arrivals(*((0.0, 100, 1) for _ in range(200)))
    ends = [
        simulate(VLLM(budget=100), one(Plain(stages=p)), come, LOOSE).seconds for p in (1, 2, 4)
    ]
    assert ends == HERE([200 * 0.02, 201 * 0.02, 203 * 0.02])


# --- what an instance knows


def test_a_shared_prefix_is_not_computed_again() -> None:
    come = [
        Arrival(0.0, 1200, 2, (1, 2)),
        Arrival(1.0, 1100, 2, (1, 2)),
        Arrival(2.0, 1024, 2, (1, 3)),
        Arrival(3.0, 1024, 2, (1, 3)),
    ]
    options = Options(prefix_sharing=True, keep_steps=True)
    result = simulate(VLLM(), one(Plain()), come, LOOSE, options)
    # The last token of a prompt is always computed, so its last block is too if it is whole.
    assert [s.tokens for s in result.steps if s.tokens] == [1200, 76, 512, 512]
    plain = simulate(VLLM(), one(Plain()), come, LOOSE, Options(keep_steps=True))
    assert [s.tokens for s in plain.steps if s.tokens] == [1200, 1100, 1024, 1024]


def test_cached_prefixes_give_way() -> None:
    """Two prompts in turn: a prompt's end goes before its beginning, as room is needed."""
    come = [Arrival(float(i), 1030, 2, (2 * i % 4, 2 * i % 4 + 1)) for i in range(3)]
    options = Options(prefix_sharing=True, keep_steps=True, watermark=0.0)
    for kv, third in ((1100, 1030), (1600, 518), (3200, 6)):
        result = simulate(VLLM(), one(Plain(kv_tokens=kv)), come, LOOSE, options)
        assert [s.tokens for s in result.steps if s.tokens] == [1030, 1030, third]


def test_routing_sees_what_was_reported_by_then() -> None:
    """The first has ended when the second comes; stale reports still count it as pending."""
    come = arrivals((0.0, 100, 10), (0.6, 100, 2))

    def where(delay: float) -> list[str]:
        options = Options(report_delay=delay)
        outcomes = simulate(VLLM(), Cluster(Plain(), 2), come, LOOSE, options).outcomes
        return [o.instance for o in outcomes]

    assert where(0.0) == ["i0", "i0"]
    assert where(0.4) == ["i0", "i0"]
    assert where(0.7) == ["i0", "i1"]


def test_what_was_routed_is_known_at_once() -> None:
    come = arrivals((0.0, 2000, 2), (0.001, 100, 2))
    options = Options(report_delay=0.5)
    outcomes = simulate(VLLM(), Cluster(Plain(), 2), come, LOOSE, options).outcomes
    assert [o.instance for o in outcomes] == ["i0", "i1"]


def test_noise_has_the_sigma_asked_for() -> None:
    come = arrivals(*((float(i), 100, 1) for i in range(3000)))
    outcomes = simulate(VLLM(), one(Plain()), come, LOOSE, Options(noise=0.1)).outcomes
    took = np.array([o.ttft for o in outcomes]) / 0.020
    assert took.mean() == pytest.approx(1.0, abs=0.01)
    assert took.std() == pytest.approx(0.1, rel=0.05)


def test_the_latency_model_follows_the_steps() -> None:
    """Policies see a fit, and it gets better with what is measured."""
    curved = Plain(pair=2e-7, each_context=1e-7)
    come = arrivals(*((0.1 * i, 100 + i, 20) for i in range(400)))
    watched = Watched(Sarathi(256))
    simulate(watched, one(curved), come, LOOSE, Options(fit_every=64))
    (instance,) = watched.serving.instances
    model = instance.fit.model
    assert model.error < 0.05
    assert model.decode(10, 4000) == pytest.approx(curved.step(0, 0.0, 10, 4000), rel=0.05)
    chunk = curved.step(256, 256 * 128.0, 0, 0)
    assert model.prefill(256) == pytest.approx(chunk, rel=0.1)


# --- the batch's running sums


class Listed:
    """A decode as plain numbers, to be summed up anew each time."""

    def __init__(self, sequence: Sequence, generated: int) -> None:
        self.sequence = sequence
        self.generated = generated

    def slack(self, now: float) -> float:
        s = self.sequence
        return self.generated * s.slo.tpot - (now - s.outcome.first)


@given(data=st.data())
def test_a_batch_sums_up_what_a_list_holds(data: st.DataObject) -> None:
    batch = Batch(4)
    running: list[Listed] = []
    settled: set[int] = set()
    now = 0.0
    for number in range(data.draw(st.integers(1, 40))):
        now += 0.01
        action = data.draw(st.sampled_from(["add", "add", "step", "step", "remove", "settle"]))
        if action == "add":
            tpot = data.draw(st.sampled_from([0.05, 0.1]))
            arrival = Arrival(0.0, data.draw(st.integers(1, 20)), data.draw(st.integers(3, 9)))
            outcome = Outcome(arrival, SLO(1.0, tpot), first=now - 0.001 * number)
            sequence = Sequence(number, outcome, data.draw(st.integers(1, 12)))
            sequence.generated = data.draw(st.integers(1, 2))
            running.append(Listed(sequence, sequence.generated))
            batch.add(sequence, settled=False)
        elif action == "step" and running:
            batch.begin(now)
            ended = batch.advance()
            for one in running:
                one.generated += 1
            over = [r for r in running if r.generated == r.sequence.output]
            assert ended == [r.sequence for r in over]
            for one in over:
                batch.remove(one.sequence, one.sequence.number in settled)
                running.remove(one)
        elif action == "remove" and running:
            victim = data.draw(st.sampled_from(running))
            batch.remove(victim.sequence, victim.sequence.number in settled)
            assert victim.sequence.generated == victim.generated
            running.remove(victim)
        elif action == "settle":
            batch.settle_all()
            settled = {r.sequence.number for r in running}
        decodes = batch.decodes(now)
        slacks = [r.slack(now) for r in running]
        assert decodes.count == batch.count == len(running)
        assert batch.context == sum(r.sequence.prompt + r.generated for r in running)
        assert batch.missing == sum(max(r.sequence.expected - r.generated, 0) for r in running)
        assert batch.blocks_needed == sum(
            (r.sequence.prompt + r.generated - 1) % 4 == 0 for r in running
        )
        assert list(batch.running) == [r.sequence for r in running]
        if running:
            assert decodes.least_slack == HERE(min(slacks))
            assert decodes.mean_slack == HERE(np.mean(slacks), abs=1e-9)
            assert decodes.tpot == min(r.sequence.slo.tpot for r in running)
        count, total = batch.settled_slack(now)
        old = [r.slack(now) for r in running if r.sequence.number in settled]
        assert count == len(old)
        assert total == HERE(sum(old), abs=1e-9)


def test_a_burst_after_a_lull_does_not_wait_for_the_batch_limit() -> None:
    """Low use shrinks the limit to a quarter, 64; then 150 short requests come in a second."""
    lull = [Arrival(0.5 * i, 10, 20) for i in range(60)]
    burst = [Arrival(30.0 + i / 150, 1, 60) for i in range(150)]
    system, cluster = EcoServe("paced"), Cluster(Plain(), 1)
    outcomes = simulate(system, cluster, [*lull, *burst], SLO(1.0, 0.25)).outcomes
    assert not any(o.late for o in outcomes)
    assert all(o.met for o in outcomes)


def test_steps_that_always_take_longer_than_predicted_cost_no_tpot() -> None:
    """Answers of two tokens have one step to keep their TPOT in. Chunks of about 197 tokens take a
    tenth more than the model tells, as they are a tile more: 10 of 400 missed by a millisecond."""
    layout = Layout(tp=4)
    cluster = make_cluster("Qwen2-72B", "A800-PCIe", 16, layout)
    work = workload.load("longbench")
    outcomes = simulate(EcoServe(), cluster, work.arrivals(2.6, 400, 11), work.slo).outcomes
    late = [o for o in outcomes if o.tpot > o.slo.tpot]
    assert len(late) <= 4
