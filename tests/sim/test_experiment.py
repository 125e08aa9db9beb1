"""Experiment files stand for the cells that they say, and wrong ones are told by field."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from ecoserve.sim import table, variants
from ecoserve.sim.experiment import (
    Cell,
    Experiment,
    Layout,
    fitting,
    load,
    make_cluster,
    parse,
    usual_layout,
)
from ecoserve.sim.matrix import BEST, OURS, USUAL, experiments, order
from ecoserve.sim.models import model
from ecoserve.sim.records import Cluster
from ecoserve.sim.systems import VLLM, DistServe, EcoServe, MoonCake, Sarathi

ROOT = Path(__file__).parents[2]
SMALL: dict[str, Any] = {
    "model": "codellama-34b",
    "gpu": "l20",
    "gpus": 32,
    "systems": ["vllm", "default"],
}


def cells(**fields: Any) -> list[Cell]:
    return list(parse(SMALL | fields, "test").cells())


def cluster(gpus: int = 32, tp: int = 4, **fields: Any) -> Cluster:
    return make_cluster("CodeLlama-34B", "L20", gpus, Layout(tp=tp), **fields)


def test_lists_stand_for_every_combination() -> None:
    found = cells(percentile=[90, 99], mixing=[0, 0.2], data=["sharegpt", "alpaca"])
    assert len(found) == 16
    assert len({cell.key for cell in found}) == 16
    assert [cell.system.name for cell in found[:2]] == ["vllm", "default"]
    assert {(c.percentile, c.mixing, c.data) for c in found} == {
        (p, m, d) for p in (90, 99) for m in (0, 0.2) for d in ("sharegpt", "alpaca")
    }
    assert found[0].model == "CodeLlama-34B"
    assert found[0].gpu == "L20"


def test_a_key_is_of_what_is_asked_alone() -> None:
    (one,) = cells(systems="vllm", percentile=90.0)
    (same,) = cells(systems=[{"system": "vllm"}], percentile=90, name="another name")
    (other,) = cells(systems="vllm", mixing=0.1)
    assert one.key == same.key != other.key


@pytest.mark.parametrize(
    ("name", "gpu", "tp"),
    [
        ("Llama-30B", "L20", 4),
        ("CodeLlama-34B", "L20", 4),
        ("Qwen2-72B", "L20", 8),
        ("Llama-30B", "A800-PCIe", 2),
        ("CodeLlama-34B", "A800-PCIe", 2),
        ("Qwen2-72B", "A800-PCIe", 4),
        ("Qwen2-72B", "H100", 4),
    ],
)
def test_the_usual_layout_is_the_published_one(name: str, gpu: str, tp: int) -> None:
    assert usual_layout(model(name), gpu) == Layout(tp=tp)


def test_instances_and_nodes_follow_from_gpus() -> None:
    four = cluster(32, 4)
    assert (four.instances, four.per_node) == (8, 2)
    eight = cluster(32, 8)
    assert (eight.instances, eight.per_node) == (4, 1)
    with pytest.raises(ValueError, match="gpus: 30 is not a multiple of TP4 = 4 GPUs"):
        cluster(30, 4)


def test_instances_set_the_gpus_by_the_layout() -> None:
    found = cells(gpus=[], instances=8, model=["CodeLlama-34B", "Qwen2-72B"], systems="vllm")
    assert [cell.gpus for cell in found] == [32, 64]


def test_hardware_fields_reach_the_cost_model() -> None:
    plain, mixed = cluster(), cluster(mixing=0.2)
    batch = (256, 256 * 128.0, 16, 16 * 500)
    assert mixed.cost.step(*batch) == pytest.approx(1.2 * plain.cost.step(*batch))
    assert cluster(bus=20).cost.step(*batch) < plain.cost.step(*batch)
    assert cluster(overlap=0.8).cost.step(*batch) < plain.cost.step(*batch)


def test_layouts_that_fit_divide_the_cluster_and_hold_the_model() -> None:
    found = fitting("CodeLlama-34B", "L20", 32)
    assert Layout(tp=4) in found
    assert Layout(tp=2, pp=2) in found
    assert Layout(tp=1) not in found  # 68 GB of weights in 48 GB
    assert all(layout.gpus <= 8 and 32 % layout.gpus == 0 for layout in found)
    with pytest.raises(ValueError, match="no layout of Qwen2-72B fits on 2 L20"):
        fitting("Qwen2-72B", "L20", 2)


@pytest.mark.parametrize(
    ("name", "settings", "system"),
    [
        ("vllm", {}, VLLM()),
        ("vllm", {"routing": "round-robin"}, VLLM(routing="round-robin")),
        ("sarathi", {}, Sarathi(chunk=512)),
        ("sarathi-256", {}, Sarathi(chunk=256)),
        ("distserve-1:1", {}, DistServe(prefill=1)),
        ("mooncake-1:1", {}, MoonCake(prefill=4)),
        ("mooncake", {}, MoonCake(prefill=4)),
        ("mooncake-3:1", {"layerwise": True}, MoonCake(prefill=6, layerwise=True)),
        ("mooncake-9:1", {}, MoonCake(prefill=7)),  # one decode instance at least
        ("paper", {}, EcoServe("paper")),
        ("paced", {"settings": {"guard": 0.02}}, EcoServe("paced", {"guard": 0.02})),
    ],
)
def test_systems_by_name(name: str, settings: dict[str, Any], system: object) -> None:
    variants.check(name, settings)
    (built,) = variants.build(name, settings, cluster())
    assert built == system
    assert variants.load(variants.dump(built)) == system


def test_distserve_with_an_instance_a_node_splits_them_all() -> None:
    (built,) = variants.build("distserve-1:1", {}, cluster(32, 8))
    assert built == DistServe(prefill=2)


def test_best_searches_what_each_system_has() -> None:
    chunks = variants.build(
        "sarathi-best", {"routing": "least-loaded"}, cluster(), chunks=(64, 128)
    )
    assert chunks == [Sarathi(64), Sarathi(128)]
    shares = variants.build("mooncake-best", {}, cluster())
    assert {s.prefill for s in shares if isinstance(s, MoonCake)} == set(range(1, 8))
    assert {s.hops for s in shares if isinstance(s, MoonCake)} == {1, 2}
    assert len(set(shares)) == len(shares)
    with pytest.raises(ValueError, match="mooncake needs two instances or more, there is 1"):
        variants.build("mooncake-best", {}, cluster(4, 4))


def test_finer_chunks_lie_between_the_neighbours() -> None:
    finer = variants.between(Sarathi(chunk=128), (64, 128, 256))
    assert [s.chunk for s in finer if isinstance(s, Sarathi)] == [96, 176]
    assert variants.between(VLLM(), (64, 128)) == []


def test_finer_chunks_go_beyond_the_ends() -> None:
    """A best chunk at the end of a coarse grid may have a better one outside."""
    least, most = (variants.between(Sarathi(chunk=c), (128, 256)) for c in (128, 256))
    assert [s.chunk for s in least if isinstance(s, Sarathi)] == [96, 176]
    assert [s.chunk for s in most if isinstance(s, Sarathi)] == [176, 368]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"model": "llama-900b"}, "model: 'llama-900b' is not known; known are Llama-30B"),
        ({"gpu": "L21"}, "gpu: 'L21' is not known; known are L20"),
        ({"gpus": 0}, "gpus.0: must be a whole number from 1 to 65536, not 0"),
        ({"gpus": []}, "either gpus or instances must be given"),
        ({"instances": 8}, "either gpus or instances must be given"),
        ({"percentil": 90}, "percentil is not a field; did you mean percentile"),
        ({"percentile": 101}, "percentile.0: must be a positive number, 100 at most, not 101"),
        ({"systems": []}, "systems: .*at least 1 item"),
        ({"systems": ["vlm"]}, "systems.0: system must be one of vllm, sarathi-CHUNK.*'vlm'"),
        ({"systems": ["vllm-512"]}, "system must be one of"),
        ({"systems": ["sarathi-1:1"]}, "system must be one of"),
        ({"systems": ["distserve-0:1"]}, "both sides of the ratio must be 1 or more"),
        ({"systems": ["vllm", "vllm"]}, "vllm twice; give them a label"),
        (
            {"systems": [{"system": "vllm", "chunk": 3}]},
            "system vllm has no setting 'chunk'; it has: budget, routing",
        ),
        (
            {"systems": [{"system": "vllm", "routing": "random"}]},
            "routing must be least-loaded or round-robin, not 'random'",
        ),
        (
            {"systems": [{"system": "paced", "settings": {"x": 1}}]},
            "policy paced has no setting 'x'",
        ),
        (
            {"systems": [{"system": "paced", "settings": 3}]},
            "system paced: settings must be numbers by name, as guard: 0.02, not 3",
        ),
        (
            {"systems": [{"system": "paced", "settings": {"guard": "a"}}]},
            "system paced: settings must be numbers by name",
        ),
        (
            {"systems": [{"system": "paced", "late_wait": -1}]},
            "system paced: late_wait must be 0 s or more, not -1",
        ),
        ({"layout": []}, "layout: .*at least 1 item"),
        ({"mixing": -0.1}, "mixing.0: must be a number from 0 to 100, not -0.1"),
        ({"bus": 0}, "bus.0"),
        ({"seeds": [1], "tune_seeds": [1]}, r"seeds and tune_seeds must differ, both have \[1\]"),
        ({"data": "sharegtp"}, "data must be one of alpaca, sharegpt, longbench or a file"),
        ({"slo": {"ttft": 1}}, "slo.tpot is missing"),
        ({"layout": {"tp": 3.5}}, "layout"),
        ({"gpus": [], "instances": 8, "layout": "best"}, "layout best needs gpus"),
    ],
)
def test_a_wrong_field_is_named(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=f"^test: .*{said}"):
        parse(SMALL | fields, "test")


def test_what_is_missing_is_named() -> None:
    with pytest.raises(ValueError, match=r"model is missing.*systems is missing"):
        parse({"gpu": "L20", "gpus": 8}, "test")
    with pytest.raises(ValueError, match="an experiment is a mapping"):
        parse(["vllm"], "test")


def test_several_experiments_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "two.yaml"
    path.write_text(yaml.safe_dump(SMALL) + "---\n" + yaml.safe_dump(SMALL | {"mixing": 0.2}))
    one, other = load(path)
    assert one.mixing == (0.0,)
    assert other.mixing == (0.2,)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("model: [", ", line 1: not YAML: "),
        ("", "holds no experiment"),
        ("- a", "an experiment is a mapping"),
    ],
)
def test_a_malformed_file_is_told(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=f"(?s)bad.yaml.*{said}"):
        load(path)
    with pytest.raises(ValueError, match=r"none\.yaml cannot be read"):
        load(tmp_path / "none.yaml")


def test_a_trace_is_found_beside_the_file(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(
        "arrived_at,num_prefill_tokens,num_decode_tokens\n0,5,5\n1,6,6\n"
    )
    path = tmp_path / "e.yaml"
    document = SMALL | {"data": "t.csv", "slo": {"ttft": 1, "tpot": 0.1}}
    path.write_text(yaml.safe_dump(document))
    (experiment,) = load(path)
    (cell, _) = experiment.cells()
    assert [a.prompt for a in cell.workload().arrivals(1.0, 2, 0)] == [5, 6]


@pytest.mark.parametrize("path", sorted((ROOT / "docs" / "experiments").glob("*.yaml")), ids=str)
def test_the_examples_are_right(path: Path) -> None:
    for experiment in load(path):
        for cell in experiment.cells():
            for layout in cell.layouts():
                assert cell.systems(cell.cluster(layout))


@pytest.mark.parametrize("quick", [True, False])
def test_the_matrix_is_whole(quick: bool) -> None:
    found = [cell for one in experiments(quick=quick) for cell in one.cells()]
    columns = len(USUAL) + len(BEST) + len(OURS)
    assert len(found) == 3 * 3 * 2 * 2 * 2 * columns
    assert len({cell.key for cell in found}) == len(found)
    assert found[0].gpu == "L20"
    assert found[0].percentile == 99
    for cell in found:
        assert not set(cell.seeds) & set(cell.tune_seeds)
        layout = cell.layout
        assert layout is not None
        assert cell.cluster(layout).instances == (
            4 if "Qwen" in cell.model and "A8" in cell.gpu else 8
        )


@pytest.mark.parametrize("quick", [True, False])
def test_the_matrix_runs_what_needs_no_search_first(quick: bool) -> None:
    found = [cell for one in experiments(quick=quick) for cell in one.cells()]
    ordered = order(found)
    assert sorted(c.key for c in ordered) == sorted(c.key for c in found)
    parts = [
        (gpu, percentile, searched)
        for gpu in ("L20", "A800-PCIe")
        for percentile in (99, 90)
        for searched in (False, True)
    ]
    places = [parts.index((c.gpu, int(c.percentile), c.system.name in BEST)) for c in ordered]
    assert places == sorted(places)


def test_the_table_covers_all_five_systems() -> None:
    main, scaling = table.experiments(searched=True)
    assert len(list(main.cells())) == 2 * 3 * 5
    assert {cell.gpus for cell in scaling.cells()} == {16, 32, 64, 128}
    assert set(table.CLAIMED) == set(table.SYSTEMS) == set(table.SEARCHED)


def test_an_experiment_is_frozen() -> None:
    experiment = Experiment.model_validate(SMALL)
    with pytest.raises(ValueError, match="frozen"):
        experiment.name = "x"  # type: ignore[misc]
