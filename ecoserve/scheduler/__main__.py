"""``python -m ecoserve.scheduler``: runs the scheduler until SIGTERM or SIGINT."""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import sys
from pathlib import Path

import uvloop

from ecoserve.scheduler.server import CannotListen, Server
from ecoserve.tasks import TaskFailed

log = logging.getLogger("ecoserve.scheduler")


async def _run(args: argparse.Namespace) -> None:
    server = Server(
        grpc_address=args.grpc,
        http_address=args.http,
        tls_address=args.tls,
        tls_folder=args.tls_files,
        debug=args.debug_mode,
    )
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await server.start()
    log.info("gRPC on %s, HTTP on %s", args.grpc, args.http)
    await server.serve_until(stop)


def main() -> int:
    parser = argparse.ArgumentParser(prog="ecoserve.scheduler", description=__doc__)
    parser.add_argument("--grpc", default="127.0.0.1:9002", metavar="HOST:PORT")
    parser.add_argument("--http", default="127.0.0.1:9003", metavar="HOST:PORT")
    parser.add_argument(
        "--debug_mode", action="store_true", help="log every pick and every phase switch"
    )
    parser.add_argument(
        "--tls", default="0.0.0.0:9004", metavar="HOST:PORT", help="gRPC by mutual TLS"
    )
    parser.add_argument(
        "--tls-files",
        type=Path,
        metavar="FOLDER",
        help="tls.crt, tls.key and ca.crt, whose changes are taken over; without, no mutual TLS",
    )
    args = parser.parse_args()
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr
    )
    # A thread that writes the metrics hands the processor back to the picks after so long.
    sys.setswitchinterval(0.001)
    try:
        uvloop.run(_run(args))
    except (CannotListen, TaskFailed) as error:
        if isinstance(error, TaskFailed):
            log.error("cannot go on", exc_info=error)
        print(f"ecoserve.scheduler: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
