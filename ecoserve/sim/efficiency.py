"""Fits the efficiencies in ``hardware`` to tables of measured kernels, and checks them.

    python -m ecoserve.sim.efficiency TABLES

TABLES holds gzipped CSV files named ``KIND_GPU_ANYTHING.csv.gz``, times in ms. Kinds, with the
columns that are read:

- ``mlp`` (as Vidur profiles): ``time_stats.{attn_pre_proj,attn_post_proj,mlp_up_proj,
  mlp_down_proj,mlp_act,add}.median``, n_head, n_kv_head, n_embd, n_expanded_embd, num_tokens,
  num_tensor_parallel_workers;
- ``all_reduce`` (as Vidur profiles): num_workers, devices_per_node, size (bytes),
  ``time_stats.all_reduce.median``;
- ``gemm`` (as aiconfigurator-core has them): m (rows), k, n (columns), latency;
- ``prefill`` and ``decode`` attention (likewise): batch_size, isl, step, num_heads,
  num_key_value_heads, head_dim, latency.

A table whose name contains a word of ``hold_out`` is only checked. Where a GPU has one table of a
kind, every other shape in it is held out. docs/cost-model.md has the figures and the sources.
"""

from __future__ import annotations

import csv
import gzip
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray

from ecoserve.sim import kernels
from ecoserve.sim.hardware import GPUS, Attention, Gemm, Gpu
from ecoserve.sim.models import BYTES

Array = NDArray[np.float64]

KINDS = ("mlp", "gemm", "prefill", "decode", "all_reduce")
HOLD_OUT = ("Qwen-72B", "Llama-2-70b", "dgx", "pairwise")

_PRODUCTS = ("attn_pre_proj", "attn_post_proj", "mlp_up_proj", "mlp_down_proj")
_SERVED = (16e6, 400e6)
"""Weights of the products that are fitted in a ``gemm`` table: those of one GPU's share of the
models here. Smaller ones stay in the cache between repetitions, which serving never sees."""
_SERVED_ROWS = 8192
_STREAMED = 100e6
"""Bytes from which a decode attention kernel's repetitions do not live off the cache."""


@dataclass(frozen=True, slots=True)
class Error:
    """How far predictions are from one table's measurements, as shares of the measured time."""

    gpu: str
    what: str
    table: str
    held_out: bool
    points: int
    mape: float
    p95: float
    bias: float


@dataclass(frozen=True, slots=True)
class Fit:
    """Efficiencies of ``gpu`` in ``hardware``'s own terms."""

    gpu: str
    what: str
    value: Gemm | Attention | tuple[int, float, float, float] | float


@dataclass(frozen=True, slots=True)
class Table:
    """A file: its kind, GPU, name, and columns of numbers; empty fields are nan."""

    kind: str
    gpu: Gpu
    name: str
    columns: dict[str, Array]

    def __getitem__(self, column: str) -> Array:
        try:
            return self.columns[column]
        except KeyError:
            raise ValueError(f"{self.name}: a {self.kind} table needs a column {column}") from None


@dataclass(frozen=True, slots=True)
class Kernels:
    """Measured kernels: columns of numbers, the seconds each took, and the shape it has.

    ``shape`` tells which belong together when half of a lone table is held out.
    """

    columns: dict[str, Array]
    seconds: Array
    shape: Array

    def __getitem__(self, column: str) -> Array:
        return self.columns[column]

    def where(self, mask: NDArray[np.bool_]) -> Kernels:
        columns = {name: values[mask] for name, values in self.columns.items()}
        return Kernels(columns, self.seconds[mask], self.shape[mask])


Predict = Callable[[Array, Kernels], Array]
"""Seconds of kernels, given a kind's parameters."""


def tables(folder: Path) -> list[Table]:
    """The tables of a folder, by name. ValueError if there are none, or for an unknown GPU."""
    found = []
    for path in sorted(folder.glob("*.csv.gz")):
        kind = next((kind for kind in KINDS if path.name.startswith(f"{kind}_")), None)
        if kind is None:
            continue
        name = path.name.removesuffix(".csv.gz")
        short = name.removeprefix(f"{kind}_").split("_")[0].lower()
        gpu = next((gpu for gpu in GPUS.values() if gpu.name.lower() == short), None)
        if gpu is None:
            raise ValueError(f"{path}: no GPU is called {short!r}; known are {', '.join(GPUS)}")
        found.append(Table(kind, gpu, name, _columns(path)))
    if not found:
        raise ValueError(f"{folder}: no tables there; they are called KIND_GPU_ANYTHING.csv.gz")
    return found


