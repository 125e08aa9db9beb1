"""`ecoserve sim` as people use it, on small cases that run for real."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from e2e.harness import descendants, until
from ecoserve.cli import app
from ecoserve.sim import evaluate, parallel
from ecoserve.sim import table as tables
from ecoserve.sim.experiment import parse
from ecoserve.sim.goodput import Goodput

PNG = b"\x89PNG"
TINY = ["--model", "Llama-3-8B", "--gpu", "L20", "--gpus", "2", "--data", "alpaca"]
SHORT = ["--requests", "60", "--warmup", "2"]
STUDY: dict[str, Any] = {
    "model": "Llama-3-8B",
    "gpu": "L20",
    "gpus": 2,
    "data": "alpaca",
    "systems": ["default"],
    "requests": 60,
    "min_seconds": 3,
    "warmup": 2,
    "resolution": 0.1,
    "seeds": [11],
    "tune_seeds": [1],
}


def ecoserve(*words: object) -> Any:
    return CliRunner().invoke(app, [str(word) for word in words], env={"COLUMNS": "200"})


def worked(*words: object) -> str:
    result = ecoserve(*words)
    assert result.exit_code == 0, result.output
    return str(result.output)


def written(path: Path, **fields: Any) -> Path:
    """An experiment file."""
    path.write_text(json.dumps(STUDY | fields))  # JSON is YAML
    return path


def test_run_shows_systems_side_by_side(tmp_path: Path) -> None:
    out = tmp_path / "r.json"
    shown = worked(
        *("sim", "run", "-s", "vllm", "-s", "paced", *TINY, *SHORT, "--rate", 4, "--json", out)
    )
    assert "vllm" in shown
    assert "within both SLOs" in shown
    assert "fluid bound" in shown
    first, second = json.loads(out.read_text())
    assert first["cell"]["system"]["system"] == "vllm"
    assert second["cell"]["system"]["system"] == "paced"
    assert first["figures"]["rate"] == 4
    assert first["figures"]["attainment"] == 1.0  # an idle cluster keeps every promise
    assert first["version"]


def test_a_run_repeats_by_its_seed(tmp_path: Path) -> None:
    def figures(seed: int) -> Any:
        out = tmp_path / "r.json"
        worked("sim", "run", *TINY, *SHORT, "--rate", 20, "--seed", seed, "--json", out)
        return json.loads(out.read_text())[0]["figures"]

    assert figures(3) == figures(3)
    assert figures(3) != figures(4)


def test_goodput_finds_a_rate_below_the_bound(tmp_path: Path) -> None:
    kept, table, plot = tmp_path / "r.jsonl", tmp_path / "r.csv", tmp_path / "c.png"
    words = ["sim", "goodput", "--gpus", 4, "-n", 100, "--warmup", 40, "--seeds", 1, "--jobs", 1]
    shown = worked(*words, "--results", kept, "--csv", table, "--plot", plot)
    assert "% of the bound" in shown
    (line,) = csv.DictReader(table.open())
    assert 0 < float(line["goodput"]) <= 1.15 * float(line["bound"])
    assert float(line["cost"]) == pytest.approx(4 * 0.60 / 3600 / float(line["goodput"]))
    assert plot.read_bytes().startswith(PNG)
    again = worked(*words, "--results", kept)
    assert "1 of 1 cells are in" in again
    assert len(kept.read_text().splitlines()) == 1


def test_compare_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = written(tmp_path / "e.yaml", name="mine", systems=["vllm", "default"])
    ran: list[str] = []
    real = parallel.rows

    def watched(alike: Any) -> Any:
        if len(ran) == 1:
            raise KeyboardInterrupt
        ran.append(alike[0].system.name)
        return real(alike)

    with monkeypatch.context() as patch:
        patch.setattr(parallel, "rows", watched)
        stopped = ecoserve("sim", "compare", path, "--jobs", 1)
    assert stopped.exit_code == 130
    assert "what was finished is kept in e.results.jsonl" in stopped.output
    assert ran == ["vllm"]
    bars = tmp_path / "b.png"
    shown = worked("sim", "compare", path, "--jobs", 1, "--plot", bars)
    assert "1 of 2 cells are in e.results.jsonl" in shown
    assert "mine: goodput" in shown
    assert bars.read_bytes().startswith(PNG)
    rows = [json.loads(line) for line in Path("e.results.jsonl").read_text().splitlines()]
    assert [row["cell"]["system"]["system"] for row in rows] == ["vllm", "default"]


def test_nothing_is_said_to_be_kept_where_nothing_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(alike: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(parallel, "rows", interrupted)
    stopped = ecoserve("sim", "goodput", *TINY, *SHORT, "--jobs", 1)
    assert stopped.exit_code == 130
    assert "stopped" in stopped.output
    assert "kept" not in stopped.output


def test_processes_end_with_the_command_however_it_ends(tmp_path: Path) -> None:
    command = ("-m", "ecoserve", "sim", "matrix", "--quick", "--jobs", "2")
    running = subprocess.Popen(
        [sys.executable, *command, "--results", tmp_path / "r.jsonl"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    # Two that work, and one of multiprocessing's own.
    until(lambda: len(descendants(running.pid)) == 3)
    started = descendants(running.pid)
    running.kill()
    running.wait()
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in started))


def test_cells_beyond_the_time_are_marked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = written(tmp_path / "e.yaml")
    assert "not run" in worked("sim", "compare", path, "--jobs", 1, "--minutes", 0)


def test_processes_find_what_one_finds(tmp_path: Path) -> None:
    path = written(tmp_path / "e.yaml", systems=["vllm", "sarathi-512"])

    def figures(jobs: int) -> Any:
        out = tmp_path / "r.json"
        worked(
            *("sim", "compare", path, "--jobs", jobs, "--json", out),
            *("--results", tmp_path / f"{jobs}.jsonl"),
        )
        return [row["figures"] for row in json.loads(out.read_text())]

    assert figures(1) == figures(2)


def test_what_mixed_steps_cost_is_played_only_where_there_are_any(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    systems = ["vllm", "sarathi-512", "distserve-1:1", "window", "default"]
    fields = {"systems": systems, "data": "sharegpt"}
    path = written(tmp_path / "e.yaml", mixing=[0.2, 0.0], **fields)
    played: list[tuple[str, float]] = []
    real = evaluate.measured

    def watched(cell: Any) -> Any:
        played.append((cell.system.name, cell.mixing))
        return real(cell)

    monkeypatch.setattr(parallel, "measured", watched)
    out = tmp_path / "r.json"
    results = ("--results", tmp_path / "r.jsonl", "--json", out)
    worked("sim", "compare", path, "--jobs", 1, *results)
    assert sorted(played) == [
        *(("default", 0.0), ("default", 0.2), ("distserve-1:1", 0.2)),
        *(("sarathi-512", 0.0), ("sarathi-512", 0.2), ("vllm", 0.2), ("window", 0.2)),
    ]
    found = {
        (row["cell"]["system"]["system"], row["cell"]["mixing"]): row["figures"]
        for row in json.loads(out.read_text())
    }
    for name in systems:
        dear, free = found[name, 0.2], found[name, 0.0]
        assert dear["bound"] < free["bound"]
        for one in (dear, free):
            assert one["share"] == pytest.approx(one["goodput"] / one["bound"])
    assert found["window", 0.2]["goodput"] == found["window", 0.0]["goodput"]
    # The same as of a cell that is alone, or of one that is measured at once.
    [cell] = parse(STUDY | fields | {"systems": ["vllm"], "mixing": 0.2}, "here").cells()
    assert evaluate.evaluate(cell) == found["vllm", 0.2]


def test_a_cell_that_cannot_be_is_told_and_the_others_run(tmp_path: Path) -> None:
    path = written(tmp_path / "e.yaml", gpus=1, systems=["distserve-1:1", "default"])
    shown = worked("sim", "compare", path, "--results", tmp_path / "r.jsonl", "--jobs", 1)
    assert "n/a, distserve-1:1: distserve needs two instances or more, there is 1" in shown


def test_a_search_is_tuned_on_other_seeds_than_it_is_tested_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seeds: list[tuple[int, ...]] = []
    real = evaluate.goodput

    def watched(*args: Any, **fields: Any) -> Any:
        seeds.append(tuple(fields["seeds"]))
        return real(*args, **fields)

    monkeypatch.setattr(evaluate, "goodput", watched)
    document = STUDY | {"systems": "sarathi-best", "chunks": [64, 256, 1024, 2048]}
    (cell,) = parse(document | {"routings": ["least-loaded"]}, "test").cells()
    figures = evaluate.evaluate(cell)
    assert seeds[-1] == (11,)
    assert set(seeds[:-1]) == {(1,)}
    tried = figures["tried"]
    assert {one["system"]["chunk"] for one in tried} >= {64, 256, 1024, 2048}
    whole = [one for one in tried if one["part"] == 1]
    best = max(whole, key=lambda one: one["rate"])
    assert figures["chosen"]["system"] == best["system"]
    # Attainment is of what was chosen, and falls with the rate.
    low, high = (evaluate.attainment(cell, k * figures["goodput"], figures) for k in (0.5, 3.0))
    assert low == 1.0
    assert high < 0.9


def test_what_a_search_gives_up_would_not_have_been_chosen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Long enough that settings do not pass their bounds by far.
    document = STUDY | {"gpus": 4, "layout": {"tp": 1}, "data": "longbench", "min_seconds": 60}
    document |= {"warmup": 30, "systems": "mooncake-best", "routings": ["least-loaded"]}
    (cell,) = parse(document, "test").cells()
    figures = evaluate.evaluate(cell)
    assert 0.0 in [one["rate"] for one in figures["tried"]]
    monkeypatch.setattr(evaluate, "_GIVEN_UP", 0.0)
    whole = evaluate.evaluate(cell)
    assert 0.0 not in [one["rate"] for one in whole["tried"]]
    assert figures["chosen"] == whole["chosen"]
    assert figures["goodput"] == whole["goodput"]


def test_all_systems_are_measured_over_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer runs find lower rates."""
    seconds: list[float] = []

    def watched(*_: Any, **fields: Any) -> Goodput:
        seconds.append(fields["seconds"])
        return Goodput(0.0, 0.0, 0.0, (0.0,))

    monkeypatch.setattr(evaluate, "goodput", watched)
    systems = ["default", "vllm", "distserve-1:1", "mooncake-1:1"]
    document = STUDY | {"data": "sharegpt", "requests": 1000, "systems": systems}
    for cell in parse(document, "test").cells():
        evaluate.evaluate(cell)
    assert len(seconds) == 4
    assert len(set(seconds)) == 1


