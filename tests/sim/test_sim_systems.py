"""The systems that are simulated: what their steps hold, where requests and KV go."""

from __future__ import annotations

import numpy as np
import pytest
from plain import Plain, arrivals

from ecoserve.policy import POLICIES
from ecoserve.policy.state import SLO
from ecoserve.sim import variants
from ecoserve.sim.engine import simulate
from ecoserve.sim.records import Arrival, Cluster, Options, Wire
from ecoserve.sim.systems import VLLM, DistServe, EcoServe, MoonCake, Sarathi, System
from ecoserve.sim.transfer import Port, transfer

LOOSE = SLO(5.0, 0.1)
HERE = pytest.approx
# 100 prompt tokens of 1e5 bytes take 1 + 10 ms.
WIRE = Wire(1e9, 1.0, 0.001)


def pair(**changes: object) -> Cluster:
    return Cluster(Plain(**changes), 2, per_node=1, pcie=WIRE, network=WIRE)  # type: ignore[arg-type]


def crowd(count: int = 150, seed: int = 2, rate: float = 12.0) -> list[Arrival]:
    rng = np.random.default_rng(seed)
    return [
        Arrival(at, int(prompt), int(output))
        for at, prompt, output in zip(
            rng.exponential(1 / rate, count).cumsum().tolist(),
            rng.integers(1, 600, count),
            rng.integers(1, 80, count),
            strict=True,
        )
    ]


# --- transfers


def test_transfers_queue_at_both_ends() -> None:
    out_a, out_b, into_a, into_b = (Port(Wire(1e9, 1.0, 0.0)) for _ in range(4))
    assert transfer(0.0, 1e9, out_a, into_a) == HERE(1.0)
    assert transfer(0.0, 1e9, out_a, into_b) == HERE(2.0)  # behind the first at the sender
    assert transfer(0.5, 1e9, out_b, into_b) == HERE(3.0)  # behind the second at the receiver
    assert transfer(9.0, 5e8, out_b, into_a) == HERE(9.5)


def test_the_slower_end_sets_the_pace_and_latency_counts() -> None:
    fast, slow = Port(Wire(1e10, 1.0, 0.0)), Port(Wire(1e9, 0.5, 0.25))
    assert transfer(0.0, 1e9, fast, slow) == HERE(2.25)


def test_what_does_not_exist_yet_cannot_leave() -> None:
    port = Port(Wire(1e9, 1.0, 0.0))
    assert transfer(0.0, 1e9, port, rest=1e8, computed=5.0) == HERE(5.1)
    port = Port(Wire(1e9, 1.0, 0.0))
    assert transfer(0.0, 1e9, port, rest=1e8, computed=0.2) == HERE(1.0)


# --- disaggregation, by hand: prefill 20 ms, transfer 11 ms, a decode step of one 11 ms


def test_distserve_pulls_over_pcie() -> None:
    come = arrivals((0.0, 100, 3), (0.0, 100, 2))
    a, b = simulate(DistServe(1, budget=100), pair(), come, LOOSE).outcomes
    assert (a.first, a.decoding, a.end) == HERE((0.020, 0.031, 0.053))
    # b is there at 51 and waits for a's step.
    assert (b.first, b.decoding, b.end) == HERE((0.040, 0.053, 0.064))
    assert (a.instance, b.instance) == ("i1", "i1")


def test_prefill_instances_compute_prompts_whole() -> None:
    """The second does not fit into the first one's step, and no piece of it delays that one."""
    come = arrivals((0.0, 100, 1), (0.0, 100, 1))
    for system in (DistServe(1, budget=150), MoonCake(1, budget=150)):
        a, b = simulate(system, pair(), come, LOOSE).outcomes
        assert (a.first, b.first) == HERE((0.020, 0.040))


def test_distserve_waits_for_room_and_holds_the_prompt_meanwhile() -> None:
    """Ten blocks: a prompt of 100 tokens takes seven, so two are nowhere together."""
    come = arrivals((0.0, 100, 3), (0.0, 100, 2), (0.0, 100, 1))
    options = Options(watermark=0.0)
    cluster = pair(kv_tokens=160)
    a, b, c = simulate(DistServe(1, budget=100), cluster, come, LOOSE, options).outcomes
    assert (a.first, a.decoding, a.end) == HERE((0.020, 0.031, 0.053))
    # b is prefilled once a's blocks are free at 31, and pulled once a has ended.
    assert (b.first, b.decoding, b.end) == HERE((0.051, 0.064, 0.075))
    assert c.first == HERE(0.064 + 0.020)


