"""Who is at the other end of a call, and whether a cluster is theirs.

A cluster with mutual TLS is for callers with a certificate of its gateway or its workers. TLS has
checked that somebody whom this scheduler trusts has signed it; but one scheduler trusts the
authorities of all its clusters, so that it was one of this cluster's is checked here.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any, Literal, TypeAlias

from ecoserve.scheduler.config import ClusterSpec, authorities

Role: TypeAlias = Literal["gateway", "worker"]
Context: TypeAlias = Any  # grpc.aio.ServicerContext

# What was found of a certificate holds for so long: it may expire meanwhile.
_LOOK_AGAIN_S = 60


def refusal(context: Context, spec: ClusterSpec, role: Role) -> str | None:
    """Why a call is none of the cluster's ``role``; None if it is."""
    if spec.mtls is None:
        return None
    peer = context.auth_context()
    if peer.get("transport_security_type") != [b"ssl"]:
        return f"cluster {spec.name} is to be reached by mutual TLS only"
    name = spec.mtls.gateway if role == "gateway" else spec.mtls.worker
    if name.encode() not in peer.get("x509_subject_alternative_name", ()):
        return f"the certificate is not that of {name}"
    (certificate,) = peer["x509_pem_cert"]
    if not _vouched(certificate, spec.mtls.ca, int(time.time()) // _LOOK_AGAIN_S):
        return f"the certificate of {name} is signed by no authority of cluster {spec.name}"
    return None


def is_local(context: Context) -> bool:
    """Whether a call comes from this machine (in Kubernetes: this Pod). The rest of 127.0.0.0/8 is
    where proxies beside a process pass on what comes from elsewhere."""
    peer: str = context.peer()
    return peer.startswith(("ipv4:127.0.0.1:", "ipv6:[::1]:", "ipv6:%5B::1%5D:", "unix:"))


@lru_cache(maxsize=4096)
def _vouched(certificate: bytes, bundle: str, _moment: int) -> bool:
    # As in ``authorities``.
    from cryptography import x509
    from cryptography.x509 import verification
    from cryptography.x509.verification import Criticality, ExtensionPolicy

    roots, between = authorities(bundle)
    # That it may sign at all is asked of an authority; the web's own rules ask for more.
    anyone = ExtensionPolicy.permit_all()
    verifier = (
        verification.PolicyBuilder()
        .store(verification.Store(roots))
        .time(datetime.now(UTC))
        .extension_policies(
            ca_policy=anyone.require_present(x509.BasicConstraints, Criticality.AGNOSTIC, None),
            ee_policy=anyone.require_present(
                x509.SubjectAlternativeName, Criticality.AGNOSTIC, None
            ),
        )
        .build_client_verifier()
    )
    try:
        verifier.verify(x509.load_pem_x509_certificate(certificate), between)
    except (verification.VerificationError, ValueError):
        return False
    return True
