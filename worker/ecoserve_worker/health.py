"""The port of health and metrics: for the kubelet, gateways' health checks and Prometheus, which
need no way to the engine and may have no certificate."""

from __future__ import annotations

from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from ecoserve_worker.gate import HEALTH

LIVE = "/ecoserve/live"
METRICS = "/metrics"


class HealthPort:
    """ASGI application: ``/ecoserve/live`` is 200 as long as the front end answers at all;
    ``/ecoserve/health`` and ``/metrics`` are those of ``app``; there is nothing else."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        if scope["type"] == "http" and (path == HEALTH or path.rstrip("/") == METRICS):
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            answer = PlainTextResponse("ok\n") if path == LIVE else PlainTextResponse("", 404)
            await answer(scope, receive, send)
