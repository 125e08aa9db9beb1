"""The scheduler as a process: one event loop with its gRPC services and its HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import grpc
import uvicorn
from envoy.service.endpoint.v3 import eds_pb2_grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer

from ecoserve import grpc_tls, tls
from ecoserve.proto.v1 import admin_pb2_grpc, session_pb2_grpc
from ecoserve.scheduler import http, picker
from ecoserve.scheduler.admin import AdminService
from ecoserve.scheduler.eds import EndpointService
from ecoserve.scheduler.picker import MOST_BODY_BYTES, Picker
from ecoserve.scheduler.sessions import WARM_S, SessionService
from ecoserve.scheduler.store import Store
from ecoserve.tasks import lasting, until

log = logging.getLogger("ecoserve.scheduler")

HEALTH_SERVICES = (
    "",
    "readiness",
    "liveness",
    picker.SERVICE,
)
STOP_S = 1.0
# Who is silent is asked, and has so long to answer. (By `keepalive_timeout_ms` it has a minute.)
_KEEPALIVE = (("grpc.keepalive_time_ms", 10_000), ("grpc.http2.ping_timeout_ms", 10_000))
_LOOK_S = 0.2  # at the certificate
# So long what came before a change of certificate may go on. A session that is then cut comes back
# within half a second.
_RETIRED_S = 86_400.0


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
    """The whole scheduler. ``start`` raises ``CannotListen``; ``stop`` is clean and idempotent.
    Between them ``serve_until`` raises ``TaskFailed`` when a part of it has failed.

    With ``tls_folder`` (see ``ecoserve.tls``) it serves gateways and workers by mutual TLS too, on
    ``tls_address``, as soon as there is a certificate in the folder; ``tls_port`` is 0 until then.
    """

    def __init__(
        self,
        *,
        grpc_address: str,
        http_address: str,
        tls_address: str = "",
        tls_folder: Path | None = None,
        debug: bool = False,
        warm_s: float = WARM_S,
    ) -> None:
        self.store = Store(debug=debug)
        self._grpc_address = grpc_address
        self._http_address = http_address
        self._tls_address = tls_address
        self._tls_folder = tls_folder
        self._server: grpc.aio.Server | None = None
        self._tls_servers: list[grpc.aio.Server] = []  # the last one takes connections
        self._sessions = SessionService(self.store, warm_s=warm_s)
        self._http: _Http | None = None
        self._tasks: list[asyncio.Task[NoReturn]] = []
        self._health = HealthServicer()
        self.grpc_port = 0
        self.http_port = 0
        self.tls_port = 0

    async def start(self) -> None:
        listening = _bind(self._http_address, "HTTP")
        self.http_port = listening.getsockname()[1]
        server = self._serving()
        named: Any = _Named(server)
        admin_pb2_grpc.add_AdminServicer_to_server(  # type: ignore[no-untyped-call]
            AdminService(self.store, self._sessions), named
        )
        health_pb2_grpc.add_HealthServicer_to_server(self._health, named)
        try:
            # gRPC's own words for a port in use are many; so the port is tried before.
            _bind(self._grpc_address, "gRPC").close()
            if self._tls_folder is not None:
                _bind(self._tls_address, "gRPC with TLS").close()
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
            asyncio.create_task(lasting("HTTP", self._http.serve, sockets=[listening])),
            asyncio.create_task(lasting("the sweep", self.store.sweep_forever)),
        ]
        if self._tls_folder is not None:
            secure = lasting("gRPC with TLS", self._serve_tls, self._tls_folder)
            self._tasks.append(asyncio.create_task(secure))

    async def serve_until(self, told: asyncio.Event) -> None:
        """Serves until ``told`` and stops. Raises ``TaskFailed`` if a part has failed before."""
        try:
            await until(told, self._tasks)
        finally:
            await self.stop()

    def _serving(self, *, shares_port: bool = False) -> grpc.aio.Server:
        """A server with what gateways and workers call."""
        server = grpc.aio.server(
            options=[
                # Two schedulers on one port would each get half of the workers.
                ("grpc.so_reuseport", int(shares_port)),
                ("grpc.max_receive_message_length", 2 * MOST_BODY_BYTES),
                *_KEEPALIVE,
                ("grpc.keepalive_permit_without_calls", 1),
                ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
            ]
        )
        named: Any = _Named(server)
        session_pb2_grpc.add_SessionServicer_to_server(  # type: ignore[no-untyped-call]
            self._sessions, named
        )
        eds_pb2_grpc.add_EndpointDiscoveryServiceServicer_to_server(
            EndpointService(self.store), named
        )
        server.add_generic_rpc_handlers((Picker(self.store).handler(),))
        return server

    async def _serve_tls(self, folder: Path) -> None:
        """Serves by the certificate in the folder, and by the next one as soon as it is there."""
        files = await _first_certificate(folder)
        served: tls.Material | None = None
        told = ""
        async with asyncio.TaskGroup() as retiring:
            while True:
                material = files.current()
                if material is not served:
                    try:
                        old = await self._serve_by(material)
                        served, told = material, ""
                        if old is not None:
                            retiring.create_task(self._retire(old))
                    except RuntimeError as error:  # the address, or what gRPC's TLS does not take
                        if str(error) != told:
                            told = str(error)
                            log.error("the certificate is not served by: %s", told)
                await asyncio.sleep(_LOOK_S)

    async def _serve_by(self, material: tls.Material) -> grpc.aio.Server | None:
        """Takes connections by this certificate from now on, with a server of its own; returns the
        one before. Calls and sessions that are there go on; a pick that comes in that very moment
        may be turned away, and its gateway then serves the call without.

        gRPC can also change the certificate of a server, but crashes where a connection is made at
        that moment: it frees what the other thread is just using (grpc/grpc#36693).
        """
        server = self._serving(shares_port=True)
        host, _, port = self._tls_address.rpartition(":")
        address = f"{host}:{self.tls_port or port}"
        self.tls_port = server.add_secure_port(address, grpc_tls.server_credentials(material))
        old = self._tls_servers[-1] if self._tls_servers else None
        self._tls_servers.append(server)
        await server.start()
        log.info("gRPC with mutual TLS on %s", address)
        return old

    async def _retire(self, server: grpc.aio.Server) -> None:
        await server.stop(_RETIRED_S)
        self._tls_servers.remove(server)

    async def stop(self) -> None:
        """Stops taking calls, gives those under way ``STOP_S`` seconds, and ends."""
        if self._server is None or self._http is None:
            return
        await self._health.enter_graceful_shutdown()
        serving, sweeping, *others = self._tasks
        await _ended(others)  # no further server begins
        await asyncio.gather(
            *(server.stop(STOP_S) for server in (self._server, *self._tls_servers))
        )
        self._http.should_exit = True
        await asyncio.wait({serving})
        await _ended([serving, sweeping])
        self._server = None


async def _ended(tasks: list[asyncio.Task[NoReturn]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _first_certificate(folder: Path) -> tls.Files:
    """Waits until there is one that can be used."""
    told = ""
    while True:
        try:
            return tls.Files(folder)
        except tls.Unusable as error:
            if str(error) != told:
                told = str(error)
                log.info("waiting for a certificate: %s", told)
        await asyncio.sleep(_LOOK_S)


def _bind(address: str, what: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host.strip("[]"), int(port)))
    except (OSError, ValueError, OverflowError) as error:  # the last: a port above 65535
        listening.close()
        raise CannotListen(f"cannot listen on {address} ({what}): {error}") from None
    return listening
