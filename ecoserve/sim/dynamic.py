"""A cluster that grows, shrinks, splits and merges while it serves.

The same objects decide as in the operator: ``scaling.signals`` and ``policy.autoscale`` how many
instances, ``policy.mitosis`` in which macro instances, ``policy.balance`` which of them gets a
request, ``policy.macro`` which of its instances.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ecoserve.policy import DEFAULT, balance, make, mitosis
from ecoserve.policy.autoscale import Step, decide
from ecoserve.policy.macro import MacroScheduler, Shed
from ecoserve.policy.signals import Settings
from ecoserve.policy.state import MacroView, Request
from ecoserve.scaling import queries
from ecoserve.scaling.recorder import Recorder, Samples
from ecoserve.scaling.signals import read
from ecoserve.sim.batch import Sequence
from ecoserve.sim.instance import Instance, Role
from ecoserve.sim.systems import Workshop

SCRAPE_S = 5.0
DECIDE_S = 15.0


@dataclass(frozen=True, slots=True)
class Moment:
    """What there was at a time: instances wanted, those that take requests, sizes of the macro
    instances, and what was done then, for people."""

    at: float
    wanted: int
    serving: int
    sizes: tuple[int, ...]
    done: str = ""


@dataclass(frozen=True, slots=True)
class Dynamic:
    """EcoServe on ``start`` instances that ``scaling`` changes, up to all of the cluster's; None:
    it stays as it is.

    ``bounds`` are mitosis', ``startup`` is how many seconds an instance needs before it takes
    requests. ``moments`` is filled while it runs, one each ``DECIDE_S``.
    """

    start: int
    bounds: mitosis.Bounds
    scaling: Settings | None = None
    startup: float = 30.0
    policy: str = DEFAULT
    moments: list[Moment] = field(default_factory=list)

    @property
    def name(self) -> str:
        return f"{self.policy}, {self.start} instances and more"

    def build(self, shop: Workshop) -> Growing:
        if not 1 <= self.start <= shop.cluster.instances:
            raise ValueError(
                f"dynamic.start must be 1 to {shop.cluster.instances}, not {self.start}"
            )
        return Growing(self, shop)


@dataclass(slots=True)
class _Member:
    """An instance that is in use."""

    instance: Instance
    group: str
    ready_at: float
    draining: bool = False

    def state(self, now: float) -> mitosis.State:
        if self.draining:
            return "draining" if self.requests else "drained"
        return "serving" if now >= self.ready_at else "starting"

    @property
    def requests(self) -> int:
        return self.instance.active + sum(not s.begun for s in self.instance.queue)


@dataclass(slots=True)
class _Counts:
    answered: int = 0
    ttft: float = 0.0
    violated: int = 0
    shed: int = 0
    routed: int = 0


class Growing:
    """The front of ``Dynamic``."""

    def __init__(self, system: Dynamic, shop: Workshop) -> None:
        policy = make(system.policy)
        role = Role(policy, shop.options.step_budget, adaptive=True)
        self.instances = shop.instances(role)
        self._system, self._shop, self._policy = system, shop, policy
        self._spare = [instance.name for instance in reversed(self.instances)]
        self._by_name = {instance.name: instance for instance in self.instances}
        self._groups: dict[str, MacroScheduler] = {}
        self._members: dict[str, _Member] = {}
        self._waiting: dict[str, Sequence] = {}
        self._layout = mitosis.Layout()
        self._wanted = system.start
        self._steps: list[Step] = []
        self._counts = _Counts()
        keep = 0.0
        if system.scaling is not None:
            expand, contract = system.scaling.expand, system.scaling.contract
            keep = max(
                *(expand.violations_for, expand.use_for, expand.ttft_for, expand.waiting_for),
                *(contract.use_for, contract.idle_for, contract.saved_for),
            )
        self._recorder = Recorder(SCRAPE_S, keep)
        self._ticking = False
        self._arrived = False
        self._dispatching = False
        self._wakeup = 0.0
        self._ttft_slo = 0.0
        self._arrange()
        for member in self._members.values():
            member.ready_at = 0.0

    # --- requests

    def arrive(self, sequence: Sequence) -> None:
        self._arrived = True
        self._ttft_slo = sequence.slo.ttft
        if not self._ticking:
            self._ticking = True
            self._tick(self._shop.clock())
        arrival = sequence.outcome.arrival
        request = Request(
            str(sequence.number), arrival.at, arrival.prompt, sequence.expected, sequence.slo
        )
        self._waiting[request.id] = sequence
        self._place(request)
        self._dispatch()

    def prefilled(self, sequence: Sequence, instance: Instance, since: float) -> None:
        raise AssertionError("these instances decode what they prefill")

    def ended(self, sequence: Sequence, instance: Instance) -> None:
        outcome = sequence.outcome
        self._counts.answered += 1
        self._counts.ttft += outcome.ttft
        self._counts.violated += not outcome.met
        if self._members[instance.name].draining:
            self._arrange()

    def reported(self, instance: Instance) -> None:
        self._dispatch()

    def _place(self, request: Request) -> None:
        now = self._shop.clock()
        able = {name: self._serving(name, now) for name in self._groups}
        places = balance.Places({n: [m.instance.name for m in some] for n, some in able.items()})
        loads = [
            sum(member.requests for member in some) + len(self._groups[name])
            for name, some in able.items()
        ]
        chosen = places.choose(request.id.encode(), loads)
        self._groups[chosen or next(iter(self._groups))].offer(request)

    def _serving(self, group: str, now: float) -> list[_Member]:
        return [
            member
            for member in self._members.values()
            if member.group == group and member.state(now) == "serving"
        ]

    def _dispatch(self) -> None:
        # Giving an instance work makes it report, which is no occasion to decide anew.
        if self._dispatching:
            return
        self._dispatching = True
        now = self._shop.clock()
        for name, queue in self._groups.items():
            if not len(queue):
                continue
            views = tuple(member.instance.view() for member in self._serving(name, now))
            for decision in queue.dispatch(MacroView(now, views)):
                sequence = self._waiting.pop(decision.request.id)
                if isinstance(decision, Shed):
                    self._counts.shed += 1
                    self._shop.shed(sequence)
                else:
                    self._counts.routed += 1
                    sequence.outcome.late = decision.late
                    self._by_name[decision.instance].add(sequence)
        self._dispatching = False
        due = [at for queue in self._groups.values() if (at := queue.next_wakeup(now)) is not None]
        if due and self._wakeup <= now:
            self._wakeup = min(due)
            self._shop.at(self._wakeup, self._dispatch)

    # --- instances

    def _arrange(self) -> None:
        """Decides and moves until everything is as it should be for now."""
        now = self._shop.clock()
        while True:
            snapshot = mitosis.Snapshot(
                self._layout,
                frozenset(self._groups),
                tuple(
                    mitosis.Instance(name, member.group, member.requests, member.state(now))
                    for name, member in self._members.items()
                ),
            )
            plan = mitosis.plan(snapshot, self._wanted, self._system.bounds, now)
            if plan.layout != self._layout:
                self._layout = plan.layout
                continue
            # One that drains is not there for another group before it is gone.
            able = [
                a for a in plan.actions if self._spare or not isinstance(a, mitosis.AddInstance)
            ]
            for action in able[:1]:
                self._do(action, now)
            if not able:
                return

    def _do(self, action: mitosis.Action, now: float) -> None:
        match action:
            case mitosis.CreateGroup(group):
                self._groups[group] = MacroScheduler(self._policy)
            case mitosis.RemoveGroup(group):
                queue = self._groups.pop(group)
                for request in (*queue.waiting, *queue.late):
                    self._place(request)
            case mitosis.MoveInstance(name, _, group):
                self._members[name].group = group
            case mitosis.AddInstance(group, _):
                name = self._spare.pop()
                ready = now + self._system.startup
                self._members[name] = _Member(self._by_name[name], group, ready)
                self._shop.at(ready, self._dispatch)
            case mitosis.DrainInstance(name):
                self._members[name].draining = True
            case mitosis.ResumeInstance(name):
                self._members[name].draining = False
            case mitosis.DeleteInstance(name):
                del self._members[name]
                self._spare.append(name)

    # --- scaling

    def _tick(self, decide_at: float) -> None:
        """Takes samples; decides when it is time; goes on while anything is there."""
        now = self._shop.clock()
        self._recorder.take(now, self._samples(now))
        if now >= decide_at:
            decide_at = now + DECIDE_S
            done = self._scale(now)
            self._arrange()
            serving = sum(member.state(now) == "serving" for member in self._members.values())
            sizes = tuple(size for _, size in self._layout.groups)
            self._system.moments.append(Moment(now, self._wanted, serving, sizes, done))
        self._ticking = self._arrived or any(m.requests for m in self._members.values())
        self._arrived = False
        if self._ticking:
            self._shop.at(now + SCRAPE_S, lambda: self._tick(decide_at))

    def _scale(self, now: float) -> str:
        settings = self._system.scaling
        if settings is None:
            return ""
        signals = read(self._recorder, self._ttft_slo, settings)
        most = len(self.instances)
        decision = decide(
            signals, self._wanted, self._system.start, most, settings, self._steps, now
        )
        if decision.action == "hold":
            return ""
        self._steps.append(Step(now, decision.before, decision.after))
        self._wanted = decision.after
        return f"from {decision.before} to {decision.after} instances: {decision.reason}"

    def _samples(self, now: float) -> Samples:
        serving = {name: m for name, m in self._members.items() if m.state(now) == "serving"}
        for member in serving.values():
            member.instance.measure(now)
        views = {name: member.instance.view() for name, member in serving.items()}
        counts, groups = self._counts, self._groups.items()
        return {
            queries.ACCEPTED: {(name,): 1.0 for name in serving},
            queries.USE: {(name,): member.instance.use for name, member in serving.items()},
            queries.SAVED: {
                (name,): view.decodes.mean_slack
                for name, view in views.items()
                if view.decodes.count
            },
            queries.WAITING: {(name,): float(len(queue.waiting)) for name, queue in groups},
            queries.LATE: {(name,): float(len(queue.late)) for name, queue in groups},
            queries.ANSWERED: {("",): counts.answered},
            queries.TTFT: {("",): counts.ttft},
            queries.VIOLATED: {("",): counts.violated},
            queries.SHED: {("",): counts.shed},
            queries.ROUTED: {("",): counts.routed},
        }
