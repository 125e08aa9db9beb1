"""The worker's command line: its own options, then ``--``, then vLLM's."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from ecoserve import numbers
from ecoserve.policy import DEFAULT, POLICIES
from ecoserve.policy.state import SLO


@dataclass(frozen=True, slots=True)
class Options:
    """See ``--help`` for what each means. Times in seconds."""

    cluster: str
    instance: str
    scheduler: str
    host: str
    port: int
    health_port: int | None
    state_dir: Path
    policy: str
    slo: SLO
    debug: bool
    step_log: Path | None
    drain_timeout: float
    tls_files: Path | None
    tls_gateway: str
    stand_alone: bool
    stock: bool
    engine: tuple[str, ...]


def parse(arguments: list[str]) -> Options:
    """Parses the command line; exits with status 2 and one line where it is wrong."""
    own, engine = arguments, []
    if "--" in arguments:
        at = arguments.index("--")
        own, engine = arguments[:at], arguments[at + 1 :]
    parser = argparse.ArgumentParser(
        prog="ecoserve-worker",
        usage="python -m ecoserve_worker [options] -- [vLLM engine arguments]",
        description="vLLM's OpenAI server as an instance of an EcoServe cluster.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--cluster", default="default", help="name of the cluster that the worker belongs to")
    add("--instance", default="worker-0", help="name of the worker, stable over restarts")
    add("--scheduler", default="", metavar="HOST:PORT", help="the scheduler's gRPC address")
    add("--host", default="127.0.0.1", help="address to serve on")
    port, seconds = numbers.PORT.argument, numbers.SECONDS.argument
    add("--port", type=port, default=8001, help="port to serve on")
    add(
        "--health-port",
        type=port,
        help="a port of its own for health and metrics (default: on the serving port alone)",
    )
    add("--state-dir", type=Path, required=True, help="where calibrations are kept")
    add("--policy", default=DEFAULT, choices=tuple(POLICIES), help="until the scheduler says")
    add("--ttft-slo", type=seconds, default=10.0, help="until the scheduler says (seconds)")
    add("--tpot-slo", type=seconds, default=0.2, help="until the scheduler says (seconds)")
    add("--debug_mode", action="store_true", help="log each phase switch with its reason")
    add("--step-log", type=Path, help="append a JSON line for each engine step to this file")
    wait = numbers.WAIT.argument
    add("--drain-timeout", type=wait, default=600.0, help="on SIGTERM (seconds)")
    add(
        "--tls-files",
        type=Path,
        metavar="FOLDER",
        help="mutual TLS: tls.crt, tls.key, ca.crt and scheduler-ca.crt; changes are taken over",
    )
    add("--tls-gateway", default="", metavar="NAME", help="DNS name in the gateway's certificate")
    add("--stand-alone", action="store_true", help="serve without a scheduler")
    add("--stock", action="store_true", help="stock vLLM scheduling, for comparison")
    given = parser.parse_args(own)
    if not (given.scheduler or given.stand_alone or given.stock):
        parser.error("--scheduler HOST:PORT is needed, or --stand-alone")
    if bool(given.tls_files) != bool(given.tls_gateway):
        parser.error("--tls-files and --tls-gateway belong together")
    return Options(
        cluster=given.cluster,
        instance=given.instance,
        scheduler=given.scheduler,
        host=given.host,
        port=given.port,
        health_port=given.health_port,
        state_dir=given.state_dir,
        policy=given.policy,
        slo=SLO(given.ttft_slo, given.tpot_slo),
        debug=given.debug_mode,
        step_log=given.step_log,
        drain_timeout=given.drain_timeout,
        tls_files=given.tls_files,
        tls_gateway=given.tls_gateway,
        stand_alone=given.stand_alone,
        stock=given.stock,
        engine=tuple(engine),
    )
