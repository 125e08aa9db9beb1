"""The step policies, run on an ideal engine."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ideal import GPU, IdealEngine, Sequence

from ecoserve.policy import POLICIES, make
from ecoserve.policy.phases import PhaseTracker, decode_step, prefill_step
from ecoserve.policy.state import NO_DECODES, SLO, Decodes, EngineView, Prompt

LOOSE = SLO(ttft=5.0, tpot=0.1)


def prompt(tokens: int, deadline: float = 5.0) -> Prompt:
    return Prompt("p", tokens, 0, deadline, LOOSE.ttft)


def view(**changes: object) -> EngineView:
    plain = EngineView(
        now=0.0,
        phase="decode",
        since_switch=1.0,
        prefill_steps=0,
        waiting=[prompt(500)],
        decodes=Decodes(8, 4000, 0.05, 0.05, 0.1),
        free_kv=100_000,
        use=0.5,
        step_budget=2048,
        latency=GPU,
    )
    return replace(plain, **changes)  # type: ignore[arg-type]


def workload(seed: int, count: int, rate: float, slo: SLO = LOOSE) -> list[Sequence]:
    rng = np.random.default_rng(seed)
    times = np.cumsum(rng.exponential(1 / rate, count))
    prompts = np.clip(rng.lognormal(5.0, 1.3, count), 1, 4000).astype(int)
    outputs = np.clip(rng.lognormal(4.0, 0.9, count), 1, 800).astype(int)
    return [
        Sequence(f"r{i}", float(t), int(p), int(o), slo)
        for i, (t, p, o) in enumerate(zip(times, prompts, outputs, strict=True))
    ]


@pytest.mark.parametrize("name", POLICIES)
def test_what_no_policy_has_a_choice_about(name: str) -> None:
    policy = make(name)
    assert policy.step(view(waiting=[])).kind == "decode"
    assert policy.step(view(decodes=NO_DECODES)).kind == "prefill"
    assert policy.step(view(blocked=True)).kind == "decode"


@pytest.mark.parametrize("name", ["paper", "padg", "window"])
def test_steps_hold_one_phase(name: str) -> None:
    engine = IdealEngine(make(name))
    engine.run(workload(1, 200, 3.0))
    assert set(engine.kinds) == {"prefill", "decode"}


def test_paced_mixes_while_that_is_cheaper_and_not_when_it_is_dear() -> None:
    cheap = IdealEngine(make("paced"))
    cheap.run(workload(1, 200, 3.0))
    assert cheap.kinds.count("mixed") > 100
    dear = IdealEngine(make("paced"), latency=replace(GPU, mixing=1.0))
    dear.run(workload(1, 200, 3.0))
    assert "mixed" not in dear.kinds


def test_paced_pays_a_penalty_for_one_prompt_and_not_for_a_queue() -> None:
    """At a penalty of 20 %, a prompt alone would have to pay a whole step's fixed cost; twenty
    share it."""
    here = view(latency=replace(GPU, mixing=0.2), decodes=Decodes(8, 4000, 1.0, 1.0, 0.1))
    policy = make("paced")
    assert policy.step(replace(here, waiting=[prompt(100)])).kind == "mixed"
    assert policy.step(replace(here, waiting=[prompt(100)] * 20)).kind == "prefill"
    free = replace(here, latency=GPU, waiting=[prompt(100)] * 20)
    assert policy.step(free).kind == "mixed"


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(sorted(POLICIES)),
    seed=st.integers(0, 10_000),
    rate=st.sampled_from([0.5, 3.0, 30.0]),
    tpot=st.sampled_from([0.02, 0.06, 0.1, 0.5]),
    ttft=st.sampled_from([0.2, 5.0]),
    kv=st.sampled_from([6_000, 200_000]),
)
def test_every_request_ends_even_when_promises_cannot_be_kept(
    name: str, seed: int, rate: float, tpot: float, ttft: float, kv: int
) -> None:
    engine = IdealEngine(make(name), kv_tokens=kv)
    arrivals = workload(seed, 40, rate, SLO(ttft, tpot))
    engine.run(arrivals)
    assert sorted(s.id for s in engine.done) == sorted(s.id for s in arrivals)
    assert all(s.generated == s.output and s.computed == s.prompt for s in engine.done)


@settings(max_examples=40, deadline=None)
@given(name=st.sampled_from(["window", "paced"]), seed=st.integers(0, 10_000))
def test_decodes_keep_their_pace_whatever_arrives(name: str, seed: int) -> None:
    # The batch stays small enough for decode alone to keep pace; then no prompt may cost it.
    slo = SLO(ttft=60.0, tpot=0.1)
    engine = IdealEngine(make(name))
    engine.run(workload(seed, 60, 3.0, slo))
    assert max(s.tpot for s in engine.done) <= slo.tpot + 1e-9
    assert min(s.worst_slack for s in engine.done) >= -1e-9


@settings(max_examples=40, deadline=None)
@given(
    name=st.sampled_from(sorted(POLICIES)),
    seed=st.integers(0, 10_000),
    size=st.integers(1, 3000),
    decodes=st.integers(1, 30),
)
def test_no_prompt_starves_while_a_window_is_feasible(
    name: str, seed: int, size: int, decodes: int
) -> None:
    # Old decodes with ample slack, and one prompt: each policy must have it on time.
    engine = IdealEngine(make(name))
    for i in range(decodes):
        old = Sequence(f"d{i}", -10.0, 200, 10_000, LOOSE, computed=200, generated=400, first=-10.0)
        engine.running.append(old)
    late = Sequence("p", 0.0, size, 2, LOOSE)
    engine.add(late)
    while late not in engine.done:
        engine.step()
        assert engine.now < 60
    assert late.ttft <= LOOSE.ttft


def test_padg_leaves_prefill_at_the_backlog_but_not_before_its_first_step() -> None:
    policy = make("padg")
    two = [prompt(300), prompt(300)]
    rich = Decodes(8, 4000, 30.0, 30.0, 0.1)
    assert policy.step(view(waiting=two, decodes=rich)).kind == "prefill"
    inside = view(waiting=two, decodes=rich, phase="prefill")
    assert policy.step(replace(inside, prefill_steps=0)).kind == "prefill"
    assert policy.step(replace(inside, prefill_steps=1)).kind == "decode"
    three = replace(inside, prefill_steps=1, waiting=[*two, prompt(300)])
    assert policy.step(three).kind == "prefill"
    assert policy.step(replace(three, use=0.95)).kind == "decode"


def test_padg_enters_prefill_at_one_and_a_half_times_the_estimate() -> None:
    policy = make("padg")
    need = GPU.prefill(500)
    enough = Decodes(8, 4000, 1.51 * need, 9.0, 0.1)
    short = Decodes(8, 4000, 1.49 * need, 9.0, 0.1)
    assert policy.step(view(decodes=enough)).kind == "prefill"
    assert policy.step(view(decodes=short)).kind == "decode"
    # The whole next step counts: three prompts need three times the slack.
    assert policy.step(view(decodes=enough, waiting=[prompt(500)] * 3)).kind == "decode"
    # A TTFT about to be lost is not waited out.
    assert policy.step(view(decodes=short, waiting=[prompt(500, need * 0.9)])).kind == "prefill"


def test_window_waits_for_a_worthwhile_window_until_the_first_prompt_cannot() -> None:
    policy = make("window", {"worth": 0.2})
    cost = GPU.decode(8, 4000)
    narrow = Decodes(8, 4000, cost + 0.1, 1.0, 0.1)
    wide = Decodes(8, 4000, cost + 0.3, 1.0, 0.1)
    long = [prompt(2000)]
    assert policy.step(view(decodes=narrow, waiting=long)).kind == "decode"
    opened = policy.step(view(decodes=wide, waiting=long))
    assert opened.kind == "prefill"
    assert GPU.prefill(opened.prefill_tokens) <= 0.3
    # A prompt that fits whole is not kept waiting for a wider one.
    assert policy.step(view(decodes=narrow, waiting=[prompt(100)])).kind == "prefill"
    pressed = policy.step(view(decodes=narrow, waiting=[prompt(2000, deadline=1.0)]))
    assert pressed.kind == "prefill"
    assert pressed.prefill_tokens >= 64


@pytest.mark.parametrize("name", ["window", "paced"])
def test_what_is_late_costs_no_other_promise_and_does_not_wait_for_ever(name: str) -> None:
    policy = make(name)
    dear = replace(GPU, mixing=1.0)
    overdue = [prompt(2000, deadline=-6.0)]
    narrow = Decodes(8, 4000, GPU.decode(8, 4000) + 0.08, 1.0, 0.1)
    assert policy.step(view(latency=dear, decodes=narrow, waiting=overdue)).kind == "decode"
    wide = replace(narrow, least_slack=1.0)
    assert policy.step(view(latency=dear, decodes=wide, waiting=overdue)).kind == "prefill"
    # These lose time with every step: to wait for their slack would be to wait for ever.
    losing = replace(narrow, tpot=0.9 * GPU.decode(8, 4000), least_slack=-1.0)
    plan = policy.step(view(latency=dear, decodes=losing, waiting=overdue))
    assert (plan.kind, plan.prefill_tokens) == ("prefill", 64)
    assert policy.step(view(latency=dear, decodes=losing)).kind == "decode"


def test_the_tracker_keeps_phases() -> None:
    tracker = PhaseTracker(0.0)
    assert tracker.advance(decode_step("idle"), 1.0) is None
    switch = tracker.advance(prefill_step(view(), "a prompt"), 2.0)
    assert switch is not None
    assert (switch.phase, switch.at, switch.reason) == ("prefill", 2.0, "a prompt")
    assert tracker.advance(prefill_step(view(), "another"), 3.0) is None
    assert tracker.prefill_steps == 2
    assert tracker.since_switch(3.5) == 1.5
    assert tracker.advance(decode_step("done"), 4.0) is not None
    assert tracker.prefill_steps == 0