def test_layouts_are_searched(tmp_path: Path) -> None:
    (cell,) = parse(STUDY | {"layout": "best"}, "test").cells()
    figures = evaluate.evaluate(cell)
    assert {one["layout"] for one in figures["tried"]} == {"TP1", "TP2", "TP1 PP2"}
    assert figures["chosen"]["layout"] in {"TP1", "TP2", "TP1 PP2"}


def test_trace_writes_steps_requests_and_phases(tmp_path: Path) -> None:
    out, phases = tmp_path / "t.json", tmp_path / "p.png"
    shown = worked(
        *("sim", "trace", *TINY, *SHORT, "--rate", 8, "-o", out, "--phases", phases),
        *("--shown", 3),
    )
    assert "within both SLOs" in shown
    events = json.loads(out.read_text())["traceEvents"]
    assert {event["cat"] for event in events if "cat" in event} == {"step", "request"}
    assert phases.read_bytes().startswith(PNG)


def test_table_and_scaling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = {"requests": 100, "min_seconds": 20, "warmup": 10, "resolution": 0.3, "seeds": [11]}
    monkeypatch.setattr(tables, "QUICK", small)
    monkeypatch.setattr(tables, "DATA", ("sharegpt",))
    monkeypatch.setattr(tables, "MODELS", ("CodeLlama-34B",))
    monkeypatch.setattr(tables, "GPUS", 8)
    monkeypatch.setattr(tables, "SCALE", (8, 16))
    drawn, kept = tmp_path / "s.png", tmp_path / "r.jsonl"
    written_tables = tmp_path / "t.md"
    words = ("--results", kept, "--scaling", drawn, "--markdown", written_tables)
    shown = worked("sim", "table", "--quick", "--jobs", 1, *words)
    assert written_tables.read_text().count("| EcoServe |") == 1
    for name, claimed in tables.CLAIMED.items():
        assert any(name in line and str(claimed) in line for line in shown.splitlines())
    assert "QUICK" in shown
    assert "16 GPUs" in shown
    assert drawn.read_bytes().startswith(PNG)
    assert "not run" not in shown


