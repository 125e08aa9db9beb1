"""The gateway: generates Envoy's configuration, finds the binary, drains it."""

from __future__ import annotations

from ecoserve.gateway.binary import EnvoyMissing, command, drain, envoy_binary
from ecoserve.gateway.config import GatewayConfig, MutualTls
from ecoserve.gateway.envoy import build, dump
from ecoserve.gateway.keys import keys_file_text
from ecoserve.gateway.tls import mtls_files, tls_file_text

__all__ = [
    "EnvoyMissing",
    "GatewayConfig",
    "MutualTls",
    "build",
    "command",
    "drain",
    "dump",
    "envoy_binary",
    "keys_file_text",
    "mtls_files",
    "tls_file_text",
]
