"""The scheduler's certificate changes while connections are there and while they are made."""

from __future__ import annotations

import asyncio
import socket
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest

from ecoserve import grpc_tls, tls
from ecoserve.proto.v1 import session_pb2, session_pb2_grpc
from ecoserve.scheduler import server as server_module
from ecoserve.scheduler.server import Server
from tests.gateway.mounted import Secret
from tests.gateway.secure_world import authority, files, until
from tests.scheduler.fakes import LATENCY, LIMITS

CA = authority()


@asynccontextmanager
async def serving(folder: Path) -> AsyncIterator[Server]:
    server = Server(
        grpc_address="127.0.0.1:0",
        http_address="127.0.0.1:0",
        tls_address="127.0.0.1:0",
        tls_folder=folder,
    )
    await server.start()
    try:
        await until("TLS is served", lambda: server.tls_port)
        yield server
    finally:
        await server.stop()


def shown(port: int, folder: Path) -> str:
    """The certificate that a new connection is shown."""
    context = ssl.create_default_context(cadata=CA.roots)
    context.load_cert_chain(folder / tls.CERTIFICATE, folder / tls.KEY)
    context.set_alpn_protocols(["h2"])
    with (
        socket.create_connection(("127.0.0.1", port), timeout=10) as plain,
        context.wrap_socket(plain, server_hostname="localhost") as secure,
    ):
        return ssl.DER_cert_to_PEM_cert(secure.getpeercert(binary_form=True) or b"")


async def test_a_session_outlives_the_certificate_that_it_was_made_by(tmp_path: Path) -> None:
    secret, worker = Secret(tmp_path / "scheduler"), Secret(tmp_path / "worker")
    worker.write(files(CA, "worker"))
    secret.write(files(CA, "scheduler"))
    credentials = grpc_tls.channel_credentials(tls.Files(worker.folder).current())

    async def is_shown(text: str) -> bool:
        try:
            found = await asyncio.to_thread(shown, server.tls_port, worker.folder)
        except OSError:  # it was the last one of the old
            return False
        return found.strip() == text.strip()

    async with (
        serving(secret.folder) as server,
        grpc.aio.secure_channel(f"localhost:{server.tls_port}", credentials) as channel,
    ):
        session = session_pb2_grpc.SessionStub(channel).Connect()
        hello = session_pb2.Hello(
            cluster="c",
            instance="i",
            incarnation="1",
            address="127.0.0.1:1",
            model="m",
            limits=LIMITS,
            latency=LATENCY,
        )
        await session.write(session_pb2.WorkerMessage(hello=hello))
        assert "not known" in (await session.read()).refused.reason
        port = server.tls_port
        for _ in range(3):
            new = files(CA, "scheduler")
            secret.write(new)
            await until("it is shown", lambda text=new[tls.CERTIFICATE]: is_shown(text))
        assert server.tls_port == port
        await session.write(session_pb2.WorkerMessage(report=session_pb2.Report(number=1)))
        assert ("c", "i") in server._sessions._links
        assert not session.done()
        # What is no pair is passed over.
        secret.write({**files(CA, "scheduler"), tls.KEY: new[tls.KEY]})
        assert await is_shown(new[tls.CERTIFICATE])
    assert session.done()


_FLOOD = "from tests.gateway.test_rotation import flood; flood"
_KNOCK = """
import socket, sys
while True:
    calls = [socket.socket() for _ in range(16)]
    for call in calls:
        try:
            call.connect(("127.0.0.1", int(sys.argv[1])))
        except ConnectionRefusedError:
            sys.exit()  # it is gone
        except OSError:
            pass
    for call in calls:
        call.close()
"""


@pytest.mark.soak
def test_connections_that_are_made_meanwhile_do_not_crash_it(tmp_path: Path) -> None:
    """With gRPC's own way of changing a certificate it takes seconds to a crash."""
    done = subprocess.run(
        [sys.executable, "-c", f"{_FLOOD}({str(tmp_path)!r})"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout) >= 50


def flood(directory: str) -> None:
    """A scheduler whose certificate changes all the time, and connections all the time."""
    secret = Secret(Path(directory) / "scheduler")
    pairs = [files(CA, "scheduler") for _ in range(2)]
    secret.write(pairs[0])
    server_module._LOOK_S = 0.01

    async def change() -> int:
        changes = 0
        async with serving(secret.folder) as server:
            knocking = [
                subprocess.Popen([sys.executable, "-c", _KNOCK, str(server.tls_port)])  # noqa: ASYNC220
                for _ in range(3)
            ]
            try:
                end = asyncio.get_running_loop().time() + 15
                while asyncio.get_running_loop().time() < end:
                    changes += 1
                    secret.write(pairs[changes % 2])
                    await asyncio.sleep(0.005)
            finally:
                for process in knocking:
                    process.kill()
                    process.wait()
        return changes

    print(asyncio.run(change()))
