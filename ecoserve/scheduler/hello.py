"""A worker's Hello, checked: every field that the scheduler leans on is right or named."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from ecoserve.policy.latency import LatencyModel
from ecoserve.proto.v1 import session_pb2


class BadHello(ValueError):
    """A Hello that cannot be accepted; the message names the field."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a server listens: an IP address and a port."""

    ip: str
    port: int

    def __str__(self) -> str:
        return f"[{self.ip}]:{self.port}" if ":" in self.ip else f"{self.ip}:{self.port}"


@dataclass(frozen=True, slots=True)
class Limits:
    """What the engine was started with, in sequences and tokens."""

    max_num_seqs: int
    max_model_len: int
    step_budget: int
    kv_tokens: int
    block_tokens: int


@dataclass(frozen=True, slots=True)
class Hello:
    """Who a worker is; ``health`` is None when its health route is on the server's own port."""

    cluster: str
    instance: str
    incarnation: str
    address: Endpoint
    model: str
    version: str
    limits: Limits
    latency: LatencyModel
    draining: bool
    health: Endpoint | None


def endpoint(text: str, field: str) -> Endpoint:
    """Reads ``ip:port`` (``[ip]:port`` for IPv6); names never resolve here, so they are refused."""
    host, _, port = text.rpartition(":")
    try:
        ip = ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))
        number = int(port)
    except ValueError:
        raise BadHello(f"{field} must be ip:port, not {text!r}") from None
    if not 0 < number < 65536:
        raise BadHello(f"{field} has a port out of range: {text!r}")
    return Endpoint(str(ip), number)


def latency_model(message: session_pb2.Latency, field: str) -> LatencyModel:
    """The model as reported; BadHello names what is wrong with it."""
    try:
        return LatencyModel(
            message.prefill_fixed,
            message.prefill_token,
            message.prefill_pair,
            message.decode_fixed,
            message.decode_sequence,
            message.decode_context,
            message.mixing,
            message.error,
        )
    except ValueError as error:
        raise BadHello(f"{field}: {error}") from None


def check(message: session_pb2.Hello) -> Hello:
    """Checks a Hello; BadHello names the first field that is wrong."""
    for name in ("cluster", "instance", "incarnation", "address", "model"):
        if not getattr(message, name):
            raise BadHello(f"hello.{name} is empty")
    limits = message.limits
    for name in Limits.__slots__:
        if not getattr(limits, name):
            raise BadHello(f"hello.limits.{name} must be positive")
    return Hello(
        cluster=message.cluster,
        instance=message.instance,
        incarnation=message.incarnation,
        address=endpoint(message.address, "hello.address"),
        model=message.model,
        version=message.version,
        limits=Limits(
            limits.max_num_seqs,
            limits.max_model_len,
            limits.step_budget,
            limits.kv_tokens,
            limits.block_tokens,
        ),
        latency=latency_model(message.latency, "hello.latency"),
        draining=message.draining,
        health=(
            endpoint(message.health_address, "hello.health_address")
            if message.health_address
            else None
        ),
    )
