"""What goes into a simulation and what comes out of it. Times in simulated seconds."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Protocol

from ecoserve.policy.state import SLO, StepKind


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request of a workload.

    ``prompt`` and ``output`` are tokens, one at least. ``blocks`` are hashes of the prompt's full
    blocks (of ``records.BLOCK`` tokens): requests that begin with the same hashes share a prefix.
    """

    at: float
    prompt: int
    output: int
    blocks: tuple[int, ...] = ()


BLOCK = 512
"""Tokens of a block in ``Arrival.blocks``, as in Mooncake's public traces."""


@dataclass(slots=True)
class Outcome:
    """What became of a request; a time is nan where the moment never came.

    ``routed`` is when an instance got it, ``first`` when its first token existed, ``decoding`` when
    the first step that decodes it began (after other prefills of a phase, or after a KV transfer),
    ``end`` when its last token existed.
    """

    arrival: Arrival
    slo: SLO
    instance: str = ""
    routed: float = math.nan
    first: float = math.nan
    decoding: float = math.nan
    end: float = math.nan
    late: bool = False
    shed: bool = False
    preemptions: int = 0

    @property
    def ttft(self) -> float:
        """Seconds from arrival to the first token."""
        return self.first - self.arrival.at

    @property
    def tpot(self) -> float:
        """(end - first) / (tokens - 1); 0 for an answer of one token."""
        return (self.end - self.first) / (self.arrival.output - 1) if self.arrival.output > 1 else 0

    @property
    def switch_wait(self) -> float:
        """Seconds between the first token and the start of decode; 0 for one token."""
        return self.decoding - self.first if self.arrival.output > 1 else 0.0

    @property
    def met(self) -> bool:
        """Both SLOs kept, plain definitions; never for what was shed or did not end."""
        return self.ttft <= self.slo.ttft and self.tpot <= self.slo.tpot

    @property
    def met_as_published(self) -> bool:
        """Both SLOs kept with the wait for decode counted to TTFT and not to TPOT, as the paper
        reports them."""
        wait = self.switch_wait
        tokens = self.arrival.output - 1
        tpot = self.tpot - wait / tokens if tokens else 0.0
        return self.ttft + wait <= self.slo.ttft and tpot <= self.slo.tpot


@dataclass(frozen=True, slots=True)
class StepRecord:
    """A step that an instance ran: ``tokens`` of prompts beside ``batch`` decodes."""

    instance: str
    start: float
    end: float
    kind: StepKind
    tokens: int
    batch: int
    reason: str = ""


@dataclass(slots=True)
class Result:
    """A finished simulation. ``outcomes`` in order of arrival, whole: shed ones included.

    ``steps`` is empty unless the simulation was asked to keep them.
    """

    outcomes: list[Outcome]
    steps: list[StepRecord] = field(default_factory=list)
    seconds: float = 0.0
    """Simulated time at which the last request was done."""


class StepCost(Protocol):
    """How long the steps of an instance take: one model on one kind of hardware in one layout.

    The arguments of ``step`` are as in ``policy.latency.StepSample``: ``tokens`` prompt tokens with
    ``pairs`` = sum of n (c + n/2) over chunks of n tokens after c, beside ``batch`` decodes with
    ``context`` tokens in all.
    """

    @property
    def stages(self) -> int:
        """Pipeline stages (PP); 1 without pipeline parallelism."""
        ...

    @property
    def kv_tokens(self) -> int:
        """Tokens of KV that the instance holds."""
        ...

    @property
    def kv_bytes(self) -> float:
        """Bytes of KV a token, over all of the instance's devices."""
        ...

    def step(self, tokens: int, pairs: float, batch: int, context: int) -> float:
        """Seconds that one stage takes for the step (or for the micro-batch, with PP)."""
        ...

    def handoff(self, tokens: int) -> float:
        """Seconds to pass the activations of ``tokens`` tokens to the next stage."""
        ...
