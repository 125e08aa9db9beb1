"""Parts of the controller's process that fail end it, with an error that says which."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import pytest
from ecoserve_operator import __main__, app
from ecoserve_operator.builders import Builders, Installation

from ecoserve.tasks import TaskFailed


class _Broken:
    """A connection to the API server of which every use is a fault."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: object, place: TracebackType | None
    ) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        raise KeyError(name)


async def _connect(_: Callable[[], None]) -> Any:
    return _Broken()


async def test_a_part_that_fails_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    async def last(*_: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(app, "watch", last)
    monkeypatch.setattr(app.Controller, "run", last)
    options = app.Options("test", "ns", "127.0.0.1:1", health_port=0, optional_groups=())
    render = Builders(Installation("w", "g", "s:1", "s:2"))
    with pytest.raises(TaskFailed, match=r"^keeping the lease failed: KeyError: 'get'$"):
        await asyncio.wait_for(app.run(options, render, _connect), 30)


def test_the_process_says_so_in_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def run(*_: object) -> None:
        raise TaskFailed("reconciling has ended")

    monkeypatch.setattr(__main__, "run", run)
    arguments = "--identity i --lease n/l --authority a --scheduler-service s:1 --scheduler-tls s:2"
    monkeypatch.setattr(
        "sys.argv", ["x", *arguments.split(), "--worker-image", "w", "--gateway-image", "g"]
    )
    assert __main__.main() == 1
    assert capsys.readouterr().err.splitlines()[-1] == "ecoserve_operator: reconciling has ended"
