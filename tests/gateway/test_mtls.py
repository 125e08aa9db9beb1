"""Mutual TLS of gateway, scheduler and workers: who is let in, and certificates that change."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import pytest_asyncio
from ecoserve_operator import pki
from ecoserve_worker import agent as agent_module
from envoy.service.discovery.v3 import discovery_pb2
from envoy.service.endpoint.v3 import eds_pb2_grpc
from envoy.service.ext_proc.v3 import external_processor_pb2 as ext_proc
from envoy.service.ext_proc.v3 import external_processor_pb2_grpc

from ecoserve import tls
from ecoserve.proto.v1 import admin_pb2, admin_pb2_grpc, session_pb2, session_pb2_grpc
from ecoserve.scheduler import eds, picker
from tests.gateway.mounted import Secret
from tests.gateway.secure_world import (
    CLUSTER,
    SecureWorld,
    authority,
    files,
    secure_world,
    until,
)
from tests.scheduler.fakes import LATENCY, LIMITS

pytestmark = [pytest.mark.envoy, pytest.mark.asyncio(loop_scope="module")]

OTHER = authority()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def one(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[SecureWorld]:
    async with secure_world(tmp_path_factory.mktemp("mtls"), workers=1) as it:
        yield it


def client_context(it: SecureWorld, identity: dict[str, str] | None) -> ssl.SSLContext:
    context = ssl.create_default_context(cadata=it.signer.roots)
    context.check_hostname = False
    if identity is not None:
        secret = Secret(it.directory / f"c{len(list(it.directory.iterdir()))}")
        secret.write(identity)
        context.load_cert_chain(secret.folder / "tls.crt", secret.folder / "tls.key")
    return context


async def test_calls_and_streams_pass(one: SecureWorld) -> None:
    (worker,) = one.workers
    assert worker.ledger.accepted
    answer = await one.envoy.ask()
    assert (answer.status_code, answer.text) == (200, worker.address)
    worker.enough.set()
    answer = await one.envoy.ask(json={"stream": True, "model": "m", "messages": []})
    assert answer.text == worker.address
    assert one.states() == {"demo-0": "accepted"}
    assert await one.envoy.stat("cluster.scheduler.ssl.handshake") > 0


async def test_what_is_no_pair_changes_nothing(one: SecureWorld) -> None:
    good = {role: files(one.signer, role) for role in one.secrets}
    done = asyncio.Event()
    # Each call makes a connection to the worker, and now and then one to the scheduler.
    calling = asyncio.create_task(keep_calling(one, done))
    for part in (
        lambda role: {tls.KEY: files(one.signer, role)[tls.KEY]},
        lambda role: {tls.CERTIFICATE: good[role][tls.CERTIFICATE][:300]},
    ):
        failed = await one.envoy.stat("sds.mtls-identity.key_rotation_failed")
        made = await one.envoy.stat("cluster.scheduler.ssl.handshake")
        for role, secret in one.secrets.items():
            secret.write({**good[role], **part(role)})

        async def noticed(failed: int = failed, made: int = made) -> bool:
            return (
                await one.envoy.stat("sds.mtls-identity.key_rotation_failed") > failed
                and await one.envoy.stat("cluster.scheduler.ssl.handshake") >= made + 2
            )

        await until("Envoy has tried it and goes on", noticed)
        assert one.states() == {"demo-0": "accepted"}
    for role, secret in one.secrets.items():
        secret.write(good[role])
    await taken_over(one)
    done.set()
    assert await calling


@pytest.mark.parametrize(
    "identity",
    [
        pytest.param(None, id="no certificate"),
        pytest.param(lambda it: files(OTHER, "gateway"), id="another authority's"),
        pytest.param(lambda it: files(it.signer, "worker"), id="a worker's"),
        pytest.param(
            lambda it: files(it.signer, "gateway", "gateway.other.ns.svc"), id="another cluster's"
        ),
    ],
)
async def test_a_worker_serves_its_gateway_only(one: SecureWorld, identity: Any) -> None:
    (worker,) = one.workers
    url = f"https://{worker.address}/v1/chat/completions"
    known = client_context(one, files(one.signer, "gateway"))
    async with httpx.AsyncClient(verify=known) as client:
        assert (await client.post(url, json={})).status_code == 200
    stranger = client_context(one, identity and identity(one))
    async with httpx.AsyncClient(verify=stranger) as client:
        with pytest.raises(httpx.TransportError):
            await client.post(url, json={})


async def test_a_worker_refuses_plain_connections(one: SecureWorld) -> None:
    (worker,) = one.workers
    async with httpx.AsyncClient() as client:
        with pytest.raises(httpx.TransportError):
            await client.get(f"http://{worker.address}/ecoserve/health")


async def test_the_scheduler_takes_no_strangers(one: SecureWorld) -> None:
    for identity in (None, files(OTHER, "gateway")):
        async with one.channel(identity) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await pick(channel)
            assert error.value.code() == grpc.StatusCode.UNAVAILABLE
    async with grpc.aio.insecure_channel(f"127.0.0.1:{one.server.tls_port}") as channel:
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await pick(channel)
        assert error.value.code() == grpc.StatusCode.UNAVAILABLE


async def test_a_cluster_is_for_its_own_gateways_and_workers(one: SecureWorld) -> None:
    """By the mutual port as by the plain one, which serves clusters that are plain."""
    gateways, workers = files(one.signer, "gateway"), files(one.signer, "worker")
    async with one.channel(gateways) as channel:
        await pick(channel)
        await endpoints(channel)
    for identity, plain in ((workers, False), (None, True)):
        async with one.channel(identity, plain=plain) as channel:
            for ask in (pick, endpoints):
                assert await refused(ask(channel)) == grpc.StatusCode.PERMISSION_DENIED
    for identity, plain in ((gateways, False), (None, True)):
        async with one.channel(identity, plain=plain) as channel:
            assert await refused(come(channel)) == grpc.StatusCode.PERMISSION_DENIED
    # The worker whose place was asked for still has it.
    assert one.states() == {"demo-0": "accepted"}


async def test_an_authority_vouches_for_its_own_cluster_only(one: SecureWorld) -> None:
    """The scheduler trusts all authorities of all clusters, but none for another's."""
    both = one.signer.roots + OTHER.roots
    mine = files(one.signer, "scheduler", trusting=both)
    one.secrets["scheduler"].write(mine)
    forged = files(OTHER, "gateway", trusting=one.signer.roots)
    async with one.channel(forged) as channel:
        await until("TLS lets it in", lambda: _connects(channel))
        assert await refused(pick(channel)) == grpc.StatusCode.PERMISSION_DENIED


