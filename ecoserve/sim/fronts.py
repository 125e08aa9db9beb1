"""What stands in front of the instances: where a request goes, and where its KV goes."""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Sequence_
from dataclasses import dataclass, field
from typing import Literal

from ecoserve.policy.macro import MacroScheduler, Shed
from ecoserve.policy.routing import load
from ecoserve.policy.state import MacroView, Request
from ecoserve.sim.batch import Sequence
from ecoserve.sim.instance import Instance
from ecoserve.sim.transfer import Port, transfer

Routing = Literal["round-robin", "least-loaded"]
At = Callable[[float, Callable[[], None]], None]

LAYERS = 48
"""Layers of a model, as far as it matters here: the last one's KV leaves after the prefill."""


class Router:
    """Chooses among instances: each in turn, or the one that owes least work within a second by
    the same measure and of the same reports as EcoServe's, with what ``beyond`` it is to come."""

    def __init__(
        self,
        instances: Sequence_[Instance],
        routing: Routing,
        beyond: Callable[[Instance], float] = lambda _: 0.0,
    ) -> None:
        self._instances = instances
        self._turns = itertools.cycle(instances) if routing == "round-robin" else None
        self._beyond = beyond

    def choose(self) -> Instance:
        if self._turns is not None:
            return next(self._turns)
        return min(self._instances, key=lambda i: load(i.view()) + self._beyond(i))


class Direct:
    """A router alone: requests wait at the instances."""

    def __init__(self, instances: Sequence_[Instance], routing: Routing) -> None:
        self.instances = instances
        self._router = Router(instances, routing)

    def arrive(self, sequence: Sequence) -> None:
        self._router.choose().add(sequence)

    def prefilled(self, sequence: Sequence, instance: Instance, since: float) -> None:
        raise AssertionError("these instances decode what they prefill")

    def ended(self, sequence: Sequence, instance: Instance) -> None:
        pass

    def reported(self, instance: Instance) -> None:
        pass


class Macro:
    """EcoServe's macro scheduler, asked for each request, on each report while requests wait, and
    when it wants to be."""

    def __init__(
        self,
        instances: Sequence_[Instance],
        scheduler: MacroScheduler,
        clock: Callable[[], float],
        at: At,
        report_delay: float,
        shed: Callable[[Sequence], None],
    ) -> None:
        self.instances = instances
        self._scheduler = scheduler
        self._clock = clock
        self._at = at
        self._delay = report_delay
        self._shed = shed
        self._by_name = {instance.name: instance for instance in instances}
        self._waiting: dict[str, Sequence] = {}
        self._wakeup = 0.0
        self._dispatching = False

    def arrive(self, sequence: Sequence) -> None:
        arrival = sequence.outcome.arrival
        held = {}
        if arrival.blocks:
            hits = ((instance.name, instance.held(sequence)) for instance in self.instances)
            held = {name: tokens for name, tokens in hits if tokens}
        request = Request(
            str(sequence.number),
            arrival.at,
            arrival.prompt,
            sequence.expected,
            sequence.slo,
            held=held,
        )
        self._waiting[request.id] = sequence
        self._scheduler.offer(request)
        self._dispatch()

    def prefilled(self, sequence: Sequence, instance: Instance, since: float) -> None:
        raise AssertionError("these instances decode what they prefill")

    def ended(self, sequence: Sequence, instance: Instance) -> None:
        pass

    def reported(self, instance: Instance) -> None:
        if not len(self._scheduler):
            return
        if self._delay:
            self._at(self._clock() + self._delay, self._dispatch)
        else:
            self._dispatch()

    def _dispatch(self) -> None:
        # Giving an instance work makes it report, which is no occasion to decide anew.
        if self._dispatching or not len(self._scheduler):
            return
        self._dispatching = True
        now = self._clock()
        view = MacroView(now, tuple(instance.view() for instance in self.instances))
        for decision in self._scheduler.dispatch(view):
            sequence = self._waiting.pop(decision.request.id)
            if isinstance(decision, Shed):
                self._shed(sequence)
            else:
                sequence.outcome.late = decision.late
                self._by_name[decision.instance].add(sequence)
        self._dispatching = False
        wakeup = self._scheduler.next_wakeup(now)
        if wakeup is not None and self._wakeup <= now:
            self._wakeup = wakeup
            self._at(wakeup, self._dispatch)


@dataclass(frozen=True, slots=True)
class _Prefilled:
    """A sequence whose KV is to go to a decode instance.

    ``holder`` is the prefill instance whose memory it is in; None: a pool. ``since`` is when it may
    have begun to leave if it can leave at ``ready``.
    """

    sequence: Sequence
    holder: Instance | None
    since: float
    ready: float


@dataclass(slots=True)
class _Queue:
    """What is prefilled, in order, and the decode instances that pull it when they have room."""

    targets: Sequence_[Instance]
    waiting: deque[_Prefilled] = field(default_factory=deque)
    tokens: int = 0

    def put(self, what: _Prefilled) -> None:
        self.waiting.append(what)
        self.tokens += what.sequence.prompt

    def pop(self) -> None:
        self.tokens -= self.waiting.popleft().sequence.prompt


