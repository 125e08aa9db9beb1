"""The worker as a process with a real engine: serving, ids, drain, a dying engine, bad starts."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from ecoserve_worker import server
from ecoserve_worker.listen import StartError
from ecoserve_worker.options import parse
from ecoserve_worker.vllm_plugin.instance import UNCALIBRATED

from ecoserve import headers
from ecoserve.policy.latency import LatencyModel
from ecoserve.proto.v1 import session_pb2 as pb
from ecoserve.relay.messages import TEXT_PATH, Limits

NAME = "smol"
PROMPT = {"model": NAME, "prompt": "The sky is", "temperature": 0}


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


class Worker:
    """``python -m ecoserve_worker`` and a client for it."""

    def __init__(
        self,
        folder: Path,
        model: Path,
        *options: str,
        port: int | None = None,
        engine: tuple[str, ...] = (),
    ) -> None:
        self.port = port or _free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.health_port = _free_port()
        self.folder = folder
        command = [sys.executable, "-m", "ecoserve_worker", "--stand-alone"]
        command += ["--state-dir", str(folder / "state"), "--port", str(self.port)]
        command += ["--health-port", str(self.health_port), *options]
        command += ["--", "--model", str(model), "--served-model-name", NAME]
        command += ["--max-model-len", "1024", "--enforce-eager", *engine]
        environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1"}
        self.out = (folder / f"{self.port}.out").open("wb")
        self.err = folder / f"{self.port}.err"
        with self.err.open("wb") as err:
            self.process = subprocess.Popen(
                command, stdout=self.out, stderr=err, env=environment, start_new_session=True
            )
        self.client = httpx.AsyncClient(base_url=self.url, timeout=60)

    async def ready(self) -> None:
        async def healthy() -> bool:
            assert self.process.poll() is None, self.err.read_text()
            try:
                return (await self.client.get("/ecoserve/health")).status_code == 200
            except httpx.TransportError:
                return False

        await until(healthy, 120)

    async def status(self) -> int:
        await until(lambda: self.process.poll() is not None, 60)
        return int(self.process.returncode)

    def engine_pid(self) -> int:
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        for pid in children.split():
            if "EngineCore" in Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " "):
                return int(pid)
        (pid,) = children.split()
        return int(pid)

    def complaints(self) -> list[str]:
        return [line for line in self.err.read_text().splitlines() if "ecoserve-worker:" in line]

    async def close(self) -> None:
        await self.client.aclose()
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self.out.close()


async def until(condition: Callable[[], Any], seconds: float = 30) -> None:
    async with asyncio.timeout(seconds):
        while True:
            result = condition()
            if await result if asyncio.iscoroutine(result) else result:
                return
            await asyncio.sleep(0.05)


async def _events(worker: Worker, body: dict[str, Any], started: asyncio.Event) -> list[str]:
    """The data of the events of a stream; a broken connection adds ``broken``."""
    data: list[str] = []
    try:
        async with worker.client.stream(
            "POST", "/v1/completions", json=PROMPT | {"stream": True} | body
        ) as answer:
            assert answer.status_code == 200
            async for line in answer.aiter_lines():
                if line.startswith("data: "):
                    data.append(line.removeprefix("data: "))
                    started.set()
    except httpx.TransportError:
        data.append("broken")
    return data


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("worker")


@pytest.fixture
async def worker(folder: Path, model_dir: Path) -> AsyncIterator[Worker]:
    worker = Worker(folder, model_dir, "--debug_mode", "--step-log", str(folder / "steps"))
    await worker.ready()
    yield worker
    await worker.close()


@pytest.mark.engine
async def test_serves_and_drains(worker: Worker, folder: Path) -> None:
    id = "eco-00000000000000aa"
    client = worker.client
    answer = await client.post(
        "/v1/completions",
        json=PROMPT | {"max_tokens": 5},
        headers={headers.REQUEST_ID: id, headers.TTFT_SLO: "3"},
    )
    assert answer.status_code == 200
    assert id in answer.json()["id"]
    await _check_chat_and_errors(client)
    await _check_metrics(worker)
    await _check_health_port(worker)
    await _check_disconnect(worker)
    await _check_continuation(client)

    # SIGTERM: what runs is finished, what comes is refused, the exit is clean.
    started = asyncio.Event()
    running = asyncio.create_task(_events(worker, {"max_tokens": 150, "ignore_eos": True}, started))
    await started.wait()
    worker.process.send_signal(signal.SIGTERM)

    async def refused() -> bool:
        return (await client.get("/ecoserve/health")).status_code == 503

    await until(refused)
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{worker.health_port}") as probe:
        assert (await probe.get("/ecoserve/health")).status_code == 503
        assert (await probe.get("/ecoserve/live")).status_code == 200
    answer = await client.post("/v1/completions", json=PROMPT)
    assert (answer.status_code, answer.headers[headers.RETRYABLE]) == (503, "1")
    events = await running
    assert events[-1] == "[DONE]"
    assert len(events) >= 150
    assert await worker.status() == 0
    assert not worker.complaints()
    assert list((folder / "state").glob("latency-*.json"))
    log = (folder / f"{worker.port}.out").read_text()
    assert "phase prefill: " in log
    assert "phase decode: " in log
    kinds = {json.loads(line)["kind"] for line in (folder / "steps").read_text().splitlines()}
    assert {"prefill", "decode"} <= kinds


async def _check_chat_and_errors(client: httpx.AsyncClient) -> None:
    chat = {"model": NAME, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
    assert (await client.post("/v1/chat/completions", json=chat)).status_code == 200
    assert (await client.get("/v1/models")).json()["data"][0]["id"] == NAME
    assert (await client.post("/v1/completions", json={"model": NAME})).status_code == 400
    response = {"model": NAME, "input": "Hi", "max_output_tokens": 4}
    answer = await client.post("/v1/responses", json=response)
    assert answer.status_code == 200
    assert answer.json()["id"].startswith("resp_eco-")


async def _check_continuation(client: httpx.AsyncClient) -> None:
    """What the stream relay leans on."""
    body = PROMPT | {"max_tokens": 12, "stream": True, "return_token_ids": True}
    answer = await client.post("/v1/completions", json=body)
    assert Limits.parse(answer.headers[headers.LIMITS]) == Limits(1024)
    events = [json.loads(line[6:]) for line in answer.text.split("\n\n")[:-2]]
    (choices, *_) = zip(*(event["choices"] for event in events), strict=True)
    tokens = [token for choice in choices for token in choice["token_ids"]]
    question = {"prompt": choices[0]["prompt_token_ids"], "tokens": tokens}
    told = (await client.post(TEXT_PATH, json=question)).json()
    assert told["text"] == "".join(choice["text"] for choice in choices)
    assert len(told["ends"]) == len(tokens) == 12
    assert told["ends"][-1] == len(told["text"])
    assert (await client.post(TEXT_PATH, json={"prompt": "x"})).status_code == 400
    chat = {"model": NAME, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
    answer = await client.post(
        "/v1/chat/completions", json=chat | {"stream": True, "return_token_ids": True}
    )
    assert answer.headers[headers.LIMITS] == Limits(1024).header()
    first, *others = [json.loads(line[6:]) for line in answer.text.split("\n\n")[:-2]]
    assert first["prompt_token_ids"]
    assert sum(len(event["choices"][0]["token_ids"]) for event in others) == 4
    answer = await client.post("/v1/chat/completions", json=chat)
    assert headers.LIMITS not in answer.headers


async def _check_metrics(worker: Worker) -> None:
    text = (await worker.client.get("/metrics")).text
    assert "vllm:num_requests_running" in text
    assert 'ecoserve_worker_steps_total{kind="prefill"}' in text
    assert 'ecoserve_worker_steps_total{kind="mixed"}' in text
    for name in ("phase", "use", "busy", "batch_limit", "mixing_penalty", "latency_model_error"):
        assert f"ecoserve_worker_{name}" in text


async def _check_health_port(worker: Worker) -> None:
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{worker.health_port}") as probe:
        assert (await probe.get("/ecoserve/health")).json()["ready"] is True
        assert (await probe.get("/ecoserve/live")).status_code == 200
        assert "ecoserve_worker_accepted 1.0" in (await probe.get("/metrics")).text
        # What makes the engine work is not there.
        assert (await probe.get("/v1/models")).status_code == 404
        assert (await probe.post("/v1/completions", json=PROMPT)).status_code == 404


async def _check_disconnect(worker: Worker) -> None:
    async with worker.client.stream(
        "POST",
        "/v1/completions",
        json=PROMPT | {"max_tokens": 900, "ignore_eos": True, "stream": True},
    ) as answer:
        async for _ in answer.aiter_lines():
            break

    async def gone() -> bool:
        text = (await worker.client.get("/metrics")).text
        return (
            "ecoserve_worker_present_requests 0.0" in text
            and "ecoserve_worker_running_decodes 0.0" in text
        )

    await until(gone)


@pytest.mark.engine
async def test_a_killed_engine_is_told_and_ends_the_worker(worker: Worker) -> None:
    started = asyncio.Event()
    stream = asyncio.create_task(_events(worker, {"max_tokens": 900, "ignore_eos": True}, started))
    whole = asyncio.create_task(
        worker.client.post("/v1/completions", json=PROMPT | {"max_tokens": 900, "ignore_eos": True})
    )
    await started.wait()
    os.kill(worker.engine_pid(), signal.SIGKILL)
    events = await stream
    assert events[-1] == "broken" or '"error"' in events[-1]
    assert "[DONE]" not in events
    answer = await whole
    assert (answer.status_code, answer.headers[headers.RETRYABLE]) == (503, "1")
    assert await worker.status() == 3
    assert len(worker.complaints()) == 1


@pytest.mark.engine
async def test_a_killed_front_end_leaves_no_engine_behind(worker: Worker) -> None:
    engine = Path(f"/proc/{worker.engine_pid()}")
    worker.process.kill()
    worker.process.wait()
    await until(lambda: not engine.exists() or "Z" in (engine / "stat").read_text().split()[2])


async def test_what_was_told_to_end_does_not_resume(tmp_path: Path) -> None:
    """It would end its drain, and with it cut off what runs."""
    options = parse(["--stand-alone", "--state-dir", str(tmp_path)])
    worker = server.Worker(options, argparse.Namespace(), tmp_path)
    resume = pb.Command(resume=pb.Resume())
    worker.ledger.draining = True
    await worker.execute(resume)
    assert not worker.ledger.draining
    worker._signalled()
    with pytest.raises(RuntimeError, match="told to end"):
        await worker.execute(resume)
    assert worker.ledger.draining
    worker.channel.close()


async def test_a_calibration_that_cannot_be_kept_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "state").touch()  # no folder
    options = parse(["--stand-alone", "--state-dir", str(tmp_path / "state")])
    worker = server.Worker(options, argparse.Namespace(), tmp_path)
    model = SimpleNamespace(get_vocab_size=lambda: 9, max_model_len=9)
    worker.engine = SimpleNamespace(vllm_config=SimpleNamespace(model_config=model))

    async def measure(*_: Any, **__: Any) -> LatencyModel:
        return UNCALIBRATED

    monkeypatch.setattr(server.calibrate, "measure", measure)
    monkeypatch.setattr(worker, "_calibration_key", dict)
    assert await worker._calibrated() is UNCALIBRATED
    assert "is not kept" in caplog.text
    worker.channel.close()


async def test_a_watch_that_fails_ends_the_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Engine:
        looks = 0

        @property
        def errored(self) -> bool:
            self.looks += 1
            if self.looks == 1:
                raise KeyError("fault")
            return False

    async def last(**_: Any) -> None:
        await ended.wait()

    async def http() -> Any:
        return SimpleNamespace(serve=last)

    ended = asyncio.Event()
    options = parse(["--stand-alone", "--state-dir", str(tmp_path)])
    worker = server.Worker(options, argparse.Namespace(), tmp_path)
    worker.engine = Engine()
    monkeypatch.setattr(server, "_ANSWERS_END_WITHIN", 0.01)
    monkeypatch.setattr(worker, "_server", http)
    monkeypatch.setattr(worker, "_work", last)
    with socket.socket() as sock, pytest.raises(StartError, match="watching the engine: 'fault'"):
        await asyncio.wait_for(worker.run(sock), 30)
    ended.set()
    worker.channel.close()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--port", "0"], "--port: must be a whole number from 1 to 65535, not '0'"),
        (["--health-port", "65536"], "--health-port: must be a whole number from 1 to 65535"),
        (
            ["--drain-timeout", "inf"],
            "--drain-timeout: must be a number of seconds from 0 to 86400, not 'inf'",
        ),
        (["--drain-timeout", "-1"], "--drain-timeout: must be a number of seconds from 0"),
        (["--ttft-slo", "nan"], "--ttft-slo: must be a positive number of seconds, 86400 at most"),
    ],
)
def test_bad_options_are_named(
    options: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(["--stand-alone", "--state-dir", "x", *options])
    assert ended.value.code == 2
    assert expected in capsys.readouterr().err


async def test_bad_starts_are_one_line(folder: Path, model_dir: Path) -> None:
    (folder / "empty").mkdir()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = int(taken.getsockname()[1])
        for worker, expected in (
            (Worker(folder, folder / "none"), "does not exist"),
            (Worker(folder, model_dir, port=port), f"port {port} of 127.0.0.1 is in use"),
            (Worker(folder, folder / "empty"), "local directory"),
            (Worker(folder, model_dir, engine=("--bogus",)), "unrecognized arguments"),
        ):
            try:
                assert await worker.status() == 1
                (line,) = worker.complaints()
                assert expected in line
                assert "Traceback" not in worker.err.read_text()
            finally:
                await worker.close()
