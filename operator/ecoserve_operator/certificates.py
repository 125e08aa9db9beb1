"""The certificates of a cluster's gateways and workers: which they have, and which come next. Pure.

Pods mount two Secrets, whose names never change, so that nothing restarts. They hold certificates
that the operator's authority has signed, or copies of those that the spec names. What changes
reaches Pods some time after it is written, not everywhere at once; therefore one thing changes at a
time: who is trusted grows first, then certificates are replaced, then who is trusted shrinks.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from ecoserve import tls
from ecoserve_operator import pki
from ecoserve_operator.pki import BadCertificate, Pair, Role

Json: TypeAlias = dict[str, Any]

ROLES: tuple[Role, ...] = ("gateway", "worker")
CHANGED = "ecoserve.io/changed"

# What is written has reached all Pods (the kubelet looks once a minute and may have seen it a
# minute late) and all connections of before are gone or made anew (gateways: once a minute).
SETTLE_S = 300.0


class BadGiven(BadCertificate):
    """A given certificate that is not good for its ``role``; the message says why."""

    def __init__(self, role: Role, why: str) -> None:
        super().__init__(why)
        self.role = role


@dataclass(frozen=True, slots=True)
class Held:
    """What the Pods have: certificates, whose authorities (``roots``) they trust, and when any of
    it was changed."""

    pairs: Mapping[Role, Pair] = field(default_factory=dict)
    roots: str = ""
    changed: float = 0.0

    @property
    def vouchers(self) -> str:
        """The roots, and what is between them and the certificates."""
        between = ["".join(map(pki.to_pem, chain[1:])) for chain in self._chains()]
        return pki.merge(self.roots, *between)

    def _chains(self) -> list[list[Any]]:
        return [pki.certificates(pair.certificate) for pair in self.pairs.values()]


@dataclass(frozen=True, slots=True)
class Wanted:
    """What they are to have. ``names`` are the DNS names, ``given`` certificates that are not the
    operator's to make; ``current`` says whether one that is held may stay, ``issue`` makes one."""

    names: Mapping[Role, str]
    roots: str
    given: Mapping[Role, Pair] = field(default_factory=dict)
    current: Callable[[Role, Pair], bool] = lambda _role, _pair: False
    issue: Callable[[Role], Pair] | None = None


def step(held: Held, wanted: Wanted, now: float) -> Held:
    """What they get next; ``held`` itself when nothing is to be done yet.

    Raises ``BadGiven`` when a given certificate proves nothing to who trusts ``wanted.roots``.
    """
    settled = now - held.changed >= SETTLE_S
    roots = pki.merge(held.roots, wanted.roots)
    pairs = dict(held.pairs)
    waits = False
    for role in ROLES:
        pair = pairs.get(role)
        given = wanted.given.get(role)
        if given is not None:
            _check_given(given, wanted, role, now)
        if pair is not None and (
            pair == given if given is not None else wanted.current(role, pair)
        ):
            continue
        new = given
        if new is None:
            assert wanted.issue is not None
            new = wanted.issue(role)
        usable = pair is not None and _proves(pair, held.roots, role, wanted.names[role], now)
        known = settled and _proves(new, held.roots, role, wanted.names[role], now)
        if known or not usable:
            pairs[role] = new
        else:
            waits = True
    if settled and not waits and pairs == held.pairs and pki.holds(held.roots, wanted.roots):
        roots = pki.merge(wanted.roots)
    if pairs == held.pairs and _same(roots, held.roots):
        return held
    return replace(held, pairs=pairs, roots=roots, changed=now)


def read_held(secrets: Mapping[Role, Json | None]) -> Held:
    """What is in the Secrets; what makes no sense there counts as missing."""
    pairs: dict[Role, Pair] = {}
    bundles, changed = [], 0.0
    for role, secret in secrets.items():
        if secret is None:
            continue
        try:
            pair, roots = read(secret)
        except BadCertificate:
            continue
        pairs[role] = pair
        bundles.append(roots)
        told = secret["metadata"].get("annotations", {}).get(CHANGED, "")
        changed = max(changed, float(told) if told.isdecimal() else 0.0)
    return Held(pairs, pki.merge(*bundles), changed)


def read(secret: Json) -> tuple[Pair, str]:
    """Certificate and roots of a Secret. Raises ``BadCertificate`` that names the key."""
    texts = []
    for key in (tls.CERTIFICATE, tls.KEY, tls.CA):
        coded = (secret.get("data") or {}).get(key)
        if not coded:
            raise BadCertificate(f"key {key} is missing")
        try:
            texts.append(base64.b64decode(coded).decode())
        except (binascii.Error, ValueError) as error:
            raise BadCertificate(f"key {key} holds no text") from error
    certificate, private, roots = texts
    for key, check, text in (
        (tls.CERTIFICATE, pki.certificates, certificate),
        (tls.KEY, pki.private_key, private),
        (tls.CA, pki.certificates, roots),
    ):
        try:
            check(text)
        except BadCertificate as error:
            raise BadCertificate(f"key {key}: {error}") from error
    return Pair(certificate, private), roots


def roots_of(secret: Json) -> str:
    """The roots in a Secret; none if it makes no sense."""
    try:
        return read(secret)[1]
    except BadCertificate:
        return ""


def data(held: Held, role: Role, scheduler_roots: str) -> dict[str, str]:
    """What is in a Secret; ``scheduler_roots`` are those who vouch for the scheduler."""
    pair = held.pairs[role]
    texts = {
        tls.CERTIFICATE: pair.certificate,
        tls.KEY: pair.key,
        tls.CA: held.roots,
        tls.SCHEDULER_CA: scheduler_roots,
    }
    return {key: base64.b64encode(text.encode()).decode() for key, text in texts.items()}


def _check_given(given: Pair, wanted: Wanted, role: Role, now: float) -> None:
    try:
        pki.check(given, wanted.roots, role, wanted.names[role], now)
    except BadCertificate as error:
        raise BadGiven(role, str(error)) from error


def _proves(pair: Pair, roots: str, role: Role, name: str, now: float) -> bool:
    try:
        pki.check(pair, roots, role, name, now)
    except BadCertificate:
        return False
    return True


def _same(one: str, other: str) -> bool:
    return set(pki.certificates(one)) == set(pki.certificates(other) if other else ())
