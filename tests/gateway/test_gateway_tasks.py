"""What the gateway's process does beside Envoy, when it fails: it is told and tried again."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from ecoserve.gateway import __main__ as process


async def test_keys_that_fail_in_whatever_way_are_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    taken = asyncio.Event()

    def write(*_: Path) -> None:
        if not caplog.records:
            raise KeyError("fault")
        taken.set()

    monkeypatch.setattr(process, "_LOOK_S", 0.001)
    monkeypatch.setattr(process, "write_keys", write)
    following = asyncio.create_task(process._follow_keys(tmp_path, tmp_path / "keys"))
    async with asyncio.timeout(30):
        await taken.wait()
    following.cancel()
    assert "the API keys are not taken over: 'fault'" in caplog.text


async def test_an_envoy_that_cannot_be_asked_to_drain_is_asked_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked: list[float] = []

    async def drain(admin: str, timeout_s: float = 0.0) -> int:
        assert admin == "127.0.0.1:9901"
        asked.append(timeout_s)
        if len(asked) == 1:
            raise ValueError("no number")
        return 0

    monkeypatch.setattr(process, "_LOOK_S", 0.001)
    monkeypatch.setattr(process, "_LINGER_S", 0.001)
    monkeypatch.setattr(process, "drain", drain)
    await asyncio.wait_for(process._drain("127.0.0.1:9901", 60.0), 30)
    assert "Envoy does not drain: no number" in caplog.text
    first, again, left = asked
    assert first == again == 0.0
    assert 50 < left <= 60


async def test_an_envoy_that_never_answers_is_given_up_when_the_time_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def drain(*_: Any) -> int:
        raise ValueError

    monkeypatch.setattr(process, "_LOOK_S", 0.001)
    monkeypatch.setattr(process, "drain", drain)
    await asyncio.wait_for(process._drain("127.0.0.1:9901", 0.05), 30)
