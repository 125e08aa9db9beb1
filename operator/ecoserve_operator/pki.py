"""X.509: authorities, the certificates that they sign, and checks of those that are given.

Pure but for the randomness of keys and serial numbers. Times are seconds since the epoch; keys and
certificates are PEM.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Literal, TypeAlias

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509 import verification
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

Role: TypeAlias = Literal["gateway", "worker", "scheduler"]

# A certificate is valid from a little before it is made: clocks of machines differ.
SKEW_S = 300.0
# It is renewed once this share of its life is over.
RENEW_AT = 2 / 3

_MAKER = "ecoserve-operator"
_SERVES: tuple[Role, ...] = ("worker", "scheduler")
_ASKS: tuple[Role, ...] = ("worker", "gateway")


class BadCertificate(ValueError):
    """Something that is no good certificate or key; the message says why."""


@dataclass(frozen=True, slots=True)
class Pair:
    """A certificate, with those between it and its root after it, and its private key."""

    certificate: str
    key: str


@dataclass(frozen=True, slots=True)
class Authority:
    """Who signs; ``roots`` are what others need to check what it has signed."""

    pair: Pair
    roots: str


def make_authority(name: str, now: float, lifetime: float) -> Authority:
    """A new authority of its own root."""
    key = ec.generate_private_key(ec.SECP256R1())
    # Two of one name could not be told apart by those who look for an issuer.
    subject = x509.Name(
        [
            x509.NameAttribute(NameOID.ORGANIZATION_NAME, _MAKER),
            x509.NameAttribute(NameOID.COMMON_NAME, f"{name} {secrets.token_hex(4)}"),
        ]
    )
    signed = (
        _builder(subject, subject, key.public_key(), now, now + lifetime)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(sign_certificates=True), critical=True)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key()), False)
        .sign(key, hashes.SHA256())
    )
    pem = to_pem(signed)
    return Authority(Pair(pem, _private(key)), pem)


def is_own(certificate: str) -> bool:
    """Whether an authority was made here."""
    (first, *_) = certificates(certificate)
    made = first.subject.get_attributes_for_oid(NameOID.ORGANIZATION_NAME)
    return [attribute.value for attribute in made] == [_MAKER]


def given_authority(pair: Pair, roots: str | None) -> Authority:
    """An authority that somebody brings; it is its own root unless ``roots`` says who is.

    Raises ``BadCertificate``.
    """
    (first, *_) = certificates(pair.certificate)
    _check_key(pair, first)
    try:
        basic = first.extensions.get_extension_for_class(x509.BasicConstraints).value
    except x509.ExtensionNotFound:
        basic = x509.BasicConstraints(ca=False, path_length=None)
    if not basic.ca:
        raise BadCertificate("it may not sign certificates (basicConstraints CA:TRUE is missing)")
    if roots is None and first.issuer != first.subject:
        raise BadCertificate("it is not its own root, so ca.crt must hold the root")
    return Authority(pair, roots if roots is not None else pair.certificate)


def issue(
    authority: Authority, role: Role, names: Iterable[str], now: float, lifetime: float
) -> Pair:
    """A certificate for DNS ``names``; it never outlives its authority."""
    signer = certificates(authority.pair.certificate)[0]
    signing_key = private_key(authority.pair.key)
    key = ec.generate_private_key(ec.SECP256R1())
    names = list(names)
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, role)])
    until = min(now + lifetime, signer.not_valid_after_utc.timestamp())
    purposes = [ExtendedKeyUsageOID.SERVER_AUTH] * (role in _SERVES)
    purposes += [ExtendedKeyUsageOID.CLIENT_AUTH] * (role in _ASKS)
    signed = (
        _builder(subject, signer.subject, key.public_key(), now, until)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(sign_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(n) for n in names]), False)
        .add_extension(_authority_key(signer), critical=False)
        .sign(signing_key, hashes.SHA256())  # type: ignore[arg-type]
    )
    between = authority.pair.certificate if signer.issuer != signer.subject else ""
    return Pair(to_pem(signed) + between, _private(key))


def certificates(pem: str) -> list[x509.Certificate]:
    """The certificates of a PEM text. Raises ``BadCertificate``."""
    try:
        return x509.load_pem_x509_certificates(pem.encode())
    except ValueError as error:
        raise BadCertificate(f"it holds no PEM certificates: {_line(error)}") from error


def private_key(pem: str) -> object:
    """The private key of a PEM text. Raises ``BadCertificate``."""
    try:
        return serialization.load_pem_private_key(pem.encode(), None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise BadCertificate(f"it holds no PEM private key: {_line(error)}") from error


def merge(*bundles: str) -> str:
    """All certificates of several bundles, each once, in their order."""
    found = [c for bundle in bundles if bundle for c in certificates(bundle)]
    return "".join(dict.fromkeys(map(to_pem, found)))


def still_valid(bundle: str, now: float) -> str:
    """Those of a bundle that have not expired."""
    if not bundle:
        return ""
    kept = [c for c in certificates(bundle) if c.not_valid_after_utc.timestamp() > now]
    return "".join(map(to_pem, kept))


def holds(bundle: str, part: str) -> bool:
    """Whether ``bundle`` has all certificates of ``part``."""
    return set(certificates(part)) <= set(certificates(bundle) if bundle else ())


def is_due(certificate: str, now: float) -> bool:
    """Whether it is time to renew a certificate."""
    leaf = certificates(certificate)[0]
    begun, end = leaf.not_valid_before_utc.timestamp(), leaf.not_valid_after_utc.timestamp()
    return now >= begun + RENEW_AT * (end - begun)


def check(pair: Pair, roots: str, role: Role, name: str, now: float) -> None:
    """Raises ``BadCertificate`` unless ``pair`` proves its holder, to who trusts ``roots``, to be
    ``name`` in all that ``role`` does, now."""
    leaf, *between = certificates(pair.certificate)
    trusted = certificates(roots)
    # Where TLS libraries look for an end of the chain.
    anchors = [c for c in trusted if c.issuer == c.subject]
    between += [c for c in trusted if c.issuer != c.subject]
    if not anchors:
        raise BadCertificate("ca.crt must hold a root, which has signed itself")
    _check_key(pair, leaf)
    moment = datetime.fromtimestamp(now, UTC)
    if moment < leaf.not_valid_before_utc:
        raise BadCertificate(f"tls.crt is not valid before {leaf.not_valid_before_utc:%FT%TZ}")
    if moment > leaf.not_valid_after_utc:
        raise BadCertificate(f"tls.crt has expired at {leaf.not_valid_after_utc:%FT%TZ}")
    names = dns_names(leaf)
    if name not in names:
        told = ", ".join(names) or "none"
        raise BadCertificate(f"tls.crt must have the DNS name {name}; it has {told}")
    builder = verification.PolicyBuilder().time(moment).store(verification.Store(anchors))
    builder = builder.extension_policies(ca_policy=_authority_policy(), ee_policy=_end_policy())
    try:
        if role in _ASKS:
            builder.build_client_verifier().verify(leaf, between)
        if role in _SERVES:
            builder.build_server_verifier(x509.DNSName(name)).verify(leaf, between)
    except verification.VerificationError as error:
        raise BadCertificate(f"tls.crt is not vouched for by ca.crt: {_line(error)}") from error
    _check_purposes(leaf, role)


def dns_names(certificate: x509.Certificate) -> list[str]:
    """The DNS names that it is for."""
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    except x509.ExtensionNotFound:
        return []
    return names.value.get_values_for_type(x509.DNSName)


def _check_key(pair: Pair, leaf: x509.Certificate) -> None:
    key = private_key(pair.key)
    if _public(key.public_key()) != _public(leaf.public_key()):  # type: ignore[attr-defined]
        raise BadCertificate("tls.key is not the key of tls.crt")


def _check_purposes(leaf: x509.Certificate, role: Role) -> None:
    try:
        found = leaf.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    except x509.ExtensionNotFound:
        return
    wanted = {"server auth": ExtendedKeyUsageOID.SERVER_AUTH} if role in _SERVES else {}
    wanted |= {"client auth": ExtendedKeyUsageOID.CLIENT_AUTH} if role in _ASKS else {}
    for what, oid in wanted.items():
        if oid not in found:
            raise BadCertificate(f"tls.crt must have the key usage {what!r}")


def _authority_policy() -> verification.ExtensionPolicy:
    # What TLS libraries ask of an authority; the web's own rules ask for more.
    return verification.ExtensionPolicy.permit_all().require_present(
        x509.BasicConstraints, verification.Criticality.AGNOSTIC, None
    )


def _end_policy() -> verification.ExtensionPolicy:
    return verification.ExtensionPolicy.permit_all().require_present(
        x509.SubjectAlternativeName, verification.Criticality.AGNOSTIC, None
    )


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, now: float, until: float
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(_moment(now - SKEW_S))
        .not_valid_after(_moment(until))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _moment(seconds: float) -> datetime:
    return datetime.fromtimestamp(0, UTC) + timedelta(seconds=int(seconds))


def _authority_key(signer: x509.Certificate) -> x509.AuthorityKeyIdentifier:
    try:
        known = signer.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
        return x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(known)
    except x509.ExtensionNotFound:
        return x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key())  # type: ignore[arg-type]


def _usage(*, sign_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not sign_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=sign_certificates,
        crl_sign=sign_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def to_pem(certificate: x509.Certificate) -> str:
    """A certificate as PEM."""
    return certificate.public_bytes(serialization.Encoding.PEM).decode()


def _private(key: ec.EllipticCurvePrivateKey) -> str:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    ).decode()


def _public(key: object) -> bytes:
    return key.public_bytes(  # type: ignore[attr-defined,no-any-return]
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )


def _line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
