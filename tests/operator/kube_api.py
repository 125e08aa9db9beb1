"""A Kubernetes API server of the tests' own: etcd and kube-apiserver, no nodes."""

from __future__ import annotations

import csv
import ctypes
import os
import secrets
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

HOW = (
    "KUBEBUILDER_ASSETS is not set: it names a folder with etcd, kube-apiserver and kubectl, as "
    "`setup-envtest use -p path` of controller-runtime prints after it has downloaded them"
)
DEADLINE = 60.0  # seconds for a server to come up, and for what it does later


def assets() -> Path:
    """The folder of the binaries; skips the test where there is none, or fails it in CI."""
    folder = os.environ.get("KUBEBUILDER_ASSETS")
    if not folder:
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(HOW)
    missing = [n for n in ("etcd", "kube-apiserver", "kubectl") if not (Path(folder) / n).exists()]
    if missing:
        pytest.fail(f"KUBEBUILDER_ASSETS={folder} lacks {', '.join(missing)}")
    return Path(folder)


@dataclass(frozen=True)
class ApiServer:
    """A running API server; the client and ``kubeconfig`` are its administrator's."""

    url: str
    token: str
    ca: Path
    kubeconfig: Path
    bin: Path
    client: httpx.Client = field(repr=False)

    def kubectl(
        self, *arguments: str, stdin: str | None = None, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        """Runs kubectl; a failure raises with what it said unless ``check`` is off."""
        done = subprocess.run(
            [str(self.bin / "kubectl"), *arguments],
            env={
                **os.environ,
                "KUBECONFIG": str(self.kubeconfig),
                "KUBECTL_KUBERC": "false",
                "HOME": str(self.kubeconfig.parent),
            },
            input=stdin,
            capture_output=True,
            text=True,
            timeout=DEADLINE,
        )
        if check and done.returncode:
            raise AssertionError(f"kubectl {' '.join(arguments)}: {done.stderr or done.stdout}")
        return done

    def apply(self, manifest: dict[str, Any] | list[dict[str, Any]], manager: str = "test") -> None:
        """Server-side apply, in order."""
        documents = manifest if isinstance(manifest, list) else [manifest]
        self.kubectl(
            *("apply", "--server-side", f"--field-manager={manager}", "-f", "-"),
            stdin=yaml.safe_dump_all(documents),
        )

    def install(self, crds: list[dict[str, Any]]) -> None:
        """Applies CRDs and waits until they are served."""
        self.apply(crds)
        for crd in crds:
            spec = crd["spec"]
            path = f"/apis/{spec['group']}/{spec['versions'][0]['name']}/{spec['names']['plural']}"
            wait_for(
                lambda path=path: self.client.get(path).status_code == 200, f"{path} is not served"
            )


def wait_for(what: Any, why: str) -> None:
    """Polls until ``what()`` is true."""
    end = time.monotonic() + DEADLINE
    while not what():
        if time.monotonic() > end:
            raise AssertionError(why)
        time.sleep(0.05)


@contextmanager
def api_server(folder: Path, *flags: str) -> Iterator[ApiServer]:
    """Runs etcd and kube-apiserver with their files in ``folder``; ``flags`` are more of the
    latter's."""
    binaries = assets()
    with ExitStack() as stack:
        etcd, peer, port = _free_ports(3)
        stack.enter_context(
            _process(
                folder,
                str(binaries / "etcd"),
                f"--data-dir={folder / 'etcd'}",
                "--unsafe-no-fsync",
                f"--listen-client-urls=http://127.0.0.1:{etcd}",
                f"--advertise-client-urls=http://127.0.0.1:{etcd}",
                f"--listen-peer-urls=http://127.0.0.1:{peer}",
                f"--initial-advertise-peer-urls=http://127.0.0.1:{peer}",
                f"--initial-cluster=default=http://127.0.0.1:{peer}",
            )
        )
        token = secrets.token_hex(16)
        with (folder / "tokens.csv").open("w", newline="") as file:
            csv.writer(file).writerow([token, "admin", "admin", "system:masters"])
        key = folder / "service-accounts.key"
        key.write_bytes(
            rsa.generate_private_key(65537, 2048).private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.TraditionalOpenSSL,
                serialization.NoEncryption(),
            )
        )
        server = stack.enter_context(
            _process(
                folder,
                str(binaries / "kube-apiserver"),
                f"--etcd-servers=http://127.0.0.1:{etcd}",
                f"--secure-port={port}",
                "--bind-address=127.0.0.1",
                f"--cert-dir={folder / 'pki'}",
                f"--token-auth-file={folder / 'tokens.csv'}",
                "--service-account-issuer=https://kubernetes.default.svc",
                f"--service-account-key-file={key}",
                f"--service-account-signing-key-file={key}",
                "--service-cluster-ip-range=10.96.0.0/16",
                "--authorization-mode=RBAC",
                "--allow-privileged=true",
                # Nobody makes the default accounts here, so Pods must do without.
                "--disable-admission-plugins=ServiceAccount",
                "--endpoint-reconciler-type=none",
                *flags,
            )
        )
        url, ca = f"https://127.0.0.1:{port}", folder / "pki" / "apiserver.crt"
        wait_for(lambda: _alive(server, folder) and _whole(ca), "no certificate was made")
        kubeconfig = folder / "kubeconfig"
        kubeconfig.write_text(yaml.safe_dump(kubeconfig_of(url, ca, token)))
        client = stack.enter_context(_client(url, ca, token))
        wait_for(lambda: _alive(server, folder) and _ready(client), "kube-apiserver is not ready")
        yield ApiServer(url, token, ca, kubeconfig, binaries, client)


def _whole(certificate: Path) -> bool:
    """Whether the file is there and no longer being written."""
    return certificate.exists() and "END CERTIFICATE" in certificate.read_text()


def _client(url: str, ca: Path, token: str) -> httpx.Client:
    import ssl

    return httpx.Client(
        base_url=url,
        verify=ssl.create_default_context(cafile=str(ca)),
        headers={"Authorization": f"Bearer {token}"},
        timeout=DEADLINE,
        trust_env=False,
    )


def _ready(client: httpx.Client) -> bool:
    try:
        return (
            client.get("/readyz").status_code == 200
            and client.get("/api/v1/namespaces/default").status_code == 200
        )
    except httpx.TransportError:
        return False


def kubeconfig_of(url: str, ca: Path, token: str) -> dict[str, Any]:
    """A kubeconfig file of whoever has the token."""
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [
            {"name": "test", "cluster": {"server": url, "certificate-authority": str(ca)}}
        ],
        "users": [{"name": "admin", "user": {"token": token}}],
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": "admin"}}],
        "current-context": "test",
    }


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for sock in sockets:
            sock.bind(("127.0.0.1", 0))
        return [sock.getsockname()[1] for sock in sockets]


@contextmanager
def _process(folder: Path, *command: str) -> Iterator[subprocess.Popen[bytes]]:
    libc = ctypes.CDLL(None)
    log = folder / f"{Path(command[0]).name}.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            command,
            stdout=out,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            # PR_SET_PDEATHSIG: it must not outlive a run that is killed.
            preexec_fn=lambda: libc.prctl(1, signal.SIGKILL),
        )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _alive(process: subprocess.Popen[bytes], folder: Path) -> bool:
    if process.poll() is not None:
        log = (folder / f"{Path(process.args[0]).name}.log").read_text(errors="replace")  # type: ignore[index,arg-type]
        raise AssertionError("kube-apiserver ended:\n" + "\n".join(log.splitlines()[-15:]))
    return True
