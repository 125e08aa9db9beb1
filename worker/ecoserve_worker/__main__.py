"""``python -m ecoserve_worker``: one instance of a cluster."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import signal
import sys
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ecoserve_worker.options import Options

# Before numpy is imported: its BLAS would start threads, and the engine's process is forked.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# Threads that wait for each other spin for a while first. Where other processes want the cores too,
# libgomp's own while, some milliseconds, makes small operations twenty times slower.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "2000")
# oneDNN keeps what it compiles for each number of tokens that a step has, 0.2 MB a piece; its own
# limit is 1,024 of them, and the commonest numbers are kept by vLLM's layers in any case.
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "128")
# One process serves, so vLLM's metrics need no files; with this set ours would not show.
os.environ.pop("PROMETHEUS_MULTIPROC_DIR", None)


def main() -> int:
    """Runs the worker; returns its exit status."""
    from ecoserve_worker.options import parse

    options = parse(sys.argv[1:])
    signal.signal(signal.SIGTERM, _interrupted)
    try:
        return _run(options)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except Exception as error:
        # One line for a person; where it came from goes to the log, which is standard output.
        logging.getLogger("ecoserve_worker").info("cannot go on", exc_info=True)
        text = str(error) or type(error).__name__
        print(f"ecoserve-worker: {text.splitlines()[0]}", file=sys.stderr, flush=True)
        return 1


def _run(options: Options) -> int:
    from ecoserve_worker.listen import bind

    with contextlib.ExitStack() as stack:
        # Before vLLM's imports, which alone take seconds; a quarter more with collections of what
        # they make, none of which is garbage. The engine's start turns them on again.
        gc.disable()
        sock = stack.enter_context(bind(options.host, options.port))
        health = None
        if options.health_port is not None:
            health = stack.enter_context(bind(options.host, options.health_port))
        from ecoserve_worker.engine import parse_engine_arguments
        from ecoserve_worker.server import serve
        from ecoserve_worker.vllm_plugin import register

        register()
        return serve(options, parse_engine_arguments(options), sock, health)


def _interrupted(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
