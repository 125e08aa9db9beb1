"""TLS towards clients, and mutual TLS with workers and scheduler, with certificates whose changes
are taken over while Envoy runs."""

from __future__ import annotations

import json

from ecoserve import tls
from ecoserve.gateway.config import GatewayConfig, MutualTls
from ecoserve.gateway.parts import Config, typed

_NAME = "gateway"
_SECRET = "extensions.transport_sockets.tls.v3.Secret"
_DOWNSTREAM = "extensions.transport_sockets.tls.v3.DownstreamTlsContext"
_UPSTREAM = "extensions.transport_sockets.tls.v3.UpstreamTlsContext"

# What ``mtls_files`` makes: Envoy wants a file of its own for each.
_IDENTITY, _WORKERS, _SCHEDULER = "mtls-identity", "mtls-workers", "mtls-scheduler"


def transport_socket(config: GatewayConfig) -> Config:
    """The part of a filter chain that speaks TLS; empty without."""
    if config.tls_file is None:
        return {}
    context = typed(
        _DOWNSTREAM,
        common_tls_context={
            "tls_params": {"tls_minimum_protocol_version": "TLSv1_2"},
            "alpn_protocols": ["h2", "http/1.1"],
            "tls_certificate_sds_secret_configs": [_from_file(_NAME, config.tls_file)],
        },
    )
    return _socket(context)


def tls_file_text(folder: str) -> str:
    """What ``GatewayConfig.tls_file`` holds, for a folder with ``tls.crt`` and ``tls.key``, as
    Kubernetes mounts a Secret: Envoy watches for the move by which that changes."""
    return _file(_NAME, tls_certificate=_certificate(folder))


def to_workers(config: GatewayConfig) -> Config:
    """The part of the workers' cluster that speaks mutual TLS; empty without."""
    if config.mtls is None:
        return {}
    return _mutual(config.mtls, config.mtls.worker, _WORKERS, "http/1.1")


def to_scheduler(config: GatewayConfig) -> Config:
    """The part of the scheduler's cluster that speaks mutual TLS; empty without."""
    if config.mtls is None:
        return {}
    return _mutual(config.mtls, config.mtls.scheduler, _SCHEDULER, "h2")


def mtls_files(folder: str) -> dict[str, str]:
    """What is in ``MutualTls.folder``, by file name, for a ``folder`` with the files of
    ``ecoserve.tls``, as Kubernetes mounts a Secret."""

    def trusted(file: str) -> Config:
        return {
            "trusted_ca": {"filename": f"{folder}/{file}"},
            "watched_directory": {"path": folder},
        }

    return {
        f"{_IDENTITY}.json": _file(_IDENTITY, tls_certificate=_certificate(folder)),
        f"{_WORKERS}.json": _file(_WORKERS, validation_context=trusted(tls.CA)),
        f"{_SCHEDULER}.json": _file(_SCHEDULER, validation_context=trusted(tls.SCHEDULER_CA)),
    }


def _mutual(mtls: MutualTls, peer: str, authority: str, protocol: str) -> Config:
    context = typed(
        _UPSTREAM,
        sni=peer,
        # Who resumes a session would not be looked at again.
        max_session_keys=0,
        common_tls_context={
            "tls_params": {
                "tls_minimum_protocol_version": "TLSv1_3",
                # The default for connections to servers is 1.2.
                "tls_maximum_protocol_version": "TLSv1_3",
            },
            "alpn_protocols": [protocol],
            "tls_certificate_sds_secret_configs": [
                _from_file(_IDENTITY, f"{mtls.folder}/{_IDENTITY}.json")
            ],
            "combined_validation_context": {
                "default_validation_context": {
                    "match_typed_subject_alt_names": [
                        {"san_type": "DNS", "matcher": {"exact": peer}}
                    ]
                },
                "validation_context_sds_secret_config": _from_file(
                    authority, f"{mtls.folder}/{authority}.json"
                ),
            },
        },
    )
    return _socket(context)


def _socket(context: Config) -> Config:
    return {
        "transport_socket": {"name": "envoy.transport_sockets.tls", "typed_config": context},
    }


def _from_file(name: str, path: str) -> Config:
    return {
        "name": name,
        "sds_config": {"resource_api_version": "V3", "path_config_source": {"path": path}},
    }


def _certificate(folder: str) -> Config:
    return {
        "certificate_chain": {"filename": f"{folder}/{tls.CERTIFICATE}"},
        "private_key": {"filename": f"{folder}/{tls.KEY}"},
        "watched_directory": {"path": folder},
    }


def _file(name: str, **fields: Config) -> str:
    resource = {"@type": f"type.googleapis.com/envoy.{_SECRET}", "name": name, **fields}
    return json.dumps({"resources": [resource]}, indent=1) + "\n"
