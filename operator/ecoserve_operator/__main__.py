"""``python -m ecoserve_operator``: runs the controller until SIGTERM or SIGINT."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import signal
import sys
from pathlib import Path

from ecoserve.gateway.parts import split
from ecoserve.numbers import PORT
from ecoserve.tasks import TaskFailed
from ecoserve_operator.app import LeaseLost, Options, run
from ecoserve_operator.builders import Builders, Installation
from ecoserve_operator.cluster_api import ApiError


def parse(arguments: list[str]) -> tuple[Options, Installation]:
    """Parses the command line; exits with status 2 and one line where it is wrong."""
    parser = argparse.ArgumentParser(prog="ecoserve_operator", description=__doc__)
    add = parser.add_argument
    add("--identity", required=True, help="who holds the lease: the Pod's name")
    add("--lease", required=True, metavar="NAMESPACE/NAME", help="of one controller at a time")
    add("--authority", required=True, metavar="NAME", help="Secret of the CA, beside the lease")
    add("--namespace", action="append", default=[], help="to work in; repeat; default: all")
    add("--scheduler", default="127.0.0.1:9002", metavar="HOST:PORT", help="its gRPC, from here")
    add("--scheduler-service", required=True, metavar="HOST:PORT", help="its gRPC, from Pods")
    add("--scheduler-tls", required=True, metavar="HOST:PORT", help="its gRPC with TLS, from Pods")
    add("--scheduler-files", type=Path, metavar="FOLDER", help="for its certificate")
    add("--scheduler-ip", help="of its Pod, for InferencePools")
    add("--health-port", type=PORT.argument, default=8081, help="of /healthz and /readyz")
    add("--worker-image", required=True, help="of clusters that name none")
    add("--gateway-image", required=True, help="of clusters that name none")
    add("--pull-policy", default="IfNotPresent", choices=("Always", "IfNotPresent", "Never"))
    add("--pull-secret", action="append", default=[], help="of these images; repeat")
    add("--monitoring", action="store_true", help="make PodMonitors and PrometheusRules")
    add("--inference-pools", action="store_true", help="make InferencePools")
    given = parser.parse_args(arguments)
    namespace, _, name = given.lease.partition("/")
    if not (namespace and name):
        parser.error(f"--lease must be NAMESPACE/NAME, not {given.lease!r}")
    for option in ("scheduler", "scheduler_service", "scheduler_tls"):
        try:
            split(f"--{option.replace('_', '-')}", getattr(given, option))
        except ValueError as error:
            parser.error(str(error))
    groups = ["monitoring.coreos.com"] * given.monitoring
    if given.inference_pools:
        groups += ["inference.networking.k8s.io", "discovery.k8s.io"]
    options = Options(
        identity=given.identity,
        lease_namespace=namespace,
        lease_name=name,
        authority_name=given.authority,
        scheduler=given.scheduler,
        scheduler_name=given.scheduler_tls.rpartition(":")[0],
        scheduler_files=given.scheduler_files,
        namespaces=tuple(given.namespace),
        health_port=given.health_port,
        optional_groups=tuple(groups),
    )
    installation = Installation(
        worker_image=given.worker_image,
        gateway_image=given.gateway_image,
        scheduler=given.scheduler_service,
        scheduler_tls=given.scheduler_tls,
        scheduler_ip=given.scheduler_ip,
        pull_policy=given.pull_policy,
        pull_secrets=tuple(given.pull_secret),
        inference_pools=given.inference_pools,
    )
    return options, installation


async def _main(options: Options, installation: Installation) -> None:
    running = asyncio.create_task(run(options, Builders(installation)))
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, running.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await running


def main() -> int:
    """Runs the controller; returns its exit status."""
    options, installation = parse(sys.argv[1:])
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr
    )
    try:
        asyncio.run(_main(options, installation))
    except (LeaseLost, ApiError, TaskFailed, OSError) as error:
        if isinstance(error, TaskFailed):
            logging.getLogger("ecoserve.operator").error("cannot go on", exc_info=error)
        print(f"ecoserve_operator: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
