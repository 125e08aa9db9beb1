"""How long engine steps take: a closed form over hardware and model, or our engine's own fit.

A step of n tokens takes, on the slowest of PP equal stages,

    fixed + layers/PP x (linear + elementwise + visible all-reduce + attention) + LM head

- linear: four matrix products, each a roofline with a soft corner, cut into tiles (``kernels``);
- elementwise: two fused add-norms, RoPE, KV write, gated activation, at streaming bandwidth;
- all-reduce: two of latency and 2 (TP-1)/TP bytes / bus; of it, ``overlap`` is hidden behind the
  layer's other work, as far as that lasts;
- attention: prefill 4 h d pairs flop at an efficiency that grows with the prompt's length, decode
  the KV read at a share of the bandwidth;
- fixed: scheduler, launches, sampling (vLLM: 3 to 5 ms);
- a step that holds both prompt tokens and decodes takes (1 + ``mixing``) times that.

Not in it: reading a chunk's earlier KV (less than the arithmetic on it for chunks of 128 tokens and
more), preemption, swapping, and what the host does between steps beyond ``fixed``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace

from ecoserve.policy.latency import LatencyModel
from ecoserve.sim import kernels
from ecoserve.sim.hardware import AllReduce, Gpu
from ecoserve.sim.models import BYTES, Model

RESERVED = 1.5e9
"""Bytes of a GPU that activations and the engine's own buffers take."""


@dataclass(frozen=True, slots=True)
class Parts:
    """Seconds of a step by what they go to. ``mixing`` is what the mixed-batch penalty adds."""

    fixed: float
    linear: float
    elementwise: float
    all_reduce: float
    attention: float
    head: float
    mixing: float

    @property
    def total(self) -> float:
        return math.fsum(getattr(self, part.name) for part in fields(self))


