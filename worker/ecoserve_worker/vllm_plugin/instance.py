"""The instance scheduler's own state: sequences, phase, latency model, use, reports.

Knows nothing of vLLM; ``scheduler`` tells it what it sees there. Times are ``time.monotonic``
seconds.
"""

from __future__ import annotations

import json
import logging
from collections import deque
from dataclasses import astuple, dataclass
from typing import IO

from ecoserve.policy import make
from ecoserve.policy.base import Policy
from ecoserve.policy.batching import next_limit
from ecoserve.policy.latency import LatencyFit, LatencyModel, StepSample
from ecoserve.policy.phases import PhaseTracker
from ecoserve.policy.state import Prompt, StepPlan
from ecoserve.policy.use import UseMeter
from ecoserve_worker.channel import EngineEnd
from ecoserve_worker.messages import (
    Calibrate,
    DecodeState,
    Forget,
    Meta,
    PhaseSwitch,
    PromptState,
    Sample,
    SequenceDone,
    Settings,
    State,
    eco_id,
)

logger = logging.getLogger("ecoserve_worker.engine")

# A guess to begin with where nothing was calibrated; the fit corrects it within some steps.
UNCALIBRATED = LatencyModel(0.01, 2e-4, 2e-8, 0.015, 4e-4, 1.5e-6, error=0.5)

_USE_INTERVAL = 0.1  # how often use is worked out anew
_LIMIT_INTERVAL = 1.0  # how often the dynamic batch size moves


class Sequence:
    """What is remembered of one sequence while the engine has it."""

    __slots__ = (
        "arrived",
        "cached",
        "eco",
        "first_token",
        "generated",
        "hit",
        "hit_version",
        "prompt",
        "prompt_tokens",
        "seen",
        "tpot",
        "ttft",
    )

    def __init__(
        self, eco: str, prompt_tokens: int, arrived: float, seen: float, ttft: float, tpot: float
    ) -> None:
        self.eco = eco
        self.prompt_tokens = prompt_tokens
        self.arrived = arrived
        self.seen = seen
        self.ttft = ttft
        self.tpot = tpot
        self.first_token = 0.0  # 0: none yet
        self.generated = 0
        self.cached = 0  # prompt tokens that came from the prefix cache
        self.hit = 0  # prefix-cache answer while it waits, and the cache version it is of
        self.hit_version = -1
        self.prompt: Prompt | None = None

    @property
    def deadline(self) -> float:
        """When its next token must exist."""
        if self.first_token:
            return self.first_token + self.generated * self.tpot
        return self.arrived + self.ttft

    def slack(self, now: float) -> float:
        """Saved TPOT, seconds. While its first token is in flight it counts as just come."""
        if not self.first_token:
            return self.tpot
        return self.first_token + self.generated * self.tpot - now


@dataclass(frozen=True, slots=True)
class Step:
    """A step that was handed to the device and has not come back."""

    started: float
    sample: StepSample  # its seconds are the estimate
    phase: str
    reason: str
    counted: bool


