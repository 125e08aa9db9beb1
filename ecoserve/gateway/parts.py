"""Small pieces of Envoy's configuration."""

from __future__ import annotations

from typing import Any

Config = dict[str, Any]


def typed(kind: str, **fields: Any) -> Config:
    """A typed configuration; ``kind`` is the message's name below ``envoy.``."""
    return {"@type": f"type.googleapis.com/envoy.{kind}", **fields}


def http_filter(name: str, kind: str, **fields: Any) -> Config:
    return {"name": f"envoy.filters.http.{name}", "typed_config": typed(kind, **fields)}


def seconds(value: float) -> str:
    return f"{value:.9f}".rstrip("0").rstrip(".") + "s"


def split(field: str, address: str) -> tuple[str, int]:
    """Host and port of "host:port" or "[v6]:port". Raises ``ValueError`` that names ``field``."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(f"{field} must be host:port with a port from 1 to 65535, not {address!r}")
    return host.strip("[]"), int(port)


def address(field: str, value: str) -> Config:
    host, port = split(field, value)
    return {"socket_address": {"address": host, "port_value": port}}
