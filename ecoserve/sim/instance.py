"""An instance: one engine that runs the steps that its policy plans.

Its pipeline has ``cost.stages`` stages (one without PP). The running decodes are dealt to as many
micro-batches, each with at most one step in flight; all share the queue of prompts. The latency
model that policies see is fitted to what the steps took, never the truth. With PP it is of the
whole way through the pipeline, so that a step that keeps within TPOT holds each stage for TPOT/PP.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random
from typing import Protocol

from ecoserve.policy.batching import next_limit
from ecoserve.policy.latency import LatencyFit, LatencyModel, StepSample
from ecoserve.policy.phases import PhaseTracker
from ecoserve.policy.state import (
    NO_DECODES,
    Decodes,
    EngineView,
    InstanceView,
    Prompt,
    StepPlan,
)
from ecoserve.policy.use import UseMeter
from ecoserve.sim.batch import Batch, Sequence
from ecoserve.sim.memory import Memory
from ecoserve.sim.records import Cluster, Options, StepRecord
from ecoserve.sim.reports import Pending, Report, Reports, together

USE_EVERY = 0.5
LIMIT_EVERY = 1.0
# Decodes share one micro-batch while its way through the pipeline takes no more of their TPOT.
PACKED = 0.85
# The least prompt tokens of a micro-batch without decodes while others hold decodes.
LEAST_CHUNK = 64


class Steps(Protocol):
    """The part of a policy that an instance needs."""

    def step(self, view: EngineView) -> StepPlan: ...


class Front(Protocol):
    """What a system does when something happens at an instance."""

    def prefilled(self, sequence: Sequence, instance: Instance, since: float) -> None:
        """Its first token exists, and it is to decode elsewhere. Its step began at ``since``."""
        ...

    def ended(self, sequence: Sequence, instance: Instance) -> None:
        """Its last token exists and its KV is free."""
        ...

    def reported(self, instance: Instance) -> None:
        """The instance has reported its state."""
        ...


@dataclass(frozen=True, slots=True)
class Role:
    """What kind of engine an instance is.

    ``decodes``: it keeps what it has prefilled, else it hands it over. ``shares``: prompts that
    begin alike may share KV. ``adaptive``: as EcoServe's worker, it moves its batch limit with its
    use, and sizes micro-batches without decodes by what the decodes of the others can spare.
    """

    policy: Steps
    step_budget: int
    decodes: bool = True
    shares: bool = True
    adaptive: bool = False


@dataclass(slots=True)
class _Step:
    batch: Batch
    sample: StepSample
    whole: list[Sequence]


class Instance:
    """One engine. The event loop is given as ``at(time, action)``, which calls ``action()`` then,
    and ``clock``."""

    def __init__(
        self,
        name: str,
        cluster: Cluster,
        role: Role,
        options: Options,
        latency: LatencyModel,
        tpot: float,
        clock: Callable[[], float],
        at: Callable[[float, Callable[[], None]], None],
        steps: list[StepRecord],
    ) -> None:
        self.name = name
        self.role = role
        self.cost = cluster.cost
        self.stages = cluster.cost.stages
        self.memory = Memory(
            cluster.cost.kv_tokens,
            options.block,
            options.watermark,
            options.prefix_sharing and role.shares,
        )
        self.queue: list[Sequence] = []  # begun first
        self.active = 0  # sequences that hold KV
        self.use = 0.0
        self.limit = options.max_num_seqs
        self.fit = LatencyFit(latency, every=options.fit_every)
        self.tracker = PhaseTracker(now=0.0)
        self._prompts: list[Prompt] = []  # of the queue, as policies see them
        self._options = options
        self._tpot = tpot
        self._clock = clock
        self._at = at
        self._steps = steps
        self._random = Random(f"{options.seed}/{name}")
        self._batches = [Batch(options.block) for _ in range(self.stages)]
        self._busy = [False] * self.stages  # micro-batches in flight
        self._incoming: list[list[Sequence]] = [[] for _ in range(self.stages)]
        self._stage_free = [0.0] * self.stages
        self._turn = 0
        self._waiting = Pending()
        self._recent = Pending()  # those that came after the last phase switch
        self._meter = UseMeter(0.0)
        self._use_at = self._limit_at = 0.0
        self.reports = Reports(name, options.report_delay)
        self._report(NO_DECODES, 0.0)

    def start(self, front: Front, ended: Callable[[Sequence], None]) -> None:
        """From now on the front is told what happens here."""
        self._front = front
        self._ended = ended

    # --- what comes and goes

    def fits(self, prompt: int, output: int) -> bool:
        """Whether a request of these lengths can be served, wherever it is preempted: it then comes
        back as one prompt, which must leave the reserve alone."""
        memory = self.memory
        return memory.blocks(prompt + output - 1) <= memory.total - memory.reserve

    def held(self, sequence: Sequence) -> int:
        """Tokens of its prompt that are in the prefix cache."""
        return self.memory.hit(sequence)

    def add(self, sequence: Sequence) -> None:
        """A request to prefill (and to decode)."""
        now = self._clock()
        sequence.outcome.instance = self.name
        sequence.outcome.routed = now
        sequence.entered = now
        sequence.computed = self.memory.hit(sequence)
        self._enqueue(sequence, len(self.queue))
        left = sequence.prompt - sequence.computed
        seconds = self.slots.prefill(left, sequence.computed)
        self.reports.routed(seconds, left + sequence.expected)
        self.poll()

    def reserve(self, sequence: Sequence) -> bool:
        """Takes memory and a place in the batch for a sequence whose KV is to come; False if there
        is none."""
        if self.active >= self.limit or not self.memory.has_room(sequence, sequence.prompt):
            return False
        self.memory.admit(sequence, sequence.prompt)
        self.active += 1
        return True

    def receive(self, sequence: Sequence) -> None:
        """The KV of a sequence for which there was reserved is there."""
        sequence.outcome.instance = self.name
        sequence.entered = self._clock()
        sequence.computed = sequence.prompt
        self._join(sequence)
        self.poll()

    def release(self, sequence: Sequence) -> None:
        """The KV of a sequence that was handed over is not needed any more."""
        self.active -= 1
        self.memory.release(sequence, sequence.prompt + sequence.generated - 1)
        self.poll()

    def _enqueue(self, sequence: Sequence, place: int) -> None:
        self.queue.insert(place, sequence)
        self._prompts.insert(place, self._prompt(sequence))
        self._count(sequence, 1)

    def _count(self, sequence: Sequence, sign: int) -> None:
        self._waiting.add(sequence, sign)
        if sequence.entered > self.tracker.switched_at:
            self._recent.add(sequence, sign)

    @staticmethod
    def _prompt(sequence: Sequence) -> Prompt:
        return Prompt(
            str(sequence.number),
            sequence.prompt + sequence.generated - sequence.computed,
            sequence.computed,
            sequence.deadline,
            sequence.slo.ttft,
            sequence.begun,
        )

    # --- steps

    def poll(self) -> None:
        """Starts what can be started."""
        now = self._clock()
        if now < self._stage_free[0] or all(self._busy):
            return
        for _ in range(self.stages):
            turn = self._turn
            self._turn = (turn + 1) % self.stages
            if not self._busy[turn] and self._start(turn, now):
                return
        if not any(self._busy):
            self._report(NO_DECODES, now)
            self._front.reported(self)

    def _start(self, turn: int, now: float) -> bool:
        """Begins a step of that micro-batch; False if there is nothing that it can do."""
        batch = self._batches[turn]
        if self._incoming[turn]:
            for sequence in self._incoming[turn]:
                batch.add(sequence, sequence.entered <= self.tracker.switched_at)
            self._incoming[turn].clear()
        blocked = bool(self.queue) and not self._admissible(self.queue[0])
        if not batch.count and (blocked or not self.queue):
            return False
        if self.role.adaptive:
            self.measure(now)
        decodes = batch.decodes(now)
        view = self._view(now, decodes, batch, blocked)
        plan = self.role.policy.step(view)
        if not batch.count and plan.kind != "prefill":
            plan = StepPlan("prefill", view.step_budget, "nothing to decode")
        if plan.kind != "decode" and (blocked or not self.queue):
            plan = StepPlan("decode", 0, "no prompt can be admitted")
        if self.tracker.advance(plan, now):
            for one in self._batches:
                one.settle_all()
            self._recent = Pending()
        self._run(turn, batch, plan, decodes, now)
        return True

    def _view(self, now: float, decodes: Decodes, batch: Batch, blocked: bool) -> EngineView:
        budget = self.role.step_budget
        if self.stages > 1:
            # Every step holds up all micro-batches. A token of those in flight is on its way.
            least = decodes.least_slack
            for other, busy in zip(self._batches, self._busy, strict=True):
                if other is not batch and other.count:
                    its = other.decodes(now)
                    slack = its.least_slack + (its.tpot if busy else 0.0)
                    least = min(least, slack)
                    if not decodes.count and self.role.adaptive:
                        model = self.fit.model
                        time = min(slack, its.tpot) / (1 + model.error)
                        budget = min(budget, model.prefill_tokens_within(time))
            if decodes.count:
                decodes = replace(decodes, least_slack=least)
            budget = max(budget, min(LEAST_CHUNK, self.role.step_budget))
        tracker = self.tracker
        return EngineView(
            now,
            tracker.phase,
            now - tracker.switched_at,
            tracker.prefill_steps,
            self._prompts,
            decodes,
            self.memory.available * self.memory.block,
            self.use,
            budget,
            self.fit.model,
            blocked,
        )

    def _run(self, turn: int, batch: Batch, plan: StepPlan, decodes: Decodes, now: float) -> None:
        report = self._report(decodes, now)
        count = context = 0
        if plan.kind != "prefill":
            self._make_room(batch)
            count, context = batch.count, batch.context
            batch.begin(now)
        whole: list[Sequence] = []
        tokens, pairs = 0, 0.0
        if plan.kind != "decode":
            most = min(plan.prefill_tokens, max(self.role.step_budget - count, 1))
            tokens, pairs = self._take_prompts(most, whole)
        stage = self.cost.step(tokens, pairs, count, context)
        if self._options.noise:
            stage *= max(1 + self._random.gauss(0.0, self._options.noise), 0.1)
        end = now + stage
        self._stage_free[0] = end
        seconds = stage
        if self.stages > 1:
            self._at(end, self.poll)
            handoff = self.cost.handoff(tokens + count)
            seconds = self.stages * stage + (self.stages - 1) * handoff
            for i in range(1, self.stages):
                end = max(end + handoff, self._stage_free[i]) + stage
                self._stage_free[i] = end
        self._busy[turn] = True
        sample = StepSample(tokens, pairs, count, context, seconds)
        step = _Step(batch, sample, whole)
        self._at(end, lambda: self._end(turn, step))
        if self._options.keep_steps:
            self._steps.append(
                StepRecord(self.name, now, end, sample.kind, tokens, count, plan.reason)
            )
        report.estimate = self.fit.predict(sample) / self.stages
        report.prefills = tokens > 0
        self._front.reported(self)

    def _admissible(self, sequence: Sequence) -> bool:
        if sequence.begun:
            return True
        total = sequence.prompt + sequence.generated
        return self.active < self.limit and self.memory.has_room(sequence, total)

    def _take_prompts(self, budget: int, whole: list[Sequence]) -> tuple[int, float]:
        """Takes up to ``budget`` prompt tokens from the queue's head; what is thereby computed in
        full goes to ``whole``."""
        tokens, pairs = 0, 0.0
        while self.queue and tokens < budget:
            sequence = self.queue[0]
            if not self._admissible(sequence):
                break
            self._count(sequence, -1)
            total = sequence.prompt + sequence.generated
            if not sequence.begun:
                self.active += 1
                sequence.begun = True
                sequence.computed = self.memory.admit(sequence, total)
            chunk = min(total - sequence.computed, budget - tokens)
            tokens += chunk
            pairs += chunk * (sequence.computed + chunk / 2)
            sequence.computed += chunk
            if sequence.computed < total:
                self._count(sequence, 1)
                self._prompts[0] = self._prompt(sequence)
                break
            del self.queue[0], self._prompts[0]
            whole.append(sequence)
        return tokens, pairs

    def _make_room(self, batch: Batch) -> None:
        """Takes the KV blocks of the next token; preempts, latest first, until there are enough."""
        while batch.count and batch.blocks_needed > self.memory.available:
            victim = next(reversed(batch.running))
            self._leave(batch, victim)
            victim.begun = False
            victim.computed = self.held(victim)
            victim.outcome.preemptions += 1
            self._enqueue(victim, 1 if self.queue and self.queue[0].begun else 0)
        self.memory.take(batch.blocks_needed)

    def _leave(self, batch: Batch, sequence: Sequence) -> None:
        batch.remove(sequence, sequence.entered <= self.tracker.switched_at)
        self.active -= 1
        self.memory.release(sequence, sequence.prompt + sequence.generated - 1)

    def _end(self, turn: int, step: _Step) -> None:
        now = self._clock()
        self._busy[turn] = False
        self.fit.observe(step.sample)
        if self.role.adaptive:
            self._meter.add(now, step.sample)
        if step.sample.batch:
            for sequence in step.batch.advance():
                self._leave(step.batch, sequence)
                self._finish(sequence, now)
        for sequence in step.whole:
            self.memory.share(sequence)
            sequence.generated += 1
            if math.isnan(sequence.outcome.first):
                sequence.outcome.first = now
            if sequence.generated == sequence.output:
                self.active -= 1
                self.memory.release(sequence, sequence.prompt + sequence.generated - 1)
                self._finish(sequence, now)
            elif self.role.decodes:
                self._join(sequence)
            else:
                self._front.prefilled(sequence, self, now - step.sample.seconds)
        self.poll()

    def _finish(self, sequence: Sequence, now: float) -> None:
        sequence.outcome.end = now
        self._ended(sequence)
        self._front.ended(sequence, self)

    def _join(self, sequence: Sequence) -> None:
        self._incoming[self._group(sequence) if self.stages > 1 else 0].append(sequence)

    def _group(self, sequence: Sequence) -> int:
        """The micro-batch that a sequence is to decode in."""
        costs = []
        for number, (batch, coming) in enumerate(zip(self._batches, self._incoming, strict=True)):
            context = batch.context + sum(s.prompt + s.generated for s in (*coming, sequence))
            cost = self.fit.model.decode(batch.count + len(coming) + 1, context)
            if self._options.packed and cost <= PACKED * sequence.slo.tpot:
                return number
            costs.append(cost)
        return costs.index(min(costs))

    def measure(self, now: float) -> None:
        """Works out use, and the batch limit that follows it, as the worker does."""
        most = self._options.max_num_seqs
        if now - self._use_at >= USE_EVERY:
            self._use_at = now
            self.use = self._meter.use(
                now,
                self.slots,
                tpot=self._tpot,
                max_batch=most,
                kv_tokens=self.memory.total * self.memory.block,
                step_budget=self.role.step_budget,
            )
        if self.active >= self.limit or now - self._limit_at >= LIMIT_EVERY:
            self._limit_at = now
            low = max(1, most // 4)
            self.limit = next_limit(self.limit, self.use, low, most, running=self.active)

    # --- reports

    @property
    def slots(self) -> LatencyModel:
        """The latency model in time of the pipeline that a step takes up, for throughput."""
        model = self.fit.model
        if self.stages == 1:
            return model
        p = self.stages
        used = max(sum(batch.count > 0 for batch in self._batches), 1)
        return replace(
            model,
            prefill_fixed=model.prefill_fixed / p,
            prefill_token=model.prefill_token / p,
            prefill_pair=model.prefill_pair / p,
            decode_fixed=model.decode_fixed * used / p,
            decode_sequence=model.decode_sequence / p,
            decode_context=model.decode_context / p,
        )

    def _report(self, decodes: Decodes, now: float) -> Report:
        model = self.slots
        batches = self._batches
        if self.stages > 1:
            decodes = together([batch.decodes(now) for batch in batches])
        settled, slack = 0, 0.0
        missing = 0
        for batch in batches:
            count, total = batch.settled_slack(now)
            settled += count
            slack += total
            missing += batch.missing
        waiting = self._waiting
        demand = waiting.tokens + waiting.expected + missing
        if self._prompts and self._prompts[0].begun:
            demand -= self._prompts[0].tokens  # their blocks are taken
        free = self.memory.available * self.memory.block
        report = Report(
            now,
            self.tracker.phase,
            self.tracker.switched_at,
            waiting.seconds(model),
            self._recent.seconds(model),
            decodes,
            slack / settled if settled else math.inf,
            free - demand,
            self.limit - waiting.count - decodes.count,
            self.use,
            model,
        )
        self.reports.file(report)
        return report

    def view(self) -> InstanceView:
        """The instance as routing sees it."""
        return self.reports.view(self._clock())