def test_of_nothing_that_was_run_nothing_is_drawn(tmp_path: Path) -> None:
    drawn = tmp_path / "s.png"
    words = ["--quick", "--minutes", 0, "--results", tmp_path / "r.jsonl", "--scaling", drawn]
    refused = ecoserve("sim", "table", *words)
    assert refused.exit_code == 1
    assert "not run" in refused.output
    assert "nothing to draw" in refused.output
    assert not drawn.exists()


def test_matrix_runs_what_is_asked_and_marks_the_rest(tmp_path: Path) -> None:
    kept = tmp_path / "r.jsonl"
    words = ["sim", "matrix", "--quick", "--results", kept, "--minutes", 0]
    tables = tmp_path / "m.md"
    only = "L20 P99 sharegpt CodeLlama-34B mixing=0.2"
    shown = worked(*words, "--only", only, "--markdown", tables)
    assert "QUICK" in shown
    assert "not run" in shown
    assert "0 of 0 cases, 1 not run" in shown
    assert "- level with every best setting (0.98) or ahead: 0 of 0 cases, 1 not run" in (
        tables.read_text().splitlines()
    )
    refused = ecoserve(*words, "--only", "L20 P98")
    assert refused.exit_code == 1
    assert "nothing in the matrix matches 'L20 P98'" in refused.output


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["run", "--model", "gpt"], "model: 'gpt' is not known; known are Llama-30B"),
        (["run", "--gpu", "A1"], "gpu: 'A1' is not known"),
        (["run", "-s", "nope"], "system must be one of"),
        (["run", "--data", "nope"], "data must be one of"),
        (
            ["run", "--data", "nope", "--tpot-slo", "1"],
            "--ttft-slo must be given for nope, which is none of alpaca, sharegpt, longbench",
        ),
        (["run", "--gpus", "6"], "gpus: 6 is not a multiple of TP4 = 4 GPUs"),
        (["run", "--tp", "1"], "CodeLlama-34B weighs"),
        (["run", "--pp", "2"], "--pp needs --tp"),
        (["run", "-s", "sarathi-best"], "a single run needs one setting, not a search"),
        (["scale", "--from", "20"], "--from must be at most --to 16, not 20"),
        (["goodput", "--gpus", "3", "--jobs", "1"], "nothing can be run: n/a, default: gpus: 3"),
        (["compare", "none.yaml"], "none.yaml cannot be read"),
        (["goodput", "--results", "/bin/sh"], "--results: /bin/sh cannot be read"),
    ],
)
def test_wrong_input_is_told_in_a_line(words: list[str], said: str) -> None:
    result = ecoserve("sim", *words)
    assert result.exit_code == 1
    assert result.output.startswith("error: ")
    assert len(result.output.splitlines()) == 1
    assert said in result.output


