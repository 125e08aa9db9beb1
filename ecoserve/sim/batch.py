"""The running decodes of an instance, kept so that a step costs no more for a larger batch.

All decodes of a batch gain one token in each of its steps. So whatever changes by the step is kept
as an offset to the number of steps made, the *tick*: context lengths and slack as running sums, the
least slack in a heap, and what happens at a known tick (a sequence ends, outgrows its last block of
KV, or passes its expected length) in a table by tick.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from heapq import heappop, heappush

from ecoserve.policy.state import NO_DECODES, SLO, Decodes
from ecoserve.sim.records import Outcome


class Sequence:
    """A request on its way through the instances.

    ``generated`` is up to date while it does not decode; ``computed`` are prompt tokens (and, after
    a preemption, output tokens) whose KV is there or being made. ``entered`` is when its present
    instance got it.
    """

    __slots__ = (
        "batch",
        "begun",
        "computed",
        "ends",
        "entered",
        "expected",
        "generated",
        "joined",
        "key",
        "number",
        "outcome",
        "output",
        "prompt",
        "slo",
        "until",
    )

    def __init__(self, number: int, outcome: Outcome, expected: int) -> None:
        self.number = number
        self.outcome = outcome
        self.prompt = outcome.arrival.prompt
        self.output = outcome.arrival.output
        self.slo: SLO = outcome.slo
        self.expected = expected
        self.entered = 0.0
        self.computed = 0
        self.generated = 0
        self.begun = False
        # While it decodes:
        self.batch: Batch | None = None
        self.joined = 0
        self.ends = 0
        self.until = 0
        self.key = 0.0

    @property
    def deadline(self) -> float:
        """When its next token must exist (not while it decodes)."""
        if self.generated:
            return self.outcome.first + self.generated * self.slo.tpot
        return self.outcome.arrival.at + self.slo.ttft


@dataclass(slots=True)
class _Class:
    """Decodes with one TPOT SLO: slack of each = key + tick x tpot - now."""

    count: int
    keys: float
    heap: list[tuple[float, int, Sequence]]


class Batch:
    """Decodes that advance together: all of an instance, or one micro-batch of a pipeline."""

    def __init__(self, block: int) -> None:
        self.tick = 0
        self.count = 0
        self.running: dict[Sequence, None] = {}  # in order of joining
        self._joins = 0
        self._fresh: list[Sequence] = []  # have not decoded yet
        self._block = block
        self._context = 0  # sum of context lengths, less count x tick
        self._classes: dict[float, _Class] = {}
        self._settled = 0
        self._settled_keys: dict[float, tuple[int, float]] = {}
        self._ending: dict[int, list[Sequence]] = defaultdict(list)
        self._growing = [0] * block  # decodes that need a block more at tick = r modulo block
        self._young = 0  # decodes below their expected length
        self._missing = 0  # tokens up to it, summed
        self._grown_up: dict[int, int] = defaultdict(int)

    @property
    def context(self) -> int:
        """Sum of context lengths, tokens."""
        return self._context + self.count * self.tick

    @property
    def missing(self) -> int:
        """Tokens that are still expected of those below their expected length."""
        return self._missing

    @property
    def blocks_needed(self) -> int:
        """Blocks of KV that the next step takes beyond what is held."""
        return self._growing[self.tick % self._block]

    def add(self, sequence: Sequence, settled: bool) -> None:
        """A sequence whose latest token exists goes on to decode.

        ``settled``: it came to the instance before the last phase switch.
        """
        tick = self.tick
        sequence.batch = self
        sequence.joined = tick - sequence.generated
        self.count += 1
        self.running[sequence] = None
        self._context += sequence.prompt - sequence.joined
        sequence.ends = sequence.joined + sequence.output
        self._ending[sequence.ends].append(sequence)
        # KV of the latest token is written by the next step.
        self._growing[(sequence.joined + 1 - sequence.prompt) % self._block] += 1
        tpot = sequence.slo.tpot
        sequence.key = sequence.outcome.first - sequence.joined * tpot
        kind = self._classes.get(tpot)
        if kind is None:
            kind = self._classes[tpot] = _Class(0, 0.0, [])
        kind.count += 1
        kind.keys += sequence.key
        self._joins += 1
        heappush(kind.heap, (sequence.key, self._joins, sequence))
        if settled:
            self._settle(tpot, 1, sequence.key)
        sequence.until = sequence.joined + sequence.expected
        if sequence.until > tick:
            self._young += 1
            self._missing += sequence.until - tick
            self._grown_up[sequence.until] += 1
        self._fresh.append(sequence)

    def remove(self, sequence: Sequence, settled: bool) -> None:
        """Takes a sequence out; its ``generated`` is brought up to date."""
        tick = self.tick
        sequence.batch = None
        sequence.generated = tick - sequence.joined
        self.count -= 1
        del self.running[sequence]
        self._context -= sequence.prompt - sequence.joined
        self._growing[(sequence.joined + 1 - sequence.prompt) % self._block] -= 1
        tpot = sequence.slo.tpot
        kind = self._classes[tpot]
        kind.count -= 1
        kind.keys -= sequence.key
        if not kind.count:
            del self._classes[tpot]
        if settled:
            self._settle(tpot, -1, -sequence.key)
        if sequence.until > tick:
            self._young -= 1
            self._missing -= sequence.until - tick
            self._grown_up[sequence.until] -= 1
        if sequence.ends > tick:
            self._ending[sequence.ends].remove(sequence)
            if sequence in self._fresh:
                self._fresh.remove(sequence)

    def begin(self, now: float) -> None:
        """A step of all decodes begins."""
        for sequence in self._fresh:
            if math.isnan(sequence.outcome.decoding):
                sequence.outcome.decoding = now
        self._fresh.clear()

    def advance(self) -> list[Sequence]:
        """Every decode has one token more; returns those that thereby ended, to be removed."""
        self._missing -= self._young
        self.tick += 1
        self._young -= self._grown_up.pop(self.tick, 0)
        return self._ending.pop(self.tick, [])

    def settle_all(self) -> None:
        """The phase switches: all that run came before."""
        self._settled = self.count
        self._settled_keys = {tpot: (c.count, c.keys) for tpot, c in self._classes.items()}

    def _settle(self, tpot: float, count: int, key: float) -> None:
        self._settled += count
        had, keys = self._settled_keys.get(tpot, (0, 0.0))
        if had + count:
            self._settled_keys[tpot] = had + count, keys + key
        else:
            self._settled_keys.pop(tpot, None)

    def settled_slack(self, now: float) -> tuple[int, float]:
        """How many have settled, and their slack summed up."""
        total = 0.0
        for tpot, (count, keys) in self._settled_keys.items():
            total += keys + count * (self.tick * tpot - now)
        return self._settled, total

    def decodes(self, now: float) -> Decodes:
        """The batch as policies see it."""
        if not self.count:
            return NO_DECODES
        least = tightest = math.inf
        total = 0.0
        for tpot, kind in self._classes.items():
            heap = kind.heap
            # What left stays in the heap until it comes to the top.
            while heap[0][2].batch is not self or heap[0][2].key != heap[0][0]:
                heappop(heap)
            offset = self.tick * tpot - now
            least = min(least, heap[0][0] + offset)
            total += kind.keys + kind.count * offset
            tightest = min(tightest, tpot)
        return Decodes(self.count, self.context, least, total / self.count, tightest)
