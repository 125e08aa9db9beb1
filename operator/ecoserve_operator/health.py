"""Whether the controller is alive: how long ago its work last went on; and its metrics."""

from __future__ import annotations

from collections.abc import Callable

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

STUCK_S = 180.0


async def serve(port: int, age: Callable[[], float], ready: Callable[[], bool]) -> web.AppRunner:
    """Serves /healthz (503 when the work has stood still for ``STUCK_S``), /readyz and /metrics on
    all addresses; ``cleanup`` of what is returned ends it."""

    async def healthz(_: web.Request) -> web.Response:
        seconds = age()
        status = 200 if seconds < STUCK_S else 503
        return web.json_response({"secondsSinceLastReconcile": round(seconds, 1)}, status=status)

    async def readyz(_: web.Request) -> web.Response:
        holds = ready()
        return web.json_response({"holdsLease": holds}, status=200 if holds else 503)

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(body=generate_latest(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    app = web.Application()
    app.router.add_get("/healthz", healthz)
    app.router.add_get("/readyz", readyz)
    app.router.add_get("/metrics", metrics)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, port=port).start()
    return runner
