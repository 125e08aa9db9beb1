"""Tasks that last: one that fails ends its process with an error that says which."""

from __future__ import annotations

import asyncio
import io
import sys
from pathlib import Path
from typing import NoReturn

import pytest
from rich.console import Console

from ecoserve.local import launcher, logs, supervisor
from ecoserve.local.admin import Refused
from ecoserve.local.display import Display
from ecoserve.local.engine import Engine, Model
from ecoserve.local.options import Options
from ecoserve.local.supervisor import Spec, Supervisor
from ecoserve.tasks import TaskFailed, lasting, until


async def _fail(error: Exception) -> None:
    raise error


async def _end() -> None:
    pass


async def _last() -> None:
    await asyncio.Event().wait()


async def test_the_error_says_which_and_why() -> None:
    cause = KeyError("x")
    with pytest.raises(TaskFailed, match=r"^the sweep failed: KeyError: 'x'$") as told:
        await lasting("the sweep", _fail, cause)
    assert told.value.__cause__ is cause
    with pytest.raises(TaskFailed, match=r"^the sweep has ended$"):
        await lasting("the sweep", _end)


async def test_of_tasks_within_tasks_the_innermost_is_told() -> None:
    async def group() -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(lasting("a part", _last))
            tasks.create_task(lasting("another part", _fail, ValueError("no")))

    with pytest.raises(
        TaskFailed, match=r"^the whole failed: another part failed: ValueError: no$"
    ):
        await lasting("the whole", group)


async def test_one_that_is_cancelled_has_not_failed() -> None:
    task = asyncio.create_task(lasting("the sweep", _last))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_waiting_ends_with_the_word_or_the_first_failure() -> None:
    told = asyncio.Event()
    lives = asyncio.create_task(lasting("one", _last))
    told.set()
    await until(told, [lives])
    assert not lives.done()
    dies = asyncio.create_task(lasting("two", _end))
    with pytest.raises(TaskFailed, match="two has ended"):
        await until(asyncio.Event(), [lives, dies])
    lives.cancel()


# --- the launcher


async def _run(monkeypatch: pytest.MonkeyPatch, folder: Path, error: Exception) -> tuple[int, str]:
    """A launcher of which a task fails once it is up: its exit status and what the user sees."""

    async def start(self: launcher.Launcher) -> None:
        self._begin("declaring the cluster", _fail, error)

    monkeypatch.setattr(launcher.Launcher, "_start", start)
    console = Console(file=io.StringIO(), record=True, width=200)
    model = Model(folder, "m", weights=0, sixteen_bit=True, max_len=128)
    engine = Engine((), ({},))
    work = launcher.Launcher(Options(workers=1, run_dir=folder), model, engine, Display(console))
    return await asyncio.wait_for(work.run(), 30), console.export_text()


async def test_the_launcher_ends_with_what_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    status, shown = await _run(monkeypatch, tmp_path, KeyError("x"))
    assert status == 1
    assert "declaring the cluster failed: KeyError: 'x'" in shown
    [record] = caplog.records
    assert record.exc_info is not None, "a fault of ours comes with its place"


async def test_what_the_user_can_mend_comes_without_a_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    status, shown = await _run(monkeypatch, tmp_path, Refused("cluster.queue_limit: too small"))
    assert status == 1
    assert "cluster.queue_limit: too small" in shown
    assert not caplog.records


async def test_a_supervisor_that_cannot_keep_a_process_tells_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> NoReturn:
        raise RuntimeError("no reason")

    monkeypatch.setattr(supervisor, "_because", fail)
    async with Supervisor() as processes:
        processes.settle()
        command = (sys.executable, "-c", "")
        await processes.start(Spec("worker", command, tmp_path / "worker.log"))
        told = await asyncio.wait_for(processes.failed, 30)
    assert told == "keeping worker running failed: RuntimeError: no reason"


async def test_a_log_that_cannot_be_begun_anew_is_told_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logs, "_LONGEST", 10)
    monkeypatch.setattr(logs, "_LOOK", 0.001)
    truncated = asyncio.Event()
    loop = asyncio.get_running_loop()

    def truncate(path: Path) -> None:
        if not caplog.records:
            raise OSError("disk error")
        loop.call_soon_threadsafe(truncated.set)

    monkeypatch.setattr(logs, "_begin_anew", truncate)
    log = tmp_path / "worker.log"
    log.write_bytes(b"x" * 100)
    bounding = asyncio.create_task(logs.bound([log]))
    async with asyncio.timeout(30):
        await truncated.wait()
    bounding.cancel()
    assert f"{log} is not begun anew: disk error" in caplog.text
