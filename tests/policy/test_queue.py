"""The macro queue decides what a plain one would, asking far less."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import example, given, settings
from hypothesis import strategies as st
from ideal import GPU
from plain_queue import PlainQueue

from ecoserve.policy import POLICIES, make
from ecoserve.policy.line import BLOCK, easiest
from ecoserve.policy.macro import SCAN_LIMIT, MacroScheduler, Routed
from ecoserve.policy.state import NO_DECODES, SLO, Decodes, InstanceView, MacroView, Request

NAMES = ("a", "b", "c")

slacks = st.sampled_from([-0.1, 0.0, 0.05, 0.3, 1.0, 5.0])
decodes = st.builds(
    lambda count, each, least, more, tpot: (
        Decodes(count, count * each, least, least + more, tpot) if count else NO_DECODES
    ),
    st.sampled_from([0, 0, 1, 20, 200, 500]),
    st.integers(1, 4000),
    slacks,
    st.sampled_from([0.0, 0.5]),
    st.sampled_from([0.05, 0.1]),
)


@st.composite
def instance(draw: st.DrawFn, name: str) -> InstanceView:
    backlog = draw(st.sampled_from([0.0, 0.0, 0.1, 0.6, 4.0]))
    return InstanceView(
        name=name,
        phase="decode",
        since_switch=1.0,
        backlog=backlog,
        backlog_since_switch=backlog / 2,
        decodes=draw(decodes),
        settled_slack=draw(slacks),
        residue=draw(st.sampled_from([0.0, 0.04])),
        free_kv=draw(st.sampled_from([0, 300, 600, 900, 3000, 100_000])),
        room=draw(st.sampled_from([0, 1, 2, 64])),
        use=0.5,
        latency=draw(st.sampled_from([GPU, replace(GPU, prefill_token=1.3 * GPU.prefill_token)])),
        weight=draw(st.sampled_from([1.0, 1.0, 0.2])),
    )


requests = st.builds(
    lambda arrived, prompt, output, sequences, slo, held, allowed: Request(
        "", arrived, prompt, output, slo, sequences, held, allowed
    ),
    st.sampled_from([0.0, 0.2, 0.5, 3.0]),
    st.sampled_from([1, 50, 200, 400, 800, 3000, 9000]),
    st.sampled_from([0, 100, 200, 400]),
    st.sampled_from([1, 1, 1, 3]),
    st.sampled_from([SLO(1.0, 0.1), SLO(5.0, 0.1), SLO(5.0, 0.06)]),
    st.dictionaries(st.sampled_from(NAMES), st.integers(0, 4000), max_size=2),
    st.sampled_from([None, None, None, frozenset("ab"), frozenset("c"), frozenset()]),
)


@settings(max_examples=100, deadline=None)
@example(
    "paced",
    [Request("", at, 500, 100, SLO(5.0, 0.1)) for at in (0.0, 3.0)],
    InstanceView("a", "decode", 1.0, 0.0, 0.0, NO_DECODES, 9.0, 0.0, 10**6, 64, 0.0, GPU),
    4.9,
)
@given(
    name=st.sampled_from(sorted(POLICIES)),
    crowd=st.lists(requests, min_size=1, max_size=6),
    one=instance("a"),
    now=st.sampled_from([0.9, 3.0, 4.9]),
)
def test_what_the_easiest_cannot_get_no_other_can(
    name: str, crowd: list[Request], one: InstanceView, now: float
) -> None:
    policy = make(name)
    if not policy.check(easiest(crowd), one, now).admitted:
        assert not any(policy.check(r, one, now).admitted for r in crowd)


# How many, and what share of their TTFT SLO has passed already.
shares = st.sampled_from([0.0, 0.5, 0.8, 0.9, 0.95, 1.1])
offers = st.tuples(st.just("offer"), requests, st.integers(1, 30), shares)
cancels = st.tuples(st.just("cancel"), st.integers(0, 100))
dispatches = st.tuples(
    st.just("dispatch"),
    st.sampled_from([0.0, 0.01, 0.3, 2.0]),
    st.lists(st.sampled_from(NAMES), unique=True).flatmap(
        lambda names: st.tuples(*(instance(name) for name in sorted(names)))
    ),
)


@settings(max_examples=80, deadline=None)
@given(
    name=st.sampled_from(sorted(POLICIES)),
    late=st.sampled_from(["serve", "serve", "shed"]),
    limit=st.sampled_from([3, 40, 1000]),
    events=st.lists(st.one_of(offers, dispatches, dispatches, cancels), min_size=4, max_size=14),
)
def test_decides_what_a_plain_queue_decides(name, late, limit, events) -> None:
    settings = {"late": late, "queue_limit": limit, "late_wait": 3.0}
    queue, plain = MacroScheduler(make(name), **settings), PlainQueue(make(name), **settings)
    now, count = 10.0, 0
    for kind, *what in events:
        if kind == "offer":
            # Many alike but for their size, as one would see in a queue.
            shape, many, share = what
            for i in range(many):
                one = replace(
                    shape,
                    id=f"r{count}",
                    arrived=now - share * shape.slo.ttft + 0.01 * i,
                    prompt_tokens=shape.prompt_tokens + 37 * i * (i % 3),
                    output_tokens=shape.output_tokens + 29 * (i % 5),
                )
                count += 1
                queue.offer(one)
                plain.offer(one)
        elif kind == "cancel":
            queue.cancel(f"r{what[0]}")
            plain.cancel(f"r{what[0]}")
        else:
            passed, instances = what
            now += passed
            view = MacroView(now, instances)
            found = [
                (d.request.id, d.instance if isinstance(d, Routed) else "shed")
                for d in queue.dispatch(view)
            ]
            assert found == plain.dispatch(view)
            assert queue.last == plain.last
        assert [r.id for r in queue.waiting] == list(plain.waiting)
        assert [r.id for r in queue.late] == list(plain.late)


def test_a_long_queue_is_asked_about_in_blocks() -> None:
    asked = []

    class Counting:
        name = "paced"

        def order(self, request, view):  # type: ignore[no-untyped-def]
            return view.instances

        def check(self, request, one, now):  # type: ignore[no-untyped-def]
            asked.append(request.id)
            return make("paced").check(request, one, now)

    scheduler = MacroScheduler(Counting(), queue_limit=1000)  # type: ignore[arg-type]
    for i in range(500):
        scheduler.offer(Request(f"r{i}", 0.0, 500 + i, 100, SLO(5.0, 0.1)))
    full = InstanceView("a", "decode", 1.0, 0.0, 0.0, NO_DECODES, 9.0, 0.0, 10**6, 0, 0.0, GPU)
    assert scheduler.dispatch(MacroView(0.0, (full,))) == []
    assert len(asked) == SCAN_LIMIT // BLOCK