class Instance:
    """One engine's scheduling state, fed and read by the scheduler plug-in."""

    def __init__(
        self,
        settings: Settings,
        channel: EngineEnd,
        *,
        max_batch: int,
        kv_tokens: int,
        step_budget: int,
        now: float,
        step_log: IO[str] | None = None,
    ) -> None:
        self.channel = channel
        self.sequences: dict[str, Sequence] = {}
        self.calibrating = False
        self.batch_limit = max_batch
        self.use = 0.0
        self.policy: Policy = make(settings.policy, settings.policy_settings)
        # A guess has no proportions worth keeping.
        self.fit = LatencyFit(UNCALIBRATED, prior=0.02)
        if settings.latency:
            self.fit = LatencyFit(LatencyModel(*settings.latency))
        self.tracker = PhaseTracker(now=now)
        self._meter = UseMeter(now)
        self._settings = settings
        self._max_batch = max_batch
        self._kv_tokens = kv_tokens
        self._step_budget = step_budget
        self._limit_at = now
        self._use_at = now
        self._busy = 0.0
        self._step_log = step_log
        self._metas: dict[str, Meta] = {}
        self._in_flight: deque[Step] = deque()
        self._last_end = now
        self._sent_latency: LatencyModel | None = None
        self._steps = {"prefill": 0, "decode": 0, "mixed": 0}

    # --- commands

    def take_commands(self) -> None:
        """Carries out what the front end has said since the last step."""
        for command in self.channel.commands():
            if isinstance(command, Meta):
                self._metas[command.id] = command
                for sequence in self.sequences.values():
                    if sequence.eco == command.id:
                        self._promise(sequence, command)
            elif isinstance(command, Forget):
                self._metas.pop(command.id, None)
            elif isinstance(command, Settings):
                self._configure(command)
            elif isinstance(command, Calibrate):
                self.calibrating = command.on

    def _configure(self, settings: Settings) -> None:
        try:
            policy = make(settings.policy, settings.policy_settings)
        except ValueError as error:
            logger.error("settings refused: %s", error)
            return
        self.policy = policy
        self._settings = settings
        if settings.latency:
            self.fit = LatencyFit(LatencyModel(*settings.latency))
            self._sent_latency = self.fit.model

    def _promise(self, sequence: Sequence, meta: Meta) -> None:
        sequence.arrived = meta.arrived
        sequence.ttft = meta.ttft or self._settings.ttft
        sequence.tpot = meta.tpot or self._settings.tpot
        sequence.prompt = None

    # --- sequences

    def sequence(self, id: str, prompt_tokens: int, arrived: float, now: float) -> Sequence:
        """A new sequence; ``arrived`` is used unless the front end has told of its request."""
        settings = self._settings
        sequence = Sequence(eco_id(id), prompt_tokens, arrived, now, settings.ttft, settings.tpot)
        meta = self._metas.get(sequence.eco)
        if meta is not None:
            self._promise(sequence, meta)
        self.sequences[id] = sequence
        return sequence

    def tokens(self, sequence: Sequence, count: int, now: float) -> None:
        """``count`` tokens of the sequence came back."""
        sequence.generated += count
        if not sequence.first_token:
            sequence.first_token = now
            if not self.calibrating:
                self.channel.first_token(sequence.eco)

    def finish(self, id: str, aborted: bool, now: float) -> None:
        """The sequence left the engine."""
        sequence = self.sequences.pop(id, None)
        if sequence is None or self.calibrating:
            return
        first, generated = sequence.first_token, sequence.generated
        self.channel.done(
            SequenceDone(
                sequence.eco,
                sequence.prompt_tokens,
                sequence.cached,
                generated,
                first - sequence.arrived if first else 0.0,
                (now - first) / (generated - 1) if generated > 1 else 0.0,
                sequence.ttft,
                sequence.tpot,
                aborted,
            )
        )

    def since_switch(self, sequence: Sequence) -> bool:
        """Whether it came to this instance after the last phase switch."""
        return sequence.seen > self.tracker.switched_at

    # --- steps

    def decide(self, plan: StepPlan, now: float) -> None:
        """Takes the plan of the step about to run into the phase."""
        switch = self.tracker.advance(plan, now)
        if switch is None:
            return
        self.channel.switch(PhaseSwitch(switch.phase, now, switch.reason))
        if self._settings.debug:
            logger.info("phase %s: %s", switch.phase, switch.reason)

    def begin(self, sample: StepSample, plan: StepPlan | None, started: float) -> StepSample:
        """A step with these contents goes to the device; returns it with its estimated seconds."""
        estimate = self.fit.predict(sample) if sample.tokens or sample.batch else 0.0
        sample = StepSample(sample.tokens, sample.pairs, sample.batch, sample.context, estimate)
        self._in_flight.append(
            Step(
                started,
                sample,
                self.tracker.phase,
                plan.reason if plan else "",
                counted=not self.calibrating and estimate > 0,
            )
        )
        return sample

    def end(self, now: float) -> None:
        """The oldest step in flight came back at ``now``.

        With asynchronous scheduling a step is handed over while the one before it runs; its own
        time begins when that one ends.
        """
        step = self._in_flight.popleft()
        seconds = now - max(step.started, self._last_end)
        self._last_end = now
        sample = step.sample
        measured = StepSample(sample.tokens, sample.pairs, sample.batch, sample.context, seconds)
        if not step.counted:
            if self.calibrating and (sample.tokens or sample.batch):
                self.channel.sample(
                    Sample(sample.tokens, sample.pairs, sample.batch, sample.context, seconds)
                )
                self.channel.send(None)
            return
        self._steps[sample.kind] += 1
        self.fit.observe(measured)
        self._meter.add(now, measured)
        if self._step_log is not None:
            self._log(step, seconds)

    def _log(self, step: Step, seconds: float) -> None:
        assert self._step_log is not None
        line = {
            "step": sum(self._steps.values()),
            "kind": step.sample.kind,
            "prompt_tokens": step.sample.tokens,
            "decodes": step.sample.batch,
            "context": step.sample.context,
            "estimated_s": round(step.sample.seconds, 6),
            "seconds": round(seconds, 6),
            "phase": step.phase,
            "reason": step.reason,
        }
        print(json.dumps(line), file=self._step_log)

    def measure(self, now: float, running: int) -> None:
        """Brings use and the dynamic batch size up to date, where it is time, with so many
        sequences running."""
        if now - self._use_at >= _USE_INTERVAL:
            self._use_at = now
            self._busy = self._meter.busy(now)
            self.use = self._meter.use(
                now,
                self.fit.model,
                tpot=self._settings.tpot,
                max_batch=self._max_batch,
                kv_tokens=self._kv_tokens,
                step_budget=self._step_budget,
            )
        # A limit that is reached keeps requests waiting: it grows at once, not when its time comes.
        if running < self.batch_limit and now - self._limit_at < _LIMIT_INTERVAL:
            return
        self._limit_at = now
        # Low use comes from few requests, not from too large a batch, so the limit stays where a
        # burst does not find an engine that takes one request at a time.
        low = max(1, self._max_batch // 4)
        self.batch_limit = next_limit(
            self.batch_limit, self.use, low, self._max_batch, running=running
        )

    # --- reports

    def report(
        self,
        now: float,
        waiting: list[PromptState],
        running: list[DecodeState],
        free_kv: int,
        step: StepSample,
    ) -> None:
        """Sends the state before ``step`` runs, with the events since the last one."""
        if not self.channel.connected:
            return
        model = self.fit.model
        latency = None if model is self._sent_latency else astuple(model)
        self._sent_latency = model
        self.channel.send(
            State(
                now,
                self.tracker.phase,
                self.tracker.since_switch(now),
                waiting,
                running,
                free_kv,
                self.use,
                self._busy,
                step.kind if step.seconds else "",
                step.seconds,
                self.batch_limit,
                self._steps["prefill"],
                self._steps["decode"],
                self._steps["mixed"],
                latency,
            )
        )

    def close(self) -> None:
        self.channel.send(None)
        self.channel.close()
        if self._step_log is not None:
            self._step_log.close()
