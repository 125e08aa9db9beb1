"""Tenants share a macro instance: who waits is served in turn, by work."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ideal import GPU

from ecoserve.policy import make
from ecoserve.policy.fair import MOST_IDLE, Shares, work
from ecoserve.policy.macro import MacroScheduler, Routed, Shed
from ecoserve.policy.state import NO_DECODES, SLO, InstanceView, MacroView, Request

PATIENT = SLO(1000.0, 0.1)


def room_for(count: int, now: float = 0.0, *, backlog: float = 0.0) -> MacroView:
    """One instance that takes so many more requests."""
    one = InstanceView(
        "a", "decode", 1.0, backlog, 0.0, NO_DECODES, 9.0, 0.0, 10**9, count, 0.5, GPU
    )
    return MacroView(now, (one,))


class Crowd:
    """A queue and those who fill it."""

    def __init__(self, **settings: object) -> None:
        self.queue = MacroScheduler(make("paced"), queue_limit=100_000, **settings)  # type: ignore[arg-type]
        self.count = 0

    def sends(
        self,
        tenant: str,
        prompt: int = 100,
        output: int = 50,
        at: float = 0.0,
        slo: SLO = PATIENT,
        priority: int = 0,
    ) -> str:
        name = f"{tenant}{self.count}"
        self.count += 1
        self.queue.offer(Request(name, at, prompt, output, slo, tenant=tenant, priority=priority))
        return name

    def routed(self, view: MacroView) -> list[Request]:
        return [d.request for d in self.queue.dispatch(view) if isinstance(d, Routed)]


def given_to(requests: Iterable[Request]) -> Counter[str]:
    """Work by tenant."""
    found: Counter[str] = Counter()
    for request in requests:
        found[request.tenant] += int(work(request))
    return found


sizes = st.tuples(st.integers(1, 3000), st.integers(0, 400))


@settings(max_examples=80, deadline=None)
@given(
    queues=st.lists(st.lists(sizes, min_size=1, max_size=30), min_size=2, max_size=4),
    rooms=st.lists(st.integers(1, 5), min_size=1, max_size=12),
)
def test_of_those_that_wait_none_gets_more_than_a_request_ahead(queues, rooms) -> None:
    crowd = Crowd()
    left: Counter[str] = Counter()
    largest = {}
    for number, queue in enumerate(queues):
        tenant = "abcd"[number]
        for prompt, output in queue:
            crowd.sends(tenant, prompt, output)
        left[tenant] = len(queue)
        largest[tenant] = max(prompt + 2 * output for prompt, output in queue)
    total: Counter[str] = Counter()
    for room in rooms:
        routed = crowd.routed(room_for(room))
        # Work conserving: whatever there is room for is used.
        assert len(routed) == min(room, sum(left.values()))
        total += given_to(routed)
        left -= Counter(r.tenant for r in routed)
        waiting = [tenant for tenant in largest if left[tenant]]
        for one in waiting:
            for other in waiting:
                assert total[one] - total[other] <= largest[one] + largest[other]


def test_a_tenant_that_sends_ten_times_its_share_leaves_the_other_its_own() -> None:
    crowd = Crowd()
    served: Counter[str] = Counter()
    waited = []
    for second in range(60):
        # Ten a second are served; the other's share is five, of which it uses four.
        for _ in range(50):
            crowd.sends("hog", at=float(second))
        mine = {crowd.sends("other", at=float(second)) for _ in range(4)}
        routed = crowd.routed(room_for(10, float(second)))
        assert len(routed) == 10
        served += Counter(r.tenant for r in routed)
        waited.append(len(mine - {r.id for r in routed}))
    assert waited == [0] * 60
    assert served == {"other": 240, "hog": 360}


def test_a_pause_saves_nothing_up() -> None:
    crowd = Crowd()
    for _ in range(200):
        crowd.sends("busy")
    crowd.routed(room_for(100))
    for _ in range(100):
        crowd.sends("back")
    assert Counter(r.tenant for r in crowd.routed(room_for(20))) == {"busy": 10, "back": 10}


def test_work_counts_and_not_requests() -> None:
    crowd = Crowd()
    for _ in range(100):
        crowd.sends("long", prompt=900, output=50)
        crowd.sends("short", prompt=100, output=0)
    assert Counter(r.tenant for r in crowd.routed(room_for(44))) == {"long": 4, "short": 40}


def test_answers_that_were_longer_than_thought_are_paid_for() -> None:
    crowd = Crowd()
    for _ in range(50):
        crowd.sends("a")
        crowd.sends("b")
    crowd.routed(room_for(2))
    crowd.queue.charge("a", 800.0)
    assert Counter(r.tenant for r in crowd.routed(room_for(10))) == {"b": 7, "a": 3}


def test_priority_orders_a_tenants_own_requests_and_no_others() -> None:
    crowd = Crowd()
    usual = [crowd.sends("a") for _ in range(20)]
    urgent = [crowd.sends("a", priority=-1) for _ in range(2)]
    idle = crowd.sends("a", priority=5)
    other = [crowd.sends("b") for _ in range(20)]
    order = [r.id for r in crowd.routed(room_for(8))]
    assert [name for name in order if name[0] == "a"] == [*urgent, *usual[:2]]
    assert [name for name in order if name[0] == "b"] == other[:4]
    rest = [r.id for r in crowd.routed(room_for(100))]
    assert rest[-1] == idle


def test_a_full_queue_sheds_from_the_tenant_with_most_in_it() -> None:
    crowd = Crowd()
    crowd.queue.queue_limit = 5
    hog = [crowd.sends("hog") for _ in range(5)]
    crowd.sends("other")
    [shed] = crowd.queue.dispatch(room_for(0))
    assert isinstance(shed, Shed)
    assert shed.request.id == hog[-1]
    crowd.sends("hog")
    [shed] = crowd.queue.dispatch(room_for(0))
    assert shed.request.id == "hog6"


def test_one_that_was_given_more_is_not_served_late_at_the_others_cost() -> None:
    full = {"backlog": 50.0}
    for others in (False, True):
        crowd = Crowd(late_wait=10.0)
        crowd.sends("hog", at=0.0)
        crowd.routed(room_for(1))
        crowd.sends("hog", at=0.0, slo=SLO(1.0, 0.1))
        if others:
            crowd.sends("other", at=2.0)
            assert [r.tenant for r in crowd.routed(room_for(1, 2.0))] == ["other"]
            crowd.queue.charge("other", -100.0)
        assert crowd.queue.dispatch(room_for(0, 5.0, **full)) == []
        [late] = crowd.queue.dispatch(room_for(0, 11.0, **full))
        assert isinstance(late, Shed if others else Routed)


def test_tenants_without_end_leave_no_more_than_so_many_accounts() -> None:
    shares = Shares()
    waiting = Request("w", 0.0, 100, 50, PATIENT, tenant="waits")
    shares.wait(waiting)
    for number in range(3 * MOST_IDLE):
        request = Request(str(number), float(number), 100, 50, PATIENT, tenant=f"t{number}")
        shares.wait(request)
        shares.serve(request, "a")
        assert len(shares._flows) <= MOST_IDLE + 2
    # Those of late are there, and so is who waits.
    assert shares.is_ahead(f"t{3 * MOST_IDLE - 1}", 0.0)
    assert [flow.tenant for flow in shares.busy] == ["waits"]


@pytest.mark.parametrize("late", ["serve", "shed"])
def test_what_can_never_be_served_shuts_nobody_out(late: str) -> None:
    # Each of the hog's prompts is pressed from the start, and only an idle instance could take it.
    slo = SLO(10.0, 0.1)
    prompt = next(n for n in range(1000, 40_000, 100) if GPU.prefill(n) > 0.6 * slo.ttft)
    crowd = Crowd(late=late)
    served = 0
    for step in range(400):
        now = step / 10
        crowd.sends("hog", prompt, at=now, slo=slo)
        crowd.sends("small", 50, at=now, slo=slo)
        routed = crowd.routed(room_for(1, now, backlog=5.0))
        assert all(r.tenant == "small" for r in routed)
        served += len(routed)
    assert served > 200
