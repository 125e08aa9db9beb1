"""Whatever happens to a cluster, every call is in one place, and what is counted adds up."""

from __future__ import annotations

import itertools
import json
from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ecoserve.policy import POLICIES
from ecoserve.policy.state import SLO
from ecoserve.proto.v1 import session_pb2
from ecoserve.scheduler import hello, work
from ecoserve.scheduler.cluster import Cluster
from ecoserve.scheduler.config import ClusterSpec, Macro, Slo
from ecoserve.scheduler.metrics import Metrics
from ecoserve.scheduler.requests import Picked, Ticket
from tests.scheduler.fakes import LATENCY, LIMITS

NAMES = ("a", "b", "c", "d")
MACROS = ("m0", "m1")

specs = st.builds(
    lambda homes, policy, late, limit: ClusterSpec(
        name="c",
        slo=Slo(ttft_s=3.0, tpot_s=0.2),
        policy=policy,
        late=late,
        late_wait_s=2.0,
        queue_limit=limit,
        macro_instances=tuple(
            Macro(name=m, instances=tuple(n for n in NAMES if homes.get(n) == m)) for m in MACROS
        ),
    ),
    st.fixed_dictionaries({name: st.sampled_from(["m0", "m0", "m1", ""]) for name in NAMES}),
    st.sampled_from([*POLICIES, "paced", "paced"]),
    st.sampled_from(["serve", "serve", "shed"]),
    st.sampled_from([1, 4, 1024]),
)
names = st.sampled_from(NAMES)