def test_mooncake_goes_through_the_pool_or_straight() -> None:
    come = arrivals((0.0, 100, 3))

    def times(system: System) -> tuple[float, float, float]:
        (o,) = simulate(system, pair(), come, LOOSE).outcomes
        return o.first, o.decoding, o.end

    assert times(MoonCake(1)) == HERE((0.020, 0.042, 0.064))
    assert times(MoonCake(1, hops=1)) == HERE((0.020, 0.031, 0.053))
    # All but a 48th is through when the prefill ends: 1 ms of latency and 10/48 ms are left.
    left = 0.001 + 0.010 / 48
    assert times(MoonCake(1, hops=1, layerwise=True))[1] == HERE(0.020 + left)
    assert times(MoonCake(1, layerwise=True))[1] == HERE(0.020 + left + 0.011)


def test_mooncake_frees_the_prefill_instance_by_the_pool() -> None:
    come = arrivals((0.0, 100, 3), (0.0, 100, 2))
    options = Options(watermark=0.0)
    cluster = pair(kv_tokens=160)
    a, b = simulate(MoonCake(1, budget=100), cluster, come, LOOSE, options).outcomes
    assert (a.first, a.decoding, a.end) == HERE((0.020, 0.042, 0.064))
    # b is prefilled from 31 to 51, in the pool at 62, pulled at 64, there at 75.
    assert (b.first, b.decoding, b.end) == HERE((0.051, 0.075, 0.086))


def test_instances_of_a_node_share_its_nic() -> None:
    """Two prefills end at once: on one node their KV leaves one after the other."""
    come = arrivals((0.0, 100, 2), (0.0, 100, 2))

    def decoding(per_node: int) -> list[float]:
        cluster = Cluster(Plain(), 4, per_node=per_node, network=WIRE)
        outcomes = simulate(MoonCake(2, hops=1), cluster, come, LOOSE).outcomes
        return [o.decoding for o in outcomes]

    assert decoding(1) == HERE([0.031, 0.031])
    assert decoding(4) == HERE([0.031, 0.042])


def test_prompts_go_where_their_decodes_are_not_all() -> None:
    """Prefills that are over at once leave nothing to tell the nodes apart but their decodes."""
    cluster = Cluster(Plain(), 4, per_node=2, pcie=WIRE)
    come = arrivals(*((0.1 * i, 10, 100) for i in range(40)))
    outcomes = simulate(DistServe(1), cluster, come, LOOSE).outcomes
    decoded = [o.instance for o in outcomes]
    assert 18 <= decoded.count("i1") <= 22


def test_a_ratio_is_of_a_node_in_distserve_and_of_all_in_mooncake() -> None:
    cluster = Cluster(Plain(), 8, per_node=4)
    assert DistServe(3).prefills(cluster) == 6
    assert DistServe(3).prefills(Cluster(Plain(), 8, per_node=1)) == 3
    assert MoonCake(3).prefills(cluster) == 3


def test_prompts_go_where_the_nic_is_free() -> None:
    """KV of a second each at two a second: with one NIC each waits longer than the last."""
    slow = Wire(1e7, 1.0, 0.0)
    cluster = Cluster(Plain(), 8, per_node=2, network=slow)
    come = arrivals(*((0.5 * i, 100, 2) for i in range(20)))
    for hops, way in ((1, 1.0), (2, 2.0)):
        outcomes = simulate(MoonCake(4, hops=hops), cluster, come, LOOSE).outcomes  # type: ignore[arg-type]
        assert max(o.decoding - o.first for o in outcomes) < way + 0.1


def test_distserve_stays_within_a_node() -> None:
    cluster = Cluster(Plain(), 4, per_node=2, pcie=WIRE)
    outcomes = simulate(DistServe(1, routing="round-robin"), cluster, crowd(), LOOSE).outcomes
    # Prefill on i0 and i2 in turn; each hands over to its neighbour.
    decoded = [o for o in outcomes if o.arrival.output > 1]
    assert {o.instance for o in decoded} == {"i1", "i3"}
    turns = ["i1" if number % 2 == 0 else "i3" for number, _ in enumerate(outcomes)]
    assert all(
        o.instance == turn for o, turn in zip(outcomes, turns, strict=True) if o.arrival.output > 1
    )


def test_a_sequence_preempted_where_it_decodes_is_computed_there() -> None:
    """The first is three decode steps ahead when its 193rd token needs the last block."""
    come = arrivals((0.0, 160, 64), (0.0, 160, 64))
    options = Options(watermark=0.0, keep_steps=True)
    result = simulate(DistServe(1), pair(kv_tokens=384), come, LOOSE, options)
    assert [o.preemptions for o in result.outcomes] == [0, 1]
    assert [s.tokens for s in result.steps if s.instance == "i1" and s.tokens] == [190]


# --- what steps hold


def test_vllm_never_mixes_and_computes_whole_prompts() -> None:
    come = crowd()
    result = simulate(VLLM(budget=300), Cluster(Plain(), 1), come, LOOSE, Options(keep_steps=True))
    assert {s.kind for s in result.steps} == {"prefill", "decode"}
    longest = max(a.prompt for a in come)
    assert longest > 300  # gets a step alone
    packed = [s.tokens for s in result.steps if s.tokens]
    assert max(packed) == longest
    assert all(tokens <= 300 or tokens in {a.prompt for a in come} for tokens in packed)


