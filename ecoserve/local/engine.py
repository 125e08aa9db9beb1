"""What each worker's engine is started with, where the user says nothing else."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ecoserve.local.machine import GIB, Machine

# A prompt of this length takes a few seconds on one core; longer ones are for the user to ask for.
MAX_MODEL_LEN = 2048
KV_MOST_GIB = 4
# Share of the memory at hand that all KV caches together may take.
KV_SHARE = 0.25
# A worker's two processes with Python, torch and vLLM in them, without weights and KV cache.
OVERHEAD = 2 * GIB

_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.gguf")


class SetupError(RuntimeError):
    """It cannot work as asked for; the message is one line for the user."""


@dataclass(frozen=True, slots=True)
class Model:
    """A model directory: size of its weights in bytes, and of the longest prompt in tokens.

    ``arguments`` are vLLM's that suit it; what the user gives comes after them and wins.
    """

    path: Path
    served_name: str
    weights: int
    sixteen_bit: bool
    max_len: int
    arguments: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Engine:
    """vLLM's arguments, and the environment of each worker."""

    arguments: tuple[str, ...]
    environments: tuple[dict[str, str], ...]


def inspect_model(
    path: Path, served_name: str | None = None, arguments: tuple[str, ...] = ()
) -> Model:
    """Looks at a model directory; ``SetupError`` if it is none."""
    if not path.exists():
        raise SetupError(f"model directory {path} does not exist")
    if not path.is_dir():
        raise SetupError(f"{path} is no directory; --model takes one in Hugging Face's form")
    try:
        config: Any = json.loads((path / "config.json").read_text())
        text = config.get("text_config", config)
        dtype = str(text.get("dtype") or text.get("torch_dtype") or config.get("torch_dtype"))
        max_len = int(text.get("max_position_embeddings") or MAX_MODEL_LEN)
    except FileNotFoundError:
        raise SetupError(f"{path} is no model: it has no config.json") from None
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise SetupError(f"{path}/config.json cannot be read: {error}") from error
    weights = next(
        (files for pattern in _WEIGHTS if (files := sorted(path.glob(pattern)))), list[Path]()
    )
    if not weights:
        raise SetupError(f"{path} is no model: it has no weights ({', '.join(_WEIGHTS)})")
    return Model(
        path=path,
        served_name=served_name or path.resolve().name,
        weights=sum(file.stat().st_size for file in weights),
        sixteen_bit="16" in dtype,
        max_len=max_len,
        arguments=arguments,
    )


def plan(
    machine: Machine, model: Model, workers: int, extra: tuple[str, ...], *, compile: bool = False
) -> Engine:
    """The engines of ``workers`` workers that share the machine.

    ``extra`` are the user's own vLLM arguments; what they name is not set here. ``compile`` has
    torch compile the model: some 1.6 times faster decodes for a start of a minute. Raises
    ``SetupError`` if the workers do not fit in memory.
    """
    own = {argument.split("=")[0].replace("_", "-") for argument in extra}
    arguments = ["--model", str(model.path), "--served-model-name", model.served_name]
    arguments += model.arguments

    def default(name: str, *value: str) -> None:
        if name not in own:
            arguments.extend((name, *value))

    if not compile:
        default("--enforce-eager")
    if not machine.on_cpu:
        # One device a worker; vLLM finds the memory itself.
        environments = tuple({"CUDA_VISIBLE_DEVICES": str(index)} for index in range(workers))
        return Engine((*arguments, *extra), environments)
    default("--max-model-len", str(min(model.max_len, MAX_MODEL_LEN)))
    if model.sixteen_bit:
        default("--dtype", "bfloat16" if machine.bfloat16 else "float32")
    widened = model.sixteen_bit and not machine.bfloat16 and "--dtype" not in own
    weights = model.weights * (2 if widened else 1)
    kv = kv_gib(machine, weights, workers)
    environment = {
        "OMP_NUM_THREADS": str(max(1, machine.cores // workers)),
        # Bound threads of several workers would all sit on the same first cores.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": str(kv),
    }
    return Engine((*arguments, *extra), (environment,) * workers)


def kv_gib(machine: Machine, weights: int, workers: int) -> int:
    """GiB of KV cache for each worker (vLLM takes whole ones).

    Raises ``SetupError`` if not even one fits beside the weights (bytes).
    """
    # A worker also needs room to load and to compute in: a tenth of its weights.
    fixed = OVERHEAD + weights + weights // 10
    left = (machine.memory - workers * fixed) / GIB
    if left < workers:
        need = workers * (fixed / GIB + 1)
        raise SetupError(
            f"too little memory: {workers} worker{'s' * (workers > 1)} of this model need"
            f"{'s' * (workers == 1)} about {need:.1f} GiB, {machine.memory / GIB:.1f} GiB are "
            f"free; use fewer --workers or a smaller --model"
        )
    share = min(left, KV_SHARE * machine.memory / GIB) / workers
    return max(1, min(KV_MOST_GIB, int(share)))
