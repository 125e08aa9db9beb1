"""Starts processes, restarts those that die, and stops them all without leaving anything behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NoReturn

from ecoserve.local import guard
from ecoserve.tasks import lasting

# A process that has lived so long has recovered: its next death starts again at the first backoff.
_STABLE = 60.0
# Unix sockets lie in the temporary folder, and their paths are bounded to 107 bytes. The longest
# are vLLM's: this, ours and a UUID.
_LONGEST_FOLDER = 50
# What a process prints for the user among whatever its libraries log.
_REASON_PREFIXES = ("ecoserve-worker: ", "ecoserve.scheduler: ", "ecoserve.relay: ")


class ProcessError(RuntimeError):
    """A process ended that must not, or died too often; the message is one line for the user."""


@dataclass(frozen=True, slots=True)
class Spec:
    """A process to keep running. ``env`` is added to the launcher's own environment."""

    name: str
    command: tuple[str, ...]
    log: Path
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Restarts:
    """When to restart and when to give up; seconds.

    ``deaths`` within ``within`` are the end, unless it was seen to work in between.
    """

    backoff: float = 0.5
    backoff_most: float = 10.0
    deaths: int = 5
    within: float = 120.0


@dataclass(slots=True)
class _Child:
    spec: Spec
    process: asyncio.subprocess.Process
    log_start: int
    deaths: deque[float]
    task: asyncio.Task[NoReturn] | None = None
    stopping: bool = False


