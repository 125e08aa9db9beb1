"""An ideal engine: takes exactly the time its latency model says, and carries out step plans.

It keeps its own books (lists of sequences), so that what a policy promised is checked against what
happened rather than against the policy's own arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ecoserve.policy.base import Policy
from ecoserve.policy.latency import LatencyModel
from ecoserve.policy.phases import PhaseTracker
from ecoserve.policy.state import (
    NO_DECODES,
    SLO,
    Decodes,
    EngineView,
    Prompt,
    StepKind,
    saved_tpot,
)

# A 30B-like engine: 31 ms a decode step, 2,300 prompt tokens a second.
GPU = LatencyModel(0.02, 4e-4, 2e-9, 0.025, 2e-4, 1.0e-7, mixing=0.0, error=0.0)


@dataclass(slots=True)
class Sequence:
    id: str
    arrived: float
    prompt: int
    output: int
    slo: SLO
    computed: int = 0
    generated: int = 0
    first: float | None = None
    last: float | None = None
    worst_slack: float = float("inf")

    @property
    def ttft(self) -> float:
        assert self.first is not None
        return self.first - self.arrived

    @property
    def tpot(self) -> float:
        assert self.first is not None
        assert self.last is not None
        return (self.last - self.first) / (self.generated - 1) if self.generated > 1 else 0.0


@dataclass
class IdealEngine:
    policy: Policy
    latency: LatencyModel = GPU
    step_budget: int = 2048
    kv_tokens: int = 200_000
    now: float = 0.0
    waiting: list[Sequence] = field(default_factory=list)
    running: list[Sequence] = field(default_factory=list)
    done: list[Sequence] = field(default_factory=list)
    kinds: list[StepKind] = field(default_factory=list)
    blocked: bool = False

    def __post_init__(self) -> None:
        self.phases = PhaseTracker(self.now)

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)
        self.blocked = False

    @property
    def used_kv(self) -> int:
        return sum(s.computed + s.generated for s in [*self.running, *self.waiting])

    def view(self) -> EngineView:
        decodes = NO_DECODES
        if self.running:
            slacks = [self.slack(s) for s in self.running]
            decodes = Decodes(
                count=len(slacks),
                context=sum(s.prompt + s.generated for s in self.running),
                least_slack=min(slacks),
                mean_slack=sum(slacks) / len(slacks),
                tpot=min(s.slo.tpot for s in self.running),
            )
        return EngineView(
            now=self.now,
            phase=self.phases.phase,
            since_switch=self.phases.since_switch(self.now),
            prefill_steps=self.phases.prefill_steps,
            waiting=[
                Prompt(
                    s.id,
                    s.prompt - s.computed,
                    s.computed,
                    s.arrived + s.slo.ttft,
                    s.slo.ttft,
                    s.computed > 0,
                )
                for s in self.waiting
            ],
            decodes=decodes,
            free_kv=self.kv_tokens - self.used_kv,
            use=0.5,
            step_budget=self.step_budget,
            latency=self.latency,
            blocked=self.blocked,
        )

    def slack(self, s: Sequence) -> float:
        assert s.first is not None
        return saved_tpot(s.generated, s.slo.tpot, self.now - s.first)

    def step(self) -> None:
        """Runs one step; the caller sees to it that something waits or runs."""
        plan = self.policy.step(self.view())
        self.phases.advance(plan, self.now)
        decoding = list(self.running) if plan.kind != "prefill" else []
        budget = plan.prefill_tokens
        work = 0.0
        chunks: list[tuple[Sequence, int]] = []
        free = self.kv_tokens - self.used_kv
        for s in self.waiting:
            chunk = min(s.prompt - s.computed, budget)
            if chunk <= 0 or (s.computed == 0 and s.prompt > free):
                break
            free -= chunk
            chunks.append((s, chunk))
            work += self.latency.prefill_work(chunk, s.computed)
            budget -= chunk
        self.blocked = plan.kind == "prefill" and not chunks
        decode = self.latency.decode(len(decoding), sum(s.prompt + s.generated for s in decoding))
        if chunks and decoding:
            self.now += (1 + self.latency.mixing) * (decode + work)
        elif chunks:
            self.now += self.latency.prefill_fixed + work
        else:
            self.now += max(decode, 1e-3)
        kind: StepKind = "decode"
        if chunks:
            kind = "mixed" if decoding else "prefill"
        self.kinds.append(kind)
        for s in decoding:
            s.worst_slack = min(s.worst_slack, self.slack(s))
            self._token(s)
        for s, chunk in chunks:
            s.computed += chunk
            if s.computed == s.prompt:
                self.waiting.remove(s)
                self.running.append(s)
                s.first = self.now
                self._token(s)

    def _token(self, s: Sequence) -> None:
        s.generated += 1
        s.last = self.now
        if s.generated >= s.output:
            self.running.remove(s)
            self.done.append(s)
            self.blocked = False

    def run(self, arrivals: list[Sequence], limit: int = 200_000) -> None:
        """Plays arrivals (sorted by time) until all are done; fails if that never happens."""
        pending = list(arrivals)
        for _ in range(limit):
            while pending and pending[0].arrived <= self.now:
                self.add(pending.pop(0))
            if self.waiting or self.running:
                self.step()
            elif pending:
                self.now = pending[0].arrived
            else:
                return
        raise AssertionError(f"{len(self.waiting)} wait, {len(self.running)} run after {limit}")
