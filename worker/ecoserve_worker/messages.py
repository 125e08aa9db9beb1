"""What engine and front end tell each other over the channel, as msgspec structs.

Both ends run on one machine, so times on the channel are ``time.monotonic`` seconds of that machine
where a moment is meant, and plain seconds where a duration is meant.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from ecoserve.headers import REQUEST_ID_PATTERN

_ECO_ID = re.compile(REQUEST_ID_PATTERN)


def eco_id(engine_id: str) -> str:
    """Our id within an engine's decorated one, or the whole one if it holds none."""
    found = _ECO_ID.search(engine_id)
    return found.group() if found else engine_id


class PromptState(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A sequence with prompt tokens still to compute; ``age`` is in seconds."""

    id: str
    tokens: int
    context: int
    age: float
    since_switch: bool


class DecodeState(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A running decode; ``slack`` is its saved TPOT in seconds."""

    id: str
    context: int
    generated: int
    slack: float
    tpot: float
    since_switch: bool


class SequenceDone(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A sequence that ended in the engine. ``ttft`` and ``tpot`` are 0 if they do not exist."""

    id: str
    prompt_tokens: int
    cached_tokens: int
    generated: int
    ttft: float
    tpot: float
    ttft_slo: float
    tpot_slo: float
    aborted: bool


class PhaseSwitch(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The instance went into ``phase`` at the moment ``at`` (monotonic seconds)."""

    phase: str
    at: float
    reason: str


class Sample(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A step measured while calibrating; see ``ecoserve.policy.latency.StepSample``."""

    tokens: int
    pairs: float
    batch: int
    context: int
    seconds: float


class State(msgspec.Struct, array_like=True, frozen=True):
    """The engine before a step: ``step_kind`` is that of the step about to run, empty if none."""

    at: float
    phase: str
    since_switch: float
    waiting: list[PromptState]
    running: list[DecodeState]
    free_kv: int
    use: float
    busy: float
    step_kind: str
    step_estimate: float
    batch_limit: int
    steps_prefill: int
    steps_decode: int
    steps_mixed: int
    latency: tuple[float, ...] | None = None


class FromEngine(msgspec.Struct, array_like=True, frozen=True):
    """One datagram from the engine. Events come whole and in order, states may be left out.

    ``first_tokens`` are ids of sequences whose first token came.
    """

    state: State | None = None
    first_tokens: list[str] = []
    done: list[SequenceDone] = []
    switches: list[PhaseSwitch] = []
    samples: list[Sample] = []


class Meta(msgspec.Struct, array_like=True, frozen=True, tag="meta"):
    """A request on its way into the engine; sequences whose id holds ``id`` are its own.

    ``arrived`` is the monotonic moment it reached the picker. An SLO of None means the default.
    """

    id: str
    arrived: float
    ttft: float | None = None
    tpot: float | None = None


class Forget(msgspec.Struct, array_like=True, frozen=True, tag="forget"):
    """The HTTP call of a request has ended."""

    id: str


class Settings(msgspec.Struct, array_like=True, frozen=True, tag="settings"):
    """How to schedule from now on; also the shape of ``additional_config["ecoserve"]``.

    ``ttft`` and ``tpot`` are the SLO of requests that bring none. ``latency`` holds the fields of a
    ``LatencyModel`` in order; None keeps the one in force.
    """

    policy: str
    policy_settings: dict[str, float]
    ttft: float
    tpot: float
    debug: bool
    latency: tuple[float, ...] | None = None


class Calibrate(msgspec.Struct, array_like=True, frozen=True, tag="calibrate"):
    """While on, steps run as stock vLLM makes them, are sent as samples and not counted."""

    on: bool


Command = Meta | Forget | Settings | Calibrate


def engine_config(
    settings: Settings,
    *,
    socket: str | None = None,
    step_log: str | None = None,
    front_pid: int | None = None,
) -> dict[str, Any]:
    """What the scheduler plug-in reads: vLLM's ``additional_config["ecoserve"]``, as plain JSON.

    ``socket`` is the channel's path, ``step_log`` a file for a JSON line a step, ``front_pid`` the
    process with which an EngineCore of its own process ends.
    """
    return {
        "settings": msgspec.to_builtins(settings),
        "socket": socket,
        "step_log": step_log,
        "front_pid": front_pid,
    }
