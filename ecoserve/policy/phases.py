"""The phase of an instance, and what the step policies share."""

from __future__ import annotations

from dataclasses import dataclass

from ecoserve.policy.state import EngineView, Phase, Prompt, StepPlan


@dataclass(frozen=True, slots=True)
class Switch:
    """A change of phase, and why."""

    phase: Phase
    at: float
    reason: str


class PhaseTracker:
    """Keeps an instance's phase from the plans that are carried out.

    Starts in decode, which is what an idle instance is in: its first prompt opens a prefill phase.
    """

    def __init__(self, now: float) -> None:
        self.phase: Phase = "decode"
        self.switched_at = now
        self.prefill_steps = 0

    def since_switch(self, now: float) -> float:
        """Seconds since the last switch."""
        return now - self.switched_at

    def advance(self, plan: StepPlan, now: float) -> Switch | None:
        """Takes note of the step about to run; the switch that it makes, if any."""
        switch = None
        if plan.phase != self.phase:
            self.phase = plan.phase
            self.switched_at = now
            self.prefill_steps = 0
            switch = Switch(plan.phase, now, plan.reason)
        if plan.kind != "decode":
            self.prefill_steps += 1
        return switch


def prefill_step(view: EngineView, reason: str, tokens: int | None = None) -> StepPlan:
    """A prefill step of at most ``tokens`` (the step budget if not given), one at least."""
    budget = view.step_budget if tokens is None else min(tokens, view.step_budget)
    return StepPlan("prefill", max(budget, 1), reason)


def decode_step(reason: str) -> StepPlan:
    """A step of all running decodes and nothing else."""
    return StepPlan("decode", 0, reason)


def forced(view: EngineView) -> StepPlan | None:
    """The step that no policy has a choice about, or None."""
    if not view.waiting:
        return decode_step("no prompt waits")
    if not view.decodes.count:
        return prefill_step(view, "nothing decodes")
    if view.blocked:
        return decode_step("no prompt can be admitted until something is freed")
    return None


def waiting_seconds(view: EngineView, limit: float = float("inf")) -> float:
    """Seconds that prefilling all waiting prompts takes, each in steps of the budget.

    Stops adding once ``limit`` is passed: callers compare, and queues can be long.
    """
    total = 0.0
    for prompt in view.waiting:
        total += view.latency.prefill_work(prompt.tokens, prompt.context)
        if total > limit:
            break
    tokens = sum(prompt.tokens for prompt in view.waiting)
    return total + view.latency.prefill_fixed * -(-tokens // view.step_budget)


def next_step_seconds(view: EngineView, tokens: int) -> float:
    """Seconds of a prefill step that packs up to ``tokens`` of the waiting prompts, in order.

    The whole step counts, not its first prompt: a budget of 2,048 packs two prompts of 1,024.
    """
    work = 0.0
    left = min(tokens, view.step_budget)
    for prompt in view.waiting:
        if left <= 0:
            break
        chunk = min(prompt.tokens, left)
        work += view.latency.prefill_work(chunk, prompt.context)
        left -= chunk
    return view.latency.prefill_fixed + work


def tokens_within(view: EngineView, seconds: float) -> int:
    """The most prompt tokens, taken in order, whose prefill step keeps within ``seconds``."""
    return tokens_for_work(view, seconds - view.latency.prefill_fixed)


def tokens_for_work(view: EngineView, work: float) -> int:
    """The most prompt tokens, taken in order, whose own work is at most ``work`` seconds."""
    tokens = 0
    for prompt in view.waiting:
        whole = view.latency.prefill_work(prompt.tokens, prompt.context)
        if whole > work:
            tokens += view.latency.tokens_for_work(work, prompt.context)
            break
        work -= whole
        tokens += prompt.tokens
        if tokens >= view.step_budget:
            break
    return min(tokens, view.step_budget)


def time_to_spare(view: EngineView, prompt: Prompt) -> float:
    """Seconds that a prompt can still wait before its prefill must begin to end by its deadline."""
    need = view.latency.prefill(prompt.tokens, prompt.context)
    return prompt.deadline - view.now - need
