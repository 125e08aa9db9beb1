"""Fitting kernel efficiencies: known ones are found again, and what is held out stays out."""

from __future__ import annotations

import csv
import gzip
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from ecoserve.sim import kernels
from ecoserve.sim.efficiency import Fit, calibrate, fit_and_check, tables
from ecoserve.sim.hardware import Attention, Gemm, gpu

A100 = gpu("A100")
TRUE = Gemm(compute=0.7, memory=0.75, sharpness=1.8, ramp=4e-6, edge=6.0, wave=0.5)
PRODUCTS = ("attn_pre_proj", "attn_post_proj", "mlp_up_proj", "mlp_down_proj")


def write(path: Path, rows: list[dict[str, object]]) -> None:
    with gzip.open(path, "wt", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def mlp_rows(
    hidden: int, ffn: int, heads: int, kv_heads: int, true: Gemm = TRUE, noise: float = 0.0
) -> Iterator[dict[str, object]]:
    random = np.random.default_rng(0)
    for tp in (1, 2, 4, 8):
        for n in (1, 16, 48, 100, 160, 256, 400, 512, 700, 1024, 1500, 2048, 4096):
            q, kv = hidden // tp, 2 * kv_heads * (hidden // heads) // tp
            shapes = ((hidden, q + kv), (q, hidden), (hidden, 2 * ffn // tp), (ffn // tp, hidden))
            row: dict[str, object] = {
                "n_head": heads, "n_kv_head": kv_heads, "n_embd": hidden,
                "n_expanded_embd": ffn, "num_tokens": n, "num_tensor_parallel_workers": tp,
                "time_stats.mlp_act.median": 1e3 * 2 * n * 3 * ffn / tp / (0.5 * A100.bandwidth),
                "time_stats.add.median": 1e3 * 2 * n * 3 * hidden / (0.5 * A100.bandwidth),
                "collective": "words",
            }  # fmt: skip
            for name, (k, m) in zip(PRODUCTS, shapes, strict=True):
                seconds = float(kernels.product(A100, n, k, m, true))
                seconds *= float(np.exp(noise * random.standard_normal()))
                row[f"time_stats.{name}.median"] = 1e3 * seconds
            yield row


def only(fits: list[Fit], what: str) -> object:
    (value,) = (fit.value for fit in fits if fit.what == what)
    return value


def test_products_find_their_efficiencies_again(tmp_path: Path) -> None:
    write(tmp_path / "mlp_a100_Some-model.csv.gz", list(mlp_rows(8192, 22016, 64, 8, noise=0.02)))
    write(tmp_path / "mlp_a100_Held-model.csv.gz", list(mlp_rows(4096, 11008, 32, 32)))
    fits, errors = fit_and_check(tables(tmp_path), ["Held"])
    found = only(fits, "mlp")
    assert isinstance(found, Gemm)
    assert found.memory == pytest.approx(TRUE.memory, rel=0.04)
    assert found.wave == pytest.approx(TRUE.wave, abs=0.15)
    assert only(fits, "elementwise") == pytest.approx(0.5)
    held = [error for error in errors if error.held_out]
    assert {error.what for error in held} == {"mlp product", "mlp layer"}
    assert {error.table for error in held} == {"mlp_a100_Held-model"}
    # The parameters trade off against each other; what they predict must not.
    assert all(error.mape < 0.02 for error in held)
    assert all(error.points == 13 * 4 * (4 if "product" in error.what else 1) for error in held)


def test_a_held_out_table_has_no_say(tmp_path: Path) -> None:
    write(tmp_path / "mlp_a100_Some-model.csv.gz", list(mlp_rows(8192, 22016, 64, 8)))
    alone, _ = fit_and_check(tables(tmp_path), ["Held"])
    odd = replace(TRUE, compute=0.3, memory=0.3)
    write(tmp_path / "mlp_a100_Held-model.csv.gz", list(mlp_rows(4096, 11008, 32, 32, odd)))
    together, errors = fit_and_check(tables(tmp_path), ["Held"])
    # A lone table is fitted on every other shape of it, so the figures differ a little.
    both = [only(fits, "mlp") for fits in (alone, together)]
    assert both[0].compute == pytest.approx(both[1].compute, rel=0.05)  # type: ignore[attr-defined]
    (worst,) = (e for e in errors if e.what == "mlp product" and e.held_out)
    assert worst.bias < -0.4


def test_a_kind_that_is_wholly_held_out_checks_the_figures_in_use(tmp_path: Path) -> None:
    in_use = list(mlp_rows(8192, 22016, 64, 8, A100.gemm))
    write(tmp_path / "mlp_a100_Held-model.csv.gz", in_use)
    fits, errors = fit_and_check(tables(tmp_path), ["Held"])
    assert not [fit for fit in fits if fit.what == "mlp"]
    assert all(error.held_out and error.mape < 1e-6 for error in errors)


def test_lone_tables_hold_out_every_other_shape(tmp_path: Path) -> None:
    shapes = [(4096, 8192), (8192, 4096), (8192, 8192), (8192, 16384)]
    rows: list[dict[str, object]] = [
        {
            "m": n, "k": k, "n": m,
            "latency": 1e3 * float(kernels.product(A100, n, k, m, TRUE)),
        }
        for k, m in [*shapes, (64, 64)]
        for n in (1, 8, 64, 100, 256, 700, 1024, 4096, 99999)
    ]  # fmt: skip
    write(tmp_path / "gemm_a100_x.csv.gz", rows)
    _, errors = fit_and_check(tables(tmp_path))
    # Two shapes of four each; (64, 64) and 99999 rows are not what is served.
    assert [(e.held_out, e.points) for e in errors] == [(False, 16), (True, 16)]
    assert errors[1].mape < 0.04  # six parameters from sixteen points


def test_attention_is_found_again(tmp_path: Path) -> None:
    true = Attention(prefill=0.6, half=800, decode=0.7, pad=40)
    prefills: list[dict[str, object]] = []
    decodes: list[dict[str, object]] = []
    for heads, kv_heads in ((8, 8), (16, 4), (32, 8), (64, 8)):
        common = {"num_heads": heads, "num_key_value_heads": kv_heads, "head_dim": 128}
        for n in (512, 1024, 2048, 4096):
            seconds = A100.gemm.ramp + float(
                kernels.prefill_attention(A100, 2 * n, n * n, heads * 128, true)
            )
            prefills.append({"batch_size": 2, "isl": n, "step": 0, **common, "latency": 0.0})
            prefills[-1]["latency"] = 1e3 * seconds
        for batch in (8, 64, 256):
            for n in (512, 8192):
                each = 4 * kv_heads * 128
                seconds = A100.gemm.ramp + float(
                    kernels.decode_attention(A100, batch, batch * n, each, true)
                )
                decodes.append({"batch_size": batch, "isl": 1, "step": n - 1, **common})
                decodes[-1]["latency"] = 1e3 * seconds
    write(tmp_path / "prefill_a100_x.csv.gz", prefills)
    write(tmp_path / "decode_a100_x.csv.gz", decodes)
    fits, errors = fit_and_check(tables(tmp_path))
    prefill, decode = only(fits, "prefill"), only(fits, "decode")
    assert isinstance(prefill, Attention)
    assert isinstance(decode, Attention)
    assert (prefill.prefill, prefill.half) == pytest.approx((0.6, 800), rel=0.01)
    assert (decode.decode, decode.pad) == pytest.approx((0.7, 40), rel=0.01)
    assert all(error.mape < 0.01 for error in errors)


def test_all_reduce_is_found_again_and_nodes_are_kept_apart(tmp_path: Path) -> None:
    rows: list[dict[str, object]] = []
    for tp in (2, 4):
        for size in np.geomspace(1e3, 1e9, 40):
            moving = 2 * (tp - 1) / tp * size / 50e9
            row = {"num_workers": tp, "devices_per_node": tp, "size": size}
            rows.append({**row, "time_stats.all_reduce.median": 1e3 * (tp * 10e-6 + moving)})
            # The same over two nodes, far slower: not what is fitted.
            rows.append({**row, "devices_per_node": tp // 2, "time_stats.all_reduce.median": 99.0})
    write(tmp_path / "all_reduce_a100_x.csv.gz", rows)
    fits, errors = fit_and_check(tables(tmp_path))
    for fit, tp in zip(fits, (2, 4), strict=True):
        assert fit.value == pytest.approx((tp, tp * 10, 50, 1), rel=0.05)
    assert [error.points for error in errors] == [20] * 4
    assert all(error.mape < 0.02 for error in errors)


def test_the_command_prints_figures_and_errors(tmp_path: Path) -> None:
    import typer

    app = typer.Typer()
    app.command()(calibrate)
    write(tmp_path / "mlp_a100_Some-model.csv.gz", list(mlp_rows(8192, 22016, 64, 8)))
    shown = CliRunner().invoke(app, [str(tmp_path)])
    assert shown.exit_code == 0
    assert "A100 mlp: Gemm(compute=" in shown.stdout
    assert "| A100 | mlp layer | mlp_a100_Some-model | 52 |" in shown.stdout
    assert CliRunner().invoke(app, [str(tmp_path / "none")]).exit_code == 2


def test_tables_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no tables there; they are called KIND_GPU"):
        tables(tmp_path)
    (tmp_path / "notes.csv.gz").write_bytes(gzip.compress(b"a\n1\n"))
    with pytest.raises(ValueError, match="no tables there"):
        tables(tmp_path)
    write(tmp_path / "gemm_a100_x.csv.gz", [{"m": 1, "k": 2, "latency": 0.1}])
    with pytest.raises(ValueError, match="gemm_a100_x: a gemm table needs a column n"):
        fit_and_check(tables(tmp_path))
    write(tmp_path / "gemm_t4_x.csv.gz", [{"m": 1}])
    with pytest.raises(ValueError, match="no GPU is called 't4'; known are L20"):
        tables(tmp_path)