class Life(RuleBasedStateMachine):
    """A cluster, the calls that were offered to it, and where those that it routed have come."""

    @initialize(spec=specs)
    def begin(self, spec: ClusterSpec) -> None:
        self.now = 100.0
        self.cluster = Cluster(spec, self.now, Metrics())
        self.waiting: dict[str, Ticket] = {}
        self.elsewhere: dict[str, str] = {}
        self.at: dict[str, str] = {}
        self.numbers = itertools.count(1)
        for name in self.cluster.members:
            self.connect(name, "1", 0.0)

    @rule(spec=specs)
    def declare(self, spec: ClusterSpec) -> None:
        self.cluster.apply(spec, self.now)

    @rule(name=names, incarnation=st.sampled_from("12"), ramp=st.sampled_from([0.0, 20.0]))
    def connect(self, name: str, incarnation: str, ramp: float) -> None:
        instance = self.cluster.connect(
            hello.check(
                session_pb2.Hello(
                    cluster="c", instance=name, incarnation=incarnation, model="m",
                    address=f"127.0.0.1:{9000 + NAMES.index(name)}",
                    limits=LIMITS, latency=LATENCY,
                )
            )
        )  # fmt: skip
        if name in self.cluster.members:
            instance.accept(self.now, ramp)
            self.report(name, 1.0, 0.0, 0, draining=False, dead=False)

    @rule(name=names)
    def disconnect(self, name: str) -> None:
        instance = self.cluster.instances.get(name)
        if instance is not None and instance.connected:
            self.cluster.disconnect(instance, self.now)

    @rule(
        name=names,
        present=st.sampled_from([0.0, 0.5, 1.0, 1.0]),
        running=st.sampled_from([0.0, 0.5, 1.0, 1.0]),
        status=st.sampled_from([0, 0, 200, 499, 500, 503]),
        draining=st.sampled_from([False] * 19 + [True]),
        dead=st.sampled_from([False] * 19 + [True]),
    )
    def report(
        self, name: str, present: float, running: float, status: int, *, draining: bool, dead: bool
    ) -> None:
        """Of the calls that have come, a share is named, and a share of those is in the engine; if
        there is a ``status``, the first ends with it."""
        instance = self.cluster.instances.get(name)
        if instance is None or not instance.connected:
            return
        self.arrive()
        here = [call for call, at in self.at.items() if at == name]
        finished = []
        if status and here:
            del self.at[here[0]]
            finished.append(
                session_pb2.Finished(
                    number=next(self.numbers), id=here.pop(0), status=status,
                    prompt_tokens=10, generated=5,
                )
            )  # fmt: skip
        here = here[: int(present * len(here))]
        cut = int(running * len(here))
        report = session_pb2.Report(
            phase="decode", kv_free_tokens=5000, batch_limit=8, present=here, finished=finished,
            running=[
                session_pb2.Decode(id=call, context=50, generated=1, slack_s=1.0, tpot_s=0.2)
                for call in here[:cut]
            ],
            waiting=[session_pb2.Prompt(id=call, tokens=500) for call in here[cut + 1 :]],
            draining=draining, engine_dead=dead,
        )  # fmt: skip
        self.cluster.report(instance, report, self.now)

    @rule(
        length=st.integers(1, 20_000),
        ttft=st.sampled_from([0.3, 3.0]),
        patience=st.sampled_from([0.5, 30.0]),
        key=st.sampled_from([b"x", b"y", b"z"]),
        tenant=st.sampled_from("pq"),
        allowed=st.sampled_from([None] * 4 + [frozenset({"127.0.0.1:9000", "127.0.0.1:9003"})]),
        elsewhere=st.sampled_from(["", "", *NAMES]),
    )
    def offer(
        self,
        length: int,
        ttft: float,
        patience: float,
        key: bytes,
        tenant: str,
        allowed: frozenset[str] | None,
        elsewhere: str,
    ) -> None:
        """If it is routed, it arrives there, or after a retry ``elsewhere``."""
        call = f"r{next(self.numbers)}"
        self.elsewhere[call] = elsewhere
        body = {"model": "m", "messages": [{"role": "user", "content": "x" * length}]}
        self.waiting[call] = self.cluster.offer(
            call,
            work.read("/v1/chat/completions", json.dumps(body).encode()),
            SLO(ttft, 0.2),
            self.now,
            patience=patience,
            conversation=key,
            tenant=tenant,
            allowed=allowed,
        )

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        call = data.draw(st.sampled_from(list(self.waiting)))
        del self.waiting[call]
        self.cluster.cancel(call)

    @rule(seconds=st.sampled_from([0.02, 0.3, 1.0, 4.0]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.cluster.pump(self.now)
        self.cluster.sweep(self.now)
        self.arrive()

    def arrive(self) -> None:
        """What was routed comes to where it was sent, or elsewhere."""
        for call, ticket in list(self.waiting.items()):
            if ticket.outcome is not None:
                del self.waiting[call]
                if isinstance(ticket.outcome, Picked):
                    self.at[call] = self.elsewhere[call] or ticket.outcome.instance

    @invariant()
    def every_call_is_in_one_place(self) -> None:
        cluster = self.cluster
        undecided = {call for call, ticket in self.waiting.items() if ticket.outcome is None}
        assert set(cluster.tickets) == undecided
        queued = [r.id for q in cluster.macros.values() for r in (*q.waiting, *q.late)]
        assert Counter([*queued, *cluster._homeless]) == Counter(list(cluster.tickets))
        reserved = [
            (call, instance.name)
            for instance in cluster.instances.values()
            for call in instance.reservations
        ]
        assert Counter(reserved) == Counter(list(cluster.ledger._reserved.items()))
        assert not undecided & {call for call, _ in reserved}

    @invariant()
    def what_is_counted_adds_up(self) -> None:
        homes = self.cluster.homes
        for macro, home in homes._homes.items():
            able = [i for i in home if i.routable]
            assert homes.routable(macro) == able
            assert homes._loads[macro] == sum(i.load for i in able)
        for instance in self.cluster.instances.values():
            held = instance.reservations.values()
            assert abs(instance._reserved_seconds - sum(r.seconds for r in held)) < 1e-9
            assert instance._reserved_kv == sum(r.kv for r in held)
            assert instance._reserved_sequences == sum(r.request.sequences for r in held)


TestLife = Life.TestCase
TestLife.settings = settings(max_examples=50, stateful_step_count=50, deadline=None)