async def test_admin_is_not_served_by_tls(one: SecureWorld) -> None:
    async with one.channel(files(one.signer, "gateway")) as channel:
        call = admin_pb2_grpc.AdminStub(channel).Remove(admin_pb2.RemoveRequest(name=CLUSTER))
        assert await refused(call) == grpc.StatusCode.UNIMPLEMENTED


async def test_certificates_and_authority_rotate_under_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_module, "_LOOK_S", 0.1)
    refusals: list[str] = []

    class Refused(picker.NotTheirs):
        def __init__(self, why: str) -> None:
            super().__init__(why)
            refusals.append(why)

    monkeypatch.setattr(picker, "NotTheirs", Refused)
    new = authority()
    async with secure_world(tmp_path, workers=2) as it:
        old = it.signer
        both = old.roots + new.roots
        done = asyncio.Event()
        stream = asyncio.create_task(
            it.envoy.ask(json={"stream": True, "model": "m", "messages": []})
        )
        callers = [asyncio.create_task(keep_calling(it, done)) for _ in range(3)]
        try:
            await it.declare(both)
            it.give(old, trusting=both)
            await taken_over(it)
            it.give(new, trusting=both)
            await taken_over(it)
            it.give(new)
            await it.declare(new.roots)
            await taken_over(it)
            # Every call makes a connection to a worker, so these are with the new certificates.
            before = await it.envoy.stat("cluster.workers.ssl.handshake")

            async def more() -> bool:
                return await it.envoy.stat("cluster.workers.ssl.handshake") >= before + 20

            await until("new connections are made", more)
        finally:
            done.set()
            for worker in it.workers:
                worker.enough.set()
        counts = await asyncio.gather(*callers)
        assert all(counts)
        *numbers, _ = (await stream).text.split("\n")
        assert numbers == [str(i) for i in range(len(numbers))]
        assert len(numbers) > 10
        assert set(it.states().values()) == {"accepted"}
        assert not refusals
        # Who was let in before is not any more.
        for worker in it.workers:
            context = client_context(it, files(old, "gateway"))
            context.load_verify_locations(cadata=new.roots)
            async with httpx.AsyncClient(verify=context) as client:
                with pytest.raises(httpx.TransportError):
                    await client.get(f"https://{worker.address}/ecoserve/health")
        async with it.channel(files(old, "gateway", trusting=new.roots)) as channel:
            assert await refused(pick(channel)) == grpc.StatusCode.UNAVAILABLE


