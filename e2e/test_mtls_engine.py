"""A real engine behind mutual TLS: answers, streams, and a rotation in the middle of one."""

from __future__ import annotations

import asyncio
import asyncio.subprocess
import json
import os
import signal
import ssl
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from ecoserve.local.engine import inspect_model, plan
from ecoserve.local.machine import inspect
from ecoserve.local.model import ENGINE_ARGUMENTS, default_cache_dir
from tests.gateway.secure_world import GATEWAY, SecureWorld, authority, files
from tests.gateway.world import free_port, until

MODEL = "SmolLM2-135M-Instruct"
QUESTION = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "What is the capital of Japan?"}],
    "temperature": 0,
}
START_S = 900.0


class EngineWorker:
    """A worker's process, in the place of a played one."""

    def __init__(self, name: str, folder: Path, scheduler_port: int, model: Path) -> None:
        # One of two on this machine, as `ecoserve up` starts them, so that it is calibrated once.
        engine = plan(inspect(), inspect_model(model, MODEL, ENGINE_ARGUMENTS), 2, ())
        self._environment = engine.environments[0]
        self._name = name
        port, self.health_port = free_port(), free_port()
        self.address = f"127.0.0.1:{port}"
        self.log = folder.parent / f"{name}.log"
        self._process: asyncio.subprocess.Process | None = None
        self._command = [
            *(sys.executable, "-m", "ecoserve_worker"),
            *("--cluster", "ns/demo", "--instance", name),
            *("--scheduler", f"localhost:{scheduler_port}"),
            *("--host", "127.0.0.1", "--port", str(port)),
            *("--health-port", str(self.health_port)),
            *("--state-dir", str(default_cache_dir() / "calibration")),
            *("--tls-files", str(folder), "--tls-gateway", GATEWAY, "--drain-timeout", "5"),
            *("--", *engine.arguments),
        ]

    async def start(self) -> None:
        environment = {**os.environ, **self._environment}
        with self.log.open("wb") as log:
            self._process = await asyncio.create_subprocess_exec(
                *self._command, stdout=log, stderr=log, env=environment, start_new_session=True
            )

    async def stop(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(30):
                await self._process.wait()
        except TimeoutError:
            os.killpg(self._process.pid, signal.SIGKILL)
            await self._process.wait()


@pytest.mark.engine
@pytest.mark.envoy
@pytest.mark.soak
async def test_a_real_engine_rotates_in_the_middle_of_a_stream(
    tmp_path: Path, model_dir: Path
) -> None:
    it = SecureWorld(tmp_path, authority())
    await it.server.start()
    await until("TLS is served", lambda: it.server.tls_port)
    worker = EngineWorker("demo-0", it.secrets["worker"].folder, it.server.tls_port, model_dir)
    try:
        await it.connect([worker], START_S)
        answer = await it.envoy.ask(json=QUESTION)
        assert "Tokyo" in answer.json()["choices"][0]["message"]["content"]

        # What the kubelet and Prometheus see is plain.
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{worker.health_port}") as plain:
            assert (await plain.get("/ecoserve/health")).status_code == 200
            assert "ecoserve_worker_accepted 1.0" in (await plain.get("/metrics")).text
            assert (await plain.get("/v1/models")).status_code == 404
        for scheme, verify in (("http", True), ("https", _trusting(it))):
            async with httpx.AsyncClient(verify=verify) as stranger:
                with pytest.raises(httpx.TransportError):
                    await stranger.get(f"{scheme}://{worker.address}/v1/models")

        # A stream runs while everything is replaced.
        body = QUESTION | {"stream": True, "max_tokens": 100, "ignore_eos": True}
        stream = asyncio.create_task(it.envoy.ask(json=body))
        before = await _serial(it, worker)
        it.give(it.signer)

        async def renewed() -> bool:
            return await _serial(it, worker) != before

        await until("the worker serves the new certificate", renewed, 60)
        again = await it.envoy.ask(json=QUESTION)
        assert again.json()["choices"] == answer.json()["choices"]
        lines = [line for line in (await stream).text.splitlines() if line]
        assert lines[-1] == "data: [DONE]"
        events = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
        assert not any("error" in event for event in events)
        moved = [it.serial("worker")]
        await until("the session has moved", lambda: it.session_serials() == moved, 60)
        assert it.states() == {"demo-0": "accepted"}
    finally:
        await it.stop()


def _trusting(it: SecureWorld) -> ssl.SSLContext:
    context = ssl.create_default_context(cadata=it.signer.roots)
    context.check_hostname = False
    return context


async def _serial(it: SecureWorld, worker: EngineWorker) -> Any:
    context = _trusting(it)
    secret = files(it.signer, "gateway")
    folder = it.directory / f"asking-{len(list(it.directory.iterdir()))}"
    folder.mkdir()
    for name, text in secret.items():
        (folder / name).write_text(text)
    context.load_cert_chain(folder / "tls.crt", folder / "tls.key")
    host, _, port = worker.address.rpartition(":")
    _, writer = await asyncio.open_connection(host, int(port), ssl=context)
    try:
        return writer.get_extra_info("peercert")["serialNumber"]
    finally:
        writer.close()
