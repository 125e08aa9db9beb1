"""Measures the engine's steps at the start of a worker, and keeps the result for the next start.

The steps are made through the engine itself as stock vLLM would, with random tokens, before any
traffic. What is measured: single prompts of several lengths, decodes of a small and a larger batch,
and prompts that join running decodes (mixed steps).
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import json
import logging
import math
import os
import random
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Protocol

from ecoserve.policy.latency import LatencyFit, LatencyModel, StepSample
from ecoserve_worker.ledger import Ledger
from ecoserve_worker.vllm_plugin.instance import UNCALIBRATED

logger = logging.getLogger(__name__)

_LENGTHS = (64, 256, 64, 640, 256)
# Sequences and their prompt tokens: the larger batch holds less context, so that both tell apart.
_BATCHES = ((4, 256), (16, 32))
_JOINING = (64, 192, 384)


class Engine(Protocol):
    """What is used of ``vllm.v1.engine.async_llm.AsyncLLM``."""

    def generate(
        self, prompt: Any, sampling_params: Any, request_id: str
    ) -> AsyncIterator[Any]: ...

    async def reset_prefix_cache(self) -> Any: ...


def cache_file(state_dir: Path, key: dict[str, Any]) -> Path:
    """Where the model measured under ``key`` (engine, arguments, machine) is kept."""
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    return state_dir / f"latency-{digest[:16]}.json"


def load(file: Path) -> LatencyModel | None:
    """The model kept in the file; None if there is none that can be read."""
    try:
        return LatencyModel(**json.loads(file.read_text()))
    except (OSError, ValueError, TypeError):
        return None


def save(file: Path, model: LatencyModel) -> None:
    """Keeps the model; readers never see half a file."""
    temporary = file.with_suffix(f".{os.getpid()}.tmp")
    temporary.write_text(json.dumps(dataclasses.asdict(model), indent=1))
    temporary.replace(file)


async def warm_up(engine: Engine, ledger: Ledger, *, vocabulary: int, max_len: int) -> None:
    """Makes the first steps, which take longer than all others, before a request has to.

    For an engine that is not measured because its model is kept. Nothing of it is counted.
    """
    ledger.calibrate(True)
    run = _Run(engine, vocabulary, max_len)
    await run.generate(16, 2)
    await run.generate(256, 4)
    ledger.samples.clear()
    ledger.calibrate(False)
    await engine.reset_prefix_cache()


async def measure(engine: Engine, ledger: Ledger, *, vocabulary: int, max_len: int) -> LatencyModel:
    """Measures and fits; about four seconds with a small model on two cores.

    Nothing of it is counted, and the prefix cache is emptied afterwards.
    """
    began = time.monotonic()
    run = _Run(engine, vocabulary, max_len)
    ledger.samples.clear()
    ledger.calibrate(True)
    await run.generate(16, 2)  # the first steps of an engine are not like the others
    warm_up = len(ledger.samples)
    for length in _LENGTHS:
        await run.generate(length, 4)
    for batch, prompt in _BATCHES:
        decodes = [run.start(prompt, 16) for _ in range(batch)]
        await decodes[0].first_token.wait()
        for length in _JOINING:
            await run.generate(length, 2)
        await asyncio.gather(*(decode.task for decode in decodes))
    samples = [StepSample(s.tokens, s.pairs, s.batch, s.context, s.seconds) for s in ledger.samples]
    ledger.samples.clear()
    ledger.calibrate(False)
    await engine.reset_prefix_cache()
    model = fit(samples[warm_up:])
    logger.info(
        "calibrated in %.1f s from %d steps: %s", time.monotonic() - began, len(samples), model
    )
    return model


def fit(samples: list[StepSample]) -> LatencyModel:
    """The latency model of freshly measured steps, with hardly any prior."""
    if not samples:
        return UNCALIBRATED
    latency_fit = LatencyFit(
        UNCALIBRATED, window=len(samples), every=len(samples), prior=0.02, outlier=math.inf
    )
    for sample in samples:
        latency_fit.observe(sample)
    return latency_fit.model


class _Generation:
    """A request of random tokens on its way through the engine."""

    def __init__(self) -> None:
        self.first_token = asyncio.Event()
        self.task: asyncio.Task[None]


class _Run:
    def __init__(self, engine: Engine, vocabulary: int, max_len: int) -> None:
        self._engine = engine
        self._vocabulary = vocabulary
        self._max_len = max_len
        self._random = random.Random(0)
        self._count = 0

    async def generate(self, prompt: int, output: int) -> None:
        await self.start(prompt, output).task

    def start(self, prompt: int, output: int) -> _Generation:
        generation = _Generation()
        generation.task = asyncio.create_task(self._generate(prompt, output, generation))
        return generation

    async def _generate(self, prompt: int, output: int, generation: _Generation) -> None:
        from vllm import SamplingParams, TokensPrompt

        length = max(1, min(prompt, self._max_len - output - 1))
        tokens = [self._random.randrange(self._vocabulary) for _ in range(length)]
        parameters = SamplingParams(max_tokens=output, ignore_eos=True, detokenize=False)
        self._count += 1
        try:
            async for _ in self._engine.generate(
                TokensPrompt(prompt_token_ids=tokens), parameters, f"calibrate-{self._count}"
            ):
                generation.first_token.set()
        finally:
            generation.first_token.set()
