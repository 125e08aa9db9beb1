"""A real scheduler, a real Envoy and played workers, with mutual TLS between them.

The workers are what a worker's front end is without an engine: its agent, and its way of serving.
"""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import uvicorn
from ecoserve_operator import pki
from ecoserve_worker.agent import Agent
from ecoserve_worker.ledger import Ledger
from ecoserve_worker.secure import secure

from ecoserve import gateway, grpc_tls, tls
from ecoserve.policy.state import SLO
from ecoserve.proto.v1 import admin_pb2, admin_pb2_grpc, session_pb2
from ecoserve.scheduler.server import Server
from tests.gateway import world
from tests.gateway.mounted import Secret
from tests.gateway.world import World

CLUSTER = "ns/demo"
GATEWAY, WORKER, SCHEDULER = "gateway.demo.ns.svc", "worker.demo.ns.svc", "localhost"
NAMES: dict[pki.Role, str] = {"gateway": GATEWAY, "worker": WORKER, "scheduler": SCHEDULER}
_INSTEAD = {
    '"max_connection_duration": "60s"': '"max_connection_duration": "0.3s"',
    '"timeout": "2s", "interval"': '"timeout": "60s", "interval"',
}
# On a machine with much else to do.
until = partial(world.until, limit_s=60.0)
LATENCY = (0.01, 2e-4, 2e-8, 0.015, 4e-4, 1.5e-6, 0.1, 0.05)


def authority() -> pki.Authority:
    return pki.make_authority("test", time.time(), 3600)


def files(
    signer: pki.Authority, role: pki.Role, name: str = "", *, trusting: str = ""
) -> dict[str, str]:
    """A Secret's content; ``trusting`` are the roots, by default the signer's."""
    pair = pki.issue(signer, role, [name or NAMES[role]], time.time(), 1800)
    roots = trusting or signer.roots
    return {
        tls.CERTIFICATE: pair.certificate,
        tls.KEY: pair.key,
        tls.CA: roots,
        tls.SCHEDULER_CA: roots,
    }


def declared(ca: str, *instances: str, **mtls: str) -> admin_pb2.ApplyRequest:
    return admin_pb2.ApplyRequest(
        cluster=admin_pb2.Cluster(
            name=CLUSTER,
            model="m",
            slo=session_pb2.SLO(ttft_s=30.0, tpot_s=1.0),
            macro_instances=[admin_pb2.MacroInstance(name="m0", instances=instances)],
            mtls=admin_pb2.MutualTls(**{"gateway": GATEWAY, "worker": WORKER, "ca": ca} | mtls),
        )
    )


