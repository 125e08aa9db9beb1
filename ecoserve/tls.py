"""Mutual TLS from files whose changes are taken over while a process runs.

The files are those of a folder, as Kubernetes mounts a Secret: a certificate with its key, and the
certificates of those who sign what the other side shows. ``ca.crt`` is for gateways and workers
among each other and for who comes to the scheduler, ``scheduler-ca.crt`` for the scheduler itself.
"""

from __future__ import annotations

import logging
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any

log = logging.getLogger("ecoserve.tls")

CERTIFICATE, KEY = "tls.crt", "tls.key"
CA, SCHEDULER_CA = "ca.crt", "scheduler-ca.crt"


class Unusable(ValueError):
    """Files that make no identity; the message says which folder and why."""


@dataclass(frozen=True, slots=True)
class Material:
    """An identity (PEM) and whom it trusts; ``server`` demands a certificate of clients."""

    certificate: bytes
    key: bytes
    ca: bytes
    server: ssl.SSLContext


class Files:
    """The identity in ``folder`` with those whom the file ``ca`` lets in.

    Raises ``Unusable`` if it cannot be used now; later, what cannot be used is not taken over, and
    what was before counts.
    """

    def __init__(self, folder: Path, ca: str = CA) -> None:
        self._paths = (folder / CERTIFICATE, folder / KEY, folder / ca)
        self._folder = folder
        self._stamp, self._material = self._load()
        self._told = ""

    def current(self) -> Material:
        """The identity as it is now; the same object while nothing has changed."""
        try:
            if _stamp(self._paths) != self._stamp:
                self._stamp, self._material = self._load()
                log.info("the certificate in %s was read again", self._folder)
                self._told = ""
        except (OSError, Unusable) as error:
            if str(error) != self._told:
                self._told = str(error)
                log.error("the certificate is not taken over: %s", error)
        return self._material

    def _load(self) -> tuple[object, Material]:
        certificate, key, ca = self._paths
        try:
            before = _stamp(self._paths)
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            context.verify_mode = ssl.CERT_REQUIRED
            context.num_tickets = 0  # who resumes a session would not be looked at again
            context.load_cert_chain(certificate, key)
            context.load_verify_locations(ca)
            texts = certificate.read_bytes(), key.read_bytes(), ca.read_bytes()
            after = _stamp(self._paths)
        except (OSError, ValueError) as error:  # ssl's errors are OSErrors
            raise Unusable(f"{self._folder}: {error}") from error
        if after != before:
            raise Unusable(f"{self._folder}: the files were changing while they were read")
        return before, Material(*texts, context)


def _stamp(paths: tuple[Path, ...]) -> object:
    return [(s.st_ino, s.st_mtime_ns, s.st_size) for s in (path.stat() for path in paths)]


class LiveContext(ssl.SSLContext):
    """For asyncio servers: each connection is held to what the files say when it begins."""

    def __new__(cls, files: Files) -> LiveContext:
        return super().__new__(cls, ssl.PROTOCOL_TLS_SERVER)

    def __init__(self, files: Files) -> None:
        self._files = files

    def wrap_bio(self, *arguments: Any, **named: Any) -> ssl.SSLObject:
        return self._files.current().server.wrap_bio(*arguments, **named)


def dns_names(certificate: dict[str, Any] | None) -> set[str]:
    """The DNS names of a peer's certificate as ``ssl`` tells it."""
    return {value for kind, value in (certificate or {}).get("subjectAltName", ()) if kind == "DNS"}
