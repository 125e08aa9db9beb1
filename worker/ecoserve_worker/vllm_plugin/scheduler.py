"""vLLM's scheduler with the instance scheduler in front of it: one phase a step.

Before each step an ``EngineView`` is built from what vLLM's scheduler holds, the policy plans the
step, and the plan is carried out with levers that are in vLLM's tree already, so that neither its
queues nor its scheduling are re-implemented:

- *decode*: ``throttle_prefills`` (vLLM's own prefill balancing) holds begun prompts back, and a
  token budget of exactly what the decodes need keeps new ones out, even one whose uncached part is
  a single token;
- *prefill*: ``next_decode_eligible_step`` (its pipeline cadence) holds the decodes in ``running``;
- ``max_num_scheduled_tokens`` sizes the one step, ``max_num_active_reqs`` is the batch limit.

``tests/worker/test_vllm_contract.py`` holds every name that is leant on. Names of our own begin
with ``_eco_``, because the scheduler that is extended has some hundred of its own.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Iterable
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Any

import msgspec
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

from ecoserve.memory import GivesBack
from ecoserve.policy.latency import StepSample
from ecoserve.policy.state import Decodes, EngineView, Prompt, StepPlan
from ecoserve_worker.channel import EngineEnd
from ecoserve_worker.messages import DecodeState, PromptState, Settings
from ecoserve_worker.vllm_plugin.instance import Instance, Sequence

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request

# How many waiting prompts have their prefix-cache hit looked up anew after a prefill step.
_LOOKUPS = 8
# A prefill step that could admit nothing is not tried again for this long, unless memory is freed.
_BLOCKED_SECONDS = 0.05


def _die_with_parent() -> None:
    """Has the kernel end this EngineCore when its front end is gone; vLLM leaves an orphan."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