class PlayedWorker:
    """Answers each call on a connection of its own; a stream goes on until ``enough``."""

    def __init__(self, name: str, folder: Path, scheduler_port: int) -> None:
        self.ledger = Ledger(SLO(30.0, 1.0))
        self.ledger.latency = LATENCY
        self.enough = asyncio.Event()
        self.address = ""
        self._name, self._folder = name, folder
        self._target = f"localhost:{scheduler_port}"
        self._tasks: list[asyncio.Task[Any]] = []

    async def start(self) -> None:
        config = uvicorn.Config(self._app, interface="asgi3", log_level="error", lifespan="off")
        config.load()
        secure(config, tls.Files(self._folder), GATEWAY)
        self._server = uvicorn.Server(config)
        sock = socket.socket()
        sock.bind(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{sock.getsockname()[1]}"
        hello = session_pb2.Hello(
            cluster=CLUSTER,
            instance=self._name,
            incarnation="1",
            address=self.address,
            model="m",
            limits=session_pb2.Limits(
                max_num_seqs=64,
                max_model_len=8192,
                step_budget=2048,
                kv_tokens=100_000,
                block_tokens=16,
            ),
        )
        identity = tls.Files(self._folder, tls.SCHEDULER_CA)
        self.agent = Agent(self._target, hello, self.ledger, self._execute, identity)
        self._tasks = [
            asyncio.create_task(self._server._serve([sock])),
            asyncio.create_task(self.agent.run()),
        ]

    async def stop(self) -> None:
        self.enough.set()
        self._server.should_exit = self._server.force_exit = True
        serving, agent = self._tasks
        agent.cancel()
        await asyncio.gather(serving, agent, return_exceptions=True)

    async def _execute(self, command: session_pb2.Command) -> None:
        """There is no engine to tell."""

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/ecoserve/health":
            status = 200 if self.ledger.accepted else 503
            await send({"type": "http.response.start", "status": status, "headers": []})
            await send({"type": "http.response.body", "body": b""})
            return
        body = b""
        while (message := await receive())["type"] == "http.request":
            body += message["body"]
            if not message["more_body"]:
                break
        headers = [(b"connection", b"close")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        number = 0
        while json.loads(body).get("stream") and not self.enough.is_set():
            chunk = f"{number}\n".encode()
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
            number += 1
            await asyncio.sleep(0.02)
        await send({"type": "http.response.body", "body": self.address.encode()})


class Gateway(World):
    """Connects to the scheduler anew all the time, as others do once a minute, and takes no worker
    that is slow for a dead one."""

    def _bootstrap(self) -> str:
        text = super()._bootstrap()
        for usual, ours in _INSTEAD.items():
            assert usual in text
            text = text.replace(usual, ours)
        return text


class SecureWorld:
    """``secrets`` are the folders of gateway, worker and scheduler."""

    def __init__(self, directory: Path, signer: pki.Authority) -> None:
        self.signer = signer
        self.secrets = {role: Secret(directory / role) for role in NAMES}
        self.give(signer)
        self.directory = directory
        self.workers: list[Any] = []
        self.server = Server(
            grpc_address="127.0.0.1:0",
            http_address="127.0.0.1:0",
            tls_address="127.0.0.1:0",
            tls_folder=self.secrets["scheduler"].folder,
        )

    def give(self, signer: pki.Authority, *, trusting: str = "") -> None:
        """New certificates for all, of the authority."""
        for role, secret in self.secrets.items():
            secret.write(files(signer, role, trusting=trusting))

    async def start(self, count: int) -> None:
        await self.server.start()
        await until("TLS is served", lambda: self.server.tls_port)
        folder, port = self.secrets["worker"].folder, self.server.tls_port
        await self.connect([PlayedWorker(f"demo-{i}", folder, port) for i in range(count)])

    async def connect(self, workers: Sequence[Any], limit_s: float = 60.0) -> None:
        """Starts workers and a gateway, and waits until the one takes the others for healthy."""
        self._channel = grpc.aio.insecure_channel(f"127.0.0.1:{self.server.grpc_port}")
        self.admin = admin_pb2_grpc.AdminStub(self._channel)
        self.workers = [*workers]
        await self.declare(self.signer.roots)
        for worker in workers:
            await worker.start()
        folder = self.directory / "sds"
        folder.mkdir()
        for name, text in gateway.mtls_files(str(self.secrets["gateway"].folder)).items():
            (folder / name).write_text(text)
        self.envoy = Gateway(
            self.directory,
            [],
            {
                "scheduler": f"127.0.0.1:{self.server.tls_port}",
                "cluster": CLUSTER,
                "connect_timeout_s": 60.0,
                "mtls": gateway.MutualTls(str(folder), WORKER, SCHEDULER),
            },
        )
        self.envoy.start_envoy()

        async def served() -> bool:
            found = await self.envoy.hosts()
            return set(found) == {w.address for w in self.workers} and all(found.values())

        await until("the workers are healthy", lambda: _quiet(served), limit_s=limit_s)

    async def declare(self, ca: str) -> None:
        await self.admin.Apply(declared(ca, *(w._name for w in self.workers)))

    def states(self) -> dict[str, str]:
        found = self.server.store.clusters[CLUSTER].instances.values()
        return {instance.name: instance.state for instance in found}

    def serial(self, role: pki.Role) -> int:
        """The number of the certificate that the role has now."""
        text = (self.secrets[role].folder / tls.CERTIFICATE).read_text()
        return pki.certificates(text)[0].serial_number

    def session_serials(self) -> list[int]:
        """The numbers of the certificates by which the workers' sessions were made."""
        links = self.server._sessions._links.values()
        shown = [link.context.auth_context()["x509_pem_cert"][0].decode() for link in links]
        return [pki.certificates(text)[0].serial_number for text in shown]

    def channel(self, identity: dict[str, str] | None, *, plain: bool = False) -> grpc.aio.Channel:
        """To the scheduler, with the certificate of a Secret or none."""
        if plain:
            return grpc.aio.insecure_channel(f"127.0.0.1:{self.server.grpc_port}")
        target = f"localhost:{self.server.tls_port}"
        if identity is None:
            roots = self.signer.roots.encode()
            return grpc.aio.secure_channel(target, grpc.ssl_channel_credentials(roots))
        folder = Secret(self.directory / f"client-{time.monotonic_ns()}")
        folder.write(identity)
        material = tls.Files(folder.folder).current()
        return grpc.aio.secure_channel(target, grpc_tls.channel_credentials(material))

    async def stop(self) -> None:
        for worker in self.workers:
            await worker.stop()
        if (envoy := self.envoy.envoy) is not None:
            envoy.kill()
            envoy.wait()
        await self.envoy.client.aclose()
        await self.envoy.admin.aclose()
        await self._channel.close()
        await self.server.stop()


async def _quiet(check: Any) -> bool:
    import httpx

    try:
        return bool(await check())
    except httpx.HTTPError:
        return False


@asynccontextmanager
async def secure_world(directory: Path, workers: int = 2) -> AsyncIterator[SecureWorld]:
    it = SecureWorld(directory, authority())
    try:
        await it.start(workers)
        yield it
    finally:
        await it.stop()
