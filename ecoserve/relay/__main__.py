"""``python -m ecoserve.relay``: the stream relay as a process of its own."""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path

import httpx
import uvicorn
import uvloop

from ecoserve import numbers
from ecoserve.gateway.relay import GATEWAY_SOCKET, RELAY_SOCKET
from ecoserve.relay.app import Relay


async def serve(folder: Path, drain_timeout: float) -> None:
    """Serves until SIGTERM or SIGINT, and then until its streams have ended or ``drain_timeout``
    seconds have passed. In ``folder`` are the relay's socket and that of the gateway."""
    transport = httpx.AsyncHTTPTransport(
        uds=str(folder / GATEWAY_SOCKET),
        # A connection of its own for each call: a socket of this machine costs nothing to connect
        # to, and none is ever found to have been closed meanwhile.
        limits=httpx.Limits(max_keepalive_connections=0),
    )
    # The gateway has the patience for both of us.
    async with httpx.AsyncClient(
        transport=transport, base_url="http://gateway", timeout=None
    ) as client:
        config = uvicorn.Config(
            Relay(client),
            uds=str(folder / RELAY_SOCKET),
            lifespan="off",
            access_log=False,
            log_level="warning",
            # What the worker said of itself stays.
            server_header=False,
            date_header=False,
            timeout_graceful_shutdown=round(drain_timeout),
        )
        await uvicorn.Server(config).serve()


def main() -> int:
    parser = argparse.ArgumentParser(prog="ecoserve.relay", description=__doc__)
    add = parser.add_argument
    add("--sockets", type=Path, required=True, metavar="FOLDER", help="as the gateway has it")
    seconds = numbers.WAIT.argument
    add("--drain-timeout", type=seconds, default=600.0, help="on SIGTERM (seconds)")
    options = parser.parse_args()
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr
    )
    logging.getLogger("httpx").setLevel(logging.WARNING)
    if not options.sockets.is_dir():
        print(f"ecoserve.relay: --sockets: {options.sockets} is no folder", file=sys.stderr)
        return 1
    try:
        uvloop.run(serve(options.sockets, options.drain_timeout))
    except OSError as error:
        print(f"ecoserve.relay: cannot serve in {options.sockets}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
