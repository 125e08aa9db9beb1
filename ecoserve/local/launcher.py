"""`ecoserve up`: a whole cluster on one machine, from its start to its end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, ParamSpec

import httpx

from ecoserve import gateway
from ecoserve.local import admin, greeting, logs, slo
from ecoserve.local.display import Display
from ecoserve.local.engine import Engine, Model, SetupError, inspect_model, plan
from ecoserve.local.fleet import Fleet
from ecoserve.local.machine import free_ports, inspect
from ecoserve.local.model import (
    ENGINE_ARGUMENTS,
    SERVED_NAME,
    ModelError,
    default_cache_dir,
    prepare_smollm2,
)
from ecoserve.local.options import CLUSTER, Options, check, claim, gateway_config
from ecoserve.local.scaling import Hands, Scaler, check_prometheus, settings_of
from ecoserve.local.supervisor import ProcessError, Spec, Supervisor
from ecoserve.policy.state import SLO
from ecoserve.proto.v1 import admin_pb2
from ecoserve.tasks import lasting

# How long a stop may take beyond the drain itself: the engine's own end, and Python's.
_STOP_BEYOND_DRAIN = 10.0
_STOP = 5.0
# Two signals that come together are one wish (a terminal and `make` both pass a Ctrl-C on).
_ONE_WISH = 1.0
_ANSWER_WITHIN = 120.0
_TOLD_IN_A_LINE = (SetupError, ProcessError, admin.Refused)

log = logging.getLogger("ecoserve.local")
P = ParamSpec("P")


def up(options: Options, display: Display) -> int:
    """Runs a cluster until it is told to stop; returns the exit status.

    0 after Ctrl-C or SIGTERM, 1 when it cannot start or cannot go on, which one line explains.
    """
    # Until the event loop takes over, SIGTERM is as good as Ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        check(options)
        settings_of(options.scaling)
        check_prometheus(options.prometheus)
        model = _model(options, display)
        machine = inspect()
        engine = plan(machine, model, options.most, options.engine_args, compile=options.compile)
        with claim(options.directory):
            return asyncio.run(Launcher(options, model, engine, display).run())
    except (SetupError, ModelError) as error:
        display.error(str(error))
        return 1
    except KeyboardInterrupt:
        display.warn("stopped before anything was started")
        return 0


def _model(options: Options, display: Display) -> Model:
    if options.model is not None:
        return inspect_model(options.model, options.served_model_name)
    with display.step(f"Model {SERVED_NAME}"):
        path = prepare_smollm2(default_cache_dir(), display.detail)
        name = options.served_model_name or SERVED_NAME
        return inspect_model(path, name, ENGINE_ARGUMENTS)


class Stopped(Exception):
    """The user wants it to end."""


@dataclass(frozen=True, slots=True)
class Addresses:
    """Where everything but the gateway listens: host:port of 127.0.0.1."""

    grpc: str
    http: str
    envoy_admin: str
    workers: tuple[str, ...]

    @classmethod
    def choose(cls, workers: int) -> Addresses:
        """Free ports, kept over restarts so that everybody finds everybody again."""
        ports = [f"127.0.0.1:{port}" for port in free_ports(3 + workers)]
        return cls(ports[0], ports[1], ports[2], tuple(ports[3:]))


class Launcher:
    """Starts scheduler, Envoy and workers, keeps them running and ends them."""

    def __init__(self, options: Options, model: Model, engine: Engine, display: Display) -> None:
        self._options = options
        self._model = model
        self._engine = engine
        self._display = display
        self._addresses = Addresses.choose(options.most)
        self._names = [f"worker-{number}" for number in range(options.most)]
        self._fleet = Fleet(self._names, options.workers, options.bounds)
        self._promise: SLO | None = None
        self._tasks: list[asyncio.Task[NoReturn]] = []
        self._up = False

    async def run(self) -> int:
        """Runs it to its end; returns the exit status."""
        status = 0
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()
        self._signalled_at = 0.0
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._signalled)
        async with Supervisor(on_event=self._display.warn) as self._supervisor:
            try:
                await self._until_stopped(self._start())
                await self._until_stopped(asyncio.Event().wait())
            except Stopped:
                status = 0
            except _TOLD_IN_A_LINE as error:
                self._display.error(str(error))
                status = 1
            finally:
                await self._shut_down()
        return status

    # --- start

    async def _start(self) -> None:
        options, display = self._options, self._display
        others = ("scheduler", "envoy", *(["relay"] if options.relay else []))
        files = {name: self._log(name) for name in (*others, *self._names)}
        self._begin("bounding the logs", logs.bound, files.values())
        if options.logs:
            self._begin("showing the logs", logs.follow, files, display.console)
        display.line("·", f"Logs in {options.directory / 'logs'}", "dim")
        await self._supervisor.start(self._scheduler())
        for name in self._fleet.running:
            await self._supervisor.start(self._worker(name))
        await self._supervisor.start(self._envoy())
        if options.relay:
            await self._supervisor.start(self._relay())
        async with admin.Admin(self._addresses.grpc, CLUSTER) as scheduler:
            derived = await self._agree(scheduler)
        self._begin("declaring the cluster", self._keep)
        with display.step("First answer through the gateway"):
            path, answer = await self._first_answer()
            display.retitle(f"First answer through the gateway: {answer!r}")
        self._supervisor.settle()
        self._up = True
        if options.most > options.workers:
            self._begin("scaling", self._scale, derived.slo)
        greeting.show(display, options, self._model, derived, path, self._addresses.http)

    async def _agree(self, scheduler: admin.Admin) -> slo.Derived:
        """Has the workers calibrate, derives the SLO and has them accepted under it."""
        options, display, count = self._options, self._display, self._options.workers
        with display.step("Scheduler"):
            await scheduler.apply(self._cluster())
        with display.step(f"{count} worker{'s' * (count > 1)} loaded and calibrated"):
            instances = await scheduler.wait(
                admin.is_calibrated, count, lambda done: display.detail(f"{done} of {count}")
            )
        derived = slo.derive(
            [admin.calibrated(instance) for instance in instances],
            ttft=options.ttft,
            tpot=options.tpot,
        )
        self._promise = derived.slo
        with display.step("Workers accepted"):
            await scheduler.apply(self._cluster())
            await scheduler.wait(
                admin.is_accepted, count, lambda done: display.detail(f"{done} of {count}")
            )
        return derived

    def _cluster(self) -> admin_pb2.Cluster:
        options, promise = self._options, self._promise
        cluster = admin_pb2.Cluster(
            name=CLUSTER,
            model=self._model.served_name,
            policy=options.policy,
            policy_settings=options.policy_settings,
            late=options.late,
            queue_limit=options.queue_limit,
            macro_instances=[
                admin_pb2.MacroInstance(name=name, instances=members)
                for name, members in self._fleet.groups.items()
            ],
            debug=options.debug,
            drain_timeout_s=options.drain_timeout,
        )
        if promise is not None:
            cluster.slo.ttft_s, cluster.slo.tpot_s = promise.ttft, promise.tpot
        return cluster

    async def _first_answer(self) -> tuple[str, str]:
        """Asks until the gateway answers; the path that works and the answer.

        Raises ``SetupError`` for an error that is an answer, and when none comes.
        """
        deadline = time.monotonic() + _ANSWER_WITHIN
        path, last = "chat/completions", "no connection"
        keys = self._options.api_keys
        headers = {"Authorization": f"Bearer {keys[0]}"} if keys else {}
        async with httpx.AsyncClient(
            base_url=self._options.url, headers=headers, timeout=_ANSWER_WITHIN, trust_env=False
        ) as client:
            while time.monotonic() < deadline:
                try:
                    body = greeting.question(self._model.served_name, path)
                    answer = await client.post(f"/{path}", json={**body, "max_tokens": 24})
                except httpx.HTTPError as error:
                    last = f"{type(error).__name__} {error}".strip()
                else:
                    if answer.is_success:
                        return path, greeting.text(answer.json())
                    last = f"{answer.status_code} {answer.text.strip()[:300]}"
                    if answer.status_code == 400 and path == "chat/completions":
                        path = "completions"  # a base model has no chat template
                        continue
                    if answer.status_code not in {404, 429, 503}:
                        break
                await asyncio.sleep(0.2)
        raise SetupError(f"the gateway gives no answer: {last} (logs: {self._options.directory})")

    # --- processes

    def _log(self, name: str) -> Path:
        return self._options.directory / "logs" / f"{name}.log"

    def _scheduler(self) -> Spec:
        addresses = self._addresses
        command = [sys.executable, "-m", "ecoserve.scheduler"]
        command += ["--grpc", addresses.grpc, "--http", addresses.http]
        command += ["--debug_mode"] * self._options.debug
        return Spec("scheduler", tuple(command), self._log("scheduler"))

    def _worker(self, name: str) -> Spec:
        options, number = self._options, self._names.index(name)
        common = {
            "PYTHONUNBUFFERED": "1",
            # The model is a local directory: nothing is to be looked up, nothing told to anyone.
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
        }
        host, _, port = self._addresses.workers[number].rpartition(":")
        command = [sys.executable, "-m", "ecoserve_worker"]
        command += ["--cluster", CLUSTER, "--instance", name]
        command += ["--scheduler", self._addresses.grpc, "--host", host, "--port", port]
        command += ["--state-dir", str(default_cache_dir() / "calibration")]
        command += ["--policy", options.policy, "--drain-timeout", str(options.drain_timeout)]
        command += ["--debug_mode"] * options.debug
        command += ["--", *self._engine.arguments]
        # What the user has set in the environment stands.
        environment = self._engine.environments[number]
        chosen = {k: v for k, v in environment.items() if k not in os.environ}
        return Spec(name, tuple(command), self._log(name), common | chosen)

    def _envoy(self) -> Spec:
        addresses, options = self._addresses, self._options
        relay = self._supervisor.temporary if options.relay else None
        config = gateway_config(options, addresses.envoy_admin, addresses.grpc, relay)
        # Keys are in it, so it lies in the private temporary folder rather than beside the logs.
        file = self._supervisor.temporary / "envoy.json"
        file.write_text(json.dumps(gateway.build(config), indent=1))
        file.chmod(0o600)
        return Spec("envoy", tuple(gateway.command(config, file)), self._log("envoy"))

    def _relay(self) -> Spec:
        command = [sys.executable, "-m", "ecoserve.relay"]
        command += ["--sockets", str(self._supervisor.temporary)]
        command += ["--drain-timeout", str(self._options.drain_timeout)]
        return Spec("relay", tuple(command), self._log("relay"))

    # --- life and end

    def _begin(
        self, name: str, work: Callable[P, Awaitable[None]], *args: P.args, **kwargs: P.kwargs
    ) -> None:
        """Does ``work`` for as long as the cluster runs, which ends when it fails."""
        task = asyncio.create_task(lasting(name, work, *args, **kwargs))
        task.add_done_callback(self._failed)
        self._tasks.append(task)

    def _failed(self, task: asyncio.Task[NoReturn]) -> None:
        if task.cancelled():
            return
        error = task.exception()
        assert error is not None  # it lasts
        if not isinstance(error.__cause__, _TOLD_IN_A_LINE):
            log.error("cannot go on", exc_info=error)
        self._supervisor.fail(str(error))

    async def _until_stopped(self, work: Coroutine[Any, Any, object]) -> None:
        """Runs ``work``; raises ``Stopped`` or ``ProcessError`` when that comes first."""
        task = asyncio.create_task(work)
        stopped = asyncio.create_task(self._stop.wait())
        failed = self._supervisor.failed
        try:
            await asyncio.wait((task, stopped, failed), return_when=asyncio.FIRST_COMPLETED)
            if failed.done():
                raise ProcessError(failed.result())
            if self._stop.is_set():
                raise Stopped
            await task
        finally:
            task.cancel()
            stopped.cancel()
            await asyncio.gather(task, stopped, return_exceptions=True)

    async def _keep(self) -> None:
        async with admin.Admin(self._addresses.grpc, CLUSTER) as scheduler:
            await scheduler.keep(self._cluster, self._supervisor.works)

    async def _scale(self, promise: SLO) -> None:
        options = self._options

        async def declare() -> None:
            await scheduler.apply(self._cluster())

        async def start(name: str) -> None:
            await self._supervisor.start(self._worker(name))

        async def stop(name: str) -> None:
            await self._supervisor.stop(name, _STOP_BEYOND_DRAIN, self._hurry)

        async with admin.Admin(self._addresses.grpc, CLUSTER) as scheduler:
            await Scaler(
                self._fleet,
                settings_of(options.scaling),
                options.workers,
                options.most,
                scheduler=scheduler,
                metrics=f"http://{self._addresses.http}/metrics",
                ttft_slo=promise.ttft,
                drain_timeout=options.drain_timeout,
                hands=Hands(start, stop, declare, self._display.warn),
                prometheus=options.prometheus,
            ).run()

    async def _shut_down(self) -> None:
        """Has the running answers finish within the drain timeout, then ends everything."""
        if self._up:
            self._display.warn("stopping: answers under way finish (Ctrl-C again to hurry)")
            with contextlib.suppress(httpx.HTTPError):
                await gateway.drain(self._addresses.envoy_admin)
        grace = self._options.drain_timeout + _STOP_BEYOND_DRAIN if self._up else _STOP
        await asyncio.gather(
            *(self._supervisor.stop(name, grace, self._hurry) for name in self._names)
        )
        await asyncio.gather(
            *(
                self._supervisor.stop(name, _STOP, self._hurry)
                for name in ("envoy", "relay", "scheduler")
            )
        )
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._up:
            self._display.line("✓", "everything is stopped", "green")

    def _signalled(self) -> None:
        now = time.monotonic()
        if not self._stop.is_set():
            self._signalled_at = now
            self._stop.set()
        elif now - self._signalled_at > _ONE_WISH:
            self._hurry.set()
