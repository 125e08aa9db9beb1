"""Starts vLLM's AsyncLLM for a worker: process layout, our scheduler, causes of a failed start."""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NoReturn

from ecoserve import engine_args
from ecoserve.engine_args import Reserved
from ecoserve_worker.listen import StartError
from ecoserve_worker.messages import Settings, engine_config
from ecoserve_worker.options import Options
from ecoserve_worker.vllm_plugin import ASYNC_SCHEDULER, SCHEDULER

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.engine.async_llm import AsyncLLM


_OURS = "ecoserve"  # the worker's part of vLLM's additional configuration
_DATA = Reserved(engine_args.DATA, "an instance is one engine; start more workers")
_SCHEDULER = Reserved(engine_args.SCHEDULER, "the engine's scheduler is EcoServe's own")


def parse_engine_arguments(options: Options) -> argparse.Namespace:
    """vLLM's own arguments, checked; raises ``StartError`` where they are wrong."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    class Parser(FlexibleArgumentParser):  # type: ignore[misc]
        def error(self, message: str) -> NoReturn:
            raise StartError(f"engine arguments: {message}")  # the usage alone is 250 lines

    reserved = (_DATA, *engine_args.EVERYWHERE, *(() if options.stock else (_SCHEDULER,)))
    try:
        engine_args.check(options.engine, reserved)
    except ValueError as error:
        raise StartError(f"engine arguments{error}") from None
    parser = make_arg_parser(Parser(prog="ecoserve-worker ... --"))
    args: argparse.Namespace = parser.parse_args(list(options.engine))
    args.host, args.port = options.host, options.port
    if os.sep in args.model and not Path(args.model).is_dir():
        raise StartError(f"model directory {args.model} does not exist")
    try:
        validate_parsed_serve_args(args)
    except (TypeError, ValueError) as error:
        raise StartError(first_line(str(error))) from error
    if args.model_tag is not None:
        raise StartError(f"engine arguments: {args.model_tag!r} belongs to no option")
    if _OURS in (args.additional_config or {}):
        raise StartError(f"--additional-config: {_OURS} in it is the worker's own")
    # vLLM's engine takes a Ctrl-C that its whole process group gets as its own; with a timeout it
    # finishes what it has while the worker drains.
    args.shutdown_timeout = args.shutdown_timeout or max(1, round(options.drain_timeout))
    return args


def configure(args: argparse.Namespace, options: Options, socket: str) -> VllmConfig:
    """The engine's configuration with our scheduler in it (unless stock is wanted)."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.platforms import current_platform
    from vllm.usage.usage_lib import UsageContext

    cpu = current_platform.is_cpu()
    if cpu:
        # The device worker inside the EngineCore: one process and two imports less, and with few
        # cores faster. On several NUMA nodes set this to 1 and VLLM_CPU_OMP_THREADS_BIND.
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    if not options.stock:
        args.scheduler_cls = SCHEDULER if cpu else ASYNC_SCHEDULER
        args.additional_config = {
            **(args.additional_config or {}),
            _OURS: engine_config(
                Settings(
                    options.policy, {}, options.slo.ttft, options.slo.tpot, debug=options.debug
                ),
                socket=socket,
                step_log=str(options.step_log) if options.step_log else None,
                front_pid=os.getpid(),
            ),
        }
    config = AsyncEngineArgs.from_cli_args(args).create_engine_config(
        usage_context=UsageContext.OPENAI_API_SERVER
    )
    if cpu and one_thread():
        # Spares the engine's process the imports, some five seconds. vLLM's CPU platform has just
        # set this to spawn; a fork is safe only while no thread can hold a lock.
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
    return config


def one_thread() -> bool:
    """Whether this process has a single thread, those of C libraries counted."""
    try:
        return len(os.listdir("/proc/self/task")) == 1
    except OSError:
        return False


def start(config: VllmConfig, args: argparse.Namespace, errors: IO[Any]) -> AsyncLLM:
    """Starts the engine; its process writes its standard error into ``errors``."""
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.async_llm import AsyncLLM

    # What is imported stays: no collection, here or in a process forked from here, visits it again.
    gc.freeze()
    gc.enable()
    with _stderr_to(errors):
        return AsyncLLM.from_vllm_config(
            config,
            usage_context=UsageContext.OPENAI_API_SERVER,
            enable_log_requests=args.enable_log_requests,
            disable_log_stats=args.disable_log_stats,
        )


@contextlib.contextmanager
def _stderr_to(file: IO[Any]) -> Iterator[None]:
    """Child processes started within inherit ``file`` as their standard error."""
    sys.stderr.flush()
    ours = os.dup(2)
    os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(ours, 2)
        os.close(ours)


_RAISED = re.compile(r"^(?:\w+\.)*\w*(?:Error|Exception|Interrupt): (?P<text>.+)$", re.MULTILINE)


def cause(errors: Path, otherwise: BaseException) -> str:
    """One line that says why the engine did not start or died, from its standard error."""
    texts = [match["text"] for match in _RAISED.finditer(errors.read_text(errors="replace"))]
    return first_line(texts[0] if texts else str(otherwise) or type(otherwise).__name__)


def first_line(text: str) -> str:
    """The first line that says something, at most 300 characters."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if len(lines) > 1 and "validation error" in lines[0]:
        del lines[0]  # pydantic's count of errors; the first of them follows
    line = (lines[0] if lines else text).removeprefix("Value error, ")
    return re.sub(r" \[type=\w+, input_value=.*", "", line)[:300]
