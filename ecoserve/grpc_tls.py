"""Mutual TLS of gRPC from the files of ``ecoserve.tls``. Apart from it, for a worker may not import
gRPC, which has threads, before its engine was forked."""

from __future__ import annotations

import grpc

from ecoserve.tls import Material


def server_credentials(material: Material) -> grpc.ServerCredentials:
    """For gRPC servers: clients must show a certificate. Another material needs another server."""
    return grpc.ssl_server_credentials(
        [(material.key, material.certificate)], material.ca, require_client_auth=True
    )


def channel_credentials(material: Material) -> grpc.ChannelCredentials:
    """For gRPC clients; another material needs another channel."""
    return grpc.ssl_channel_credentials(material.ca, material.key, material.certificate)
