"""The cost model: known figures, limits, monotonicity, errors."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ecoserve.policy.latency import LatencyFit, LatencyModel, StepSample
from ecoserve.sim import kernels
from ecoserve.sim.cost import CostModel, FittedCost
from ecoserve.sim.hardware import GPUS, gpu
from ecoserve.sim.models import MODELS, model
from ecoserve.sim.records import StepCost

L20 = gpu("L20")


def cost(name: str = "CodeLlama-34B", card: str = "L20", **layout: float) -> CostModel:
    options = {"tp": 4, **layout}
    return CostModel(model(name), gpu(card), **options)  # type: ignore[arg-type]


COSTS = [
    cost(),
    cost(overlap=0.8, mixing=0.2),
    cost(tp=2, pp=2),
    cost("Llama-30B"),
    cost("Qwen2-72B", tp=8),
    cost("Llama-3-8B", "H100", tp=1),
    cost("Llama-3-70B", "A100"),
    cost("SmolLM2-135M", "L40S", tp=1),
    FittedCost(LatencyModel(0.02, 1e-4, 1e-7, 0.01, 1e-3, 1e-7, mixing=0.1), 10_000),
]
steps = st.tuples(
    st.integers(0, 4096), st.integers(0, 4000), st.integers(0, 256), st.integers(0, 1000)
)


def run(costs: StepCost, tokens: int, before: int, batch: int, each: int) -> float:
    return costs.step(tokens, tokens * (before + tokens / 2), batch, batch * each)


@pytest.mark.parametrize(
    ("name", "tp", "weights"),
    [
        ("Llama-30B", 4, 32.5e9),
        ("CodeLlama-34B", 4, 33.7e9),
        ("Qwen2-72B", 8, 72.7e9),
        ("Llama-3-8B", 1, 8.0e9),
        ("Llama-3-70B", 4, 70.6e9),
        ("SmolLM2-135M", 1, 134.5e6),
        ("Llama-2-7B", 1, 6.74e9),
        ("Llama-2-70B", 4, 69.0e9),
        ("Qwen-72B", 8, 72.3e9),
    ],
)
def test_weights_are_those_of_the_models(name: str, tp: int, weights: float) -> None:
    assert model(name).weights == pytest.approx(weights, rel=0.005)
    assert tp in model(name).tensor_parallel


def test_kv_bytes_are_those_published() -> None:
    assert model("Llama-30B").kv_bytes() == 1_597_440
    assert model("CodeLlama-34B").kv_bytes() == 196_608
    assert model("Qwen2-72B").kv_bytes() == 327_680


def test_kv_heads_are_copied_where_there_are_fewer_than_devices() -> None:
    few = replace(model("Llama-3-8B"), kv_heads=4)
    assert few.kv_bytes(8) == 2 * few.kv_bytes(4) == 2 * few.kv_bytes()


def test_which_tp_divides_the_heads() -> None:
    assert model("Llama-30B").tensor_parallel == (1, 2, 4)  # 52 heads
    assert model("CodeLlama-34B").tensor_parallel[:4] == (1, 2, 4, 8)
    assert model("SmolLM2-135M").tensor_parallel == (1,)  # 9 heads


@pytest.mark.parametrize(
    ("name", "tp", "rate", "share"),
    [
        ("CodeLlama-34B", 4, 2300, 0.54),
        ("Llama-30B", 4, 2317, 0.55),
        ("Qwen2-72B", 8, 1496, 0.69),
    ],
)
def test_prefill_rate_on_l20(name: str, tp: int, rate: float, share: float) -> None:
    """Linear layers at 0.70 and all-reduce at 10 GB/s, by hand: 2 W/TP / (F 0.7) and
    2 x 2 (TP-1)/TP x 2 H / 10^10 a token and layer."""
    parts = cost(name, tp=tp, bus=10e9).parts(4096, 0, 0, 0)
    both = parts.linear + parts.all_reduce
    assert 4096 / both == pytest.approx(rate, rel=0.02)
    assert parts.all_reduce / both == pytest.approx(share, abs=0.01)
    # What the hand calculation leaves out stays small.
    assert parts.total < 1.06 * both


def test_a_decode_step_before_any_token() -> None:
    assert cost().step(0, 0, 1, 1) == pytest.approx(0.031, abs=0.001)


@pytest.mark.parametrize(
    ("name", "card", "tp", "tokens"),
    [
        ("Llama-30B", "L20", 4, 64e3),
        ("Llama-30B", "A800-PCIe", 2, 48e3),
        ("CodeLlama-34B", "L20", 4, 505e3),
        ("CodeLlama-34B", "A800-PCIe", 2, 374e3),
        ("Qwen2-72B", "L20", 8, 574e3),
        ("Qwen2-72B", "A800-PCIe", 4, 417e3),
    ],
)
def test_kv_capacity(name: str, card: str, tp: int, tokens: float) -> None:
    assert cost(name, card, tp=tp).kv_tokens == pytest.approx(tokens, rel=0.015)


def test_transfer_times_on_ten_gigabit() -> None:
    """350 tokens of Llama-30B (559 MB) take half a second on 10 GbE, 0.02 s over PCIe."""
    size = 350 * model("Llama-30B").kv_bytes()
    assert L20.nic.seconds(size) == pytest.approx(0.50, abs=0.01)
    assert L20.host.seconds(size) == pytest.approx(0.023, abs=0.002)


def test_all_reduce_limits() -> None:
    fabric = L20.all_reduce
    assert fabric.seconds(1e6, 1) == 0
    assert fabric.seconds(0, 4) == pytest.approx(13e-6)
    # Large messages move 2 (TP-1)/TP of their bytes at the bus bandwidth.
    assert fabric.seconds(1e9, 4) == pytest.approx(1.5e9 / 10e9, rel=0.001)
    assert fabric.seconds(1e8, 3) > 0  # the next larger TP's figures
    with pytest.raises(ValueError, match="up to 8 devices, not 16"):
        fabric.seconds(1, 16)


@pytest.mark.parametrize("card", GPUS.values(), ids=lambda card: card.name)
def test_products_between_their_limits(card: object) -> None:
    assert isinstance(card, type(L20))
    k, m = 8192, 11008
    weights = 2 * k * m / card.bandwidth
    one = kernels.product(card, 1, k, m)
    assert weights / 0.95 < one < 1.5 * weights  # a decode reads the weights
    n = 65536
    flops = 2 * n * k * m / card.flops
    assert flops < kernels.product(card, n, k, m) < flops / 0.6  # a long prefill computes
    # Never faster than either limit alone, wherever between.
    for rows in (1, 17, 64, 65, 200, 1000, 5000):
        compute = 2 * rows * k * m / (card.flops * card.gemm.compute)
        assert kernels.product(card, rows, k, m) > max(compute, weights)


@given(st.floats(0, 1e3), st.floats(0, 1e3), st.floats(1, 12))
def test_p_norm(a: float, b: float, p: float) -> None:
    norm = float(kernels.p_norm(a, b, p))
    assert max(a, b) <= norm * (1 + 1e-12)
    assert norm <= (a + b) * (1 + 1e-12)
    assert float(kernels.p_norm(a, b, 1.0)) == pytest.approx(a + b)


@given(st.integers(1, 9000), st.integers(1, 9000))
def test_products_of_arrays_are_products_of_numbers(n: int, m: int) -> None:
    both = kernels.product(L20, [n, 1], [512, 512], [m, m])
    assert both[0] == pytest.approx(float(kernels.product(L20, n, 512, m)))
    assert both[0] >= both[1]


@pytest.mark.parametrize("costs", COSTS)
def test_satisfies_the_protocol(costs: StepCost) -> None:
    accepted: StepCost = costs
    assert accepted.stages >= 1
    assert accepted.kv_tokens >= 1
    assert accepted.kv_bytes >= 0
    assert accepted.step(0, 0.0, 0, 0) == 0
    assert accepted.handoff(0) == 0
    assert type(accepted.step(1, 0.5, 1, 1)) is float


@pytest.mark.parametrize("costs", COSTS)
@given(step=steps, more=steps)
@settings(max_examples=40, deadline=None)
def test_more_work_never_takes_less(
    costs: StepCost, step: tuple[int, ...], more: tuple[int, ...]
) -> None:
    tokens, before, batch, each = step
    if not tokens + batch:
        return
    base = run(costs, *step)
    assert math.isfinite(base)
    assert base > 0
    # Adding the other kind of work makes it a mixed step, which costs no less either.
    larger = tuple(a + b for a, b in zip(step, more, strict=True))
    assert run(costs, *larger) >= base * (1 - 1e-12)
    assert run(costs, tokens, before, batch, each + 1) >= base
    assert run(costs, tokens, before + 1, batch, each) >= base


@given(step=steps)
@settings(max_examples=60, deadline=None)
def test_the_parts_are_the_step(step: tuple[int, ...]) -> None:
    tokens, before, batch, each = step
    for costs in COSTS[:5]:
        assert isinstance(costs, CostModel)
        parts = costs.parts(tokens, tokens * (before + tokens / 2), batch, batch * each)
        assert parts.total == pytest.approx(run(costs, *step), rel=1e-9)


@given(step=steps, share=st.floats(0, 1))
@settings(max_examples=60, deadline=None)
def test_overlap_hides_all_reduce_behind_work_that_exists(
    step: tuple[int, ...], share: float
) -> None:
    tokens, _, batch, _ = step
    plain = cost("Qwen2-72B", tp=8).parts(tokens, 0, batch, 0)
    hidden = cost("Qwen2-72B", tp=8, overlap=share).parts(tokens, 0, batch, 0)
    assert hidden.linear == plain.linear
    work = plain.linear + plain.elementwise
    expected = max(plain.all_reduce * (1 - share), plain.all_reduce - work)
    assert hidden.all_reduce == pytest.approx(expected, abs=1e-12)


def test_the_mixed_batch_penalty_is_for_mixed_steps() -> None:
    free, dear = cost(), cost(mixing=0.2)
    mixed = (256, 256 * 128.0, 32, 16000)
    assert dear.step(*mixed) == pytest.approx(1.2 * free.step(*mixed))
    for plain in ((256, 256 * 128.0, 0, 0), (0, 0.0, 32, 16000)):
        assert dear.step(*plain) == free.step(*plain)


def test_a_mixed_step_reads_the_weights_once() -> None:
    together = cost().step(128, 128 * 64.0, 32, 16000)
    apart = cost().step(128, 128 * 64.0, 0, 0) + cost().step(0, 0, 32, 16000)
    assert 0.5 * apart < together < 0.9 * apart


def test_decode_reads_its_context() -> None:
    grown = cost().step(0, 0, 32, 132_000) - cost().step(0, 0, 32, 32_000)
    share = L20.attention.decode
    read = 196_608 / 4 / (864e9 * share)
    assert grown == pytest.approx(100_000 * read)
    # Each sequence costs some tokens more.
    attention = cost().parts(0, 0, 32, 32_000).attention
    assert attention == pytest.approx((32_000 + 32 * L20.attention.pad) * read)


def test_attention_of_long_prompts_grows_with_the_square() -> None:
    def attention(n: int) -> float:
        return cost().parts(n, n * n / 2, 0, 0).attention

    # The efficiency of a prompt as long as ``half`` is half of the best.
    half = int(L20.attention.half)
    flop = 4 * half * half / 2 * 64 * 128 / 4 * 48
    assert flop / attention(half) == pytest.approx(L20.flops * L20.attention.prefill / 2, rel=0.01)
    assert attention(64_000) / attention(32_000) == pytest.approx(4, rel=0.02)


def test_pipeline_stages_share_the_layers() -> None:
    whole, staged = cost(tp=2, pp=1), cost(tp=2, pp=2)
    assert staged.stages == 2
    assert staged.gpus == 4
    one, two = whole.parts(1000, 0, 0, 0), staged.parts(1000, 0, 0, 0)
    assert two.linear == pytest.approx(one.linear / 2)
    assert two.all_reduce == pytest.approx(one.all_reduce / 2)
    assert two.fixed == one.fixed
    assert staged.kv_tokens > 2 * whole.kv_tokens  # weights once, memory twice
    # 1000 tokens of hidden state and residual: 33 MB, half of it over PCIe by each device, the
    # other half gathered at 10 GB/s.
    size = 2 * 2 * 8192 * 1000
    assert staged.handoff(1000) == pytest.approx(size / 2 / 24e9 + size / 2 / 10e9, rel=0.02)
    assert whole.handoff(1000) == 0


def test_price_counts_the_gpus() -> None:
    assert cost(tp=2, pp=2).price == pytest.approx(4 * L20.price)


def test_every_model_and_gpu_that_fit_give_a_cost() -> None:
    fitting = 0
    for shape in MODELS.values():
        for card in GPUS.values():
            for tp in shape.tensor_parallel:
                if tp > card.gpus or 2 * shape.weights > 0.8 * tp * card.memory:
                    continue
                fitting += 1
                assert 0 < CostModel(shape, card, tp=tp).step(100, 5000, 8, 800) < 1
    assert fitting > 100


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tp": 3}, "tp: CodeLlama-34B has 64 heads and 8 KV heads.*allowed are 1, 2, 4, 8"),
        ({"tp": 0}, "tp: "),
        ({"tp": 1, "pp": 7}, "pp: CodeLlama-34B has 48 layers.*allowed are 1, 2, 3, 4, 6, 8"),
        ({"tp": 8, "pp": 2}, "tp x pp: 8 x 2 GPUs asked for, a node has 8"),
        ({"tp": 1}, "tp x pp: CodeLlama-34B weighs 67.5 GB.*1 L20 of 48 GB"),
        ({"bus": 0}, "bus must be above 0"),
        ({"bus": math.nan}, "bus must be above 0"),
        ({"overlap": 1.1}, "overlap must be 0 to 1, not 1.1"),
        ({"mixing": -0.1}, "mixing must be finite and not negative"),
        ({"fixed": math.inf}, "fixed must be finite and not negative seconds"),
        ({"memory_utilisation": 0}, "memory_utilisation must be above 0"),
    ],
)
def test_what_cannot_be(options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cost(**options)


def test_unknown_names_list_the_known() -> None:
    assert gpu("a800-pcie") is GPUS["A800-PCIe"]
    assert model("llama-30b") is MODELS["Llama-30B"]
    with pytest.raises(ValueError, match="gpu: 'T4' is not known; known are L20, L40S"):
        gpu("T4")
    with pytest.raises(ValueError, match="model: 'GPT' is not known; known are Llama-30B"):
        model("GPT")


@given(step=steps)
def test_fitted_cost_is_what_the_fit_predicts(step: tuple[int, ...]) -> None:
    tokens, before, batch, each = step
    if not tokens + batch:
        return
    latency = LatencyModel(0.02, 1e-4, 1e-7, 0.01, 1e-3, 1e-7, mixing=0.1)
    sample = StepSample(tokens, tokens * (before + tokens / 2), batch, batch * each, 1.0)
    predicted = LatencyFit(latency).predict(sample)
    assert run(FittedCost(latency, 1000), *step) == pytest.approx(predicted)


def test_fitted_cost_needs_room() -> None:
    latency = LatencyModel(0.02, 1e-4, 1e-7, 0.01, 1e-3, 1e-7)
    with pytest.raises(ValueError, match="kv_tokens must be at least 1"):
        FittedCost(latency, 0)
    with pytest.raises(ValueError, match="kv_bytes must not be negative"):
        FittedCost(latency, 1, -1.0)
