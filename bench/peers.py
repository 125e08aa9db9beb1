"""Servers that the benches start: stock vLLM, stock in our process layout, our worker.

All serve one model on this machine's CPUs with the same engine arguments (model, length, dtype,
eager or compiled, KV size), those that `ecoserve up` would set. `stock` is vLLM's own server with
its own processes and threads; `stock-in-our-layout` is its engine and its scheduler inside our
worker's processes, so that what is left to compare with our worker is the scheduling.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import httpx
import quota

from e2e.harness import descendants
from ecoserve.local.engine import Engine, Model, inspect_model, plan
from ecoserve.local.machine import free_ports, inspect
from ecoserve.local.model import default_cache_dir, prepare_smollm2

VLLM_SERVER = "vllm.entrypoints.launchers.api_server.entry"


@dataclass(frozen=True, slots=True)
class Server:
    """A command that serves ``/v1`` on a port of 127.0.0.1, with what its environment adds."""

    name: str
    port: int
    command: tuple[str, ...]
    environment: Mapping[str, str]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


def small_model() -> Model:
    """SmolLM2-135M-Instruct, fetched and prepared on first use."""
    return inspect_model(prepare_smollm2(default_cache_dir()))


def engines(model: Model, workers: int, *extra: str) -> Engine:
    """Arguments and environments as `ecoserve up --workers` would set them on this machine."""
    return plan(inspect(), model, workers, extra)


def stock(of: Engine, *extra: str, name: str = "stock") -> Server:
    """vLLM's own server: the same engine arguments and KV size, its own processes and threads."""
    (port,) = free_ports(1)
    command = (sys.executable, "-m", VLLM_SERVER, "--host", "127.0.0.1", "--port", str(port))
    kv = {"VLLM_CPU_KVCACHE_SPACE": of.environments[0]["VLLM_CPU_KVCACHE_SPACE"]}
    return Server(name, port, (*command, *of.arguments, *extra), kv)


def worker(of: Engine, state: Path, *own: str, name: str, engine: tuple[str, ...] = ()) -> Server:
    """Our worker without a scheduler; ``own`` are its options (``--stock``, ``--policy`` ...)."""
    (port,) = free_ports(1)
    command = (sys.executable, "-m", "ecoserve_worker", "--stand-alone", "--port", str(port))
    given = (*own, "--state-dir", str(state), "--drain-timeout", "1", "--")
    return Server(name, port, (*command, *given, *of.arguments, *engine), of.environments[0])


@contextlib.asynccontextmanager
async def running(
    server: Server, log: Path, *, patience: float = 300, group: Path | None = None
) -> AsyncIterator[float]:
    """Runs the server (in a CPU ``group`` of ``quota``, once it is ready); yields the seconds from
    its start to its first token.

    Raises ``RuntimeError`` with the end of its log if it ends or is not ready in time.
    """
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("VLLM_", "OMP_"))}
    environment |= {"TOKENIZERS_PARALLELISM": "false", **server.environment}
    with log.open("wb") as file:
        began = time.perf_counter()
        process = await asyncio.create_subprocess_exec(
            *server.command, env=environment, stdout=file, stderr=file, start_new_session=True
        )
        try:
            await asyncio.wait_for(_first_token(server, process, log), patience)
            took = time.perf_counter() - began
            if group is not None:
                for pid in (process.pid, *descendants(process.pid)):
                    quota.move(group, pid)
            yield took
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), 20)
            with contextlib.suppress(ProcessLookupError):  # an EngineCore that outlived it
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()


async def _first_token(server: Server, process: asyncio.subprocess.Process, log: Path) -> None:
    async with httpx.AsyncClient(trust_env=False, timeout=60, base_url=server.url) as client:
        model = ""
        while True:
            if process.returncode is not None:
                raise RuntimeError(f"{server.name} ended with {process.returncode}:\n{_end(log)}")
            with contextlib.suppress(httpx.HTTPError):
                if not model:
                    listed = await client.get("/v1/models")
                    model = listed.json()["data"][0]["id"] if listed.status_code == 200 else ""
                if model:
                    body = {"model": model, "prompt": "Hello", "max_tokens": 1}
                    answer = await client.post("/v1/completions", json=body)
                    if answer.status_code == 200:
                        return
            await asyncio.sleep(0.02)


def _end(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-15:])