async def keep_calling(it: SecureWorld, done: asyncio.Event) -> int:
    count = 0
    while not done.is_set():
        answer = await it.envoy.ask()
        assert answer.status_code == 200, answer.text
        count += 1
    return count


async def taken_over(it: SecureWorld) -> None:
    """Everyone has the certificates and authorities that the folders hold now."""
    wanted = {role: it.serial(role) for role in it.secrets}
    trusted = {
        c.serial_number
        for c in pki.certificates((it.secrets["gateway"].folder / "ca.crt").read_text())
    }

    async def envoy() -> bool:
        known = (await it.envoy.admin.get("/certs")).json()["certificates"]
        chains = {int(c["serial_number"], 16) for k in known for c in k.get("cert_chain", ())}
        roots = {int(c["serial_number"], 16) for k in known for c in k.get("ca_cert", ())}
        # Envoy tells of one certificate of a bundle.
        return chains == {wanted["gateway"]} and roots <= trusted

    await until("Envoy has taken it over", envoy)
    before = await it.envoy.stat("cluster.scheduler.ssl.handshake")

    async def again() -> bool:
        return await it.envoy.stat("cluster.scheduler.ssl.handshake") >= before + 2

    await until("Envoy has connected to the scheduler with it", again)

    moved = [wanted["worker"]] * len(it.workers)
    await until("the sessions have moved", lambda: it.session_serials() == moved)
    await until("all are accepted", lambda: set(it.states().values()) == {"accepted"})
    context = client_context(it, files_of(it, "gateway"))
    context.load_verify_locations(cadata=(it.secrets["gateway"].folder / "ca.crt").read_text())
    for worker in it.workers:
        host, _, port = worker.address.rpartition(":")
        _, writer = await asyncio.open_connection(host, int(port), ssl=context)
        found = writer.get_extra_info("peercert")
        writer.close()
        assert int(found["serialNumber"], 16) == wanted["worker"]


def files_of(it: SecureWorld, role: pki.Role) -> dict[str, str]:
    folder = it.secrets[role].folder
    return {name: (folder / name).read_text() for name in ("tls.crt", "tls.key", "ca.crt")}


async def pick(channel: grpc.aio.Channel) -> None:
    """Asks as a gateway does."""
    stub = external_processor_pb2_grpc.ExternalProcessorStub(channel)
    call = stub.Process(metadata=(("x-ecoserve-cluster", CLUSTER),), timeout=10)
    request = ext_proc.ProcessingRequest(
        request_body=ext_proc.HttpBody(body=b"{}", end_of_stream=True)
    )
    await call.write(request)
    answer = await call.read()
    if answer is grpc.aio.EOF:
        status = await call.code()
        raise grpc.aio.AioRpcError(status, grpc.aio.Metadata(), grpc.aio.Metadata())
    assert answer.HasField("dynamic_metadata")
    call.cancel()


async def endpoints(channel: grpc.aio.Channel) -> None:
    """Asks for the workers as a gateway does."""
    request = discovery_pb2.DiscoveryRequest(resource_names=[CLUSTER], type_url=eds.TYPE_URL)
    call = eds_pb2_grpc.EndpointDiscoveryServiceStub(channel).StreamEndpoints(iter([request]))
    async for answer in call:
        assert answer.resources
        return


async def come(channel: grpc.aio.Channel) -> None:
    """Comes as a worker does, in the place of the one that is there."""
    hello = session_pb2.Hello(
        cluster=CLUSTER,
        instance="demo-0",
        incarnation="2",
        address="127.0.0.1:1",
        model="m",
        limits=LIMITS,
        latency=LATENCY,
    )
    message = session_pb2.WorkerMessage(hello=hello)
    async for _ in session_pb2_grpc.SessionStub(channel).Connect(iter([message])):
        pass


async def _connects(channel: grpc.aio.Channel) -> bool:
    try:
        async with asyncio.timeout(1):
            await channel.channel_ready()
    except TimeoutError:
        return False
    return True


async def refused(call: Any) -> grpc.StatusCode:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await call
    return error.value.code()
