"""Parts of the scheduler that fail: the process ends and says which, or goes on and says so."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import textwrap
from collections.abc import Callable
from typing import Any

import pytest

from ecoserve.scheduler.cluster import Cluster
from ecoserve.scheduler.eds import _Subscription
from ecoserve.scheduler.server import Server
from ecoserve.scheduler.store import Store
from ecoserve.tasks import TaskFailed
from tests.scheduler.fakes import chat, until
from tests.scheduler.test_eds import HEALTHY, Discovery


def _once(do: Callable[..., Any]) -> Callable[..., Any]:
    """``do``, but that it fails the first time."""
    calls: list[None] = []

    def called(*args: Any, **named: Any) -> Any:
        calls.append(None)
        if len(calls) == 1:
            raise KeyError("fault")
        return do(*args, **named)

    return called


async def test_a_sweep_that_fails_ends_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: Store) -> None:
        raise KeyError("fault")

    monkeypatch.setattr(Store, "changed", fail)
    server = Server(grpc_address="127.0.0.1:0", http_address="127.0.0.1:0")
    await server.start()
    with pytest.raises(TaskFailed, match=r"^the sweep failed: KeyError: 'fault'$"):
        await asyncio.wait_for(server.serve_until(asyncio.Event()), 30)
    await server.stop()  # it is stopped, so this does nothing


async def test_http_that_ends_ends_the_server() -> None:
    server = Server(grpc_address="127.0.0.1:0", http_address="127.0.0.1:0")
    await server.start()
    assert server._http is not None
    server._http.should_exit = True
    with pytest.raises(TaskFailed, match=r"^HTTP has ended$"):
        await asyncio.wait_for(server.serve_until(asyncio.Event()), 30)


async def test_it_serves_until_it_is_told(rig) -> None:
    told = asyncio.Event()
    serving = asyncio.create_task(rig.server.serve_until(told))
    await rig.ready("a")
    assert (await rig.gateway.call(chat())).destinations
    told.set()
    await asyncio.wait_for(serving, 30)


def test_the_process_ends_with_a_line_and_a_status() -> None:
    source = """
        import sys
        from ecoserve.scheduler.store import Store
        from ecoserve.scheduler.__main__ import main
        async def sweep(self):
            raise KeyError("fault")
        Store.sweep_forever = sweep
        sys.argv[1:] = ["--grpc", "127.0.0.1:0", "--http", "127.0.0.1:0"]
        sys.exit(main())
    """
    command = [sys.executable, "-c", textwrap.dedent(source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        "ecoserve.scheduler: the sweep failed: KeyError: 'fault'"
    )


async def test_a_session_that_fails_is_told_and_opened_anew(
    rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    [worker] = await rig.ready("a")
    monkeypatch.setattr(Cluster, "report", _once(Cluster.report))
    worker.report()
    await asyncio.wait_for(worker.ended.wait(), 15)
    assert "c/a: the session ends by a fault of the scheduler" in caplog.text
    again = rig.worker("a")
    await again.ready()
    assert (await rig.gateway.call(chat())).destinations == [again.address]


async def test_endpoints_that_fail_are_told_and_asked_for_anew(
    rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    [worker] = await rig.ready("a")
    monkeypatch.setattr(_Subscription, "_take", _once(_Subscription._take))
    first = Discovery(rig.port)
    await first.ask("c")
    await until(lambda: first._task.done(), "the stream ends")
    assert "endpoints end by a fault of the scheduler" in caplog.text
    await first.close()
    second = Discovery(rig.port)
    await second.ask("c")
    await until(lambda: second.endpoints() == {worker.address: HEALTHY})
    await second.close()
