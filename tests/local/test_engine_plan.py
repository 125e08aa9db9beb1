from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ecoserve.local import machine
from ecoserve.local.engine import KV_MOST_GIB, OVERHEAD, Model, SetupError, inspect_model, plan
from ecoserve.local.machine import GIB, Machine

MODEL = Model(Path("/models/m"), "m", weights=GIB, sixteen_bit=True, max_len=8192)
MACHINE = Machine(cores=8, memory=64 * GIB, bfloat16=True, on_cpu=True)


def value(arguments: tuple[str, ...], name: str) -> str:
    return arguments[arguments.index(name) + 1]


def test_defaults_on_a_cpu() -> None:
    engine = plan(MACHINE, MODEL, 2, ())
    assert value(engine.arguments, "--model") == "/models/m"
    assert value(engine.arguments, "--served-model-name") == "m"
    assert value(engine.arguments, "--max-model-len") == "2048"
    assert value(engine.arguments, "--dtype") == "bfloat16"
    assert "--enforce-eager" in engine.arguments
    assert len(engine.environments) == 2
    assert engine.environments[0]["OMP_NUM_THREADS"] == "4"
    assert engine.environments[0]["VLLM_CPU_KVCACHE_SPACE"] == "4"


def test_a_cpu_without_bfloat16_gets_float32_and_room_for_it() -> None:
    old = Machine(cores=1, memory=9 * GIB, bfloat16=False, on_cpu=True)
    assert value(plan(old, MODEL, 1, ()).arguments, "--dtype") == "float32"
    with pytest.raises(SetupError, match=r"2 workers of this model need about 10\.4 GiB"):
        plan(old, MODEL, 2, ())
    assert plan(old, MODEL, 2, ("--dtype", "bfloat16"))


def test_what_the_user_says_stands() -> None:
    extra = ("--max_model_len=4096", "--dtype", "float32")
    engine = plan(MACHINE, MODEL, 1, extra, compile=True)
    assert "--max-model-len" not in engine.arguments
    assert "--enforce-eager" not in engine.arguments
    assert engine.arguments.count("--dtype") == 1
    assert engine.arguments[-3:] == extra


def test_with_devices_each_worker_has_its_own() -> None:
    gpu = Machine(cores=8, memory=GIB, bfloat16=True, on_cpu=False)
    engine = plan(gpu, MODEL, 2, ())
    assert [e["CUDA_VISIBLE_DEVICES"] for e in engine.environments] == ["0", "1"]
    assert "--dtype" not in engine.arguments


@given(st.integers(0, 512 * GIB), st.integers(0, 64 * GIB), st.integers(1, 64))
def test_workers_fit_in_memory_or_are_refused(memory: int, weights: int, workers: int) -> None:
    model = Model(Path("m"), "m", weights, sixteen_bit=True, max_len=2048)
    here = Machine(cores=4, memory=memory, bfloat16=True, on_cpu=True)
    try:
        engine = plan(here, model, workers, ())
    except SetupError:
        assert workers * (OVERHEAD + weights * 1.1 + GIB) > memory - GIB
        return
    kv = int(engine.environments[0]["VLLM_CPU_KVCACHE_SPACE"])
    assert 1 <= kv <= KV_MOST_GIB
    assert workers * (OVERHEAD + weights + kv * GIB) <= memory


def test_a_model_directory(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"text_config": {"dtype": "bfloat16", "max_position_embeddings": 1024}})
    )
    (tmp_path / "a.safetensors").write_bytes(b"12345")
    (tmp_path / "b.safetensors").write_bytes(b"123")
    model = inspect_model(tmp_path)
    assert model == Model(tmp_path, tmp_path.name, weights=8, sixteen_bit=True, max_len=1024)
    (tmp_path / "config.json").write_text("[")
    with pytest.raises(SetupError, match=r"config\.json cannot be read"):
        inspect_model(tmp_path)


def test_memory_is_bounded_by_the_cgroup(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9 kB\nMemAvailable:   8192 kB\n")
    assert machine.available_memory(tmp_path) == 8 << 20
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (group / "memory.max").write_text("max\n")
    (group / "memory.current").write_text("3000000\n")
    (group / "memory.stat").write_text("anon 5\ninactive_file 1000000\n")
    assert machine.available_memory(tmp_path) == 8 << 20
    (group / "memory.max").write_text("4000000\n")
    assert machine.available_memory(tmp_path) == 2_000_000


def test_cpu_flags(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nflags\t\t: fpu avx512_bf16 x\n\nprocessor\t: 1\n")
    assert machine.cpu_flags(cpuinfo) == {"fpu", "avx512_bf16", "x"}
    assert machine.cpu_flags(tmp_path / "none") == set()