def fit_and_check(
    found: Sequence[Table], hold_out: Iterable[str] = HOLD_OUT
) -> tuple[list[Fit], list[Error]]:
    """Fits what the tables allow; the errors are those of the fit, or where every table of a kind
    is held out, of the figures that ``hardware`` has now."""
    words = tuple(hold_out)
    fits: list[Fit] = []
    errors: list[Error] = []
    for kind in KINDS:
        for gpu in GPUS.values():
            own = [table for table in found if (table.kind, table.gpu.name) == (kind, gpu.name)]
            held = [any(word in table.name for word in words) for table in own]
            if not own:
                continue
            if kind == "all_reduce":
                _all_reduce(gpu, own, held, fits, errors)
            elif kind in ("mlp", "gemm"):
                _gemm(gpu, kind, own, held, fits, errors)
            else:
                _attention(gpu, kind, own, held, fits, errors)
    return fits, errors


def _gemm(
    gpu: Gpu, kind: str, own: list[Table], held: list[bool], fits: list[Fit], errors: list[Error]
) -> None:
    read = _mlp_products if kind == "mlp" else _gemm_products
    now = gpu.gemm

    def predict(x: Array, kernels_: Kernels) -> Array:
        seconds: Array = kernels.product(
            gpu, kernels_["rows"], kernels_["k"], kernels_["m"], _to_gemm(x)
        )
        return seconds

    start = np.array(
        [now.compute, now.memory, now.sharpness, now.ramp * 1e6, now.edge / 10, now.wave]
    )
    bounds = ([0.2, 0.2, 1.0, 0.0, 0.0, 0.0], [1.5, 1.2, 12.0, 50.0, 20.0, 1.0])
    pairs = [(table.name, read(table)) for table in own]
    x = _fit(gpu, f"{kind} product", pairs, held, predict, start, bounds, errors)
    if x is not None:
        fits.append(Fit(gpu.name, kind, _to_gemm(x)))
    if kind == "mlp":
        for (name, measured), only_checked in zip(pairs, held, strict=True):
            parameters = start if x is None else x
            together = measured["tp"] * 1e6 + measured["rows"]
            errors.append(
                _error(
                    gpu, "mlp layer", name, only_checked,
                    _sums(together, predict(parameters, measured)),
                    _sums(together, measured.seconds),
                )
            )  # fmt: skip
        fits.append(Fit(gpu.name, "elementwise", _streaming(gpu, own)))


def _to_gemm(x: Array) -> Gemm:
    compute, memory, sharpness, ramp, edge, wave = (float(value) for value in x)
    return Gemm(compute, memory, sharpness, ramp * 1e-6, edge * 10, wave)


def _attention(
    gpu: Gpu, kind: str, own: list[Table], held: list[bool], fits: list[Fit], errors: list[Error]
) -> None:
    now = gpu.attention

    def predict_prefill(x: Array, measured: Kernels) -> Array:
        seconds: Array = gpu.gemm.ramp + kernels.prefill_attention(
            gpu,
            measured["batch"] * measured["tokens"],
            measured["batch"] * measured["tokens"] ** 2 / 2,
            measured["width"],
            replace(now, prefill=float(x[0]), half=float(x[1]) * 1000),
        )
        return seconds

    def predict_decode(x: Array, measured: Kernels) -> Array:
        seconds: Array = gpu.gemm.ramp + kernels.decode_attention(
            gpu,
            measured["batch"],
            measured["context"],
            measured["kv_bytes"],
            replace(now, decode=float(x[0]), pad=float(x[1]) * 100),
        )
        return seconds

    if kind == "prefill":
        pairs = [(table.name, _prefills(table)) for table in own]
        start = np.array([now.prefill, now.half / 1000])
        bounds = ([0.05, 0.0], [1.5, 20.0])
        x = _fit(gpu, "prefill attention", pairs, held, predict_prefill, start, bounds, errors)
        if x is not None:
            fits.append(
                Fit(gpu.name, kind, replace(now, prefill=float(x[0]), half=float(x[1]) * 1000))
            )
    else:
        pairs = [(table.name, _decodes(table)) for table in own]
        start = np.array([now.decode, now.pad / 100])
        bounds = ([0.05, 0.0], [1.2, 20.0])
        x = _fit(gpu, "decode attention", pairs, held, predict_decode, start, bounds, errors)
        if x is not None:
            fits.append(
                Fit(gpu.name, kind, replace(now, decode=float(x[0]), pad=float(x[1]) * 100))
            )


