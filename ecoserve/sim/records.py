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
    def tpot_as_published(self) -> float:
        """TPOT without the wait for decode; 0 for an answer of one token."""
        tokens = self.arrival.output - 1
        return self.tpot - self.switch_wait / tokens if tokens else 0.0

    @property
    def met(self) -> bool:
        """Both SLOs kept, plain definitions; never for what was shed or did not end."""
        return self.ttft <= self.slo.ttft and self.tpot <= self.slo.tpot

    @property
    def met_as_published(self) -> bool:
        """Both SLOs kept with the wait for decode counted to TTFT and not to TPOT, as the paper
        reports them."""
        in_time = self.ttft + self.switch_wait <= self.slo.ttft
        return in_time and self.tpot_as_published <= self.slo.tpot


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


@dataclass(frozen=True, slots=True)
class Wire:
    """A way for KV between instances: ``line`` bytes a second each way, of which a transfer gets
    the share ``use``, after ``alpha`` seconds."""

    line: float
    use: float = 0.9
    alpha: float = 0.001

    def seconds(self, size: float) -> float:
        """Seconds that ``size`` bytes take on the idle wire: alpha + bytes / (use x line)."""
        return self.alpha + size / (self.use * self.line)


@dataclass(frozen=True, slots=True)
class Cluster:
    """The hardware: ``instances`` alike, ``per_node`` of them on a node.

    ``pcie`` is between two instances of a node (each has its own), ``network`` a node's NIC, which
    its instances share.
    """

    cost: StepCost
    instances: int
    per_node: int = 1
    pcie: Wire = Wire(25e9, 0.8, 0.0005)
    network: Wire = Wire(1.25e9, 0.9, 0.001)

    def __post_init__(self) -> None:
        for name in ("instances", "per_node"):
            if getattr(self, name) < 1:
                raise ValueError(f"cluster.{name} must be at least 1, not {getattr(self, name)}")


@dataclass(frozen=True, slots=True)
class Options:
    """How a simulation is run; what is the engine's rather than the system's.

    ``noise`` is the relative sigma of step times. ``report_delay`` is the age, seconds, of the
    state that routing sees. ``output_error`` is the sigma of the logarithm of predicted over true
    output length; None: nobody predicts, and the mean of what has ended is expected, as the
    scheduler server does. ``prefix_sharing`` caches prompts by ``Arrival.blocks``. ``watermark`` is
    the share of KV blocks that new prompts leave free. ``packed`` puts a pipeline's decodes into as
    few micro-batches as their TPOT allows, else they are spread evenly. ``fit_every`` is how many
    steps an instance makes between fits of its latency model. ``keep_steps`` fills
    ``Result.steps``.
    """

    seed: int = 0
    noise: float = 0.0
    report_delay: float = 0.0
    output_error: float | None = None
    prefix_sharing: bool = False
    max_num_seqs: int = 256
    step_budget: int = 2048
    block: int = 16
    watermark: float = 0.01
    packed: bool = True
    fit_every: int = 256
    keep_steps: bool = False

    def __post_init__(self) -> None:
        for name in ("noise", "report_delay", "watermark"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"options.{name} must be 0 or more, not {getattr(self, name)}")
        for name in ("max_num_seqs", "step_budget", "block", "fit_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"options.{name} must be at least 1, not {getattr(self, name)}")
        if self.output_error is not None and not 0 <= self.output_error < math.inf:
            raise ValueError(f"options.output_error must be 0 or more, not {self.output_error}")


DEFAULTS = Options()
