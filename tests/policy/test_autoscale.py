"""Autoscaling: each trigger, what holds it back, that it never swings, nor scales on ignorance."""

from __future__ import annotations

import math
from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ecoserve.policy.autoscale import Decision, Step, decide
from ecoserve.policy.signals import Contract, Expand, Known, Settings, Signal, Signals, Unknown

SETTINGS = Settings()
PREDICTIVE = Settings(strategy="predictive")
PAPER = Settings(contract=Contract(saved=1.0))
NOW = 10_000.0
NONE = Unknown("no data")
NAMES = [item.name for item in fields(Signals)]


def quiet(count: int, use: float = 0.6) -> Signals:
    """Nothing to do: all are there, half used, on time."""
    return Signals(
        accepted=Known(count),
        violations=Known(0.0),
        use_low=Known(use),
        ttft=Known(0.2),
        waiting=Known(0.0),
        use_high=Known(use),
        idle=Known(0.0),
        saved=Known(0.5),
        arrivals=Known(2.0 * count * use),
        arrivals_high=Known(2.0 * count * use),
        capacity=Known(2.0),
    )


def after(signals: Signals, count: int = 8, **other: object) -> Decision:
    """The decision with the defaults of these tests."""
    given: dict[str, object] = {
        "minimum": 1,
        "maximum": 16,
        "settings": SETTINGS,
        "history": (),
        "now": NOW,
    }
    return decide(signals, count, **(given | other))  # type: ignore[arg-type]


# --- triggers ------------------------------------------------------------------------------------


def test_nothing_happens_within_the_bounds() -> None:
    decision = after(quiet(8))
    assert (decision.after, decision.cause, decision.unknown) == (8, "WithinBounds", ())


@pytest.mark.parametrize(
    ("change", "cause", "count"),
    [
        ({"violations": Known(0.051)}, "SloViolations", 9),
        ({"violations": Known(0.30)}, "SloViolations", 11),
        ({"violations": Known(1.0)}, "SloViolations", 12),  # max_step
        ({"use_low": Known(0.86), "use_high": Known(0.9)}, "Use", 12),
        ({"ttft": Known(1.01)}, "Ttft", 9),
        ({"waiting": Known(1.5)}, "Waiting", 9),
        ({"use_low": Known(0.3), "use_high": Known(0.39)}, "LowUse", 7),
        ({"use_high": Known(0.45), "idle": Known(0.625)}, "Idle", 7),
    ],
)
def test_each_trigger(change: dict[str, Signal], cause: str, count: int) -> None:
    decision = after(replace(quiet(8), **change))
    assert (decision.cause, decision.after) == (cause, count)


@pytest.mark.parametrize(
    "change",
    [
        {"violations": Known(0.05)},
        {"use_low": Known(0.85), "use_high": Known(0.85)},
        {"ttft": Known(1.0)},
        {"waiting": Known(1.0)},
        {"use_high": Known(0.40)},
        {"idle": Known(0.60)},
    ],
)
def test_a_bound_that_is_met_is_not_passed(change: dict[str, Signal]) -> None:
    assert after(replace(quiet(8), **change)).action == "hold"


def test_the_published_bound_of_saved_tpot_counts_where_it_is_switched_on() -> None:
    # TTFT SLO x (n + 1) / n, with n 8: 1.125 TTFT SLOs.
    above = replace(quiet(8, use=0.5), saved=Known(1.13))
    assert after(above).action == "hold"
    assert after(above, settings=PAPER).cause == "SavedTpot"
    assert after(replace(above, saved=Known(1.125)), settings=PAPER).action == "hold"


def test_the_reason_is_for_people() -> None:
    decision = after(replace(quiet(8), use_low=Known(0.912)))
    assert decision.reason == "use stayed above 85 % for 5 min (91 % at least)"
    held = after(replace(quiet(8), use_low=Known(0.912)), history=[Step(NOW - 10, 7, 8)])
    assert held.reason == (
        "use stayed above 85 % for 5 min; the last step up was less than 3 min ago"
    )


def test_instances_that_start_count_as_idle() -> None:
    busy = replace(quiet(8), use_low=Known(0.9), accepted=Known(6))
    assert after(busy).action == "hold"
    assert after(replace(busy, accepted=Known(8))).action == "expand"


def test_what_lags_waits_for_instances_that_start() -> None:
    late = replace(quiet(8), violations=Known(0.3), accepted=Known(6))
    recent = [Step(NOW - 200, 6, 8)]
    assert after(late, history=recent).cause == "Starting"
    assert after(replace(late, accepted=NONE), history=recent).cause == "Starting"
    assert after(late, history=[Step(NOW - 301, 6, 8)]).action == "expand"
    # The arrival rate says how many are needed, those that start among them.
    rising = replace(late, arrivals=Known(20.0))
    assert after(rising, history=recent, settings=PREDICTIVE).cause == "Arrivals"