def _all_reduce(
    gpu: Gpu, own: list[Table], held: list[bool], fits: list[Fit], errors: list[Error]
) -> None:
    def predict(x: Array, measured: Kernels) -> Array:
        tp = measured["tp"]
        moving = 2 * (tp - 1) / tp * measured["bytes"] / (x[1] * 1e9)
        return kernels.p_norm(x[0] * 1e-6, moving, float(x[2]))

    sizes = [(table.name, _reductions(table)) for table in own]
    for tp in sorted({int(n) for _, measured in sizes for n in measured["tp"]}):
        if tp not in gpu.all_reduce.bus:
            continue
        pairs = [(name, measured.where(measured["tp"] == tp)) for name, measured in sizes]
        kept = [i for i, (_, measured) in enumerate(pairs) if len(measured.seconds)]
        now = gpu.all_reduce
        start = np.array([now.latency[tp] * 1e6, now.bus[tp] / 1e9, now.sharpness[tp]])
        bounds = ([0.5, 0.5, 0.3], [500.0, 1000.0, 4.0])
        x = _fit(
            gpu, f"all-reduce TP{tp}", [pairs[i] for i in kept], [held[i] for i in kept],
            predict, start, bounds, errors,
        )  # fmt: skip
        if x is not None:
            fits.append(Fit(gpu.name, "all_reduce", (tp, float(x[0]), float(x[1]), float(x[2]))))


def _fit(
    gpu: Gpu,
    what: str,
    pairs: list[tuple[str, Kernels]],
    held: list[bool],
    predict: Predict,
    start: Array,
    bounds: tuple[list[float], list[float]],
    errors: list[Error],
) -> Array | None:
    """Parameters that fit the tables not held out; None if all are. Adds each table's error."""
    from scipy.optimize import least_squares

    parts: list[tuple[str, Kernels, bool]] = []
    if len(pairs) == 1 and not held[0]:
        name, measured = pairs[0]
        _, rank = np.unique(measured.shape, return_inverse=True)
        parts = [(name, measured.where(rank % 2 == odd), bool(odd)) for odd in (0, 1)]
    else:
        parts = [(name, measured, no) for (name, measured), no in zip(pairs, held, strict=True)]
    fitted = [measured for _, measured, only_checked in parts if not only_checked]
    x: Array | None = None
    if fitted:
        # Relative errors; the soft loss keeps a library's odd choice of kernel from pulling.
        def residuals(parameters: Array) -> Array:
            return np.concatenate(
                [np.log(predict(parameters, some) / some.seconds) for some in fitted]
            )

        inside = np.clip(start, *(np.asarray(bound) * (1 + 1e-9) for bound in bounds))
        found: Any = least_squares(
            residuals, inside, bounds=bounds, loss="soft_l1", f_scale=0.1, diff_step=1e-3
        )
        x = np.asarray(found.x, dtype=np.float64)
    for name, measured, only_checked in parts:
        predicted = predict(start if x is None else x, measured)
        errors.append(_error(gpu, what, name, only_checked, predicted, measured.seconds))
    return x


def _error(
    gpu: Gpu, what: str, table: str, held_out: bool, predicted: Array, seconds: Array
) -> Error:
    off = predicted / seconds - 1
    return Error(
        gpu.name, what, table, held_out, len(off),
        float(np.abs(off).mean()), float(np.quantile(np.abs(off), 0.95)), float(off.mean()),
    )  # fmt: skip


def _streaming(gpu: Gpu, own: list[Table]) -> float:
    """Bandwidth share of activation and residual add together, at 512 tokens and more."""
    moved = taken = 0.0
    for table in own:
        large = table["num_tokens"] >= 512
        shard = table["n_expanded_embd"] / table["num_tensor_parallel_workers"]
        values = table["num_tokens"] * (3 * shard + 3 * table["n_embd"])
        ms = table["time_stats.mlp_act.median"] + table["time_stats.add.median"]
        good = large & np.isfinite(ms)
        moved += float(BYTES * values[good].sum())
        taken += float(ms[good].sum()) * 1e-3
    return moved / (taken * gpu.bandwidth)


def _mlp_products(table: Table) -> Kernels:
    tp, rows = table["num_tensor_parallel_workers"], table["num_tokens"]
    hidden, ffn = table["n_embd"], table["n_expanded_embd"] / tp
    head = hidden / table["n_head"]
    q, kv = hidden / tp, 2 * table["n_kv_head"] * head / tp
    shapes = ((hidden, q + kv), (q, hidden), (hidden, 2 * ffn), (ffn, hidden))
    ms = [table[f"time_stats.{name}.median"] for name in _PRODUCTS]
    columns = {
        "tp": np.tile(tp, 4),
        "rows": np.tile(rows, 4),
        "k": np.concatenate([k for k, _ in shapes]),
        "m": np.concatenate([m for _, m in shapes]),
    }
    return _measured(columns, np.concatenate(ms) * 1e-3, columns["k"] * 1e6 + columns["m"])