class _Mixin(Scheduler if TYPE_CHECKING else object):  # type: ignore[misc]
    """The instance scheduler on top of a vLLM scheduler class."""

    max_num_active_reqs: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config = self.vllm_config.additional_config["ecoserve"]
        step_log = config.get("step_log")
        if config.get("front_pid") not in (None, os.getpid()):
            _die_with_parent()
        groups = max(1, len(self.kv_cache_config.kv_cache_groups))
        self._eco_tokens_a_block = self.block_size / groups
        self._eco_budget: int = self.max_num_scheduled_tokens
        self._eco = Instance(
            msgspec.convert(config["settings"], Settings),
            EngineEnd(config.get("socket")),
            max_batch=self.max_num_active_reqs,
            kv_tokens=int(self.kv_cache_config.num_blocks * self._eco_tokens_a_block),
            step_budget=self._eco_budget,
            now=time.monotonic(),
            step_log=open(step_log, "a", buffering=1) if step_log else None,  # noqa: SIM115
        )
        self._eco_cache_version = 0
        self._eco_blocked_until = 0.0
        self._eco_blocked_free = 0
        self._eco_memory = GivesBack()

    # --- what vLLM calls

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        eco = self._eco
        eco.take_commands()
        if eco.calibrating or self._pause_state == PauseState.PAUSED_ALL:
            return self._eco_stock_step(throttle_prefills)
        now = time.monotonic()
        eco.measure(now, len(self.running))
        decoding: list[Request] = []
        begun: dict[str, Request] = {}
        prompts: list[Prompt] = []
        waiting: list[PromptState] = []
        running: list[DecodeState] = []
        decodes, need = self._eco_look_at_running(now, decoding, begun, prompts, waiting, running)
        self._eco_look_at_waiting(now, prompts, waiting)
        free = self.kv_cache_manager.block_pool.get_num_free_blocks()
        blocked = now < self._eco_blocked_until and free <= self._eco_blocked_free
        view = EngineView(
            now=now,
            phase=eco.tracker.phase,
            since_switch=eco.tracker.since_switch(now),
            prefill_steps=eco.tracker.prefill_steps,
            waiting=prompts,
            decodes=decodes,
            free_kv=int(free * self._eco_tokens_a_block),
            use=eco.use,
            step_budget=self._eco_budget,
            latency=eco.fit.model,
            blocked=blocked,
        )
        plan = self._eco_possible(eco.policy.step(view), view, throttle_prefills)
        eco.decide(plan, now)
        self.max_num_active_reqs = max(eco.batch_limit, len(self.running))
        output = self._eco_carry_out(plan, decoding, prompts, need, throttle_prefills)
        sample = self._eco_contents(output, begun, decodes)
        if plan.kind == "prefill" and prompts and decodes.count and not sample.tokens:
            self._eco_blocked_until = now + _BLOCKED_SECONDS
            self._eco_blocked_free = free
        if sample.tokens:
            self._eco_cache_version += 1
        sample = eco.begin(sample, plan, now)
        eco.report(now, waiting, running, view.free_kv, sample)
        return output

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        outputs: dict[int, EngineCoreOutputs] = super().update_from_output(
            scheduler_output, model_runner_output
        )
        eco = self._eco
        now = time.monotonic()
        for of_client in outputs.values():
            for output in of_client.outputs:
                sequence = eco.sequences.get(output.request_id)
                if sequence is None:
                    continue
                if output.new_token_ids:
                    eco.tokens(sequence, len(output.new_token_ids), now)
                if output.finish_reason is not None:
                    eco.finish(output.request_id, False, now)
        eco.end(now)
        self._eco_rest(now)
        return outputs

    def finish_requests(
        self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus
    ) -> list[Request]:
        finished: list[Request] = super().finish_requests(request_ids, finished_status)
        now = time.monotonic()
        for request in finished:
            aborted = finished_status == RequestStatus.FINISHED_ABORTED
            self._eco.finish(request.request_id, aborted, now)
        self._eco_rest(now)
        return finished

    def shutdown(self) -> None:
        self._eco.close()
        super().shutdown()

    def _eco_rest(self, now: float) -> None:
        """Returns the memory of a burst when there is nothing left to do."""
        if not self.requests:
            self._eco_memory.at(now)

    # --- looking

    def _eco_look_at_running(
        self,
        now: float,
        decoding: list[Request],
        begun: dict[str, Request],
        prompts: list[Prompt],
        waiting: list[PromptState],
        running: list[DecodeState],
    ) -> tuple[Decodes, int]:
        """Sorts ``running`` into decodes and begun prompts; also the tokens the decodes will take.

        One loop over all running requests, since it runs before every step.
        """
        eco = self._eco
        sequences = eco.sequences
        next_step = self.current_step + 1
        context = need = 0
        least = total = 0.0
        tightest = float("inf")
        for request in self.running:
            id = request.request_id
            sequence = sequences.get(id) or self._eco_meet(request, now)
            computed = request.num_computed_tokens
            if request.is_prefill_chunk:
                begun[id] = request
                left = request.num_tokens - computed
                prompts.append(
                    Prompt(sequence.eco, left, computed, sequence.deadline, sequence.ttft, True)
                )
                waiting.append(self._eco_prompt_state(sequence, left, computed, now))
                continue
            decoding.append(request)
            slack = sequence.slack(now)
            if slack < least or len(decoding) == 1:
                least = slack
            total += slack
            if sequence.tpot < tightest:
                tightest = sequence.tpot
            context += computed
            placeholders = request.num_output_placeholders
            # The two conditions under which vLLM leaves a decode out of the next step.
            if request.next_decode_eligible_step <= next_step and not (
                placeholders > 0
                and computed + 2 - placeholders >= request.num_prompt_tokens + request.max_tokens
            ):
                need += request.num_tokens_with_spec + placeholders - computed
            running.append(
                DecodeState(
                    sequence.eco,
                    computed,
                    sequence.generated,
                    slack,
                    sequence.tpot,
                    eco.since_switch(sequence),
                )
            )
        count = len(decoding)
        if not count:
            return Decodes(), 0
        return Decodes(count, context, least, total / count, tightest), need

    def _eco_look_at_waiting(
        self, now: float, prompts: list[Prompt], waiting: list[PromptState]
    ) -> None:
        queues = (
            chain(self.kv_holding_waiting, self.waiting)
            if self._pause_state == PauseState.UNPAUSED
            else self.kv_holding_waiting
        )
        sequences = self._eco.sequences
        version = self._eco_cache_version
        lookups = _LOOKUPS
        for request in queues:
            sequence = sequences.get(request.request_id) or self._eco_meet(request, now)
            if sequence.hit_version != version and lookups and not request.num_computed_tokens:
                lookups -= 1
                sequence.hit_version = version
                sequence.hit = self._eco_cached_prefix(request)
            context = max(sequence.hit, request.num_computed_tokens)
            left = request.num_tokens - context
            prompt, deadline = sequence.prompt, sequence.deadline
            if prompt is None or (prompt.tokens, prompt.context, prompt.deadline) != (
                left,
                context,
                deadline,
            ):
                prompt = sequence.prompt = Prompt(
                    sequence.eco,
                    left,
                    context,
                    deadline,
                    sequence.ttft,
                    request.num_computed_tokens > 0,
                )
            prompts.append(prompt)
            waiting.append(self._eco_prompt_state(sequence, left, context, now))

    def _eco_prompt_state(
        self, sequence: Sequence, tokens: int, context: int, now: float
    ) -> PromptState:
        since_switch = self._eco.since_switch(sequence)
        return PromptState(sequence.eco, tokens, context, now - sequence.arrived, since_switch)

    def _eco_meet(self, request: Request, now: float) -> Sequence:
        arrived = now - max(0.0, time.time() - request.arrival_time)
        return self._eco.sequence(request.request_id, request.num_prompt_tokens, arrived, now)

    def _eco_cached_prefix(self, request: Request) -> int:
        """Tokens of the prompt in the prefix cache; looking leaves vLLM's hit statistics alone."""
        manager = self.kv_cache_manager
        if not manager.prefix_cache_lookup_enabled(request):
            return 0
        _, hit, _ = manager.coordinator.find_longest_cache_hit(
            request.block_hashes, request.num_tokens - 1
        )
        return int(hit)

    # --- acting

    def _eco_possible(self, plan: StepPlan, view: EngineView, throttled: bool) -> StepPlan:
        """The plan, or what has to be done instead: an engine with work must not stand still."""
        if plan.kind == "decode" and view.waiting and not view.decodes.count:
            return StepPlan("prefill", view.step_budget, "nothing to decode")
        if plan.kind != "decode" and view.decodes.count:
            if not view.waiting:
                return StepPlan("decode", 0, "no prompt is waiting")
            if throttled:
                return StepPlan("decode", 0, "prefills are throttled by the engine")
        if plan.kind != "decode" and not self.scheduler_config.enable_chunked_prefill:
            # A prompt that does not fit in the step would never be taken.
            first = view.waiting[0].tokens if view.waiting else 0
            return replace(plan, prefill_tokens=max(plan.prefill_tokens, first))
        return plan

    def _eco_carry_out(
        self,
        plan: StepPlan,
        decoding: list[Request],
        prompts: list[Prompt],
        need: int,
        throttled: bool,
    ) -> SchedulerOutput:
        budget = self._eco_budget
        if plan.kind == "decode":
            self.prefill_capacity_bound = False
            self.max_num_scheduled_tokens = min(budget, need)
            throttled = True
        else:
            tokens = max(1, plan.prefill_tokens) if prompts else budget
            if plan.kind == "prefill":
                hold_until = self.current_step + 2
                for request in decoding:
                    if request.next_decode_eligible_step < hold_until:
                        request.next_decode_eligible_step = hold_until
            else:
                tokens += need
            self.max_num_scheduled_tokens = min(budget, tokens)
        try:
            return super().schedule(throttled)
        finally:
            self.max_num_scheduled_tokens = budget

    def _eco_stock_step(self, throttle_prefills: bool) -> SchedulerOutput:
        now = time.monotonic()
        decoding: list[Request] = []
        begun: dict[str, Request] = {}
        decodes, _ = self._eco_look_at_running(now, decoding, begun, [], [], [])
        output = super().schedule(throttle_prefills)
        self._eco.begin(self._eco_contents(output, begun, decodes), None, now)
        return output

    def _eco_contents(
        self, output: SchedulerOutput, begun: dict[str, Request], decodes: Decodes
    ) -> StepSample:
        """What the step really holds, from vLLM's own output. Its seconds are not known yet."""
        scheduled = output.num_scheduled_tokens
        if not scheduled:
            return StepSample(0, 0.0, 0, 0, 0.0)
        eco = self._eco
        prompts = tokens = 0
        pairs = 0.0
        for new in output.scheduled_new_reqs:
            count, context = scheduled[new.req_id], new.num_computed_tokens
            prompts += 1
            tokens += count
            pairs += count * (context + count / 2)
            sequence = eco.sequences.get(new.req_id)
            if sequence is not None and not sequence.generated and not eco.calibrating:
                sequence.cached = context
        cached = output.scheduled_cached_reqs
        if begun or cached.resumed_req_ids:
            for id, context in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
                if id in begun or id in cached.resumed_req_ids:
                    count = scheduled[id]
                    prompts += 1
                    tokens += count
                    pairs += count * (context + count / 2)
        batch = len(scheduled) - prompts
        context = round(decodes.context * batch / decodes.count) if decodes.count else 0
        return StepSample(tokens, pairs, batch, context, 0.0)


class EcoScheduler(_Mixin, Scheduler):  # type: ignore[misc]
    """For engines that schedule between steps (CPUs)."""


class EcoAsyncScheduler(_Mixin, AsyncScheduler):  # type: ignore[misc]
    """For engines that schedule a step while the one before it runs (GPUs)."""
