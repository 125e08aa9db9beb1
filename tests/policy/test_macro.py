"""Admission, routing order and the macro queue."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from ideal import GPU, IdealEngine, Sequence

from ecoserve.policy import POLICIES, make
from ecoserve.policy.macro import MacroScheduler, Routed, Shed
from ecoserve.policy.state import NO_DECODES, SLO, Decodes, InstanceView, MacroView, Request

LOOSE = SLO(ttft=5.0, tpot=0.1)


def instance(name: str = "a", **changes: object) -> InstanceView:
    plain = InstanceView(
        name=name,
        phase="decode",
        since_switch=1.0,
        backlog=0.0,
        backlog_since_switch=0.0,
        decodes=NO_DECODES,
        settled_slack=float("inf"),
        residue=0.0,
        free_kv=100_000,
        room=64,
        use=0.0,
        latency=GPU,
    )
    return replace(plain, **changes)  # type: ignore[arg-type]


def request(rid: str = "r", prompt: int = 500, **changes: object) -> Request:
    return replace(Request(rid, 0.0, prompt, 100, LOOSE), **changes)  # type: ignore[arg-type]


def view(*instances: InstanceView, now: float = 0.0) -> MacroView:
    return MacroView(now, instances)


def route(scheduler: MacroScheduler, v: MacroView, *requests: Request) -> list[Routed | Shed]:
    for one in requests:
        scheduler.offer(one)
    return scheduler.dispatch(v)


@pytest.mark.parametrize("name", POLICIES)
def test_an_idle_instance_takes_a_request(name: str) -> None:
    (decision,) = route(MacroScheduler(make(name)), view(instance()), request())
    assert isinstance(decision, Routed)
    assert (decision.instance, decision.late) == ("a", False)


def test_algorithm_1_checks_mean_slack_of_settled_decodes_and_ignores_the_young() -> None:
    policy, need = make("paper"), GPU.prefill(500)
    young = Decodes(4, 2000, 0.01, 0.01, 0.1)
    ready = instance(decodes=young, settled_slack=need * 1.01)
    assert policy.check(request(), ready, 0.0).admitted
    assert policy.check(request(), replace(ready, settled_slack=need * 0.99), 0.0).reason == "tpot"
    full = replace(ready, settled_slack=99.0, backlog_since_switch=LOOSE.ttft - need * 0.99)
    assert policy.check(request(), full, 0.0).reason == "ttft"
    assert policy.check(request(), replace(ready, free_kv=499), 0.0).reason == "kv"
    # Literally: the wait before admission does not count.
    assert policy.check(request(arrived=-4.99), ready, 0.0).admitted


def test_decodes_are_spread_even_if_one_instance_measured_itself_a_little_faster() -> None:
    scheduler = MacroScheduler(make("paced"))
    busy = instance("a", decodes=Decodes(8, 4000, 0.05, 0.05, 0.1))
    slower = replace(GPU, prefill_token=1.2 * GPU.prefill_token)
    idle = instance("b", latency=slower)
    assert route(scheduler, view(busy, idle), request())[0].instance == "b"  # type: ignore[union-attr]


@pytest.mark.parametrize("name", ["padg", "window", "paced"])
def test_a_hot_prefix_does_not_pile_up_on_one_instance(name: str) -> None:
    scheduler = MacroScheduler(make(name))
    scheduler.last = "b"
    hot = request(prompt=300, held={"a": 300})
    piled = view(instance("a", backlog=1.0), instance("b"))
    assert route(scheduler, piled, hot)[0].instance == "b"  # type: ignore[union-attr]


@settings(max_examples=150, deadline=None)
@given(
    name=st.sampled_from(["padg", "window", "paced"]),
    prompt=st.integers(1, 4000),
    age=st.floats(0, 5),
    backlog=st.lists(st.integers(1, 2000), max_size=4),
    decodes=st.lists(st.tuples(st.integers(10, 2000), st.floats(0.0, 3.0)), max_size=12),
    free=st.integers(0, 60_000),
    mixing=st.sampled_from([0.0, 0.3]),
)
def test_an_admitted_request_breaks_no_promise_that_the_check_could_know_of(
    name: str,
    prompt: int,
    age: float,
    backlog: list[int],
    decodes: list[tuple[int, float]],
    free: int,
    mixing: float,
) -> None:
    """Admits on a view, then plays the instance on the ideal engine and looks at what happened."""
    policy = make(name)
    engine = IdealEngine(policy, latency=replace(GPU, mixing=mixing))
    tpot = LOOSE.tpot
    for i, (context, slack) in enumerate(decodes):
        generated = int(slack / tpot) + 2
        first = -(generated * tpot - slack)
        engine.running.append(
            Sequence(f"d{i}", first, context, 10_000, LOOSE, context, generated, first)
        )
    for i, tokens in enumerate(backlog):
        engine.add(Sequence(f"b{i}", 0.0, tokens, 1, LOOSE))
    total = sum(GPU.prefill(tokens) for tokens in backlog)
    slacks = [engine.slack(s) for s in engine.running]
    state = instance(
        backlog=total,
        backlog_since_switch=total,
        decodes=Decodes(
            len(slacks),
            sum(c + s.generated for (c, _), s in zip(decodes, engine.running, strict=True)),
            min(slacks),
            sum(slacks) / len(slacks),
            tpot,
        )
        if slacks
        else NO_DECODES,
        free_kv=free,
        latency=engine.latency,
    )
    wanted = request(prompt=prompt, arrived=-age)
    if not policy.check(wanted, state, 0.0).admitted:
        return
    assert prompt + wanted.output_tokens <= free
    started = [s for s in engine.running if engine.slack(s) >= 0]
    mine = Sequence("r", -age, prompt, 1, LOOSE)
    engine.add(mine)
    if name == "padg":
        # Its check promises that the pending prefills fit as one phase; play that phase.
        while engine.waiting:
            chunk = min(sum(s.prompt - s.computed for s in engine.waiting), engine.step_budget)
            done = 0
            for s in list(engine.waiting):
                take = min(s.prompt - s.computed, chunk - done)
                engine.now += engine.latency.prefill_work(take, s.computed)
                s.computed += take
                done += take
                if s.computed == s.prompt:
                    engine.waiting.remove(s)
                    s.first = engine.now
            engine.now += engine.latency.prefill_fixed
        assert all(engine.slack(s) >= -1e-6 for s in started)
        assert engine.now <= wanted.deadline + engine.latency.prefill_fixed * (len(backlog) + 2)
        return
    while mine.first is None:
        engine.step()
    assert all(s.worst_slack >= -1e-6 for s in started if slacks and min(slacks) > 0.04)
    assert mine.ttft <= LOOSE.ttft


def test_padg_asks_last_used_then_next_then_the_lightest() -> None:
    scheduler = MacroScheduler(make("padg"))
    busy = GPU.prefill(500) + 0.01
    quiet = [instance(n) for n in "abcd"]
    assert route(scheduler, view(*quiet), request("1"))[0].instance == "a"  # type: ignore[union-attr]
    assert route(scheduler, view(*quiet), request("2"))[0].instance == "a"  # type: ignore[union-attr]
    full_a = [replace(quiet[0], room=0), *quiet[1:]]
    assert route(scheduler, view(*full_a), request("3"))[0].instance == "b"  # type: ignore[union-attr]
    # b was used last; b and c are full, so the lighter of d and a it is.
    mixed = [
        replace(quiet[0], backlog=busy),
        replace(quiet[1], room=0),
        replace(quiet[2], room=0),
        replace(quiet[3], backlog=busy / 2),
    ]
    assert route(scheduler, view(*mixed), request("4"))[0].instance == "d"  # type: ignore[union-attr]


@pytest.mark.parametrize("name", ["padg", "window", "paced"])
def test_a_conversation_returns_to_the_instance_that_holds_it(name: str) -> None:
    scheduler = MacroScheduler(make(name))
    scheduler.last = "a"
    both = view(instance("a"), instance("b", backlog=0.1), instance("c"))
    held = request(prompt=1000, held={"b": 900, "a": 200})
    assert route(scheduler, both, held)[0].instance == "b"  # type: ignore[union-attr]
    # A shared system prompt that all hold, a block more or less, decides nothing.
    scheduler.last = "a"
    shared = request("2", prompt=1000, held={"a": 130, "b": 140, "c": 128})
    assert route(scheduler, both, shared)[0].instance != "b"  # type: ignore[union-attr]
    # An instance that holds it but cannot take it is no reason to break a promise.
    full = view(instance("a"), instance("b", room=0))
    again = request("3", prompt=1000, held={"b": 900})
    assert route(scheduler, full, again)[0].instance == "a"  # type: ignore[union-attr]


def test_a_request_that_nobody_can_take_waits_and_is_routed_when_somebody_can() -> None:
    scheduler = MacroScheduler(make("paced"))
    assert route(scheduler, view(instance(room=0)), request()) == []
    assert [r.id for r in scheduler.waiting] == ["r"]
    assert scheduler.next_wakeup(1.0) is not None
    (decision,) = scheduler.dispatch(view(instance(), now=1.0))
    assert isinstance(decision, Routed)
    assert scheduler.next_wakeup(1.0) is None


def test_a_late_request_gives_way_and_is_served_when_nothing_else_waits() -> None:
    scheduler = MacroScheduler(make("paced"))
    busy = instance(backlog=1.0)
    late, on_time = request("late", arrived=-6.0), request("new", prompt=20_000, arrived=0.0)
    assert route(scheduler, view(busy), late) == []
    assert [r.id for r in scheduler.late] == ["late"]
    scheduler.offer(replace(on_time, prompt_tokens=9000))
    assert scheduler.dispatch(view(replace(busy, room=0))) == []
    decisions = scheduler.dispatch(view(instance()))
    assert [d.request.id for d in decisions] == ["new"]  # one prefill pending now: late waits
    (decision,) = scheduler.dispatch(view(instance()))
    assert isinstance(decision, Routed)
    assert (decision.request.id, decision.late) == ("late", True)


def test_long_late_prompts_leave_half_of_the_instances_to_others() -> None:
    scheduler = MacroScheduler(make("paced"))
    idle = [instance(name) for name in "abcd"]
    long = [request(f"long{i}", prompt=20_000, arrived=-6.0) for i in range(3)]
    decisions = route(scheduler, view(*idle), *long, request("short", arrived=-6.0))
    assert [d.request.id for d in decisions] == ["long0", "long1", "short"]
    taken = {d.instance for d in decisions if isinstance(d, Routed)}
    assert len(taken) == 3
    # As long as the engines still have them before them, and no longer.
    busy = [replace(i, backlog=1.0) if i.name in taken else i for i in idle]
    assert scheduler.dispatch(view(*busy)) == []
    (decision,) = scheduler.dispatch(view(*idle))
    assert decision.request.id == "long2"


def test_one_instance_alone_takes_a_long_late_prompt() -> None:
    scheduler = MacroScheduler(make("paced"))
    (decision,) = route(scheduler, view(instance()), request(prompt=20_000, arrived=-6.0))
    assert isinstance(decision, Routed)


def test_a_late_request_waits_no_longer_than_its_bound() -> None:
    scheduler = MacroScheduler(make("paced"), late_wait=10.0)
    full = instance(backlog=9.0, room=0)
    assert route(scheduler, view(full, now=6.0), request()) == []
    assert scheduler.dispatch(view(full, now=14.9)) == []
    (decision,) = scheduler.dispatch(view(full, now=15.0))
    assert isinstance(decision, Routed)
    assert decision.late


def test_shed_mode_turns_a_late_request_away_at_once() -> None:
    scheduler = MacroScheduler(make("paced"), late="shed")
    (decision,) = route(scheduler, view(instance(room=0), now=6.0), request())
    assert isinstance(decision, Shed)
    assert 1 <= decision.retry_after <= 60


def test_a_full_queue_sheds_the_costliest_late_request_first_and_then_newcomers() -> None:
    scheduler = MacroScheduler(make("paced"), queue_limit=2)
    full = instance(room=0, backlog=1.0)
    route(scheduler, view(full, now=6.0), request("l1", 300), request("l2", 900))
    (decision,) = route(scheduler, view(full, now=6.0), request("n1", arrived=6.0))
    assert isinstance(decision, Shed)
    assert decision.request.id == "l2"
    (decision,) = route(scheduler, view(full, now=6.0), request("n2", arrived=6.0))
    assert decision.request.id == "l1"
    (decision,) = route(scheduler, view(full, now=6.0), request("n3", arrived=6.0))
    assert decision.request.id == "n3"
    assert [r.id for r in scheduler.waiting] == ["n1", "n2"]


def test_a_subset_hint_is_kept_to() -> None:
    scheduler = MacroScheduler(make("padg"))
    v = view(instance("a"), instance("b"), instance("c"))
    (decision,) = route(scheduler, v, request(allowed=frozenset({"b", "c"})))
    assert isinstance(decision, Routed)
    assert decision.instance == "b"
    assert decision.fallbacks == ("c",)


def test_a_warming_instance_offers_only_its_share() -> None:
    policy = make("paced")
    heavy = request(prompt=4000)
    assert policy.check(heavy, instance(), 0.0).admitted
    assert policy.check(heavy, instance(weight=0.2), 0.0).reason == "ttft"
    assert policy.check(request(prompt=100), instance(weight=0.2), 0.0).admitted


@pytest.mark.parametrize(
    ("field", "value"), [("queue_limit", 0), ("late_wait", -1.0), ("late", "drop")]
)
def test_a_wrong_setting_is_named(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=field):
        MacroScheduler(make("paced"), **{field: value})  # type: ignore[arg-type]


class NothingLostNothingDoubled(RuleBasedStateMachine):
    """Whatever happens, each request is in exactly one place: waiting, routed, shed or gone."""

    @initialize(
        name=st.sampled_from(sorted(POLICIES)),
        late=st.sampled_from(["serve", "shed"]),
        limit=st.integers(1, 8),
    )
    def start(self, name: str, late: str, limit: int) -> None:
        self.scheduler = MacroScheduler(
            make(name),
            late=late,
            queue_limit=limit,
            late_wait=3.0,  # type: ignore[arg-type]
        )
        self.now = 0.0
        self.count = 0
        self.open: set[str] = set()
        self.limit = limit
        self.instances = (instance("a"), instance("b"))

    @rule(prompt=st.integers(1, 9000), age=st.floats(0, 8))
    def offer(self, prompt: int, age: float) -> None:
        rid = f"r{self.count}"
        self.count += 1
        self.open.add(rid)
        self.scheduler.offer(request(rid, prompt, arrived=self.now - age))

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def client_leaves(self, data: st.DataObject) -> None:
        rid = data.draw(st.sampled_from(sorted(self.open)))
        if self.scheduler.cancel(rid):
            self.open.discard(rid)

    @rule(
        passed=st.floats(0, 4),
        shapes=st.lists(
            st.tuples(st.integers(0, 8), st.integers(0, 20_000), st.floats(0, 3), st.floats(0, 2)),
            max_size=3,
        ),
    )
    def dispatch(self, passed: float, shapes: list[tuple[int, int, float, float]]) -> None:
        self.now += passed
        self.instances = tuple(
            instance(
                f"i{i}",
                room=room,
                free_kv=free,
                backlog=backlog,
                settled_slack=slack,
                decodes=Decodes(room, 1000 * room, slack, slack, 0.1) if room else NO_DECODES,
            )
            for i, (room, free, backlog, slack) in enumerate(shapes)
        )
        for decision in self.scheduler.dispatch(MacroView(self.now, self.instances)):
            self.open.remove(decision.request.id)  # KeyError: decided twice
            if isinstance(decision, Routed):
                assert decision.instance in {i.name for i in self.instances}
                assert decision.instance not in decision.fallbacks

    @invariant()
    def all_are_accounted_for(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        held = {r.id for r in (*self.scheduler.waiting, *self.scheduler.late)}
        assert held <= self.open
        assert len(self.scheduler) == len(self.open)
        assert len(held) <= self.limit

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        # In the end everything is decided: time passes and an instance is there.
        for _ in range(200):
            if not self.open:
                break
            self.dispatch(1.0, [(8, 20_000, 0.0, 3.0)])
        assert not self.open


TestNothingLostNothingDoubled = NothingLostNothingDoubled.TestCase
TestNothingLostNothingDoubled.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None
)