class Supervisor:
    """Keeps processes running, each in a session and process group of its own.

    Until ``settle`` is called the death of any is an end to all: what cannot start once will not
    start the fifth time either. After it the dead are restarted with exponential backoff. The end,
    in both cases, is told by ``failed``. Use as an async context manager: leaving it kills whatever
    is left. ``temporary`` is their folder for temporary files, which goes with them.
    """

    def __init__(
        self,
        restarts: Restarts | None = None,
        on_event: Callable[[str], None] = lambda _: None,
        grace: float = guard.GRACE,
    ) -> None:
        self.failed: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._restarts = restarts or Restarts()
        self._on_event = on_event
        self._grace = grace
        self._children: dict[str, _Child] = {}
        self._mark = uuid.uuid4().hex
        self._settled = False
        self._guard: subprocess.Popen[bytes]
        self.temporary: Path

    async def __aenter__(self) -> Supervisor:
        folder = tempfile.gettempdir()
        folder = folder if len(folder) <= _LONGEST_FOLDER else "/tmp"
        self.temporary = Path(tempfile.mkdtemp(prefix="ecoserve-", dir=folder))
        # Not asyncio's own: it must outlive the loop, and a start of milliseconds blocks nobody.
        self._guard = subprocess.Popen(  # noqa: ASYNC220
            [sys.executable, "-m", guard.__name__, self._mark, str(self._grace), self.temporary],
            stdin=subprocess.PIPE,
            bufsize=0,  # what it was not there to be told must not come up when the pipe is closed
            start_new_session=True,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.gather(*(self.stop(name, 0.0) for name in list(self._children)))
        assert self._guard.stdin is not None
        self._guard.stdin.close()
        # The guard now ends what has left its process group, if anything, and then itself.
        await asyncio.to_thread(self._guard.wait)
        shutil.rmtree(self.temporary, ignore_errors=True)  # it has, unless it was killed itself

    @property
    def pids(self) -> dict[str, int]:
        """The process id of each, by name."""
        return {name: child.process.pid for name, child in self._children.items()}

    def settle(self) -> None:
        """From now on, what dies is restarted."""
        self._settled = True

    def works(self, name: str) -> None:
        """The process does its work again: its deaths until now no longer count.

        A fault that returns while it serves costs a restart each time; only one that cannot get
        so far any more is given up.
        """
        child = self._children.get(name)
        if child is not None:
            child.deaths.clear()

    async def start(self, spec: Spec) -> None:
        """Starts a process and keeps it running; ``ProcessError`` if its program cannot be run."""
        child = await self._spawn(spec)
        self._children[spec.name] = child
        keeping = lasting(f"keeping {spec.name} running", self._keep, child)
        child.task = asyncio.create_task(keeping)
        child.task.add_done_callback(partial(self._kept, child))

    async def stop(self, name: str, grace: float, hurry: asyncio.Event | None = None) -> None:
        """Ends a process: SIGTERM, then SIGKILL to its group after ``grace`` seconds or when
        ``hurry`` is set."""
        child = self._children.pop(name, None)
        if child is None or child.task is None:
            return
        child.stopping = True
        process = child.process
        if process.returncode is None and grace > 0:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            waits = {asyncio.create_task(process.wait())}
            if hurry is not None:
                waits.add(asyncio.create_task(hurry.wait()))
            _, pending = await asyncio.wait(
                waits, timeout=grace, return_when=asyncio.FIRST_COMPLETED
            )
            for wait in pending:
                wait.cancel()
        self._kill_group(process.pid)
        await process.wait()
        child.task.cancel()
        await asyncio.wait({child.task})

    async def _spawn(self, spec: Spec) -> _Child:
        spec.log.parent.mkdir(parents=True, exist_ok=True)
        # The file is the child's own stdout, not a pipe through us: nothing is lost, and nothing
        # blocks, when the launcher is busy or gone.
        with spec.log.open("ab") as log:
            start = log.tell()
            try:
                process = await asyncio.create_subprocess_exec(
                    *spec.command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env={
                        **os.environ,
                        "TMPDIR": str(self.temporary),
                        **spec.env,
                        guard.MARK: self._mark,
                    },
                    start_new_session=True,
                )
            except OSError as error:
                raise ProcessError(f"cannot start {spec.name}: {error}") from error
        self._tell_guard("+", process.pid)
        return _Child(spec, process, start, deque(maxlen=self._restarts.deaths))

    def _kept(self, child: _Child, task: asyncio.Task[NoReturn]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None and not child.stopping:
            self.fail(str(error))

    async def _keep(self, child: _Child) -> None:
        spec = child.spec
        deaths = child.deaths
        backoff = self._restarts.backoff
        while True:
            began = time.monotonic()
            code = await child.process.wait()
            # What it left running would hold on to memory, ports and the log.
            self._kill_group(child.process.pid)
            if child.stopping:
                return
            now = time.monotonic()
            deaths.append(now)
            what = f"{spec.name} {_how(code)}{_because(spec.log, child.log_start)}"
            if not self._settled:
                self.fail(f"{what} (log: {spec.log})")
                return
            if len(deaths) == self._restarts.deaths and now - deaths[0] <= self._restarts.within:
                self.fail(
                    f"{spec.name} died {len(deaths)} times in {now - deaths[0]:.0f} s, giving up; "
                    f"last it {_how(code)}{_because(spec.log, child.log_start)} (log: {spec.log})"
                )
                return
            if now - began > _STABLE or len(deaths) == 1:
                backoff = self._restarts.backoff
            self._on_event(f"{what}; restarting in {backoff:g} s")
            await asyncio.sleep(backoff)
            backoff = min(self._restarts.backoff_most, 2 * backoff)
            try:
                spawned = await self._spawn(spec)
            except ProcessError as error:
                self.fail(str(error))
                return
            child.process, child.log_start = spawned.process, spawned.log_start

    def fail(self, message: str) -> None:
        """Tells the end of all by ``failed``, unless another was told before."""
        if not self.failed.done():
            self.failed.set_result(message)

    def _kill_group(self, group: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
        self._tell_guard("-", group)

    def _tell_guard(self, sign: str, group: int) -> None:
        assert self._guard.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._guard.stdin.write(f"{sign}{group}\n".encode())


def _how(code: int) -> str:
    if code < 0:
        try:
            return f"was killed by {signal.Signals(-code).name}"
        except ValueError:
            return f"was killed by signal {-code}"
    return f"ended with exit status {code}"


def _because(log: Path, start: int) -> str:
    line = reason(log, start)
    return f": {line}" if line else ""


def reason(log: Path, start: int = 0) -> str:
    """The line of a log, from byte ``start`` on, that says best why its process ended.

    The last line that the process addressed to the user, or simply the last one; empty if none.
    """
    with contextlib.suppress(OSError), log.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        # Less than there was: the log was begun anew.
        file.seek(max(start if start <= size else 0, size - (1 << 20)))
        lines = [line.strip() for line in file.read().decode(errors="replace").splitlines()]
        for line in reversed(lines):
            for prefix in _REASON_PREFIXES:
                if line.startswith(prefix):
                    return line.removeprefix(prefix)
        return next((line for line in reversed(lines) if line), "")
    return ""