def test_contraction_waits_for_instances_that_start() -> None:
    low = replace(quiet(8, use=0.2), accepted=Known(7))
    patient = Settings(Expand(starting=1000.0))
    recent = [Step(NOW - 700, 6, 8)]
    assert after(low, history=recent, settings=patient).cause == "Starting"
    # But not for ever: there may be no room for them.
    assert after(low, history=[Step(NOW - 1001, 6, 8)], settings=patient).cause == "LowUse"
    assert after(low).cause == "LowUse"


def test_contraction_leaves_room() -> None:
    # One of two instances at 39 % each would be at 78 %, near the bound of expansion.
    assert after(quiet(2, use=0.39), count=2).cause == "WouldOverload"
    assert after(quiet(2, use=0.31), count=2).after == 1


def test_the_last_instance_stays_and_none_is_left_alone() -> None:
    assert after(quiet(1, use=0.0), count=1, minimum=0).cause == "AtMinimum"
    assert after(quiet(0), count=0, minimum=0).cause == "NoInstance"


# --- unknown -------------------------------------------------------------------------------------


def test_expansion_needs_its_own_signal_only() -> None:
    unknown = Signals(*[NONE] * len(NAMES))
    assert after(replace(unknown, violations=Known(0.5))).action == "expand"
    assert after(replace(unknown, waiting=Known(5.0))).action == "expand"
    assert after(replace(unknown, use_low=Known(2.0))).action == "hold"  # of how many?


@pytest.mark.parametrize("name", [n for n in NAMES if n not in ("saved", "use_low")][:6])
def test_contraction_needs_all_signals(name: str) -> None:
    low = quiet(8, use=0.2)
    assert after(low).action == "contract"
    decision = after(replace(low, **{name: Unknown("newest point is of 12:00:00Z")}))
    assert decision.action == "hold"
    assert any("newest point is of 12:00:00Z" in text for text in decision.unknown)
    assert "newest point is of 12:00:00Z" in decision.reason


def test_what_is_not_asked_for_need_not_be_known() -> None:
    low = replace(quiet(8, use=0.2), saved=NONE, arrivals=NONE, arrivals_high=NONE, capacity=NONE)
    assert after(low).action == "contract"
    assert after(low, settings=PAPER).action == "hold"
    assert after(replace(low, saved=Known(0.0)), settings=PREDICTIVE).action == "hold"


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_known_value_is_finite(value: float) -> None:
    with pytest.raises(ValueError, match="finite"):
        Known(value)


# --- predictive ----------------------------------------------------------------------------------


def test_predictive_has_the_fewest_instances_that_keep_use_within_its_bound() -> None:
    # 30 requests/s at 2 an instance: 15 instances' worth, 18 at 85 %.
    rising = replace(quiet(8), arrivals=Known(30.0))
    free = Settings(Expand(max_step=100), strategy="predictive")
    assert after(rising, maximum=99, settings=free).after == 18
    assert after(rising).action == "hold"


def test_predictive_contracts_by_the_greatest_rate_and_by_use() -> None:
    calm = replace(quiet(8), arrivals=Known(6.0), arrivals_high=Known(6.0), use_high=Known(0.4))
    assert after(calm, settings=PREDICTIVE).after == 7
    assert after(replace(calm, arrivals_high=Known(9.9)), settings=PREDICTIVE).action == "hold"
    # Were the capacity estimated too high, use says so.
    assert after(replace(calm, use_high=Known(0.7)), settings=PREDICTIVE).action == "hold"


# --- settings ------------------------------------------------------------------------------------


def test_wrong_settings_are_named() -> None:
    with pytest.raises(ValueError, match=r"contract\.use must be less than expand\.use"):
        Settings(Expand(use=0.5), Contract(use=0.5))
    with pytest.raises(ValueError, match=r"expand\.max_step must be a whole number from 1"):
        Settings(Expand(max_step=0))
    with pytest.raises(ValueError, match=r"contract\.cooldown must be a number of seconds from 0"):
        Settings(contract=Contract(cooldown=math.nan))
    with pytest.raises(ValueError, match="minimum"):
        after(quiet(8), minimum=5, maximum=4)


# --- properties ----------------------------------------------------------------------------------

shares = st.floats(0, 1)
values = {
    "accepted": st.integers(0, 20).map(float),
    "violations": shares,
    "use_low": st.floats(0, 3),
    "ttft": st.floats(0, 3),
    "waiting": st.floats(0, 5),
    "use_high": st.floats(0, 3),
    "idle": shares,
    "saved": st.floats(-3, 3),
    "arrivals": st.floats(0, 100),
    "arrivals_high": st.floats(0, 100),
    "capacity": st.floats(0, 10),
}


