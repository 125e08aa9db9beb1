"""``python -m ecoserve.gateway``: runs Envoy with a bootstrap that was made before.

It does what Envoy by itself does not: SIGTERM drains before it ends, and API keys are read from a
folder of files, as Kubernetes mounts a Secret, whose changes are taken over.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys
from pathlib import Path

from ecoserve import numbers
from ecoserve.gateway.binary import EnvoyMissing, arguments, drain
from ecoserve.gateway.keys import keys_file_text
from ecoserve.gateway.parts import split

log = logging.getLogger("ecoserve.gateway")

# So long it takes calls after it was told to end: whoever sends here has to learn of it.
_LINGER_S = 5.0
_ENVOY_ENDS_S = 5.0
_LOOK_S = 1.0


def read_keys(folder: Path) -> tuple[str, ...]:
    """The keys in the files of a folder, one a line; hidden files are Kubernetes' own.

    Raises ``OSError`` and ``ValueError``.
    """
    files = sorted(f for f in folder.iterdir() if not f.name.startswith(".") and f.is_file())
    lines = (line.strip() for file in files for line in file.read_text().splitlines())
    return tuple(dict.fromkeys(line for line in lines if line))


def write_keys(folder: Path, file: Path) -> None:
    """Makes what Envoy reads of the keys in ``folder``, by a move, which Envoy watches for."""
    text = keys_file_text(read_keys(folder))
    if file.exists() and file.read_text() == text:
        return
    new = file.with_suffix(".new")
    new.touch(mode=0o600)
    new.write_text(text)
    new.replace(file)
    log.info("API keys read from %s", folder)


async def _follow_keys(folder: Path, file: Path) -> None:
    """Keeps the keys as they are in the folder. While that cannot be read, those before count."""
    told = ""
    while True:
        await asyncio.sleep(_LOOK_S)
        try:
            write_keys(folder, file)
            told = ""
        except Exception as error:  # whatever it is, calls go on
            if str(error) != told:
                told = str(error)
                log.error("the API keys are not taken over: %s", error)


async def _run(options: argparse.Namespace) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    following = None
    if options.keys_from is not None:
        write_keys(options.keys_from, options.keys_to)
        following = asyncio.create_task(_follow_keys(options.keys_from, options.keys_to))
    command = arguments(options.config, drain_s=options.drain_timeout, threads=options.threads)
    envoy = await asyncio.create_subprocess_exec(*command)
    ended = asyncio.create_task(envoy.wait())
    told = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({ended, told}, return_when=asyncio.FIRST_COMPLETED)
        if not ended.done():
            draining = asyncio.create_task(_drain(options.admin, options.drain_timeout))
            await asyncio.wait({ended, draining}, return_when=asyncio.FIRST_COMPLETED)
            draining.cancel()
        if not ended.done():
            envoy.terminate()
            await asyncio.wait({ended}, timeout=_ENVOY_ENDS_S)
        return 0 if stop.is_set() else (ended.result() or 1)
    finally:
        if following is not None:
            following.cancel()
        if not ended.done():
            envoy.kill()
            await ended


async def _drain(admin: str, timeout_s: float) -> None:
    """Returns when all calls have ended or the time is over. An Envoy that cannot be asked is asked
    again: what it serves would be cut off."""
    clock = asyncio.get_running_loop().time
    until = clock() + timeout_s
    while True:
        try:
            await drain(admin)
            await asyncio.sleep(min(_LINGER_S, until - clock()))
            left = await drain(admin, max(until - clock(), 0.0))
        except Exception as error:
            log.warning("Envoy does not drain: %s", error or type(error).__name__)
            if clock() + _LOOK_S >= until:
                return
            await asyncio.sleep(_LOOK_S)
        else:
            if left:
                log.warning("%d calls did not end within %g s", left, timeout_s)
            return


def main() -> int:
    parser = argparse.ArgumentParser(prog="ecoserve.gateway", description=__doc__)
    add = parser.add_argument
    add("--config", type=Path, required=True, metavar="FILE", help="Envoy's bootstrap")
    add("--admin", default="127.0.0.1:9901", metavar="HOST:PORT", help="as in the bootstrap")
    seconds, threads = numbers.WAIT.argument, numbers.Allowed(1, 1024, whole=True).argument
    add("--drain-timeout", type=seconds, default=600.0, help="on SIGTERM (seconds)")
    add("--threads", type=threads, default=min(4, os.cpu_count() or 2), help="of Envoy")
    add("--keys-from", type=Path, metavar="FOLDER", help="files with API keys, one a line")
    add("--keys-to", type=Path, metavar="FILE", help="the keys file that the bootstrap names")
    options = parser.parse_args()
    if (options.keys_from is None) != (options.keys_to is None):
        parser.error("--keys-from and --keys-to belong together")
    try:
        split("--admin", options.admin)
    except ValueError as error:
        parser.error(str(error))
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr
    )
    logging.getLogger("httpx").setLevel(logging.WARNING)
    try:
        return asyncio.run(_run(options))
    except (EnvoyMissing, OSError, ValueError) as error:
        print(f"ecoserve.gateway: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
