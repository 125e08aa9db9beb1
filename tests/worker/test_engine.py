"""Real engine, real model: output is stock vLLM's, and no step mixes phases."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from engines import BLOCK, POLICIES, PURE, Engine

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def expected(stock: Engine, prompts: list[str]) -> list[list[int]]:
    return stock.generate(prompts)


@pytest.fixture(scope="module")
def expected_tiny(tiny_stock: Engine, prompts: list[str]) -> list[list[int]]:
    return tiny_stock.generate(prompts, output=30)


@pytest.mark.parametrize("policy", POLICIES)
def test_greedy_output_is_stocks(
    eco: Engine, prompts: list[str], expected: list[list[int]], policy: str
) -> None:
    eco.use(policy)
    assert eco.generate(prompts) == expected
    if policy in ("padg", "paced"):  # again with every prompt's prefix in the cache
        assert eco.generate(prompts) == expected


@pytest.mark.parametrize("policy", POLICIES)
def test_greedy_output_is_stocks_with_preemptions(
    tiny_eco: Engine,
    prompts: list[str],
    expected_tiny: list[list[int]],
    policy: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # With time to spare, however slow the machine is, prompts come in until the KV is full.
    tiny_eco.use(policy, tpot=10.0)
    preempted: set[str] = set()
    schedule = tiny_eco.scheduler.schedule

    def spy(throttle_prefills: bool = False) -> Any:
        output = schedule(throttle_prefills)
        preempted.update(output.preempted_req_ids or ())
        return output

    monkeypatch.setattr(tiny_eco.scheduler, "schedule", spy)
    assert tiny_eco.generate(prompts, output=30) == expected_tiny
    assert preempted


def test_prefix_caching_does_not_change_output(
    expected: list[list[int]], expected_tiny: list[list[int]]
) -> None:
    assert expected == [
        longer[: len(tokens)] for tokens, longer in zip(expected, expected_tiny, strict=True)
    ]


def _spy(scheduler: Any, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, bool]]:
    """(prompt tokens, decodes, whether a prompt came in with one token left) of each step, told
    apart without the plug-in's own means."""
    seen: list[tuple[int, int, bool]] = []
    schedule = scheduler.schedule

    def spy(throttle_prefills: bool = False) -> Any:
        computed = {id: r.num_computed_tokens for id, r in scheduler.requests.items()}
        output = schedule(throttle_prefills)
        entering = {new.req_id for new in output.scheduled_new_reqs}
        entering |= output.scheduled_cached_reqs.resumed_req_ids
        prompt_tokens = decodes = 0
        for id, count in output.num_scheduled_tokens.items():
            prompt = scheduler.requests[id].num_prompt_tokens
            if id in entering or count > 1 or computed[id] < prompt:
                prompt_tokens += count
            else:
                decodes += 1
        one_left = any(output.num_scheduled_tokens[id] == 1 for id in entering)
        seen.append((prompt_tokens, decodes, one_left))
        return output

    monkeypatch.setattr(scheduler, "schedule", spy)
    return seen


@pytest.mark.parametrize("policy", PURE)
def test_no_step_mixes_phases(eco: Engine, monkeypatch: pytest.MonkeyPatch, policy: str) -> None:
    eco.use(policy, tpot=0.05)
    eco.steps()
    seen = _spy(eco.scheduler, monkeypatch)
    source = random.Random(1)
    shared = [source.randrange(1000, 20000) for _ in range(4 * BLOCK)]
    one_left = [*shared, 7]  # once cached, a single token of it is left to compute
    tokens: dict[str, list[int]] = {}
    eco.add(one_left, 30)
    for index in range(60):
        if index % 4 == 0:
            length = source.choice((5, 40, 200, 500))
            eco.add([source.randrange(1000, 20000) for _ in range(length)], 12)
        if index % 5 == 1:
            eco.add(one_left, 8)
        eco.step(tokens)
    while eco.llm.llm_engine.has_unfinished_requests():
        eco.step(tokens)
    assert not [step for step in seen if step[0] and step[1]]
    assert any(step[2] for step in seen), "no prompt came in with one token left"
    kinds = Counter(step["kind"] for step in eco.steps())
    assert kinds["mixed"] == 0
    assert kinds["prefill"] == sum(1 for step in seen if step[0])
    assert kinds["decode"] == sum(1 for step in seen if step[1])


def test_log_tells_mixed_steps_apart(eco: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    eco.use("paced")
    eco.steps()
    seen = _spy(eco.scheduler, monkeypatch)
    eco.generate([[*range(1000 + index, 1200 + index)] for index in range(12)])
    kinds = Counter(step["kind"] for step in eco.steps())
    assert kinds["mixed"] == sum(1 for step in seen if step[0] and step[1])


def test_hit_statistics_are_left_alone(eco: Engine) -> None:
    eco.use("paper")
    manager = eco.scheduler.kv_cache_manager
    tokens: dict[str, list[int]] = {}
    prompt = [*range(3000, 3000 + 3 * BLOCK)]
    eco.add(prompt, 2)
    while eco.llm.llm_engine.has_unfinished_requests():
        eco.step(tokens)
    id = eco.add(prompt, 2)
    request = next(r for key, r in eco.scheduler.requests.items() if key.startswith(id))
    stats = manager.prefix_cache_stats
    assert eco.scheduler._eco_cached_prefix(request) == 2 * BLOCK
    assert manager.prefix_cache_stats == stats
    eco.step(tokens)
    assert eco.scheduler._eco.sequences[request.request_id].cached == 2 * BLOCK
    while eco.llm.llm_engine.has_unfinished_requests():
        eco.step(tokens)


def test_abort_in_the_middle_of_a_prefill(eco: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    eco.use("paper")
    monkeypatch.setattr(eco.scheduler, "_eco_budget", 64)
    engine = eco.llm.llm_engine
    tokens: dict[str, list[int]] = {}
    other = eco.add([*range(5000, 5020)], 6)
    free = eco.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    id = eco.add([*range(6000, 6500)], 4)
    for _ in range(4):
        eco.step(tokens)
    begun = [r for key, r in eco.scheduler.requests.items() if key.startswith(id)]
    assert begun[0].is_prefill_chunk
    engine.abort_request([id])
    while engine.has_unfinished_requests():
        eco.step(tokens)
    eco.step(tokens)
    assert len(tokens[other]) == 6
    assert not eco.scheduler._eco.sequences
    assert eco.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == free


def test_every_record_of_a_sequence_goes_with_it(eco: Engine, tiny_eco: Engine) -> None:
    for engine in (eco, tiny_eco):
        assert not engine.scheduler._eco.sequences
        assert not engine.scheduler.requests


def test_memory_is_given_back_when_nothing_is_left_to_do(
    eco: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    eco.use("paced")
    left: list[int] = []

    class Noted:
        def at(self, now: float) -> None:
            left.append(len(eco.scheduler.requests))

    monkeypatch.setattr(eco.scheduler, "_eco_memory", Noted())
    eco.generate([[5, 6, 7], [8, 9]], output=3)
    assert left == [0]
    id = eco.add([5, 6, 7], 20)
    eco.step({})
    eco.llm.llm_engine.abort_request([id])
    eco.step({})
    assert set(left) == {0}
    assert len(left) > 1