class Disaggregated:
    """Prefill and decode instances, and the KV's way between them.

    ``groups`` are prefill instances with the decode instances that they may hand over to. Least
    loaded: a prompt goes where prefill, the way of its KV and the group's decodes together are
    least loaded; what a group has prefilled waits in one queue, and its head goes to the decode
    instance with the most KV room and the least KV on its way, once there is enough. Round-robin:
    prompts go to the prefill instances in turn, what one has prefilled to its decode instances in
    turn.
    ``leaving`` and ``entering`` are the ports of each instance. With ``pool`` KV leaves by the one
    at once into a pool that has room for all, and enters by the other when it is pulled; else both
    are taken up together, and the prefill instance holds the KV until it is through. ``layerwise``:
    KV leaves while the prompt is computed, all but the last layer's.
    """

    def __init__(
        self,
        groups: Sequence_[tuple[Sequence_[Instance], Sequence_[Instance]]],
        leaving: dict[str, Port],
        entering: dict[str, Port],
        clock: Callable[[], float],
        at: At,
        *,
        routing: Routing,
        pool: bool,
        layerwise: bool,
    ) -> None:
        prefills = [instance for group, _ in groups for instance in group]
        self.instances = prefills + [instance for _, group in groups for instance in group]
        self._router = Router(prefills, routing, self._beyond)
        self._turns: dict[str, Iterator[_Queue]] = {}
        self._queues: dict[str, list[_Queue]] = {}
        self._queue_of: dict[str, _Queue] = {}
        for some, decodes in groups:
            apart = routing == "round-robin"
            queues = [_Queue([d]) for d in decodes] if apart else [_Queue(decodes)]
            self._queues |= {prefill.name: queues for prefill in some}
            turns = itertools.cycle(queues)
            self._turns |= {prefill.name: turns for prefill in some}
            self._queue_of |= {d.name: queue for queue in queues for d in queue.targets}
        self._leaving = leaving
        self._entering = entering
        self._clock = clock
        self._at = at
        self._pool = pool
        self._layerwise = layerwise

    def arrive(self, sequence: Sequence) -> None:
        self._router.choose().add(sequence)

    def prefilled(self, sequence: Sequence, instance: Instance, since: float) -> None:
        now = self._clock()
        queue = next(self._turns[instance.name])
        if not self._pool:
            self._put(queue, _Prefilled(sequence, instance, since, now))
            return

        def pooled() -> None:
            instance.release(sequence)
            self._put(queue, _Prefilled(sequence, None, math.inf, math.inf))

        self._at(self._transfer(instance, sequence, since, self._leaving[instance.name]), pooled)

    def ended(self, sequence: Sequence, instance: Instance) -> None:
        if instance.name in self._queue_of:
            self._pull(self._queue_of[instance.name])

    def reported(self, instance: Instance) -> None:
        pass

    def _beyond(self, prefill: Instance) -> float:
        """Seconds that a prompt meets after its prefill there: KV that leaves before its own, the
        work of where it would decode, and KV that waits, as the share of all room that it takes.

        Without it an instance that has just prefilled counts as idle, and gets all prompts, however
        busy its wire and the instances that decode for it are.
        """
        leaving = max(self._leaving[prefill.name].free_at - self._clock(), 0.0)
        (queue,) = self._queues[prefill.name]
        room = sum(target.cost.kv_tokens for target in queue.targets)
        decoding = min(load(target.view()) for target in queue.targets)
        return leaving + decoding + queue.tokens / room

    def _put(self, queue: _Queue, what: _Prefilled) -> None:
        queue.put(what)
        self._pull(queue)

    def _pull(self, queue: _Queue) -> None:
        while queue.waiting:
            what = queue.waiting[0]
            targets = sorted(queue.targets, key=self._taken)
            target = next((t for t in targets if t.reserve(what.sequence)), None)
            if target is None:
                return
            queue.pop()
            self._move(what, target)

    def _taken(self, target: Instance) -> float:
        """The share of its KV room that is taken, and the seconds until its wire is free."""
        memory = target.memory
        entering = max(self._entering[target.name].free_at - self._clock(), 0.0)
        return entering + 1 - memory.available / memory.total

    def _move(self, what: _Prefilled, target: Instance) -> None:
        now = self._clock()
        ports = [self._entering[target.name]]
        since = now
        if what.holder is not None:
            ports.append(self._leaving[what.holder.name])
            since = what.since if now == what.ready else now

        def moved() -> None:
            if what.holder is not None:
                what.holder.release(what.sequence)
            target.receive(what.sequence)

        self._at(self._transfer(target, what.sequence, since, *ports), moved)

    def _transfer(
        self, instance: Instance, sequence: Sequence, since: float, *ports: Port
    ) -> float:
        now = self._clock()
        size = sequence.prompt * instance.cost.kv_bytes
        if not self._layerwise:
            since = now
        return transfer(since, size, *ports, rest=size / LAYERS, computed=now)
