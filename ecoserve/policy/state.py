"""Immutable snapshots that every decision is made from.

Two levels decide. An *instance* (one engine) decides before each step what the step holds, from an
``EngineView``. A *macro instance* (several instances) decides where a request goes, from a
``MacroView``. Both read a clock that the caller passes in, in seconds; only differences matter, so
engine, scheduler and simulator each use their own. Token counts are tokens, times are seconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from ecoserve.policy.latency import LatencyModel

Phase = Literal["prefill", "decode"]
StepKind = Literal["prefill", "decode", "mixed"]


@dataclass(frozen=True, slots=True)
class SLO:
    """What was promised: seconds to the first token, seconds per token after it.

    A request meets its TPOT when (end - first token) / (tokens - 1) is within ``tpot``.
    """

    ttft: float
    tpot: float

    def __post_init__(self) -> None:
        for name in ("ttft", "tpot"):
            value = getattr(self, name)
            if not 0 < value < float("inf"):
                raise ValueError(f"slo.{name} must be a positive number of seconds, not {value!r}")


def saved_tpot(generated: int, tpot: float, since_first_token: float) -> float:
    """Seconds that a running request is ahead of its TPOT promise (negative: late).

    generated tokens x TPOT SLO - (now - time of its first token). It is also the time within which
    the request's next token must come.
    """
    return generated * tpot - since_first_token


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt that an instance has still to prefill, whole or in part.

    ``tokens`` are still to be computed; ``context`` were computed before or are held as a cached
    prefix. ``deadline`` is when its next token must exist: arrival + TTFT SLO, or, for a preempted
    request that is computed anew, the moment its saved TPOT is used up. ``patience`` is the
    request's TTFT SLO, the scale on which it counts as overdue.
    """

    id: str
    tokens: int
    context: int
    deadline: float
    patience: float
    begun: bool = False


@dataclass(frozen=True, slots=True)
class Decodes:
    """The running decodes of an instance, summed up.

    ``context`` is the sum of their context lengths. ``least_slack`` and ``mean_slack`` are of their
    saved TPOT (infinite for none). ``tpot`` is the tightest TPOT SLO among them.
    """

    count: int = 0
    context: int = 0
    least_slack: float = float("inf")
    mean_slack: float = float("inf")
    tpot: float = float("inf")


NO_DECODES = Decodes()


@dataclass(frozen=True, slots=True)
class EngineView:
    """What an instance knows before a step.

    ``waiting`` is in the order in which the engine will take the prompts; those that hold KV
    because a chunk of them was computed come first. ``prefill_steps`` counts the steps with prompt
    tokens of the phase under way. ``step_budget`` is the most tokens that one step may hold.
    ``blocked`` says that the last prefill step could admit nothing (KV full, grammar compiling, no
    LoRA slot) and that nothing has been freed since. ``use`` is load as ``policy.use`` defines it.
    """

    now: float
    phase: Phase
    since_switch: float
    prefill_steps: int
    waiting: Sequence[Prompt]
    decodes: Decodes
    free_kv: int
    use: float
    step_budget: int
    latency: LatencyModel
    blocked: bool = False


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What the next step holds.

    ``prefill_tokens`` is the most prompt tokens that it may take (0 for ``decode``). ``phase`` is
    the instance's phase from this step on: the step's kind, or for a mixed step the phase that new
    prompts see, which is prefill. ``reason`` is for people; it is shown when the phase changes.
    """

    kind: StepKind
    prefill_tokens: int
    reason: str

    @property
    def phase(self) -> Phase:
        return "decode" if self.kind == "decode" else "prefill"


@dataclass(frozen=True, slots=True)
class Request:
    """A request at the macro scheduler.

    ``arrived`` is on the scheduler's clock. ``prompt_tokens`` and ``output_tokens`` (an estimate)
    are sums over its ``sequences`` (a list of prompts, or n > 1). ``held`` tells for each instance
    how many of its prompt tokens that instance has in its prefix cache. ``allowed`` names the
    instances that may serve it (a gateway's subset hint); None: any. ``tenant`` is whose share of
    the capacity it counts to; of a tenant's own requests those of lower ``priority`` go first.
    """

    id: str
    arrived: float
    prompt_tokens: int
    output_tokens: int
    slo: SLO
    sequences: int = 1
    held: Mapping[str, int] = field(default_factory=dict)
    allowed: frozenset[str] | None = None
    tenant: str = ""
    priority: int = 0

    @property
    def deadline(self) -> float:
        return self.arrived + self.slo.ttft

    def uncached(self, instance: str) -> int:
        """Prompt tokens that the instance would have to compute; at least one a sequence."""
        return max(self.sequences, self.prompt_tokens - self.held.get(instance, 0))

    def kv_tokens(self, instance: str) -> int:
        """Tokens of KV that the request needs on the instance, its expected output included."""
        return self.uncached(instance) + self.output_tokens


@dataclass(frozen=True, slots=True)
class InstanceView:
    """An instance as the macro scheduler knows it: last report, aged, plus what was routed since.

    ``backlog`` is the prefill time of all its pending prompts; ``backlog_since_switch`` of those
    that arrived since its last phase switch. ``settled_slack`` is the mean saved TPOT of the
    running requests that arrived before that switch (infinite for none). ``residue`` is what is
    left of the step under way. ``free_kv`` is in tokens, after reservations. ``room`` is how many
    more sequences its batch takes. ``weight`` in (0, 1] is the share of its capacity offered while
    it warms up.
    """

    name: str
    phase: Phase
    since_switch: float
    backlog: float
    backlog_since_switch: float
    decodes: Decodes
    settled_slack: float
    residue: float
    free_kv: int
    room: int
    use: float
    latency: LatencyModel
    weight: float = 1.0

    def prefill_seconds(self, request: Request) -> float:
        """Time to prefill what the instance does not hold of the request's prompt."""
        uncached = request.uncached(self.name)
        return self.latency.prefill(uncached, request.prompt_tokens - uncached)

    def take(self, request: Request) -> InstanceView:
        """The instance with one more request routed to it."""
        seconds = self.prefill_seconds(request)
        return replace(
            self,
            backlog=self.backlog + seconds,
            backlog_since_switch=self.backlog_since_switch + seconds,
            free_kv=self.free_kv - request.kv_tokens(self.name),
            room=self.room - request.sequences,
        )


@dataclass(frozen=True, slots=True)
class MacroView:
    """The instances of a macro instance that may be given work, in their fixed cyclic order.

    ``last`` names the instance that took the previous request; it may be gone.
    """

    now: float
    instances: tuple[InstanceView, ...]
    last: str | None = None
