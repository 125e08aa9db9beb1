"""``python -m ecoserve.gateway``: Envoy as Kubernetes runs it."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import ipaddress
import os
import signal
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from ecoserve import gateway
from ecoserve.gateway.__main__ import read_keys, write_keys
from tests.gateway.mounted import Secret
from tests.gateway.world import CHAT, MESSAGE, World, free_port, until, world

LOOPBACK = ipaddress.ip_address("127.0.0.1")


@pytest.fixture
def as_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Has worlds run the process instead of Envoy itself; gives its further arguments."""
    more: list[str] = []
    groups: list[int] = []

    def start(it: World) -> None:
        bootstrap = it.directory / "envoy.json"
        bootstrap.write_text(it._bootstrap())
        command = [sys.executable, "-m", "ecoserve.gateway", "--config", str(bootstrap)]
        command += ["--admin", it.config.admin, "--drain-timeout", "20", "--threads", "1", *more]
        with (it.directory / "envoy.log").open("wb") as log:
            it.envoy = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        groups.append(it.envoy.pid)

    monkeypatch.setattr(World, "start_envoy", start)
    yield more
    # A world kills the process, which cannot take its Envoy along then.
    for group in groups:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)


async def _ended(it: World) -> int:
    envoy = it.envoy
    assert envoy is not None
    await until("the process has ended", lambda: envoy.poll() is not None, 20)
    return int(envoy.returncode)


@pytest.mark.envoy
async def test_it_drains_before_it_ends(tmp_path: Path, as_process: list[str]) -> None:
    status = f"127.0.0.1:{free_port()}"
    async with world(tmp_path, workers=1, status=status) as it:
        worker = it.workers[0]
        worker.behaviour = "stream"
        running = await it.stream(pick=worker.address)
        lines = running.aiter_lines()
        await anext(lines)
        async with httpx.AsyncClient(base_url=f"http://{status}") as told:
            assert (await told.get("/healthz")).status_code == 200
            assert it.envoy is not None
            it.envoy.send_signal(signal.SIGTERM)

            async def unready() -> bool:
                return (await told.get("/healthz")).status_code == 503

            await until("it is no longer ready", unready)
            assert (await told.get("/live")).status_code == 200
        # Who has not learnt of it yet is served.
        worker.behaviour = "answer"
        assert (await it.ask(pick=worker.address)).status_code == 200
        assert it.envoy.poll() is None
        worker.gate.set()
        assert [line async for line in lines if line][-1] == "data: [DONE]"
        assert await _ended(it) == 0


@pytest.mark.envoy
async def test_it_ends_when_envoy_does(tmp_path: Path, as_process: list[str]) -> None:
    async with world(tmp_path, workers=1) as it:
        await it.admin.post("/quitquitquit")
        assert await _ended(it) == 1


@pytest.mark.envoy
async def test_keys_of_a_secret(tmp_path: Path, as_process: list[str]) -> None:
    secret, file = Secret(tmp_path / "secret"), tmp_path / "keys.json"
    secret.write({"alice": "sk-alice\n", "bob": "sk-bob"})
    as_process += ["--keys-from", str(secret.folder), "--keys-to", str(file)]

    async def status(key: str) -> int:
        return (await it.ask(headers={"authorization": f"Bearer {key}"})).status_code

    async def follows(key: str, expected: int) -> None:
        async def so() -> bool:
            return await status(key) == expected

        await until(f"{key} gives {expected}", so)

    async with world(tmp_path, workers=1, api_keys_file=str(file)) as it:
        assert file.stat().st_mode & 0o77 == 0
        assert [await status(f"sk-{name}") for name in ("alice", "bob", "eve")] == [200, 200, 401]
        secret.write({"alice": "sk-new", "bob": "sk-bob"})
        await follows("sk-new", 200)
        await follows("sk-alice", 401)
        # Without a key nobody would be let in: the ones before stay.
        secret.write({"alice": "\n", "bob": ""})
        log = it.directory / "envoy.log"
        await until("it says so", lambda: "not taken over" in log.read_text())
        assert await status("sk-new") == 200
        assert "sk-new" not in log.read_text()


@pytest.mark.envoy
async def test_status_tells_health_and_metrics_alone(tmp_path: Path) -> None:
    status = f"127.0.0.1:{free_port()}"
    async with (
        world(tmp_path, workers=1, status=status, api_keys=("sk-one",)) as it,
        httpx.AsyncClient(base_url=f"http://{status}") as told,
    ):
        assert (await told.get("/live")).status_code == 200
        metrics = await told.get("/metrics")
        assert metrics.status_code == 200
        assert "envoy_cluster_upstream_rq_total" in metrics.text
        for path in ("/", CHAT, "/stats", "/quitquitquit", "/metrics/../quitquitquit"):
            assert (await told.post(path)).status_code == 404
        assert (await it.admin.get("/ready")).status_code == 200


@pytest.mark.envoy
async def test_certificates_are_taken_over_live(tmp_path: Path) -> None:
    secret = Secret(tmp_path / "secret")
    first, second = _certificate(), _certificate()
    secret.write(first)
    file = tmp_path / "tls.json"
    file.write_text(gateway.tls_file_text(str(secret.folder)))
    async with world(tmp_path, workers=1, tls_file=str(file)) as it:
        assert await _served(it) == first["tls.crt"]
        trusting = ssl.create_default_context(cadata=first["tls.crt"])
        async with httpx.AsyncClient(verify=trusting) as client:
            url = f"https://{it.config.listen}{CHAT}"
            assert (await client.post(url, json=MESSAGE)).status_code == 200
            secret.write(second)

            async def rotated() -> bool:
                return await _served(it) == second["tls.crt"]

            await until("the new certificate is served", rotated)
            # The connection that was there stays.
            assert (await client.post(url, json=MESSAGE)).status_code == 200
        with pytest.raises(httpx.HTTPError):
            await it.ask()


async def _served(it: World) -> str:
    host, _, port = it.config.listen.rpartition(":")
    return await asyncio.to_thread(ssl.get_server_certificate, (host, int(port)))


def _certificate() -> dict[str, str]:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "gateway")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(LOOPBACK)]), critical=False)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    pem = certificate.public_bytes(serialization.Encoding.PEM)
    return {"tls.crt": pem.decode(), "tls.key": private.decode()}


def test_keys_are_read_from_the_files_that_are_seen(tmp_path: Path) -> None:
    secret = Secret(tmp_path / "secret")
    secret.write({"many": "a\n\n b \na\n", "one": "c"})
    assert read_keys(secret.folder) == ("a", "b", "c")


def test_keys_that_are_the_same_are_not_written_again(tmp_path: Path) -> None:
    secret, file = Secret(tmp_path / "secret"), tmp_path / "keys.json"
    secret.write({"k": "a"})
    write_keys(secret.folder, file)
    before = file.stat().st_ino
    write_keys(secret.folder, file)
    assert file.stat().st_ino == before
    secret.write({"k": "b"})
    write_keys(secret.folder, file)
    assert file.stat().st_ino != before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["keys.json", "secret"]


def test_what_is_missing_is_said_in_a_line(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    command = [sys.executable, "-m", "ecoserve.gateway", "--config", "x.json"]
    command += ["--keys-from", str(tmp_path / "empty"), "--keys-to", str(tmp_path / "k.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr.startswith("ecoserve.gateway: api_keys must not be empty")
