"""`ecoserve plan` gives what was asked for with the fewest GPUs, by simulation."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ecoserve.cli import app
from ecoserve.policy.autoscale import decide
from ecoserve.policy.signals import Contract, Expand, Known, Settings, Signals
from ecoserve.sim.evaluate import holds
from ecoserve.sim.experiment import Cell, Layout, parse
from ecoserve.sim.plan import Plan, best, for_gpus, for_rate
from ecoserve.sim.plan_command import advice

STUDY: dict[str, Any] = {
    "model": "Llama-3-8B",
    "gpu": "L20",
    "gpus": 8,
    "data": "alpaca",
    "layout": "best",
    "systems": "default",
    "requests": 150,
    "min_seconds": 40,
    "warmup": 20,
    "resolution": 0.05,
    "seeds": [11],
}


def cell(**fields: Any) -> Cell:
    (one,) = parse(STUDY | fields, "test").cells()
    return one


def test_for_gpus_takes_the_layout_that_serves_most() -> None:
    plans = for_gpus(cell(gpus=2))
    assert [plan.goodput for plan in plans] == sorted((p.goodput for p in plans), reverse=True)
    assert plans[0].layout == Layout(tp=1)  # no all-reduce, and the model fits one GPU
    for plan in plans:
        assert plan.gpus == plan.instances * plan.layout.gpus == 2
        assert 0 < plan.share < 1.2
        assert (plan.lower, plan.upper) == (2, 4)
        assert plan.hourly == pytest.approx(2 * 0.60)
        assert plan.cost == pytest.approx(plan.hourly / 3600 / plan.goodput)


def test_for_rate_takes_the_fewest_gpus_that_hold() -> None:
    one = for_gpus(cell(gpus=1))[0].goodput
    plans = for_rate(cell(), 1.7 * one)
    best = plans[0]
    assert best.gpus == min(plan.gpus for plan in plans) == 2
    fewer = cell(layout={"tp": 1}, gpus=1)
    assert not holds(fewer, 1.7 * one)
    assert holds(cell(layout={"tp": 1}, gpus=2), 1.7 * one)


def settled(rate: float, capacity: float, begin: int, settings: Settings) -> int:
    """Instances that predictive scaling stays at when it knows all, before use has shown it."""
    count = begin
    for _ in range(20):
        use = rate / (capacity * count)
        signals = Signals(
            accepted=Known(count),
            violations=Known(0),
            use_low=Known(0),
            ttft=Known(0),
            waiting=Known(0),
            use_high=Known(use),
            idle=Known(0),
            saved=Known(0),
            arrivals=Known(rate),
            arrivals_high=Known(rate),
            capacity=Known(capacity),
        )
        after = decide(signals, count, 1, 20, settings, [], 0.0).after
        if after == count:
            return count
        count = after
    raise AssertionError(f"still moving at {count}")


@pytest.mark.parametrize(("load", "planned", "grown", "shrunk"), [(1.6, 2, 2, 3), (5.0, 5, 6, 8)])
def test_predictive_scaling_asks_for_the_plan_and_its_room(
    load: float, planned: int, grown: int, shrunk: int
) -> None:
    """With the plan's capacity and no room it asks for as many as the plan; with the room that it
    keeps for more (use of 85 % at most, 62.5 % after a step down) for that many more."""
    alone = cell(layout={"tp": 1})
    rate = load * for_gpus(cell(layout={"tp": 1}, gpus=1))[0].goodput
    (plan,) = for_rate(alone, rate)
    assert plan.instances == planned
    usual = Settings(strategy="predictive")
    assert settled(rate, plan.capacity, 1, usual) == grown
    assert settled(rate, plan.capacity, 10, usual) == shrunk
    full = Settings(Expand(use=1.0), Contract(use=0.999), "predictive")
    assert (
        settled(rate, plan.capacity, 1, full) == settled(rate, plan.capacity, 10, full) == planned
    )


def test_a_given_layout_is_kept() -> None:
    (plan,) = for_gpus(cell(gpus=4, layout={"tp": 2}))
    assert plan.layout == Layout(tp=2)
    assert plan.instances == 2


def test_what_cannot_be_is_told() -> None:
    with pytest.raises(ValueError, match="500 requests/s of alpaca need more than 2 L20"):
        for_rate(cell(gpus=2), 500)
    with pytest.raises(ValueError, match="no layout of Qwen2-72B fits on 2 L20"):
        for_gpus(cell(gpus=2, model="Qwen2-72B"))
    with pytest.raises(ValueError, match="keeps these SLOs for 90 % of alpaca at any rate"):
        for_gpus(cell(gpus=1, slo={"ttft": 0.001, "tpot": 0.001}))
    with pytest.raises(ValueError, match="keeps these SLOs for 90 % of alpaca at any rate"):
        for_rate(cell(gpus=1, slo={"ttft": 0.001, "tpot": 0.001}), 1)
    with pytest.raises(ValueError, match="rate must be a positive"):
        for_rate(cell(), -1)


def test_the_best_of_several_systems() -> None:
    cells = list(
        parse(STUDY | {"gpus": 2, "systems": ["default", "distserve-1:1"]}, "test").cells()
    )
    plans = best(cells)
    assert {plan.system for plan in plans} == {"paced", "distserve-1p"}
    assert [plan.goodput for plan in plans] == sorted((p.goodput for p in plans), reverse=True)
    for plan in plans:
        assert plan.ours == (plan.system == "paced")
        assert plan.bound <= plan.apart
        assert plan.ours or plan.bound == plan.apart
    # One instance cannot be both, which leaves the other system.
    alone = [cell.model_copy(update={"gpus": 1, "layout": Layout(tp=1)}) for cell in cells]
    assert {plan.system for plan in best(alone)} == {"paced"}
    with pytest.raises(ValueError, match="two instances"):
        best(alone[1:])
    rate = 0.8 * max(plan.goodput for plan in best(alone))
    assert {plan.gpus for plan in best(cells, rate) if not plan.ours} == {2}


QUICK = ["-n", 150, "--warmup", 10, "--tp", 4]


def plan(*words: object) -> Any:
    return CliRunner().invoke(app, ["plan", *map(str, words)], env={"COLUMNS": "200"})


def test_the_command(tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    result = plan(*QUICK, "--gpus", 4, "--price", 2, "--json", out)
    assert result.exit_code == 0, result.output
    assert "Take 1 instance of TP4 on 4 L20" in " ".join(result.output.split())
    found = json.loads(out.read_text())
    assert found["asked"] == {"rate": None, "gpus": 4}
    assert found["plans"][0]["hourly"] == 8
    assert found["plans"][0]["capacity"] == found["plans"][0]["goodput"]  # of one instance
    assert found["settings"]["data"] == "sharegpt"


def test_the_advice_is_what_ecoserve_runs_and_what_it_is_behind() -> None:
    (one,) = for_gpus(cell(gpus=1))
    ours = replace(one, goodput=8.0, bound=10.0, apart=10.5)
    apart = replace(ours, system="distserve-1p", ours=False, goodput=9.0)

    def said(*plans: Plan) -> str:
        return " ".join(advice(cell(), plans))

    assert said(ours).startswith("Take 1 instance of TP1 on 1 L20, macro instances of 2 to 4")
    assert "spec.autoscaling.capacity: 4 requests/s" in said(replace(ours, instances=2))
    assert "instances of their own" not in said(ours)
    assert "a bound 20% above this layout's" in said(replace(ours, apart=12.0))
    assert "distserve-1p does better, which EcoServe does not run" in said(apart, ours)
    assert "Take" not in said(apart)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "either --rate or --gpus must be given"),
        (["--rate", 5, "--model", "x"], "model: 'x' is not known"),
        (["--gpus", 3, "--tp", 2], "gpus: 3 is not a multiple of TP2"),
    ],
)
def test_wrong_input_is_told(words: list[object], said: str) -> None:
    result = plan(*words)
    assert result.exit_code == 1
    assert said in " ".join(result.output.split())