def test_vllm_lets_no_decode_run_while_a_prompt_waits() -> None:
    come = arrivals(*((0.01 * i, 100, 5) for i in range(20)))
    outcomes = simulate(VLLM(), Cluster(Plain(), 1), come, LOOSE).outcomes
    assert max(o.first for o in outcomes) <= min(o.decoding for o in outcomes)


@pytest.mark.parametrize("chunk", [16, 64, 256])
def test_sarathi_keeps_to_its_budget_and_always_decodes(chunk: int) -> None:
    cluster = Cluster(Plain(sequence=1e-4), 1)
    result = simulate(Sarathi(chunk), cluster, crowd(), LOOSE, Options(keep_steps=True))
    assert all(s.tokens + s.batch <= max(chunk, s.batch) for s in result.steps)
    assert any(s.kind == "mixed" for s in result.steps)
    fulls = [s for s in result.steps if s.kind == "mixed" and s.tokens + s.batch == chunk]
    assert fulls
    # Prompts never run without the decodes that are there.
    ends = 0.0
    for step in result.steps:
        if step.kind == "prefill":
            running = [o for o in result.outcomes if o.first < step.start < o.end]
            assert not running
        assert step.start >= ends
        ends = step.end - 1e-9


@pytest.mark.parametrize("name", ["vllm", "sarathi-64", "distserve", "mooncake", *POLICIES])
def test_only_systems_that_say_so_make_mixed_steps(name: str) -> None:
    cluster = pair()
    [system] = variants.build(name, {}, cluster)
    steps = simulate(system, cluster, crowd(), LOOSE, Options(keep_steps=True)).steps
    assert any(s.kind == "mixed" for s in steps) == variants.mixes(name)


def test_round_robin_takes_turns_and_least_loaded_does_not() -> None:
    come = arrivals((0.0, 2000, 1), (0.001, 10, 1), (0.002, 10, 1), (0.003, 10, 1))
    cluster = Cluster(Plain(), 2)

    def where(routing: str) -> list[str]:
        system = VLLM(routing=routing)  # type: ignore[arg-type]
        return [o.instance for o in simulate(system, cluster, come, LOOSE).outcomes]

    assert where("round-robin") == ["i0", "i1", "i0", "i1"]
    assert where("least-loaded") == ["i0", "i1", "i1", "i1"]


def test_ecoserve_runs_the_policy_with_its_settings() -> None:
    result = simulate(
        EcoServe("window", {"worth": 0.4, "longest": 0.5}),
        Cluster(Plain(), 2),
        crowd(),
        LOOSE,
        Options(keep_steps=True),
    )
    assert {s.kind for s in result.steps} <= {"prefill", "decode"}
    assert any("worth it" in s.reason or "window" in s.reason for s in result.steps)
    with pytest.raises(ValueError, match="worth"):
        simulate(EcoServe("window", {"worth": -1}), Cluster(Plain(), 1), crowd(), LOOSE)


def test_late_requests_are_served_or_shed_as_set() -> None:
    """Forty prompts of 0.21 s at once with a TTFT of a second: most cannot be on time."""
    come = arrivals(*((0.0, 2000, 2) for _ in range(40)))
    slo = SLO(1.0, 0.1)
    served = simulate(EcoServe("paced"), Cluster(Plain(), 2), come, slo).outcomes
    assert all(o.end > 0 for o in served)
    assert any(o.late for o in served)
    shed = simulate(EcoServe("paced", late="shed"), Cluster(Plain(), 2), come, slo).outcomes
    assert any(o.shed for o in shed)
    assert all(o.met for o in shed if not o.shed)
    full = simulate(EcoServe("paced", queue_limit=3), Cluster(Plain(), 2), come, slo).outcomes
    assert any(o.shed for o in full)


@pytest.mark.parametrize(
    ("system", "field"),
    [
        (Sarathi(0), "chunk"),
        (VLLM(budget=0), "budget"),
        (DistServe(2), "prefill"),
        (DistServe(1, budget=0), "budget"),
        (MoonCake(4), "prefill"),
        (MoonCake(0), "prefill"),
        (MoonCake(1, hops=3), "hops"),  # type: ignore[arg-type]
        (EcoServe("fastest"), "policy"),
        (EcoServe(queue_limit=0), "queue_limit"),
    ],
)
def test_bad_settings_are_named(system: System, field: str) -> None:
    with pytest.raises(ValueError, match=field):
        simulate(system, Cluster(Plain(), 4, per_node=2), crowd(), LOOSE)


def test_distserve_needs_whole_nodes() -> None:
    with pytest.raises(ValueError, match="per_node"):
        simulate(DistServe(1), Cluster(Plain(), 3, per_node=2), crowd(), LOOSE)
