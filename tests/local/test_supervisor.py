from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

from ecoserve.local.supervisor import ProcessError, Restarts, Spec, Supervisor, reason

QUICK = Restarts(backoff=0.01, backoff_most=0.05, deaths=4, within=60)


def python(name: str, folder: Path, source: str, **env: str) -> Spec:
    command = (sys.executable, "-c", textwrap.dedent(source))
    return Spec(name, command, folder / f"{name}.log", env)


# Prints its own id and that of a child which ignores SIGTERM, as a stuck engine might.
FAMILY = """
    import os, signal, subprocess, sys, time
    child = subprocess.Popen([sys.executable, "-c",
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        "print('ready', flush=True); time.sleep(600)"], stdout=subprocess.PIPE)
    child.stdout.readline()
    print("pids", os.getpid(), child.pid, flush=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    while True:
        time.sleep(0.1)
"""


def alive(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


async def until(what: Callable[[], object], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, "it never came"
        await asyncio.sleep(0.01)


async def family(log: Path) -> list[int]:
    await until(lambda: log.exists() and "pids" in log.read_text())
    return [int(pid) for pid in re.findall(r"\d+", _last_line(log))]


def _last_line(log: Path) -> str:
    return log.read_text().splitlines()[-1]


async def failure(supervisor: Supervisor) -> str:
    return await asyncio.wait_for(supervisor.failed, 30)


async def test_a_death_is_followed_by_a_restart_with_the_same_command(tmp_path: Path) -> None:
    events: list[str] = []
    async with Supervisor(QUICK, events.append) as supervisor:
        supervisor.settle()
        await supervisor.start(python("worker", tmp_path, FAMILY))
        first, orphan = await family(tmp_path / "worker.log")
        os.kill(first, signal.SIGKILL)
        await until(lambda: (tmp_path / "worker.log").read_text().count("pids") == 2)
        second, _ = await family(tmp_path / "worker.log")
        assert second != first
        await until(lambda: not alive(orphan))  # what a dead process leaves must not live on
        await until(lambda: supervisor.pids == {"worker": second})
    assert len(events) == 1
    assert "worker was killed by SIGKILL" in events[0]


async def test_it_gives_up_on_what_keeps_dying(tmp_path: Path) -> None:
    events: list[str] = []
    async with Supervisor(QUICK, events.append) as supervisor:
        supervisor.settle()
        source = "import sys; sys.exit('ecoserve-worker: no such device')"
        await supervisor.start(python("worker", tmp_path, source))
        message = await failure(supervisor)
    assert "worker died 4 times" in message
    assert "no such device" in message
    assert "\n" not in message
    backoffs = [re.search(r"restarting in ([\d.]+) s", event) for event in events]
    assert [float(found[1]) for found in backoffs if found] == [0.01, 0.02, 0.04]


async def test_what_works_in_between_is_not_given_up(tmp_path: Path) -> None:
    log = tmp_path / "worker.log"
    events: list[str] = []
    async with Supervisor(QUICK, events.append) as supervisor:
        supervisor.settle()
        await supervisor.start(python("worker", tmp_path, FAMILY))
        for number in range(1, 3 * QUICK.deaths):
            await until(lambda n=number: log.exists() and log.read_text().count("pids") == n)
            supervisor.works("worker")
            os.kill((await family(log))[0], signal.SIGKILL)
        assert not supervisor.failed.done()
        await until(lambda: log.read_text().count("pids") == 3 * QUICK.deaths)
    assert {re.search(r"restarting in (\S+) s", event)[1] for event in events} == {"0.01"}  # type: ignore[index]
    supervisor.works("nobody")


async def test_before_all_is_up_one_death_is_the_end(tmp_path: Path) -> None:
    async with Supervisor(QUICK) as supervisor:
        source = """
            import sys
            print("Traceback ...")
            print("ecoserve-worker: the weights do not match", file=sys.stderr)
            print("some library's last words")
            sys.exit(3)
        """
        await supervisor.start(python("worker", tmp_path, source))
        message = await failure(supervisor)
    assert message.startswith("worker ended with exit status 3: the weights do not match (log: ")


async def test_a_program_that_is_not_there(tmp_path: Path) -> None:
    async with Supervisor(QUICK) as supervisor:
        with pytest.raises(ProcessError, match="cannot start envoy"):
            await supervisor.start(Spec("envoy", ("/nonexistent/envoy",), tmp_path / "envoy.log"))


async def test_stop_lets_it_finish(tmp_path: Path) -> None:
    source = """
        import signal, sys, time
        def finish(*_):
            time.sleep(0.2)
            print("finished", flush=True)
            sys.exit(0)
        signal.signal(signal.SIGTERM, finish)
        print("up", flush=True)
        while True:
            time.sleep(0.01)
    """
    log = tmp_path / "worker.log"
    async with Supervisor(QUICK) as supervisor:
        await supervisor.start(python("worker", tmp_path, source))
        await until(lambda: log.exists() and "up" in log.read_text())
        await supervisor.stop("worker", 30)
        assert "finished" in log.read_text()
        assert supervisor.pids == {}
        assert not supervisor.failed.done()


@pytest.mark.parametrize("way", ["grace", "hurry"])
async def test_what_does_not_stop_is_killed(tmp_path: Path, way: str) -> None:
    source = """
        import signal, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print("up", flush=True)
        time.sleep(600)
    """
    log = tmp_path / "worker.log"
    async with Supervisor(QUICK) as supervisor:
        await supervisor.start(python("worker", tmp_path, source))
        await until(lambda: log.exists() and "up" in log.read_text())
        pid = supervisor.pids["worker"]
        hurry = asyncio.Event()
        if way == "hurry":
            asyncio.get_running_loop().call_later(0.05, hurry.set)
        await asyncio.wait_for(
            supervisor.stop("worker", 0.1 if way == "grace" else 600, hurry), timeout=30
        )
        assert not alive(pid)


async def test_leaving_ends_everything_even_what_left_its_group(tmp_path: Path) -> None:
    source = """
        import os, subprocess, sys, tempfile, time
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"],
                                 start_new_session=True)
        open(os.path.join(tempfile.gettempdir(), "litter"), "w").close()
        print("pids", os.getpid(), child.pid, flush=True)
        time.sleep(600)
    """
    async with Supervisor(QUICK, grace=0.2) as supervisor:
        await supervisor.start(python("worker", tmp_path, source))
        pids = await family(tmp_path / "worker.log")
        temporary = supervisor.temporary
        assert (temporary / "litter").exists()
    assert not any(map(alive, pids))
    assert not temporary.exists()


async def test_sockets_find_room_where_the_temporary_folder_is_deep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("d" * 60)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    async with Supervisor(QUICK) as supervisor:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.bind(str(supervisor.temporary / str(uuid.uuid4())))
    assert not supervisor.temporary.exists()


async def test_a_killed_guard_is_not_missed(tmp_path: Path) -> None:
    async with Supervisor(QUICK) as supervisor:
        supervisor._guard.kill()
        supervisor._guard.wait()
        await supervisor.start(python("worker", tmp_path, FAMILY))
        pids = await family(tmp_path / "worker.log")
    # It is the guard that waits for those whose parent is gone.
    await until(lambda: not any(map(alive, pids)))
    assert not supervisor.temporary.exists()


def test_a_killed_launcher_takes_all_with_it(tmp_path: Path) -> None:
    launcher = f"""
        import asyncio, sys
        from pathlib import Path
        from ecoserve.local.supervisor import Spec, Supervisor
        async def main():
            async with Supervisor(grace=0.5) as supervisor:
                for name in ("one", "two"):
                    await supervisor.start(Spec(
                        name, (sys.executable, "-c", {textwrap.dedent(FAMILY)!r}),
                        Path({str(tmp_path)!r}) / f"{{name}}.log"))
                print(supervisor.temporary, flush=True)
                await asyncio.sleep(600)
        asyncio.run(main())
    """
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(launcher)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        temporary = Path(process.stdout.readline().strip())
        pids = [
            pid for name in ("one", "two") for pid in asyncio.run(family(tmp_path / f"{name}.log"))
        ]
        assert all(map(alive, pids))
        process.kill()
    asyncio.run(until(lambda: not any(map(alive, pids))))
    asyncio.run(until(lambda: not temporary.exists()))


def test_the_reason_is_of_the_last_start(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("ecoserve-worker: old\n")
    start = log.stat().st_size
    assert reason(log, start) == ""
    log.write_text("ecoserve-worker: old\nValueError: new\n\n")
    assert reason(log, start) == "ValueError: new"
    assert reason(log) == "old"
    assert reason(tmp_path / "none") == ""
    log.write_text("ecoserve-worker: it was begun anew\n")
    assert reason(log, 10_000) == "it was begun anew"
