"""The scheduler as a process: one event loop with its gRPC services and its HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from typing import Any

import grpc
import uvicorn
from envoy.service.endpoint.v3 import eds_pb2_grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer

from ecoserve.proto.v1 import admin_pb2_grpc, session_pb2_grpc
from ecoserve.scheduler import http, picker
from ecoserve.scheduler.admin import AdminService
from ecoserve.scheduler.eds import EndpointService
from ecoserve.scheduler.picker import MOST_BODY_BYTES, Picker
from ecoserve.scheduler.sessions import WARM_S, SessionService
from ecoserve.scheduler.store import Store

HEALTH_SERVICES = (
    "",
    "readiness",
    "liveness",
    picker.SERVICE,
)
STOP_S = 1.0


class CannotListen(Exception):
    """An address that is in use or not this machine's; the message says which."""


class _Http(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        # Signals are the process's own business.
        yield


class _Named:
    """Takes services for a server so that their methods are found by name as calls come.

    The generated code would also register each method, and grpc.aio's server then waits for a call
    of each anew at every call, which costs more than all that a pick does.
    """

    def __init__(self, server: grpc.aio.Server) -> None:
        self.add_generic_rpc_handlers = server.add_generic_rpc_handlers

    def add_registered_method_handlers(self, service: str, methods: object) -> None:
        """Left undone."""


class Server:
    """The whole scheduler. ``start`` raises ``CannotListen``; ``stop`` is clean and idempotent."""

    def __init__(
        self, *, grpc_address: str, http_address: str, debug: bool = False, warm_s: float = WARM_S
    ) -> None:
        self.store = Store(debug=debug)
        self._grpc_address = grpc_address
        self._http_address = http_address
        self._warm_s = warm_s
        self._server: grpc.aio.Server | None = None
        self._http: _Http | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._health = HealthServicer()
        self.grpc_port = 0
        self.http_port = 0

    async def start(self) -> None:
        listening = _bind(self._http_address, "HTTP")
        self.http_port = listening.getsockname()[1]
        server = grpc.aio.server(
            options=[
                # Two schedulers on one port would each get half of the workers.
                ("grpc.so_reuseport", 0),
                ("grpc.max_receive_message_length", 2 * MOST_BODY_BYTES),
                ("grpc.keepalive_time_ms", 10_000),
                ("grpc.keepalive_timeout_ms", 5_000),
                ("grpc.keepalive_permit_without_calls", 1),
                ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
            ]
        )
        sessions = SessionService(self.store, warm_s=self._warm_s)
        named: Any = _Named(server)
        session_pb2_grpc.add_SessionServicer_to_server(  # type: ignore[no-untyped-call]
            sessions, named
        )
        admin_pb2_grpc.add_AdminServicer_to_server(  # type: ignore[no-untyped-call]
            AdminService(self.store, sessions), named
        )
        eds_pb2_grpc.add_EndpointDiscoveryServiceServicer_to_server(
            EndpointService(self.store), named
        )
        health_pb2_grpc.add_HealthServicer_to_server(self._health, named)
        server.add_generic_rpc_handlers((Picker(self.store).handler(),))
        try:
            # gRPC's own words for a port in use are many; so the port is tried before.
            _bind(self._grpc_address, "gRPC").close()
            self.grpc_port = server.add_insecure_port(self._grpc_address)
        except (CannotListen, RuntimeError) as error:
            listening.close()
            raise CannotListen(str(error)) from None
        for name in HEALTH_SERVICES:
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)
        await server.start()
        self._server = server
        config = uvicorn.Config(
            http.app(self.store), log_level="warning", access_log=False, lifespan="off"
        )
        self._http = _Http(config)
        self._tasks = [
            asyncio.create_task(self._http.serve(sockets=[listening])),
            asyncio.create_task(self.store.sweep_forever()),
        ]

    async def stop(self) -> None:
        """Stops taking calls, gives those under way ``STOP_S`` seconds, and ends."""
        if self._server is None or self._http is None:
            return
        await self._health.enter_graceful_shutdown()
        await self._server.stop(STOP_S)
        self._http.should_exit = True
        serving, sweeping = self._tasks
        await serving
        sweeping.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await sweeping
        self._server = None


def _bind(address: str, what: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host.strip("[]"), int(port)))
    except (OSError, ValueError) as error:
        listening.close()
        raise CannotListen(f"cannot listen on {address} ({what}): {error}") from None
    return listening
