"""The two other simulators as players of arrivals, for `outside.py`; their sources must be on
sys.path."""

from __future__ import annotations

import atexit
import inspect
import logging
import tempfile
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ecoserve.sim.records import Arrival, StepCost

Times = NDArray[np.float64]
"""TTFT and TPOT, seconds, of each request in order of arrival."""

# What simdistserve adds to the profile: to every prefill, to every step, to every step by the token
# of context (milliseconds).
PER_PREFILL, PER_STEP, PER_TOKEN = 1.0, 2.0, 1e-4


@dataclass(frozen=True, slots=True)
class Profile:
    """Step times as simdistserve computes them, for our simulator; milliseconds.

    ``prefill``: constant, per token, per squared token of each prompt. ``small`` and ``large``
    (from ``threshold`` sequences on): constant, per token of context, per sequence.
    """

    prefill: tuple[float, float, float]
    small: tuple[float, float, float]
    large: tuple[float, float, float]
    threshold: int
    stages: int = 1
    kv_tokens: int = 1
    kv_bytes: float = 0.0

    def step(self, tokens: int, pairs: float, batch: int, context: int) -> float:
        """Seconds; a step holds prompts, whole ones, or decodes."""
        if tokens:
            a, b, c = self.prefill
            work = a + b * tokens + c * 2 * pairs + PER_PREFILL
            return 1e-3 * (work + PER_STEP + PER_TOKEN * tokens)
        a, b, c = self.small if batch < self.threshold else self.large
        # They count the token to come in the profile's context, and not in the step's own.
        step = PER_STEP + PER_TOKEN * (context - batch)
        return 1e-3 * (a + b * context + c * batch + step)

    def handoff(self, tokens: int) -> float:
        return 0.0


@dataclass(frozen=True, slots=True)
class Simdistserve:
    """vLLM (``decode`` 0) or DistServe of so many instances in simdistserve.

    ``budget`` is the most prompt tokens of a step. ``cost``: step times in place of its profile of
    OPT-13B and of what it adds to it. ``capped``: a decode step holds no more than 50,000 tokens of
    context, as its source has it, with a note that this is to be reverted.
    """

    prefill: int
    decode: int
    budget: int
    cost: StepCost | None = None
    capped: bool = True

    @staticmethod
    def profile(model: str, engine: str) -> Profile:
        """Its profile of a model on one A100, by which engine's steps."""
        from simdistserve.estimators import time_estimator

        known = getattr(time_estimator, f"{engine}_profile_data")[model]["1"]
        return Profile(
            tuple(known["prefill"]),
            tuple(known["decoding_smallbs"]),
            tuple(known["decoding_largebs"]),
            known["decoding_large_small_bs_threshold"],
        )

    def play(self, arrivals: Sequence[Arrival]) -> Times:
        import simpy
        from simdistserve.base import worker
        from simdistserve.base.request import Request
        from simdistserve.base.scheduler import put_requests_with_interarrivals
        from simdistserve.base.worker import WorkerConfig
        from simdistserve.clusters.disagg import DisaggCluster
        from simdistserve.clusters.vllm import VLLMCluster
        from simdistserve.estimators import time_estimator

        if self.cost is None:
            worker.get_prefill_time = time_estimator.get_prefill_time
            worker.get_decode_time = time_estimator.get_decode_time
            worker.Worker.add_ray_overhead = lambda _, tokens: PER_STEP + PER_TOKEN * tokens
        else:
            worker.get_prefill_time = self._prefill
            worker.get_decode_time = self._decode
            worker.Worker.add_ray_overhead = lambda _, tokens: 0.0
        worker.Worker._enter_decodes = _decode_steps()[self.capped]
        env = simpy.Environment()
        config = WorkerConfig(
            model_type="OPT-13B",
            TP=1,
            TP_Prefill=1,
            TP_Decode=1,
            prefill_max_batch_size=10**7,
            decode_max_batch_size=10**7,
            prefill_max_tokens=self.budget,
            decode_max_tokens=10**7,
            enable_chunked_prefill=False,
            engine_type="distserve" if self.decode else "vllm",
        )
        cluster: Any
        if self.decode:
            cluster = DisaggCluster(
                env,
                N_prefill_instance=self.prefill,
                N_decode_instance=self.decode,
                worker_configs=config,
            )
        else:
            cluster = VLLMCluster(env, N_instance=self.prefill, worker_configs=config)
        cluster.run()
        # It makes `output_lens` tokens after the first; ours count the first.
        requests = [
            Request(env, number, prefill_length=a.prompt, output_lens=a.output - 1)
            for number, a in enumerate(arrivals)
        ]
        at = 1e3 * np.array([a.at for a in arrivals])
        put_requests_with_interarrivals(env, cluster.scheduler, np.diff(at, prepend=0), requests)
        env.run()
        return np.array([self._times(request) for request in requests])

    def _prefill(self, *_: Any, **given: Any) -> float:
        lengths = given["prefill_len_list"]
        assert self.cost is not None
        return 1e3 * self.cost.step(sum(lengths), sum(n * n / 2 for n in lengths), 0, 0)

    def _decode(self, batch: int, **given: Any) -> float:
        assert self.cost is not None
        return 1e3 * self.cost.step(0, 0.0, batch, sum(given["token_generated_list"]))

    @staticmethod
    def _times(request: Any) -> tuple[float, float]:
        """From its own log: first token when it first waits to decode, end when it leaves."""
        when: dict[str, float] = {}
        for moment, event, _ in request.log:
            when.setdefault(event, moment)
        first, end = when["wait_decode"], when["exit_system"]
        left = request.output_lens
        return 1e-3 * (first - when["init"]), 1e-3 * (end - first) / left if left else 0.0


