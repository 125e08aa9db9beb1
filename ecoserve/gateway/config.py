"""Settings of a gateway."""

from __future__ import annotations

from dataclasses import dataclass
from ipaddress import ip_address
from typing import Literal

from ecoserve import numbers
from ecoserve.gateway.parts import split

MIB = 2**20

# The path of a Unix socket has at most 107 bytes.
_LONGEST_SOCKET_FOLDER = 90
_SECONDS = {
    "idle_timeout_s": numbers.SECONDS,
    "picker_timeout_s": numbers.Allowed(0, 1, above=True, of="seconds"),
    "picker_max_wait_s": numbers.Allowed(0, 3600, above=True, of="seconds"),
    "connect_timeout_s": numbers.SECONDS,
    "health_interval_s": numbers.SECONDS,
    "drain_s": numbers.WAIT,
}


@dataclass(frozen=True, slots=True)
class MutualTls:
    """Mutual TLS with workers and scheduler: the DNS names that their certificates must have, and
    the folder of the files that ``mtls_files`` makes.

    Raises ``ValueError`` that names the field.
    """

    folder: str
    worker: str
    scheduler: str

    def __post_init__(self) -> None:
        for name in ("folder", "worker", "scheduler"):
            if not getattr(self, name):
                raise ValueError(f"mtls.{name} must not be empty")


@dataclass(frozen=True, slots=True)
class GatewayConfig:
    """Settings of one gateway; times in seconds, sizes in bytes, addresses "host:port".

    Where it listens (``listen``, ``admin``, ``status``) the host is an IP address.
    ``idle_timeout_s`` is the one knob of patience: how long a request or an answer may be silent.
    There is no total timeout. ``picker_timeout_s`` is how long the scheduler may take to react
    before the call goes on without it (at most a second), ``picker_max_wait_s`` how long a call may
    wait there once the scheduler has said that it waits.

    ``status`` is an address that tells health and metrics without TLS and keys: ``/healthz`` (503
    while Envoy drains), ``/live`` and ``/metrics``. ``tls_file`` is the path of a file made by
    ``tls_file_text``; clients then connect by TLS. ``mtls`` is about the connections to workers and
    scheduler, which are plain without.

    ``relay`` is the folder of the Unix sockets between the gateway and the stream relay, which is
    private to both; without it there is no relay.

    Keys are either ``api_keys`` (fixed) or ``api_keys_file``, the path of a file made by
    ``keys_file_text``, whose changes are taken over while Envoy runs.

    Raises ``ValueError`` that names the field.
    """

    listen: str
    admin: str
    scheduler: str
    cluster: str
    body_limit: int = 16 * MIB
    idle_timeout_s: float = 3600.0
    api_keys: tuple[str, ...] = ()
    api_keys_file: str | None = None
    body_mode: Literal["buffered", "full_duplex"] = "buffered"
    picker_timeout_s: float = 0.5
    picker_max_wait_s: float = 60.0
    connect_timeout_s: float = 2.0
    drain_s: float = 600.0
    health_path: str = "/ecoserve/health"
    health_interval_s: float = 1.0
    access_log: str | None = None
    status: str | None = None
    tls_file: str | None = None
    mtls: MutualTls | None = None
    relay: str | None = None

    def __post_init__(self) -> None:
        split("scheduler", self.scheduler)
        for name in ("listen", "admin", *(["status"] if self.status is not None else [])):
            host, _ = split(name, given := getattr(self, name))
            # Envoy looks up names of what it connects to, not of what it listens on.
            if not _is_ip(host):
                raise ValueError(f"{name} must be an IP address and a port, not {given!r}")
        if split("admin", self.admin)[0] not in ("127.0.0.1", "::1"):
            raise ValueError(f"admin must be on loopback, since it asks no key, not {self.admin!r}")
        if not self.cluster:
            raise ValueError("cluster must not be empty")
        if not 1024 <= self.body_limit <= 2**31:
            raise ValueError(f"body_limit must be 1 KiB to 2 GiB, not {self.body_limit} bytes")
        if self.body_mode not in ("buffered", "full_duplex"):
            raise ValueError(f"body_mode must be buffered or full_duplex, not {self.body_mode!r}")
        for name, allowed in _SECONDS.items():
            allowed.check(name, getattr(self, name))
        if not self.health_path.startswith("/"):
            raise ValueError(f"health_path must begin with /, not {self.health_path!r}")
        if self.relay is not None and not (
            self.relay.startswith("/") and len(self.relay) <= _LONGEST_SOCKET_FOLDER
        ):
            raise ValueError(
                f"relay must be an absolute path of at most {_LONGEST_SOCKET_FOLDER} characters, "
                f"not {self.relay!r}"
            )
        if self.api_keys and self.api_keys_file is not None:
            raise ValueError("api_keys and api_keys_file exclude each other")
        check_keys(self.api_keys)


def _is_ip(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def check_keys(keys: tuple[str, ...]) -> None:
    """Raises ``ValueError`` if one of ``keys`` cannot be sent as a bearer token, or is there twice;
    the message does not tell the key."""
    for number, key in enumerate(keys, 1):
        if not key or not key.isascii() or not key.isprintable() or " " in key:
            raise ValueError(f"api_keys: number {number} is empty or holds spaces or non-ASCII")
    if len(set(keys)) != len(keys):
        raise ValueError("api_keys must be different from each other")
