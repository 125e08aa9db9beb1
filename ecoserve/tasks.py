"""Tasks that last as long as their process. One that ends before would leave it half dead, so it
ends the process, with an error that says which; docs/architecture.md lists them all."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import NoReturn, ParamSpec

P = ParamSpec("P")


class TaskFailed(Exception):
    """A task that the process cannot do without has ended; the message says which, and why."""


async def lasting(
    name: str, work: Callable[P, Awaitable[object]], *args: P.args, **kwargs: P.kwargs
) -> NoReturn:
    """Does ``work``, which has no end of its own but to be cancelled. Raises ``TaskFailed`` when it
    fails or ends; ``name`` is what it is called there."""
    try:
        await work(*args, **kwargs)
    except Exception as error:
        raise TaskFailed(f"{name} failed: {_why(error)}") from error
    raise TaskFailed(f"{name} has ended")


async def until(told: asyncio.Event, tasks: Iterable[asyncio.Task[NoReturn]]) -> None:
    """Waits for ``told``, or raises what the first of the tasks to end raises."""
    waiting = asyncio.create_task(told.wait())
    tasks = set(tasks)
    try:
        await asyncio.wait({waiting, *tasks}, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            if task.done():
                await task
    finally:
        waiting.cancel()


def _why(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return str(error) if isinstance(error, TaskFailed) else f"{type(error).__name__}: {error}"