@cache
def _decode_steps() -> tuple[Any, Any]:
    """How simdistserve's worker fills a decode step: without its cap, and as it comes."""
    from simdistserve.base.worker import Worker

    own = Worker._enter_decodes
    cap = "decode_max_tokens = 50000"
    source = textwrap.dedent(inspect.getsource(own))
    if cap not in source:
        raise RuntimeError(f"simdistserve's Worker._enter_decodes has no more {cap!r}")
    lifted: dict[str, Any] = {}
    exec(source.replace(cap, "decode_max_tokens = self.decode_max_tokens"), {}, lifted)
    return lifted["_enter_decodes"], own


@dataclass(frozen=True, slots=True)
class Vidur:
    """``kind`` vllm or sarathi with its budget or chunk in Vidur, so many replicas in turn."""

    kind: str
    tokens: int
    replicas: int
    cost: StepCost

    def play(self, arrivals: Sequence[Arrival]) -> Times:
        from vidur import config
        from vidur.entities import Replica
        from vidur.execution_time_predictor import ExecutionTimePredictorRegistry
        from vidur.simulator import Simulator
        from vidur.types import ExecutionTimePredictorType

        logging.getLogger("vidur").setLevel(logging.WARNING)
        dummy = ExecutionTimePredictorType.DUMMY

        class Given(config.BaseExecutionTimePredictorConfig):  # type: ignore[misc]
            @staticmethod
            def get_type() -> Any:
                return dummy

        registry = ExecutionTimePredictorRegistry
        if dummy in registry._registry:
            registry.unregister(dummy)
        registry.register(dummy, lambda **_: SimpleNamespace(get_execution_time=self._time))
        common = {
            "batch_size_cap": 256,
            "num_blocks": self.cost.kv_tokens // 16,
            "watermark_blocks_fraction": 0.01,
        }
        scheduler = (
            config.VllmSchedulerConfig(max_tokens_in_batch=self.tokens, **common)
            if self.kind == "vllm"
            else config.SarathiSchedulerConfig(chunk_size=self.tokens, **common)
        )
        Replica._id = -1  # replicas are counted from 0 in each simulation
        with tempfile.TemporaryDirectory() as folder:
            trace = Path(folder) / "trace.csv"
            lines = (f"{a.at!r},{a.prompt},{a.output}\n" for a in arrivals)
            trace.write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n" + "".join(lines))
            simulator = Simulator(
                config.SimulationConfig(
                    log_level="warning",
                    cluster_config=config.ClusterConfig(
                        num_replicas=self.replicas,
                        replica_scheduler_config=scheduler,
                    ),
                    request_generator_config=config.TraceRequestGeneratorConfig(
                        trace_file=str(trace), max_tokens=8192
                    ),
                    execution_time_predictor_config=Given(),
                    metrics_config=config.MetricsConfig(
                        write_metrics=False, enable_chrome_trace=False, output_dir=folder
                    ),
                )
            )
        atexit.unregister(simulator._write_output)
        requests = [event._request for _, event in simulator._event_queue]
        outputs = [request.num_decode_tokens for request in requests]
        simulator.run()
        times = sorted(
            (r.arrived_at, r.prefill_completed_at, r.completed_at, output)
            for r, output in zip(requests, outputs, strict=True)
        )
        return np.array(
            [
                (first - at, (end - first) / (output - 1) if output > 1 else 0.0)
                for at, first, end, output in times
            ]
        )

    def _time(self, batch: Any, stage: int) -> Any:
        """Seconds of a step; ``stage`` is always the only one."""
        tokens, pairs, decodes, context = 0, 0.0, 0, 0
        for request, chunk in zip(batch.requests, batch.num_tokens, strict=True):
            before = request.num_processed_tokens
            if request.is_prefill_complete:
                decodes += 1
                context += before
            else:
                tokens += chunk
                pairs += chunk * (before + chunk / 2)
        # numpy's integers would make keys of a cost model's tables that are slow to look up.
        seconds = float(self.cost.step(int(tokens), float(pairs), decodes, int(context)))
        return SimpleNamespace(total_time=seconds, model_time=seconds)