def some(unknown: bool = True) -> st.SearchStrategy[Signals]:
    """Any signals, unknown ones among them."""
    parts: dict[str, st.SearchStrategy[Signal]] = {
        name: value.map(Known) if not unknown else value.map(Known) | st.just(NONE)
        for name, value in values.items()
    }
    return st.builds(Signals, **parts)


steps = st.lists(
    st.builds(Step, st.floats(NOW - 2000, NOW), st.integers(1, 16), st.integers(1, 16)), max_size=4
)
any_settings = st.sampled_from([SETTINGS, PREDICTIVE, PAPER])
counts = st.integers(0, 20)


@given(some(), counts, st.integers(0, 8), st.integers(8, 20), any_settings, steps)
def test_it_stays_within_its_bounds(
    signals: Signals,
    count: int,
    minimum: int,
    maximum: int,
    settings: Settings,
    history: list[Step],
) -> None:
    decision = decide(signals, count, minimum, maximum, settings, history, NOW)
    assert minimum <= decision.after <= maximum
    if minimum <= count <= maximum:
        assert -settings.contract.max_step <= decision.after - count <= settings.expand.max_step
        assert decision.after >= min(count, 1)


@given(some(), st.integers(1, 16), any_settings, steps, st.sampled_from(NAMES))
def test_knowing_less_never_scales_more(
    signals: Signals, count: int, settings: Settings, history: list[Step], name: str
) -> None:
    knowing = decide(signals, count, 1, 16, settings, history, NOW)
    less = decide(replace(signals, **{name: NONE}), count, 1, 16, settings, history, NOW)
    assert count <= less.after <= max(knowing.after, count) or less.after == knowing.after
    nothing = Signals(*[NONE] * len(NAMES))
    assert decide(nothing, count, 1, 16, settings, history, NOW).action == "hold"


@given(
    some(unknown=False),
    st.integers(1, 16),
    any_settings,
    st.sampled_from(["violations", "ttft", "waiting", "arrivals"]),
    st.floats(0, 3),
)
def test_more_load_never_means_fewer_instances(
    signals: Signals, count: int, settings: Settings, name: str, more: float
) -> None:
    """The two signals of use and of arrivals rise together, the others alone."""
    grown = replace(signals, **{name: Known(getattr(signals, name).value + more)})
    if name == "arrivals":
        grown = replace(grown, arrivals_high=Known(signals.arrivals_high.value + more))  # type: ignore[union-attr]
    assert (
        decide(grown, count, 1, 16, settings, (), NOW).after
        >= decide(signals, count, 1, 16, settings, (), NOW).after
    )
    used = replace(
        signals,
        use_low=Known(signals.use_low.value + more),  # type: ignore[union-attr]
        use_high=Known(signals.use_high.value + more),  # type: ignore[union-attr]
    )
    assert (
        decide(used, count, 1, 16, settings, (), NOW).after
        >= decide(signals, count, 1, 16, settings, (), NOW).after
    )


@given(some(), st.integers(1, 16), any_settings, st.floats(0, 599), st.booleans())
def test_cooldowns_hold(
    signals: Signals, count: int, settings: Settings, ago: float, was_up: bool
) -> None:
    last = Step(NOW - ago, count - 1, count) if was_up else Step(NOW - ago, count + 1, count)
    decision = decide(signals, count, 1, 16, settings, [last], NOW)
    assert decision.action != "contract"
    if was_up and ago < settings.expand.cooldown:
        assert decision.action == "hold"


@given(st.floats(0.05, 14), st.integers(1, 16), any_settings, st.floats(0.5, 4))
def test_under_a_constant_load_it_comes_to_rest(
    load: float, count: int, settings: Settings, capacity: float
) -> None:
    """``load`` in instances' worth; violations when there are too few. It moves one way, then not
    at all: no flapping."""
    history: list[Step] = []
    now = 0.0
    for _ in range(200):
        now += 60
        use = load / count
        rate = Known(load * capacity)
        signals = replace(
            quiet(count, use),
            violations=Known(min(max(use - 1.0, 0.0), 1.0)),
            idle=Known(math.floor(max(count - load / 0.8, 0.0)) / count),
            arrivals=rate,
            arrivals_high=rate,
            capacity=Known(capacity),
        )
        decision = decide(signals, count, 1, 16, settings, history, now)
        if decision.action != "hold":
            history.append(Step(now, count, decision.after))
            count = decision.after
    moves = [step.after - step.before for step in history]
    assert all(move > 0 for move in moves) or all(move < 0 for move in moves)
    assert not history or history[-1].at < 200 * 60 - 700
    assert load / count <= settings.expand.use + 1e-9 or count == 16
