"""Seconds of single kernels on one GPU, in closed form; numbers or numpy arrays go in alike.

``hardware.Gemm``, ``Attention`` and ``AllReduce`` hold the efficiencies, ``efficiency`` fits them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ecoserve.sim.hardware import Attention, Gemm, Gpu
from ecoserve.sim.models import BYTES

Values = Any
"""A number or an array of them."""

# Blocks of the result that a streaming multiprocessor computes, as matrix libraries cut them.
_TILE_ROWS = np.array([16, 32, 64, 64, 128, 128, 128, 256])
_TILE_COLUMNS = np.array([64, 64, 64, 128, 64, 128, 256, 128])


def product(gpu: Gpu, rows: Values, k: Values, m: Values, gemm: Gemm | None = None) -> Values:
    """A (rows x k) by (k x m) product: ramp + (compute^p + memory^p)^(1/p), a smooth roofline.

    The result is cut into tiles, which the multiprocessors take in waves; the tile is the one that
    takes least. A last wave that is not full costs ``gemm.wave`` of what it leaves idle, and a
    small tile loads more for what it computes, which ``gemm.edge`` charges. Memory is the weights
    read and the activations read and written.
    """
    gemm = gemm or gpu.gemm
    n, k, m = (np.asarray(value, dtype=np.float64)[..., None] for value in (rows, k, m))
    waves = np.ceil(n / _TILE_ROWS) * np.ceil(m / _TILE_COLUMNS) / gpu.processors
    waves = waves + gemm.wave * (np.ceil(waves) - waves)
    area = _TILE_ROWS * _TILE_COLUMNS * (1 + gemm.edge * (1 / _TILE_ROWS + 1 / _TILE_COLUMNS))
    flops = 2 * gpu.processors * k * (waves * area).min(axis=-1, keepdims=True)
    compute = flops / (gpu.flops * gemm.compute)
    memory = BYTES * (k * m + n * (k + m)) / (gpu.bandwidth * gemm.memory)
    return gemm.ramp + p_norm(compute, memory, gemm.sharpness)[..., 0]


def prefill_attention(
    gpu: Gpu, tokens: Values, pairs: Values, width: Values, attention: Attention | None = None
) -> Values:
    """Causal attention of prompts: 4 pairs width flop, ``width`` being heads x head size.

    Of a whole prompt pairs = n^2 / 2, so an efficiency of prefill / (1 + half / n) makes the time
    proportional to pairs (1 + half / n) = pairs + n half / 2, which is linear in both. A later
    chunk of a prompt is charged alike for each of its tokens.
    """
    attention = attention or gpu.attention
    work = pairs + tokens * attention.half / 2
    return 4 * work * width / (gpu.flops * attention.prefill)


def decode_attention(
    gpu: Gpu, batch: Values, context: Values, kv_bytes: Values, attention: Attention | None = None
) -> Values:
    """Reading the KV of ``batch`` sequences with ``context`` tokens in all, ``kv_bytes`` a token.

    What each sequence costs by itself is given as ``pad`` further tokens: kernels read whole
    blocks, and short sequences leave multiprocessors idle.
    """
    attention = attention or gpu.attention
    read = (context + attention.pad * batch) * kv_bytes
    return read / (gpu.bandwidth * attention.decode)


def p_norm(a: Values, b: Values, p: float) -> NDArray[np.float64]:
    """(a^p + b^p)^(1/p) of values not negative: their sum at p = 1, towards the larger above."""
    a, b = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    larger, smaller = np.maximum(a, b), np.minimum(a, b)
    # Divided by the larger, so that no power overflows.
    ratio = np.divide(smaller, larger, out=np.zeros(np.shape(larger)), where=larger > 0)
    norm: NDArray[np.float64] = larger * (1 + ratio**p) ** (1 / p)
    return norm
