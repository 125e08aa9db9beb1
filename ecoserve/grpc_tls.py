"""Mutual TLS of gRPC from the files of ``ecoserve.tls``. Apart from it, for a worker may not import
gRPC, which has threads, before its engine was forked."""

from __future__ import annotations

import grpc

from ecoserve.tls import Files, Material


def server_credentials(files: Files) -> grpc.ServerCredentials:
    """For gRPC servers: clients must show a certificate, and each connection is held to what the
    files say when it begins."""
    known = files.current()

    def changed() -> grpc.ServerCertificateConfiguration | None:
        nonlocal known
        if (found := files.current()) is known:
            return None
        known = found
        return _configuration(found)

    return grpc.dynamic_ssl_server_credentials(
        _configuration(known),
        changed,  # type: ignore[arg-type] # None is for no change
        require_client_authentication=True,
    )


def _configuration(material: Material) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration(
        [(material.key, material.certificate)], root_certificates=material.ca
    )


def channel_credentials(material: Material) -> grpc.ChannelCredentials:
    """For gRPC clients; another material needs another channel."""
    return grpc.ssl_channel_credentials(material.ca, material.key, material.certificate)