def test_what_is_no_yaml_is_told_in_a_line(tmp_path: Path) -> None:
    path = tmp_path / "e.yaml"
    path.write_text("systems: [vllm\n")
    result = ecoserve("sim", "compare", path)
    assert result.exit_code == 1
    assert f"error: {path}, line 2: not YAML: " in result.output
    assert len(result.output.splitlines()) == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["run", "--rate", "0"],
            "'--rate' / '-r': must be a positive number, 100000 at most, not 0",
        ),
        (
            ["run", "--rate", "nan"],
            "'--rate' / '-r': must be a positive number, 100000 at most, not nan",
        ),
        (["run", "--mixing", "-1"], "'--mixing': must be a number from 0 to 100, not -1"),
        (
            ["run", "--tpot-slo", "0"],
            "'--tpot-slo': must be a positive number of seconds, 86400 at most, not 0",
        ),
        (
            ["scale", "--ttft-slo", "0"],
            "'--ttft-slo': must be a positive number of seconds, 86400 at most, not 0",
        ),
        (
            ["scale", "-r", "20", "-r", "-1"],
            "'--rate' / '-r': must be a positive number, 100000 at most, not -1",
        ),
        (
            ["scale", "--minutes", "0"],
            "'--minutes': must be a positive number, 1440 at most, not 0",
        ),
        (["table", "--price", "0"], "'--price': must be a positive number, 1000000 at most, not 0"),
        (
            ["goodput", "--percentile", "0"],
            "'--percentile' / '-p': must be a positive number, 100 at most, not 0",
        ),
        (["trace", "--overlap", "2"], "'--overlap': must be a number from 0 to 1, not 2"),
        (["trace", "-o", "/"], "'--out' / '-o': / is a folder"),
        (["run", "--json", "/nowhere/r.json"], "'--json': there is no folder /nowhere"),
        (["scale", "--plot", "g.txt"], "'--plot': g.txt must end in one of"),
    ],
)
def test_wrong_options_are_told_before_anything_runs(words: list[str], said: str) -> None:
    result = ecoserve("sim", *words)
    assert result.exit_code == 2
    assert said in result.output.splitlines()[-1]


def test_the_table_needs_no_matplotlib() -> None:
    code = "import sys, ecoserve.sim.table; assert 'matplotlib' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_traces_need_slos(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n0,50,5\n1,60,6\n2,70,7\n")
    refused = ecoserve("sim", "run", "--data", path)
    assert refused.exit_code == 1
    assert "needs SLOs" in " ".join(refused.output.split())
    shown = worked("sim", "run", *TINY[:-1], path, *SHORT, "--rate", 2, "--ttft-slo", 1)
    assert "100.0%" in shown
    steps = ["--minutes", 0.5, "--rate", 2, "--from", 1, "--to", 1, "-v", "fixed"]
    one = [*TINY[:4], "--tp", 1, "--data", path, "--ttft-slo", 1]
    drawn = tmp_path / "s.png"
    assert "100.0" in worked("sim", "scale", *steps, *one, "--plot", drawn)
    assert drawn.read_bytes().startswith(PNG)


def test_help_names_every_command() -> None:
    shown = worked("sim", "--help")
    for name in ("run", "goodput", "compare", "table", "matrix", "trace"):
        assert name in shown


def test_the_command_line_starts_without_the_simulator() -> None:
    code = "import sys, ecoserve.cli; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    heavy = {"ecoserve.sim.engine", "ecoserve.sim.experiment", "matplotlib", "pydantic", "yaml"}
    assert not heavy & set(done.stdout.split())
