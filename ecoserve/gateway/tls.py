"""TLS towards clients, with a certificate whose changes are taken over while Envoy runs."""

from __future__ import annotations

import json

from ecoserve.gateway.config import GatewayConfig
from ecoserve.gateway.parts import Config, typed

_NAME = "gateway"
_SECRET = "extensions.transport_sockets.tls.v3.Secret"
_CONTEXT = "extensions.transport_sockets.tls.v3.DownstreamTlsContext"


def transport_socket(config: GatewayConfig) -> Config:
    """The part of a filter chain that speaks TLS; empty without."""
    if config.tls_file is None:
        return {}
    secret = {
        "name": _NAME,
        "sds_config": {
            "resource_api_version": "V3",
            "path_config_source": {"path": config.tls_file},
        },
    }
    context = typed(
        _CONTEXT,
        common_tls_context={
            "tls_params": {"tls_minimum_protocol_version": "TLSv1_2"},
            "alpn_protocols": ["h2", "http/1.1"],
            "tls_certificate_sds_secret_configs": [secret],
        },
    )
    return {
        "transport_socket": {"name": "envoy.transport_sockets.tls", "typed_config": context},
    }


def tls_file_text(folder: str) -> str:
    """What ``GatewayConfig.tls_file`` holds, for a folder with ``tls.crt`` and ``tls.key``, as
    Kubernetes mounts a Secret: Envoy watches for the move by which that changes."""
    resource = {
        "@type": f"type.googleapis.com/envoy.{_SECRET}",
        "name": _NAME,
        "tls_certificate": {
            "certificate_chain": {"filename": f"{folder}/tls.crt"},
            "private_key": {"filename": f"{folder}/tls.key"},
            "watched_directory": {"path": folder},
        },
    }
    return json.dumps({"resources": [resource]}, indent=1) + "\n"
