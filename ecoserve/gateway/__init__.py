"""The gateway: generates Envoy's configuration, finds the binary, drains it."""

from __future__ import annotations

from ecoserve.gateway.binary import EnvoyMissing, drain, envoy_binary
from ecoserve.gateway.envoy import GatewayConfig, build

__all__ = ["EnvoyMissing", "GatewayConfig", "build", "drain", "envoy_binary"]
