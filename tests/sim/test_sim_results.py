"""Results survive interruption, and the matrix says of them only what is there."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from ecoserve.sim import matrix, table
from ecoserve.sim.experiment import Cell, parse
from ecoserve.sim.report import NOT_RUN, Pairs, goodput_table, markdown, pivot, reasons
from ecoserve.sim.results import Results, Row, row, write_csv, write_json

SMALL: dict[str, Any] = {
    "model": "CodeLlama-34B",
    "gpu": "L20",
    "gpus": 32,
    "systems": ["vllm", "default"],
    "mixing": [0, 0.2],
}
CELLS = list(parse(SMALL, "test").cells())


def figures(rate: float, bound: float = 20.0) -> dict[str, Any]:
    chosen = {"layout": "TP4", "name": "x", "system": {"kind": "VLLM"}}
    spread = {"low": rate - 1, "high": rate + 1, "rates": [rate, rate]}
    return {"goodput": rate, **spread, "bound": bound, "share": rate / bound, "chosen": chosen}


def text(table_shown: Any) -> str:
    console = Console(width=250, record=True, file=io.StringIO())
    console.print(table_shown)
    return console.export_text()


def test_rows_are_found_again(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "r.jsonl"
    results = Results(path)
    kept = row(CELLS[0], figures(7.0), 1.234)
    results.add(kept)
    again = Results(path)
    assert again.get(CELLS[0]) == kept
    assert again.get(CELLS[1]) is None
    assert [found is None for _, found in again.of(CELLS)] == [False, True, True, True]
    assert kept["version"]
    assert kept["cell"]["seeds"] == [11, 12, 13]


def test_half_a_line_at_the_end_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    results = Results(path)
    for cell in CELLS[:2]:
        results.add(row(cell, figures(7.0), 1.0))
    path.write_text(path.read_text()[:-30])
    again = Results(path)
    assert again.get(CELLS[0]) is not None
    assert again.get(CELLS[1]) is None
    again.add(row(CELLS[1], figures(8.0), 1.0))
    assert all(Results(path).get(cell) for cell in CELLS[:2])


def test_another_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text("hello\nworld\n")
    with pytest.raises(ValueError, match=r"r\.jsonl, line 1: not a result"):
        Results(path)


def test_rows_of_other_code_are_told_and_can_be_forgotten() -> None:
    results = Results()
    old = row(CELLS[0], figures(7.0), 1.0)
    results.add({**old, "code": "another"})
    results.add(row(CELLS[1], figures(7.0), 1.0))
    assert results.stale(CELLS) == 1
    results.forget(CELLS)
    assert results.get(CELLS[0]) is None


def test_csv_and_json_hold_what_was_asked_and_found(tmp_path: Path) -> None:
    rows = [row(CELLS[0], figures(7.0), 1.0), row(CELLS[1], {"error": "too big"}, 0.0)]
    write_json(tmp_path / "r.json", rows)
    assert json.loads((tmp_path / "r.json").read_text()) == rows
    write_csv(tmp_path / "r.csv", rows)
    first, second = csv.DictReader((tmp_path / "r.csv").open())
    assert first["model"] == "CodeLlama-34B"
    assert first["system.system"] == "vllm"
    assert float(first["goodput"]) == 7.0
    assert first["chosen.layout"] == "TP4"
    assert first["code"] == rows[0]["code"]
    assert second["error"] == "too big"


def test_what_was_not_run_and_what_cannot_be_are_told_apart() -> None:
    pairs: Pairs = [
        (CELLS[0], row(CELLS[0], {"error": "needs two"}, 0.0)),
        (CELLS[1], row(CELLS[1], figures(9.0), 0.0)),
        (CELLS[2], None),
        (CELLS[3], None),
    ]
    shown = text(goodput_table(pairs, "t"))
    assert shown.count("n/a") == 1
    assert shown.count(NOT_RUN) == 2
    assert "9" in shown
    assert reasons(pairs) == ["n/a, vllm: needs two"]
    fields, cases = pivot(pairs)
    assert fields == ["data", "mixing"]
    assert list(cases) == [("sharegpt", "0%"), ("sharegpt", "20%")]


def matrix_pairs(rates: dict[str, float | None]) -> list[tuple[Cell, Row | None]]:
    """One case of the matrix: L20, P99, ShareGPT, mixing free."""
    cells = [
        cell
        for one in matrix.experiments(quick=True)
        for cell in one.cells()
        if (cell.model, cell.gpu, cell.percentile, cell.mixing, cell.data)
        == ("CodeLlama-34B", "L20", 99, 0.0, "sharegpt")
    ]
    found: list[tuple[Cell, Row | None]] = []
    for cell in cells:
        value = rates.get(cell.system.name)
        found.append((cell, None if value is None else row(cell, figures(value), 0.0)))
    return found


EVERY = (*matrix.USUAL, *matrix.BEST, *matrix.OURS)


def test_ratios_of_the_matrix() -> None:
    rates: dict[str, float | None] = {
        **dict.fromkeys(EVERY, 10.0),
        "sarathi-512": 12.0,
        "mooncake-best": 16.0,
        "default": 18.0,
    }
    shown = text(matrix.ratios_table(matrix_pairs(rates), "t"))
    line = next(part for part in shown.splitlines() if "sharegpt" in part)
    values = [float(cell) for cell in line.split("│")[2:-1]]
    # Over vLLM, Sarathi (its better usual setting), DistServe, MoonCake; best usual; best; bound.
    # The bound, 20, over the best usual.
    assert values == pytest.approx([1.8, 1.5, 1.8, 1.8, 1.5, 1.12, 0.9, 1.67], abs=0.006)


def test_the_matrix_tells_what_was_searched() -> None:
    rates: dict[str, float | None] = {**dict.fromkeys(EVERY, 10.0), "padg": None}
    pairs = matrix_pairs(rates)
    table = matrix.rates_table(pairs, "rates")
    head, line = markdown(table).splitlines()[2:5:2]
    cells = dict(zip(head.split(" | "), line.split(" | "), strict=True))
    assert cells["vllm"] == "10"
    assert cells["sarathi best"] == "10 x"
    assert cells["padg"] == NOT_RUN
    for cell, found in pairs:
        if found is not None and cell.system.name == "vllm":
            found["cell"]["layout"] = None
    assert "| 10 TP4 |" in markdown(matrix.rates_table(pairs, "rates"))


def test_verdicts_count_only_what_was_run() -> None:
    whole: dict[str, float | None] = {**dict.fromkeys(EVERY, 10.0), "default": 19.6}
    assert list(matrix.verdicts(matrix_pairs(whole))) == [
        "ahead of every usual setting by 1.25 or more, at P99: 1 of 1 cases",
        "level with every best setting (0.98) or ahead: 1 of 1 cases",
        "0.97 of the bound or more where mixing is free: 1 of 1 cases",
    ]
    behind = whole | {"default": 9.0}
    said = [line.split(": ")[1] for line in matrix.verdicts(matrix_pairs(behind))]
    assert said == ["0 of 1 cases"] * 3
    partly = whole | {"vllm": None}
    lines = list(matrix.verdicts(matrix_pairs(partly)))
    assert lines[0].endswith("0 of 0 cases, 1 not run")
    assert lines[1].endswith("0 of 0 cases, 1 not run")


def test_the_table_puts_claimed_beside_found() -> None:
    main, _ = table.experiments(quick=True)
    pairs: list[tuple[Cell, Row | None]] = []
    for cell in main.cells():
        values = figures(12.0 if cell.system.name == "EcoServe" else 8.0)
        values |= {
            "ttft": {"p50": 0.4, "p90": 1.0, "p99": 1.5},
            "ttft_with_switch_wait": {"p50": 0.5, "p90": 1.25, "p99": 2.0},
            "tpot": {"p50": 0.06, "p90": 0.09, "p99": 0.1},
            "tpot_as_published": {"p50": 0.05, "p90": 0.08, "p99": 0.1},
            "cost": 0.001,
        }
        pairs.append((cell, row(cell, values, 0.0)))
    shown = text(table.main_table(pairs, "Llama-30B", "t"))
    vllm = [line for line in shown.splitlines() if "vLLM" in line]
    cells = [[part.strip() for part in line.split("│")[1:-1]] for line in vllm]
    found = ["8 ± 1", "1.50", "0.40", "0.50/1.25", "50/80", "1"]
    assert cells == [
        ["sharegpt", "vLLM", "12.4", "2.97", *found],
        ["longbench", "vLLM", "–", "–", *found],
        ["alpaca", "vLLM", "–", "–", *found],
    ]
