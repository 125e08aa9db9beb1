"""A worker's front end in one event loop: vLLM's OpenAI app, our gate, the channel, the agent."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import time
import uuid
from dataclasses import astuple
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import httpx
import uvicorn
import uvloop
from msgspec import structs

from ecoserve import tls
from ecoserve.policy import make
from ecoserve.policy.state import SLO
from ecoserve_worker import calibrate, metrics
from ecoserve_worker.channel import FrontEnd
from ecoserve_worker.continuation import Continuation
from ecoserve_worker.engine import cause, configure, first_line, start
from ecoserve_worker.gate import Gate
from ecoserve_worker.health import HealthPort
from ecoserve_worker.ledger import Ledger
from ecoserve_worker.listen import StartError
from ecoserve_worker.messages import Settings
from ecoserve_worker.options import Options
from ecoserve_worker.secure import secure

if TYPE_CHECKING:
    from starlette.types import ASGIApp
    from vllm.v1.engine.async_llm import AsyncLLM

    from ecoserve.policy.latency import LatencyModel
    from ecoserve.proto.v1 import session_pb2 as pb

logger = logging.getLogger(__name__)

# Exit status when the EngineCore died, so that a supervisor starts the worker again.
ENGINE_DIED = 3

_WATCH_INTERVAL = 0.1
_ANSWERS_END_WITHIN = 3.0
# A Ctrl-C reaches the whole process group and then comes once more from whoever started us.
_SAME_SIGNAL_WITHIN = 1.0


def serve(
    options: Options,
    args: argparse.Namespace,
    sock: socket.socket,
    health: socket.socket | None = None,
) -> int:
    """Runs the worker to its end; returns the exit status. ``sock`` is what it serves on,
    ``health`` where health and metrics are besides.

    The engine is started before there is an event loop: a forked process would share the loop's
    signal descriptor, and the loop would take the engine's signals for its own.
    """
    with tempfile.TemporaryDirectory(prefix="ecoserve-") as directory:
        errors = Path(directory) / "engine.err"
        with errors.open("wb") as file:
            worker = Worker(options, args, Path(directory))
            try:
                worker.start_engine(file)
            except (Exception, SystemExit) as error:
                worker.channel.close()
                logger.debug("the engine did not start", exc_info=True)
                raise StartError(f"the engine did not start: {cause(errors, error)}") from error
            try:
                status: int = uvloop.run(worker.run(sock, health))
            finally:
                worker.stop_engine()
            if status == ENGINE_DIED:
                text = cause(errors, RuntimeError("it was killed or ended by itself"))
                print(f"ecoserve-worker: the engine died: {text}", file=sys.stderr)
            return status


class Worker:
    """The parts of a worker and what ties them together."""

    def __init__(self, options: Options, args: argparse.Namespace, directory: Path) -> None:
        self.options = options
        self.args = args
        self.ledger = Ledger(options.slo, tell=self._tell, engine_dead=lambda: self.engine_dead)
        self.channel = FrontEnd(directory / "channel", self.ledger.received)
        self.engine: AsyncLLM
        self.app: ASGIApp
        self.gate: Gate
        # Read before the engine loads, so that what is wrong with them is told at once.
        self._clients = self._identity = None
        if options.tls_files is not None:
            self._clients = tls.Files(options.tls_files)
            self._identity = tls.Files(options.tls_files, tls.SCHEDULER_CA)
        self._told_to_stop = asyncio.Event()
        self._told_at = 0.0
        self._settings = Settings(
            options.policy, {}, options.slo.ttft, options.slo.tpot, debug=options.debug
        )

    @property
    def engine_dead(self) -> bool:
        return bool(self.engine.errored)

    def _tell(self, command: Any) -> None:
        if not self.options.stock:
            self.channel.tell(command)

    # --- life

    def start_engine(self, errors: Any) -> None:
        """Starts the engine. Blocks; no thread may exist before (see ``engine.configure``)."""
        config = configure(self.args, self.options, str(self.channel.path))
        self.engine = start(config, self.args, errors)

    def stop_engine(self) -> None:
        """Ends the engine's processes; what it still had is lost."""
        self.channel.close()
        self.engine.shutdown(timeout=0 if self.engine_dead else 5)

    async def run(self, sock: socket.socket, health: socket.socket | None = None) -> int:
        """Serves until told to stop or until the engine dies; returns the exit status."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signalled)
        self.channel.start()
        server = await self._server()
        if self._clients is not None:
            secure(server.config, self._clients, self.options.tls_gateway)
        servers = {sock: server}
        if health is not None:
            servers[health] = self._http_server(HealthPort(self.gate), lifespan="off")
        serving = [
            asyncio.create_task(server.serve(sockets=[listening]))
            for listening, server in servers.items()
        ]
        work = asyncio.create_task(self._work())
        dead = asyncio.create_task(self._engine_dies())
        told = asyncio.create_task(self._told_to_stop.wait())
        try:
            await asyncio.wait({*serving, work, dead, told}, return_when=asyncio.FIRST_COMPLETED)
            if not self.engine_dead:
                for what, part in (("", work), ("watching the engine: ", dead)):
                    if part.done() and (error := part.exception()) is not None:
                        text = f"{what}{str(error) or type(error).__name__}"
                        raise StartError(first_line(text)) from error
                if any(task.done() for task in serving) and not told.done():
                    raise StartError("the HTTP server has ended; see its log")
                self.ledger.draining = True
                self.ledger.changed.set()
                await self._until_idle(self.options.drain_timeout)
            if self.engine_dead:
                self.ledger.changed.set()
                await self._until_idle(_ANSWERS_END_WITHIN)
                return ENGINE_DIED
            return 0
        finally:
            await self._until_acknowledged(work)
            for task in (work, dead, told):
                task.cancel()
            for server in servers.values():
                server.should_exit = True
                server.force_exit = bool(self.ledger.present)  # what has not ended is cut off
            await asyncio.wait(serving, timeout=_ANSWERS_END_WITHIN)

    async def _server(self) -> uvicorn.Server:
        from vllm.entrypoints.launchers.api_server.app_state import init_app_state
        from vllm.entrypoints.launchers.app import build_app

        tasks = await self.engine.get_supported_tasks()
        app = build_app(self.args, tasks, self.engine.model_config)
        await init_app_state(self.engine, app.state, self.args, tasks)
        # vLLM tells this to exit when the engine is dead; we do that ourselves, answers first.
        app.state.server = argparse.Namespace(should_exit=False)
        self.app = app
        metrics.register(self.ledger)
        self.gate = Gate(app, self.ledger, Continuation.of(app.state))
        return self._http_server(self.gate)

    def _http_server(
        self, app: ASGIApp, lifespan: Literal["auto", "off"] = "auto"
    ) -> uvicorn.Server:
        from vllm import envs
        from vllm.entrypoints.launchers.launcher import NoSignalServer

        config = uvicorn.Config(
            app,
            log_level=self.args.uvicorn_log_level,
            access_log=False,
            timeout_keep_alive=envs.VLLM_HTTP_TIMEOUT_KEEP_ALIVE,
            lifespan=lifespan,
        )
        config.load()
        server: uvicorn.Server = NoSignalServer(config)
        return server

    async def _work(self) -> None:
        """Calibrates, then is an instance of the cluster until cancelled."""
        options = self.options
        if not options.stock:
            self.ledger.starting = "calibrating"
            model = await self._calibrated()
            self.ledger.latency = astuple(model)
            self._settings = structs.replace(self._settings, latency=self.ledger.latency)
            self.channel.tell(self._settings)
            self._settings = structs.replace(self._settings, latency=None)
        if options.stand_alone or options.stock:
            self.ledger.accepted = True
            logger.info("serving on %s:%d without a scheduler", options.host, options.port)
            await asyncio.Event().wait()
        self.ledger.starting = "waiting for the scheduler"
        from ecoserve_worker.agent import Agent  # gRPC has threads: not before the engine's fork

        agent = Agent(options.scheduler, self._hello(), self.ledger, self.execute, self._identity)
        await agent.run()

    async def _calibrated(self) -> LatencyModel:
        config = self.engine.vllm_config.model_config
        size = {"vocabulary": config.get_vocab_size(), "max_len": config.max_model_len}
        file = calibrate.cache_file(self.options.state_dir, self._calibration_key())
        model = calibrate.load(file)
        if model is not None:
            await calibrate.warm_up(self.engine, self.ledger, **size)
            return model
        model = await calibrate.measure(self.engine, self.ledger, **size)
        try:
            self.options.state_dir.mkdir(parents=True, exist_ok=True)
            calibrate.save(file, model)
        except OSError as error:  # the next start takes some seconds more
            logger.warning("the calibration is not kept: %s", error)
        return model

    def _calibration_key(self) -> dict[str, Any]:
        from vllm import __version__ as version
        from vllm.platforms import current_platform

        threads = ("OMP_NUM_THREADS", "VLLM_CPU_OMP_THREADS_BIND", "VLLM_ENABLE_V1_MULTIPROCESSING")
        return {
            "engine": list(self.options.engine),
            "vllm": version,
            "device": current_platform.get_device_name(),
            "cpus": len(os.sched_getaffinity(0)),
            "environment": {name: os.environ.get(name) for name in threads},
        }

    def _hello(self) -> pb.Hello:
        from ecoserve import __version__
        from ecoserve.proto.v1 import session_pb2 as pb

        options, config = self.options, self.engine.vllm_config
        cache, scheduler = config.cache_config, config.scheduler_config
        host = f"[{options.host}]" if ":" in options.host else options.host
        # By TLS a gateway checks the port that it sends to, and with it that it gets in.
        plain_port = options.health_port if options.tls_files is None else None
        return pb.Hello(
            cluster=options.cluster,
            instance=options.instance,
            incarnation=uuid.uuid4().hex,
            address=f"{host}:{options.port}",
            health_address=f"{host}:{plain_port}" if plain_port else "",
            model=(self.args.served_model_name or [self.args.model])[0],
            version=__version__,
            limits=pb.Limits(
                max_num_seqs=scheduler.max_num_seqs,
                max_model_len=config.model_config.max_model_len,
                step_budget=scheduler.max_num_scheduled_tokens or scheduler.max_num_batched_tokens,
                kv_tokens=(cache.num_gpu_blocks or 0) * cache.block_size,
                block_tokens=cache.block_size,
            ),
        )

    # --- commands of the scheduler

    async def execute(self, command: pb.Command) -> None:
        """Carries out a command; raises what is to be told to the scheduler."""
        kind = command.WhichOneof("command")
        if kind == "configure":
            self._configure(command.configure)
        elif kind == "drain":
            await self._drain(command.drain.timeout_s or self.options.drain_timeout)
        elif kind == "resume":
            if self._told_to_stop.is_set():
                raise RuntimeError("it was told to end")
            self.ledger.draining = False
            self.ledger.changed.set()
        elif kind == "warm":
            await self._warm(command.warm)

    def _configure(self, given: pb.Configure) -> None:
        settings = dict(given.policy_settings)
        policy = given.policy or self._settings.policy
        make(policy, settings)  # raises what is wrong with them
        slo = self.ledger.slo
        if given.HasField("slo"):
            slo = SLO(given.slo.ttft_s, given.slo.tpot_s)
        self.ledger.slo = slo
        debug = given.debug or self.options.debug
        self._settings = Settings(policy, settings, slo.ttft, slo.tpot, debug)
        self.channel.tell(self._settings)

    async def _drain(self, seconds: float) -> None:
        self.ledger.draining = True
        self.ledger.changed.set()
        if not await self._until_idle(seconds) and self.ledger.draining:
            raise TimeoutError(f"{len(self.ledger.present)} requests did not end in {seconds:g} s")

    async def _warm(self, warm: pb.Warm) -> None:
        failed = []
        transport = httpx.ASGITransport(app=self.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://worker") as client:
            for request in warm.requests:
                body = json.loads(request.body)
                body |= {"max_tokens": 1, "stream": False}
                for name in ("max_completion_tokens", "stream_options", "n"):
                    body.pop(name, None)
                answer = await client.post(request.path, json=body, timeout=None)
                if answer.is_error:
                    failed.append(f"{request.path}: {answer.status_code}")
        if failed:
            raise RuntimeError(f"warm-up requests failed: {', '.join(failed)}")

    # --- the end

    def _signalled(self) -> None:
        now = time.monotonic()
        if self._told_to_stop.is_set():
            if now - self._told_at < _SAME_SIGNAL_WITHIN:
                return
            for child in multiprocessing.active_children():
                child.kill()
            os._exit(1)
        logger.info("draining; a second signal ends at once")
        self._told_at = now
        self.ledger.draining = True
        self._told_to_stop.set()

    async def _engine_dies(self) -> None:
        while not self.engine_dead:  # noqa: ASYNC110 - vLLM has no event for it
            await asyncio.sleep(_WATCH_INTERVAL)

    async def _until_idle(self, seconds: float) -> bool:
        """Waits until no request is under way; False if time ran out or the drain was undone."""
        deadline = time.monotonic() + seconds
        while not self.ledger.idle:
            was_dead = self.engine_dead
            await asyncio.sleep(0.05)
            self.ledger.settle()
            if time.monotonic() > deadline or not (self.ledger.draining or self.engine_dead):
                return False
            if self.engine_dead and not was_dead:
                return False
        return True

    async def _until_acknowledged(self, work: asyncio.Task[None]) -> None:
        """Gives the agent a moment to hand over what ended last."""
        deadline = time.monotonic() + 1.0
        while self.ledger.finished and not work.done() and time.monotonic() < deadline:
            if self.options.stand_alone or self.options.stock:
                return
            await asyncio.sleep(0.05)