def _gemm_products(table: Table) -> Kernels:
    columns = {"rows": table["m"], "k": table["k"], "m": table["n"]}
    measured = _measured(columns, table["latency"] * 1e-3, table["k"] * 1e6 + table["n"])
    weights = measured["k"] * measured["m"]
    return measured.where(_within(weights, *_SERVED) & (measured["rows"] <= _SERVED_ROWS))


def _prefills(table: Table) -> Kernels:
    columns = {
        "batch": table["batch_size"],
        "tokens": table["isl"],
        "heads": table["num_heads"],
        "width": table["num_heads"] * table["head_dim"],
    }
    measured = _measured(columns, table["latency"] * 1e-3, _heads(table))
    together = measured["batch"] * measured["tokens"]
    served = (measured["tokens"] >= 512) & (together <= 2 * _SERVED_ROWS)
    return measured.where(served & _within(measured["heads"], 8, 64))


def _decodes(table: Table) -> Kernels:
    columns = {
        "batch": table["batch_size"],
        "context": table["batch_size"] * (table["isl"] + table["step"]),
        "kv_bytes": 2 * BYTES * table["num_key_value_heads"] * table["head_dim"],
        "group": table["num_heads"] / table["num_key_value_heads"],
    }
    measured = _measured(columns, table["latency"] * 1e-3, _heads(table))
    streamed = measured["context"] * measured["kv_bytes"] >= _STREAMED
    served = _within(measured["batch"], 8, 512) & _within(measured["group"], 1, 8)
    return measured.where(streamed & served)


def _heads(table: Table) -> Array:
    return table["num_heads"] * 1e4 + table["num_key_value_heads"]


def _within(values: Array, low: float, high: float) -> NDArray[np.bool_]:
    return (values >= low) & (values <= high)


def _reductions(table: Table) -> Kernels:
    columns = {
        "tp": table["num_workers"],
        "bytes": table["size"],
        "one_node": (table["num_workers"] == table["devices_per_node"]).astype(np.float64),
    }
    measured = _measured(columns, table["time_stats.all_reduce.median"] * 1e-3, table["size"])
    return measured.where(measured["one_node"] == 1)


def _measured(columns: dict[str, Array], seconds: Array, shape: Array) -> Kernels:
    return Kernels(columns, seconds, shape).where(np.isfinite(seconds) & (seconds > 0))


def _sums(keys: Array, values: Array) -> Array:
    _, index = np.unique(keys, return_inverse=True)
    return np.bincount(index, values).astype(np.float64)


def _columns(path: Path) -> dict[str, Array]:
    with gzip.open(path, "rt", newline="") as file:
        rows = csv.reader(file)
        header = next(rows, [])
        cells = list(zip(*rows, strict=True))
    columns: dict[str, Array] = {}
    for name, values in zip(header, cells, strict=False):
        try:
            columns[name] = np.array([float(value) if value else np.nan for value in values])
        except ValueError:
            continue  # words: not a number that is needed
    return columns


def calibrate(
    folder: Annotated[Path, typer.Argument(metavar="TABLES", help="Folder of measured tables.")],
    hold_out: Annotated[
        list[str] | None, typer.Option(help="Only check tables with this word in their name.")
    ] = None,
) -> None:
    """Fit kernel efficiencies to measured tables; print them and their error on each table."""
    try:
        fits, errors = fit_and_check(tables(folder), hold_out or HOLD_OUT)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    for fit in fits:
        value = fit.value
        if isinstance(value, tuple):
            tp, latency, bus, sharpness = value
            print(f"{fit.gpu} {fit.what}: tp{tp}=({latency:.1f}, {bus:.1f}, {sharpness:.2f})")
        elif isinstance(value, float):
            print(f"{fit.gpu} {fit.what}: streaming={value:.2f}")
        else:
            print(f"{fit.gpu} {fit.what}: {value}")
    print(
        "\n| GPU | kernel | table | points | MAPE % | p95 % | bias % | |\n|---|---|---|"
        + "--:|" * 4
        + "---|"
    )
    for row in errors:
        held = "held out" if row.held_out else "fitted"
        print(
            f"| {row.gpu} | {row.what} | {row.table} | {row.points} | {100 * row.mape:.1f} "
            f"| {100 * row.p95:.1f} | {100 * row.bias:+.1f} | {held} |"
        )


if __name__ == "__main__":
    typer.run(calibrate)