class CostModel:
    """Steps of ``model`` on ``tp`` x ``pp`` GPUs, all in one node.

    ``bus`` (bytes/s) replaces the GPU's all-reduce bandwidth, ``fixed`` is in seconds, ``mixing``
    and ``overlap`` are shares. ValueError, naming what is allowed, for a TP or PP that does not
    divide the model, more GPUs than a node has, or weights that leave no room for KV.
    """

    def __init__(
        self,
        model: Model,
        gpu: Gpu,
        *,
        tp: int = 1,
        pp: int = 1,
        bus: float | None = None,
        overlap: float = 0.0,
        mixing: float = 0.0,
        fixed: float = 0.004,
        memory_utilisation: float = 0.9,
    ) -> None:
        model.check(tp, pp)
        if tp * pp > gpu.gpus:
            raise ValueError(f"tp x pp: {tp} x {pp} GPUs asked for, a node has {gpu.gpus}")
        if bus is not None and not bus > 0:
            raise ValueError(f"bus must be above 0 bytes/s, not {bus!r}")
        if not 0 <= overlap <= 1:
            raise ValueError(f"overlap must be 0 to 1, not {overlap!r}")
        if not (math.isfinite(mixing) and mixing >= 0):
            raise ValueError(f"mixing must be finite and not negative, not {mixing!r}")
        if not (math.isfinite(fixed) and fixed >= 0):
            raise ValueError(f"fixed must be finite and not negative seconds, not {fixed!r}")
        if not 0 < memory_utilisation <= 1:
            raise ValueError(
                f"memory_utilisation must be above 0, at most 1, not {memory_utilisation!r}"
            )
        self.model = model
        self.gpu = gpu
        self.tp = tp
        self.pp = pp
        self.overlap = overlap
        self.mixing = mixing
        self.fixed = fixed
        self._all_reduce = gpu.all_reduce if bus is None else _with_bus(gpu.all_reduce, bus)
        self._all_reduce.seconds(0, tp)  # a TP beyond the table is refused here, not mid-run
        self.kv_tokens = self._room(memory_utilisation)
        self.kv_bytes = float(model.kv_bytes(tp))
        h, d, f = model.hidden, model.head_dim, model.ffn
        kv_heads = max(model.kv_heads // tp, 1)
        q = model.heads * d // tp
        kv = 2 * kv_heads * d
        # QKV, output, gate and up, down: (k, m) of each.
        self._k = (h, q, h, f // tp)
        self._m = (q + kv, h, 2 * f // tp, h)
        # Two add-norms read and write two tensors each; RoPE does q and k; KV is copied to the
        # cache; the activation reads two and writes one.
        values = 2 * 4 * h + 2 * (q + kv // 2) + 2 * kv + 3 * f // tp
        self._elementwise = values * BYTES / (gpu.bandwidth * gpu.streaming)
        self._layers = model.layers // pp
        # Attention is linear in what a step holds, so one coefficient each is enough.
        self._pair = self._layers * float(kernels.prefill_attention(gpu, 0, 1, q))
        self._token = self._layers * float(kernels.prefill_attention(gpu, 1, 0, q))
        self._context = self._layers * float(kernels.decode_attention(gpu, 0, 1, kv * BYTES))
        self._sequence = self._layers * float(kernels.decode_attention(gpu, 1, 0, kv * BYTES))
        self._dense: dict[int, float] = {}
        self._head: dict[int, float] = {}

    @property
    def stages(self) -> int:
        """Pipeline stages."""
        return self.pp

    @property
    def gpus(self) -> int:
        """GPUs of an instance."""
        return self.tp * self.pp

    @property
    def price(self) -> float:
        """Indicative dollars an hour for the instance (``Gpu.price``)."""
        return self.gpus * self.gpu.price

    def step(self, tokens: int, pairs: float, batch: int, context: int) -> float:
        """Seconds of a step on the slowest stage; 0 for an empty one (``records.StepCost``)."""
        rows = tokens + batch
        if not rows:
            return 0.0
        dense = self._dense.get(rows)
        if dense is None:
            dense = self._dense[rows] = self.fixed + sum(self._layer_parts(rows))
        # Of the prompts only the last position's logits are needed: about one more row.
        sampled = batch + 1 if tokens else batch
        head = self._head.get(sampled)
        if head is None:
            head = self._head[sampled] = self._head_seconds(sampled)
        seconds = dense + head + self._attention_seconds(tokens, pairs, batch, context)
        return (1 + self.mixing) * seconds if tokens and batch else seconds

    def parts(self, tokens: int, pairs: float, batch: int, context: int) -> Parts:
        """The same step, by what its seconds go to; their total is ``step``'s."""
        rows = tokens + batch
        if not rows:
            return Parts(0, 0, 0, 0, 0, 0, 0)
        linear, elementwise, all_reduce = self._layer_parts(rows)
        attention = self._attention_seconds(tokens, pairs, batch, context)
        head = self._head_seconds(batch + 1 if tokens else batch)
        plain = Parts(self.fixed, linear, elementwise, all_reduce, attention, head, 0.0)
        mixing = self.mixing * plain.total if tokens and batch else 0.0
        return Parts(self.fixed, linear, elementwise, all_reduce, attention, head, mixing)

    def handoff(self, tokens: int) -> float:
        """Seconds to pass ``tokens`` tokens' hidden state and residual to the next stage.

        Each of the TP devices sends its share, which the receivers then gather.
        """
        if self.pp == 1 or not tokens:
            return 0.0
        size = 2 * BYTES * self.model.hidden * tokens
        # Gathering moves half of what summing does.
        gather = self._all_reduce.seconds(size / 2, self.tp)
        return self.gpu.peer.seconds(size / self.tp) + gather

    def _layer_parts(self, rows: int) -> tuple[float, float, float]:
        """Seconds of linear layers, elementwise work and visible all-reduce over a stage."""
        linear = float(kernels.product(self.gpu, rows, self._k, self._m).sum())
        elementwise = self._elementwise * rows
        summed = 2 * self._all_reduce.seconds(BYTES * self.model.hidden * rows, self.tp)
        visible = summed - min(self.overlap * summed, linear + elementwise)
        return self._layers * linear, self._layers * elementwise, self._layers * visible

    def _attention_seconds(self, tokens: int, pairs: float, batch: int, context: int) -> float:
        prefill = self._pair * pairs + self._token * tokens
        return prefill + self._sequence * batch + self._context * context

    def _head_seconds(self, rows: int) -> float:
        columns = math.ceil(self.model.vocab / self.tp)
        return float(kernels.product(self.gpu, rows, self.model.hidden, columns))

    def _room(self, utilisation: float) -> int:
        gpus = self.gpus
        room = gpus * (utilisation * self.gpu.memory - RESERVED) - BYTES * self.model.weights
        tokens = int(room / self.model.kv_bytes(self.tp)) if room > 0 else 0
        if tokens < 1:
            raise ValueError(
                f"tp x pp: {self.model.name} weighs {BYTES * self.model.weights / 1e9:.1f} GB, too "
                f"much to leave KV room on {gpus} {self.gpu.name} of {self.gpu.memory / 1e9:.0f} GB"
            )
        return tokens


def _with_bus(all_reduce: AllReduce, bus: float) -> AllReduce:
    return replace(all_reduce, bus=dict.fromkeys(all_reduce.bus, bus))


@dataclass(frozen=True, slots=True)
class FittedCost:
    """Steps as a fitted latency model predicts them, for instances of an engine that was measured.

    ``kv_tokens`` and ``kv_bytes`` are the engine's own; there is no pipeline.
    """

    latency: LatencyModel
    kv_tokens: int
    kv_bytes: float = 0.0

    def __post_init__(self) -> None:
        if self.kv_tokens < 1:
            raise ValueError(f"kv_tokens must be at least 1, not {self.kv_tokens!r}")
        if self.kv_bytes < 0:
            raise ValueError(f"kv_bytes must not be negative, not {self.kv_bytes!r}")

    @property
    def stages(self) -> int:
        return 1

    def step(self, tokens: int, pairs: float, batch: int, context: int) -> float:
        """Seconds of the step; 0 for an empty one."""
        model = self.latency
        if not tokens:
            return model.decode(batch, context)
        prompt = model.prefill_token * tokens + model.prefill_pair * pairs
        if not batch:
            return model.prefill_fixed + prompt
        return (1 + model.mixing) * (model.decode(batch, context) + prompt)

    def handoff(self, tokens: int) -> float:
        """There is no next stage."""
        return 0.0
