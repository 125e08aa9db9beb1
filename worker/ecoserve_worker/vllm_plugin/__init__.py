"""The part of a worker that runs inside vLLM's EngineCore."""

from __future__ import annotations

import logging
import sys

SCHEDULER = "ecoserve_worker.vllm_plugin.scheduler.EcoScheduler"
ASYNC_SCHEDULER = "ecoserve_worker.vllm_plugin.scheduler.EcoAsyncScheduler"


def register() -> None:
    """vLLM's general plug-in hook: runs in the front end, the EngineCore and every device worker.

    The scheduler is chosen by its path, so nothing is registered here; a process that vLLM has
    spawned only gets our log lines beside vLLM's. Calling it again does nothing.
    """
    ours = logging.getLogger("ecoserve_worker")
    if ours.handlers:
        return
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(
        logging.Formatter("%(asctime)s %(levelname)s ecoserve-worker[%(process)d] %(message)s")
    )
    ours.addHandler(handler)
    ours.setLevel(logging.INFO)
    ours.propagate = False
