"""Carries out a plan: gets to know the endpoint, plays the steps, searches the goodput."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Protocol

from ecoserve.bench import endpoint
from ecoserve.bench.endpoint import Model, Unloaded
from ecoserve.bench.judge import Summary, Window, summarise_all
from ecoserve.bench.load import Client, Outcome
from ecoserve.bench.plan import Kind, Plan
from ecoserve.bench.play import Run
from ecoserve.bench.prompts import Writer
from ecoserve.bench.search import Bisection, sealed
from ecoserve.bench.workload import Conversation, Workload, source
from ecoserve.policy.state import SLO

# Text of different runs must differ, and that of the unloaded calls from all of them.
FIRST_SALT = 1000
# Conversations are drawn so many at a time for closed loops, which use as many as they can.
_DRAWN = 256


@dataclass(frozen=True, slots=True)
class Played:
    """One run of a step."""

    seed: int
    outcomes: tuple[Outcome, ...]
    window: Window


@dataclass(frozen=True, slots=True)
class Step:
    """A load that was played, over ``runs`` of different seeds; ``load`` is concurrency or
    requests a second.

    ``decided_early`` if it was ended once too many calls had missed their SLOs; its figures are
    then of a run cut short. ``interrupted`` if the user ended it.
    """

    kind: Kind
    load: float
    runs: tuple[Played, ...]
    summary: Summary
    decided_early: bool = False
    interrupted: bool = False

    def attained(self, target: float) -> bool:
        """Whether enough calls met both SLOs."""
        met = self.summary.attained
        return met is not None and met >= target and not self.decided_early


@dataclass(slots=True)
class Found:
    """All that a bench has found, so far or in the end."""

    plan: Plan
    model: Model | None = None
    writer: Writer | None = None
    alone: Unloaded | None = None
    slo: SLO | None = None
    steps: list[Step] = field(default_factory=list)
    search: Bisection | None = None
    interrupted: bool = False


class Watcher(Protocol):
    """Is told how a bench goes on."""

    def known(self, found: Found) -> None:
        """The endpoint is known and its unloaded figures are."""

    def began(self, kind: Kind, load: float, calls: int | None, seconds: float) -> None:
        """A run began, of so many calls (None: as many as fit into ``seconds``)."""

    def ended(self, outcome: Outcome) -> None:
        """A call ended."""

    def stepped(self, step: Step) -> None:
        """A step is over."""


class Bench:
    """One bench. ``found`` holds what was measured, whenever it is looked at."""

    def __init__(self, plan: Plan, watcher: Watcher) -> None:
        self.found = Found(plan)
        self._plan = plan
        self._watcher = watcher
        self._run: Run | None = None
        self._starting: asyncio.Task[None] | None = None
        self._runs = 0
        self._workload = Workload(
            source(data=plan.data, prompt=plan.prompt, output=plan.output, cv=plan.cv),
            plan.turns,
            plan.think,
        )

    def stop(self) -> None:
        """Ends the bench; what was measured is kept."""
        self.found.interrupted = True
        if self._run is not None:
            self._run.stop()
        elif self._starting is not None:
            self._starting.cancel()

    async def play(self) -> None:
        """Plays it all. Raises ``EndpointError``."""
        async with Client(self._plan.url, api_key=self._plan.api_key) as client:
            self._starting = asyncio.create_task(self._meet(client))
            try:
                await self._starting
            except asyncio.CancelledError:
                if self.found.interrupted:
                    return
                raise
            await self._steps(client)
            if self._plan.search and not self.found.interrupted:
                await self._search(client)

    async def _meet(self, client: Client) -> None:
        plan, found = self._plan, self.found
        found.model = await endpoint.discover(client, plan.model)
        longest = min(found.model.longest, self._workload.longest)
        made = await endpoint.writer(client, found.model.name, plan.api)
        found.writer = replace(made, salt=plan.salt)
        # Room for what counting words misses, and for what a chat template adds to each turn.
        room = 16 + int(made.overhead) * plan.turns
        if found.model.longest <= self._workload.longest:
            self._workload = replace(self._workload, longest=longest - room)
        found.alone = await endpoint.unloaded(
            client, found.writer, self._workload, plan.unloaded_calls
        )
        found.slo = endpoint.slo(plan.ttft, plan.tpot, found.alone)
        self._watcher.known(found)

    async def _steps(self, client: Client) -> None:
        for users in self._plan.users():
            if self.found.interrupted:
                return
            step = await self._step(client, "concurrency", float(users))
            if self._plan.open_ended and not step.attained(self._plan.attainment):
                break
        for rate in self._plan.rates:
            if self.found.interrupted:
                return
            await self._step(client, "rate", rate)

    async def _search(self, client: Client) -> None:
        plan = self._plan
        search = Bisection(self._first_rate(), plan.precision, plan.most_rates)
        for step in self.found.steps:
            if step.kind == "rate":
                search.tell(step.load, step.attained(plan.attainment))
        search.most += len(search.tried)
        self.found.search = search
        while (rate := search.next) is not None:
            step = await self._step(client, "rate", rate, may_end=True)
            if step.interrupted:
                return
            search.tell(rate, step.attained(plan.attainment))

    def _first_rate(self) -> float:
        """What the best step so far served, or one request at a time, unloaded."""
        good = [s for s in self.found.steps if s.attained(self._plan.attainment)]
        best = max((s.summary.requests_per_s for s in good), default=0.0)
        if best > 0:
            return best
        alone = self.found.alone
        assert alone is not None
        return 1 / max(alone.e2e, 1e-3)

    async def _step(
        self, client: Client, kind: Kind, load: float, *, may_end: bool = False
    ) -> Step:
        plan, slo = self._plan, self.found.slo
        assert slo is not None
        seeds = [plan.seed + i for i in range(plan.repeats if kind == "rate" else 1)]
        loads = {seed: self._load(load, seed) for seed in seeds} if kind == "rate" else {}
        planned = sum(len(c.turns) for load_ in loads.values() for c in load_)
        runs: list[Played] = []
        missed, early = 0, False
        for seed in seeds:
            run = self._run = Run(client, self._writer(), plan.timeout)
            window = Window(plan.warmup, plan.seconds)
            if kind == "rate":
                last = loads[seed][-1].turns[0].at
                # A little more than the last, which so is within.
                window = Window(min(plan.warmup, last / 2), max(last, plan.warmup) + 1e-6)

            def ended(outcome: Outcome, run: Run = run, window: Window = window) -> None:
                nonlocal missed, early
                self._watcher.ended(outcome)
                if window.judged([outcome]) and not outcome.meets(slo):
                    missed += 1
                if may_end and sealed(missed, planned, plan.attainment) and not early:
                    early = True
                    run.stop()

            run.on_outcome = ended
            if kind == "rate":
                self._watcher.began(kind, load, sum(len(c.turns) for c in loads[seed]), window.end)
                await run.open_loop(loads[seed])
            else:
                self._watcher.began(kind, load, None, plan.seconds)
                await run.closed_loop(self._endless(seed), int(load), plan.seconds)
            runs.append(Played(seed, tuple(run.outcomes), window))
            self._run = None
            if early or self.found.interrupted:
                break
        step = Step(
            kind,
            load,
            tuple(runs),
            summarise_all([(r.outcomes, r.window) for r in runs], slo),
            decided_early=early,
            interrupted=self.found.interrupted,
        )
        self.found.steps.append(step)
        self._watcher.stepped(step)
        return step

    def _load(self, rate: float, seed: int) -> list[Conversation]:
        count = max(round(rate * self._plan.seconds), 1)
        return self._workload.conversations(rate, count, seed)

    def _endless(self, seed: int) -> Iterator[Conversation]:
        for part in itertools.count():
            # Another seed for each part, far from those of other runs.
            count = _DRAWN * self._workload.turns
            yield from self._workload.conversations(1.0, count, seed + 10_000 * part)

    def _writer(self) -> Writer:
        assert self.found.writer is not None
        self._runs += 1
        return replace(self.found.writer, salt=self._plan.salt + FIRST_SALT + self._runs)
