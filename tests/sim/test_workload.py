"""Generated lengths and gaps have the published moments; traces are read, and wrong ones told."""

from __future__ import annotations

import gzip
import runpy
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ecoserve.policy.state import SLO
from ecoserve.sim import tracefile
from ecoserve.sim.records import Arrival
from ecoserve.sim.workload import DATASETS, Lognormal, Recorded, gaps, load

PUBLISHED = {  # mean and median of prompts, of outputs; TTFT SLO
    "alpaca": (20.6, 17, 163.8, 119, 1.0),
    "sharegpt": (343.8, 148, 237.2, 152, 5.0),
    "longbench": (2686.9, 2736.5, 101.8, 19, 15.0),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_lengths_have_the_published_moments(name: str) -> None:
    data = DATASETS[name]
    mean_in, median_in, mean_out, median_out, ttft = PUBLISHED[name]
    arrivals = data.arrivals(1.0, 60_000, seed=3)
    prompts = np.array([a.prompt for a in arrivals])
    outputs = np.array([a.output for a in arrivals])
    assert prompts.mean() == pytest.approx(mean_in, rel=0.02)
    assert np.median(prompts) == pytest.approx(median_in, rel=0.02)
    assert outputs.mean() == pytest.approx(mean_out, rel=0.03)
    assert np.median(outputs) == pytest.approx(median_out, rel=0.02)
    assert prompts.min() >= 1
    assert outputs.min() >= 1
    assert data.slo == SLO(ttft, 0.1)


def test_longbench_prompts_are_left_skewed_and_bounded() -> None:
    prompts = np.array([a.prompt for a in DATASETS["longbench"].arrivals(1.0, 40_000, seed=1)])
    low, middle, high = np.percentile(prompts, (5, 50, 95))
    assert middle - low > 1.15 * (high - middle)
    assert prompts.max() <= 4600


def test_lognormal_without_a_felt_cap_has_the_closed_form() -> None:
    lengths = Lognormal(median=148, mean=343.8, cap=10**9)
    assert lengths.sigma == pytest.approx((2 * np.log(343.8 / 148)) ** 0.5, rel=1e-6)


@pytest.mark.parametrize("cv", [0.5, 1.0, 2.0, 4.0])
def test_gaps_have_rate_and_variation(cv: float) -> None:
    drawn = gaps(200_000, seed=5, cv=cv, rate=8.0)
    assert drawn.mean() == pytest.approx(1 / 8, rel=0.03)
    assert drawn.std() / drawn.mean() == pytest.approx(cv, rel=0.05)


@given(
    name=st.sampled_from(sorted(DATASETS)),
    seed=st.integers(0, 2**31),
    count=st.integers(1, 60),
    more=st.integers(0, 60),
    factor=st.floats(0.01, 100),
)
def test_random_numbers_are_common_to_rates_and_counts(
    name: str, seed: int, count: int, more: int, factor: float
) -> None:
    data = DATASETS[name]
    base, longer = data.arrivals(2.0, count, seed), data.arrivals(2.0, count + more, seed)
    faster = data.arrivals(2.0 * factor, count, seed)
    assert longer[:count] == base
    assert [(a.prompt, a.output) for a in faster] == [(a.prompt, a.output) for a in base]
    assert [a.at * factor for a in faster] == pytest.approx([a.at for a in base])


def test_seeds_differ() -> None:
    data = DATASETS["sharegpt"]
    one, other = data.arrivals(1.0, 50, 1), data.arrivals(1.0, 50, 2)
    assert [a.prompt for a in one] != [a.prompt for a in other]
    assert [a.at for a in one] != [a.at for a in other]


@pytest.mark.parametrize(
    ("rate", "count", "seed", "said"),
    [
        (0.0, 5, 1, "rate must be a positive"),
        (float("nan"), 5, 1, "rate must be a positive"),
        (1.0, 0, 1, "requests must be 1 or more"),
        (1.0, 5, -1, "seed must be a whole number from 0"),
    ],
)
def test_wrong_arguments_are_named(rate: float, count: int, seed: int, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        DATASETS["alpaca"].arrivals(rate, count, seed)


AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:15:51.2224670,879,0
2023-11-16 18:15:51.3910170,91,16
"""
KEPT = """arrived_at,num_prefill_tokens,num_decode_tokens
0.0,374,44
4.314579,396,109
4.710427,91,16
"""
MOONCAKE = (
    '{"timestamp": 1000, "input_length": 1100, "output_length": 5, "hash_ids": [7, 8, 9]}\n'
    '{"timestamp": 3500, "input_length": 512, "output_length": 6, "hash_ids": [7]}\n'
)


def test_both_azure_forms_are_read_alike(tmp_path: Path) -> None:
    raw, kept = tmp_path / "raw.csv", tmp_path / "kept.csv.gz"
    raw.write_text(AZURE)
    kept.write_bytes(gzip.compress(KEPT.encode()))
    one, other = tracefile.read(raw), tracefile.read(kept)
    assert one.prompts == other.prompts == (374, 396, 91)
    assert one.outputs == other.outputs == (44, 109, 16)  # nothing was asked of the third line
    assert one.times == pytest.approx(other.times, abs=1e-5)


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz"])
def test_mooncake_is_read(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"trace{suffix}"
    data = MOONCAKE.encode()
    path.write_bytes(gzip.compress(data) if suffix.endswith("gz") else data)
    trace = tracefile.read(path)
    assert trace.times == (0.0, 2.5)
    assert trace.prompts == (1100, 512)
    assert trace.blocks == ((7, 8), (7,))  # full blocks only


def test_a_trace_keeps_its_shape_at_another_rate(tmp_path: Path) -> None:
    path = tmp_path / "kept.csv"
    path.write_text(KEPT)
    slo = SLO(1.0, 0.1)
    work = load(str(path), slo=slo)
    assert isinstance(work, Recorded)
    assert work.slo == slo
    twice = work.arrivals(4.0, 6, seed=0)
    assert [a.prompt for a in twice] == [374, 396, 91, 374, 396, 91]
    assert twice[-1].at == pytest.approx(6 / 4)
    gap = twice[1].at - twice[0].at, twice[2].at - twice[1].at
    assert gap[0] / gap[1] == pytest.approx(4.314579 / (4.710427 - 4.314579))


def test_lengths_without_times_get_gaps(tmp_path: Path) -> None:
    path = tmp_path / "lengths.csv"
    path.write_text("num_prefill_tokens,num_decode_tokens,total\n10,2,12\n20,3,23\n")
    arrivals = load(str(path), slo=SLO(1, 1)).arrivals(2.0, 4000, seed=1)
    between = np.diff([a.at for a in arrivals])
    assert between.mean() == pytest.approx(0.5, rel=0.1)
    assert between.std() / between.mean() == pytest.approx(1, rel=0.1)
    assert {a.prompt for a in arrivals} == {10, 20}


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.csv", "x,y\n1,2\n", r"line 1: the header must have arrived_at.*not x, y"),
        ("a.csv", "", "line 1: the header must have.*not nothing"),
        ("a.csv", KEPT + "7,abc,3\n", r"line 5: num_prefill_tokens must be a whole .*'abc'"),
        ("a.csv", KEPT + "7,3,-1\n", "line 5: num_decode_tokens must be a whole number from 0"),
        ("a.csv", KEPT + "nan,3,1\n", "line 5: arrived_at must be a number from 0"),
        ("a.csv", KEPT + "7,3\n", "line 5: 3 fields expected, 2 found"),
        ("a.csv", AZURE + "yesterday,3,1\n", "line 6: TIMESTAMP must be a date and time"),
        ("a.csv", "num_prefill_tokens,num_decode_tokens\n", "holds no request"),
        ("a.jsonl", MOONCAKE + "{oops\n", "line 3: not JSON"),
        ("a.jsonl", "[1]\n", "line 1: an object is expected"),
        ("a.jsonl", '{"timestamp": 0, "output_length": 1}', "line 1: input_length .* missing"),
        (
            "a.jsonl",
            '{"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": ["a"]}',
            "line 1: hash_ids must be a list of whole numbers",
        ),
        ("a.txt", "hello", "a trace is .csv"),
        ("a.csv.gz", "not gzip", "cannot be read"),
    ],
)
def test_a_malformed_trace_names_line_and_field(
    tmp_path: Path, name: str, text: str, said: str
) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ValueError, match=said):
        tracefile.read(path)


def test_unknown_data_and_a_trace_without_slo_are_told(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="alpaca, sharegpt, longbench or a file, not 'nope'"):
        load("nope")
    path = tmp_path / "kept.csv"
    path.write_text(KEPT)
    with pytest.raises(ValueError, match="needs SLOs"):
        load(str(path))


def test_all_at_once_has_no_rate(tmp_path: Path) -> None:
    path = tmp_path / "burst.csv"
    path.write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n1,5,5\n1,5,5\n")
    with pytest.raises(ValueError, match="all requests arrive at once"):
        load(str(path), slo=SLO(1, 1)).arrivals(1.0, 4, 0)


@given(
    st.lists(
        st.tuples(st.integers(0, 10**6), st.integers(1, 3000), st.integers(1, 999), st.booleans()),
        min_size=1,
        max_size=20,
    )
)
def test_written_traces_read_back(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[int, int, int, bool]]
) -> None:
    folder = tmp_path_factory.mktemp("traces")
    arrivals = sorted(
        (
            Arrival(ms / 1000, prompt, output, tuple(range(prompt // 512)) if shared else ())
            for ms, prompt, output, shared in rows
        ),
        key=lambda a: a.at,
    )
    first = arrivals[0].at
    tracefile.write_csv(folder / "t.csv", arrivals)
    tracefile.write_jsonl(folder / "t.jsonl.gz", arrivals)
    for name in ("t.csv", "t.jsonl.gz"):
        trace = tracefile.read(folder / name)
        assert trace.times == pytest.approx([a.at - first for a in arrivals])
        assert trace.prompts == tuple(a.prompt for a in arrivals)
        assert trace.outputs == tuple(a.output for a in arrivals)
    assert trace.blocks == tuple(a.blocks for a in arrivals)


def test_the_shipped_traces_are_what_their_script_makes(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    script = runpy.run_path(str(root / "bench" / "make_traces.py"))
    script["write"](tmp_path)
    shipped = root / "docs" / "experiments" / "traces"
    for name in ("bursty.csv", "conversations.jsonl.gz"):
        assert tracefile.read(shipped / name) == tracefile.read(tmp_path / name)
    shared = tracefile.read(shipped / "conversations.jsonl.gz").blocks
    firsts = [blocks[:2] for blocks in shared]
    assert len(set(firsts)) == 8  # system prompts
