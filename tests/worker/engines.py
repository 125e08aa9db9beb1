"""A real engine that tests step by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ecoserve_worker.messages import Settings, engine_config

PURE = ("paper", "padg", "window")
POLICIES = (*PURE, "paced")
BLOCK = 32

# Tight enough that the policies have something to decide on a CPU.
SLO_TTFT, SLO_TPOT = 5.0, 0.1


class Engine:
    """A vLLM engine stepped by hand, so that requests arrive at fixed steps."""

    def __init__(self, model: Path, step_log: Path | None, **arguments: Any) -> None:
        from ecoserve_worker.vllm_plugin import SCHEDULER
        from vllm import LLM

        if step_log is not None:
            settings = Settings("paper", {}, SLO_TTFT, SLO_TPOT, debug=False)
            arguments |= {
                "scheduler_cls": SCHEDULER,
                "additional_config": {"ecoserve": engine_config(settings, step_log=str(step_log))},
            }
        self.llm = LLM(
            model=str(model),
            dtype="float32",
            enforce_eager=True,
            max_model_len=1024,
            block_size=BLOCK,
            disable_log_stats=True,
            **arguments,
        )
        self._step_log = step_log
        self._requests = 0

    @property
    def scheduler(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core.scheduler

    def use(self, policy: str, *, ttft: float = SLO_TTFT, tpot: float = SLO_TPOT) -> None:
        """Schedules by this policy from now on, with an empty prefix cache."""
        self.scheduler._eco._configure(Settings(policy, {}, ttft, tpot, debug=False))
        assert self.llm.reset_prefix_cache()

    def add(self, prompt: Any, max_tokens: int) -> str:
        from vllm import SamplingParams

        self._requests += 1
        id = f"r{self._requests}"
        parameters = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        if isinstance(prompt, list):
            prompt = {"prompt_token_ids": prompt}
        self.llm.llm_engine.add_request(id, prompt, parameters)
        return id

    def step(self, tokens: dict[str, list[int]]) -> None:
        for output in self.llm.llm_engine.step():
            if output.finished:
                tokens[output.request_id] = list(output.outputs[0].token_ids)

    def generate(self, prompts: list[Any], *, output: int = 6) -> list[list[int]]:
        """Greedy tokens of each prompt, ``output`` to ``output`` + 8; one arrives a step."""
        tokens: dict[str, list[int]] = {}
        ids: list[str] = []
        for index, prompt in enumerate(prompts):
            ids.append(self.add(prompt, output + index % 9))
            if index >= 3:
                self.step(tokens)
        while self.llm.llm_engine.has_unfinished_requests():
            self.step(tokens)
        return [tokens[id] for id in ids]

    def steps(self) -> list[dict[str, Any]]:
        """The step log since the last call."""
        assert self._step_log is not None
        lines = self._step_log.read_text().splitlines()
        self._step_log.write_text("")
        return [json.loads(line) for line in lines]
