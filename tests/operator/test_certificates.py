"""Certificates of gateways and workers: what is trusted, replaced and forgotten, and when."""

from __future__ import annotations

import asyncio
import base64
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
from ecoserve_operator import authority, certificates, pki
from ecoserve_operator.authority import (
    Authorities,
    Authority,
    advance,
    from_secret,
    is_current,
    to_secret,
)
from ecoserve_operator.certificates import ROLES, SETTLE_S, BadGiven, Held, Wanted, step
from ecoserve_operator.cluster_api import ApiError
from ecoserve_operator.pki import BadCertificate, Pair, Role
from hypothesis import given, settings
from hypothesis import strategies as st

from ecoserve import tls

NOW = 1_800_000_000.0
HOUR, DAY = 3600.0, 86_400.0
NAMES: dict[Role, str] = {"gateway": "gateway.c.ns.svc", "worker": "worker.c.ns.svc"}
# Seconds after which all Pods have what was written, with what is left of connections of before.
LAG = SETTLE_S - 60


def issue(
    signer: pki.Authority,
    role: Role = "worker",
    name: str = "",
    now: float = NOW,
    life: float = DAY,
) -> Pair:
    return pki.issue(signer, role, [name or NAMES[role]], now, life)


CA = pki.make_authority("test", NOW, 30 * DAY)
OTHER = pki.make_authority("other", NOW, 30 * DAY)


# --- certificates --------------------------------------------------------------------------------


@pytest.mark.parametrize("role", ROLES)
def test_what_is_issued_proves_its_name(role: Role) -> None:
    pair = issue(CA, role)
    pki.check(pair, CA.roots, role, NAMES[role], NOW)
    pki.check(pair, OTHER.roots + CA.roots, role, NAMES[role], NOW + DAY - 1)


def test_it_never_outlives_its_authority() -> None:
    (leaf,) = pki.certificates(issue(CA, life=1000 * DAY).certificate)
    assert leaf.not_valid_after_utc.timestamp() == NOW + 30 * DAY


@pytest.mark.parametrize(
    ("pair", "role", "name", "now", "what"),
    [
        (issue(OTHER), "worker", "worker.c.ns.svc", NOW, "not vouched for by ca.crt"),
        (issue(CA), "worker", "worker.d.ns.svc", NOW, "it has worker.c.ns.svc"),
        (issue(CA), "worker", "worker.c.ns.svc", NOW + 2 * DAY, "has expired at 2027-01-16T"),
        (issue(CA), "worker", "worker.c.ns.svc", NOW - HOUR, "not valid before 2027-01-15T"),
        (issue(CA, "gateway", "x"), "worker", "x", NOW, "must have the key usage 'server auth'"),
        (Pair(issue(CA).certificate, issue(CA).key), "worker", NAMES["worker"], NOW, "not the key"),
    ],
)
def test_what_proves_nothing(pair: Pair, role: Role, name: str, now: float, what: str) -> None:
    with pytest.raises(BadCertificate, match=what):
        pki.check(pair, CA.roots, role, name, now)


@given(
    life=st.floats(HOUR, 1000 * DAY),
    share=st.floats(0, 2),
)
def test_renewal_is_due_after_two_thirds(life: float, share: float) -> None:
    long_lived = pki.Authority(pki.make_authority("t", NOW, 2000 * DAY).pair, "")
    pair = issue(long_lived, life=life)
    age = share * life
    # A certificate's times are whole seconds.
    if abs(share - 2 / 3) * life > 2 + pki.SKEW_S:
        assert pki.is_due(pair.certificate, NOW + age) is (share > 2 / 3)


def test_an_authority_below_another() -> None:
    """Its certificates bring what is between them and the root."""
    # Made by hand, for authorities made here are their own roots.
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    def name(text: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])

    root_key, key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))

    def made(subject: str, public: Any) -> str:
        builder = pki._builder(name(subject), name("root"), public, NOW, NOW + DAY)
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=None), True)
        return pki.to_pem(builder.sign(root_key, hashes.SHA256()))

    root = made("root", root_key.public_key())
    pair = Pair(made("between", key.public_key()), pki._private(key))
    with pytest.raises(BadCertificate, match=r"ca\.crt must hold the root"):
        pki.given_authority(pair, None)
    below = pki.given_authority(pair, root)
    issued = issue(below)
    assert len(pki.certificates(issued.certificate)) == 2
    pki.check(issued, root, "worker", NAMES["worker"], NOW)
    with pytest.raises(BadCertificate, match=r"ca\.crt must hold a root"):
        pki.check(issued, pair.certificate, "worker", NAMES["worker"], NOW)
    with pytest.raises(BadCertificate, match="CA:TRUE"):
        pki.given_authority(issue(CA), CA.roots)


# --- what Pods get -------------------------------------------------------------------------------


@cache
def proved_until(pair: Pair, roots: str, role: Role) -> float:
    """How long a certificate proves who has it, to who trusts ``roots``; it raises if never."""
    (leaf,) = pki.certificates(pair.certificate)
    begun = leaf.not_valid_before_utc.timestamp()
    pki.check(pair, roots, role, NAMES[role], begun + pki.SKEW_S)
    return leaf.not_valid_after_utc.timestamp()


@dataclass
class Cluster:
    """A cluster through time: whoever reads its Secrets has some version of the last ``LAG``."""

    signer: Authorities = field(default_factory=lambda: Authorities(CA, since=NOW))
    now: float = NOW
    brought: pki.Authority | None = None
    pairs: dict[Role, Pair] = field(default_factory=dict)
    held: Held = field(default_factory=Held)
    versions: list[tuple[float, Held]] = field(default_factory=list)

    def bring(self, source: pki.Authority | None) -> None:
        """The spec names Secrets of another authority, or none."""
        self.brought = source
        self.pairs = {} if source is None else {r: issue(source, r, now=self.now) for r in ROLES}

    def wanted(self) -> Wanted:
        def current(role: Role, pair: Pair) -> bool:
            return is_current(pair, self.signer, role, NAMES[role], self.now)

        roots = self.signer.roots if self.brought is None else self.brought.roots
        return Wanted(
            NAMES,
            roots,
            self.pairs,
            current,
            lambda role: issue(self.signer.current, role, now=self.now),
        )

    def look(self) -> None:
        self.signer = advance(self.signer, self.now, "test")
        if self.brought is not None and pki.is_due(self.pairs["worker"].certificate, self.now):
            self.bring(self.brought)
        after = step(self.held, self.wanted(), self.now)
        if after is not self.held:
            self.held = after
            self.versions.append((self.now, after))

    def there(self) -> list[Held]:
        """What somebody may have now."""
        begun = self.now - LAG
        past = [held for at, held in self.versions if at <= begun]
        return [*past[-1:], *(held for at, held in self.versions if at > begun)]

    def check(self) -> None:
        for one in self.there():
            # The scheduler has the latest at once.
            for other in (*self.there(), self.held):
                for role in ROLES:
                    assert self.now <= proved_until(one.pairs[role], other.roots, role)


_sources = st.sampled_from([None, "other", "third"])
_events = st.one_of(
    st.tuples(st.just("wait"), st.floats(1, 2 * SETTLE_S)),
    st.tuples(st.just("days"), st.floats(0.1, 0.6)),
    st.tuples(st.just("bring"), _sources),
    st.tuples(st.just("renew"), st.none()),
)


@settings(max_examples=15)
@given(events=st.lists(_events, max_size=10))
def test_whoever_meets_trusts_each_other(events: list[tuple[str, Any]]) -> None:
    """Whatever changes, and wherever what was written is late."""
    sources = {
        None: None,
        "other": pki.make_authority("o", NOW, 100 * DAY),
        "third": pki.make_authority("t", NOW, 100 * DAY),
    }
    it = Cluster(Authorities(pki.make_authority("first", NOW, 100 * DAY), since=NOW))
    it.look()
    assert set(it.held.pairs) == set(ROLES), "a new cluster has all at once"
    for what, value in events:
        left = 0.0
        match what:
            case "wait":
                left = value
            case "days":
                left = value * DAY
            case "bring":
                it.bring(sources[value])
            case "renew":
                signer = it.signer
                it.signer = Authorities(
                    signer.current, signer.next, signer.retired, signer.since, renew=True
                )
        it.look()
        it.check()
        while left > 0:
            # The controller looks twice a minute; here often enough for nothing to be missed.
            busy = it.now - it.held.changed <= 2 * SETTLE_S
            jump = min(left, LAG / 2 if busy else HOUR)
            it.now += jump
            left -= jump
            it.look()
            it.check()
    for _ in range(8):
        it.now += SETTLE_S
        it.look()
        it.check()
    assert pki.holds(it.wanted().roots, it.held.roots), "what is of no use is forgotten"
    for role, pair in it.pairs.items():
        assert it.held.pairs[role] == pair


def test_what_is_given_is_taken_when_it_is_trusted() -> None:
    it = Cluster()
    it.look()
    it.now += SETTLE_S
    first = it.held
    it.bring(OTHER)
    it.look()
    assert it.held.pairs == first.pairs
    assert pki.holds(it.held.roots, CA.roots)
    assert pki.holds(it.held.roots, OTHER.roots)
    it.now += SETTLE_S - 1
    it.look()
    assert it.held.pairs == first.pairs, "not everyone may trust it yet"
    it.now += 1
    it.look()
    assert it.held.pairs == it.pairs
    assert pki.holds(it.held.roots, CA.roots), "not everyone may have it yet"
    it.now += SETTLE_S
    it.look()
    assert not pki.holds(it.held.roots, CA.roots)
    assert step(it.held, it.wanted(), it.now + DAY / 2) is it.held, "nothing more is to be done"


def test_what_is_missing_or_broken_is_made_at_once() -> None:
    it = Cluster()
    it.look()
    it.held = Held({"gateway": it.held.pairs["gateway"]}, it.held.roots, it.now)
    it.now += 1
    it.look()
    assert set(it.held.pairs) == set(ROLES)
    it.now += 2 * DAY  # both have expired
    it.look()
    for role, pair in it.held.pairs.items():
        pki.check(pair, it.held.roots, role, NAMES[role], it.now)


def test_a_bad_gift_is_refused_and_named() -> None:
    it = Cluster()
    it.look()
    it.bring(OTHER)
    it.pairs["gateway"] = issue(CA, "gateway")
    with pytest.raises(BadGiven, match=r"not vouched for by ca\.crt") as error:
        it.look()
    assert error.value.role == "gateway"


# --- Secrets -------------------------------------------------------------------------------------


def secret(**texts: str) -> dict[str, Any]:
    names = {"crt": tls.CERTIFICATE, "key": tls.KEY, "ca": tls.CA}
    coded = {names[k]: base64.b64encode(v.encode()).decode() for k, v in texts.items()}
    return {"metadata": {"name": "s", "namespace": "ns"}, "data": coded}


@pytest.mark.parametrize(
    ("given_secret", "what"),
    [
        (secret(), "key tls.crt is missing"),
        (secret(crt=issue(CA).certificate, ca=CA.roots), "key tls.key is missing"),
        (secret(crt="x", key=issue(CA).key, ca=CA.roots), "key tls.crt: it holds no PEM"),
        (secret(crt=issue(CA).certificate, key="x", ca=CA.roots), "key tls.key: it holds no PEM"),
        (secret(crt=issue(CA).certificate, key=issue(CA).key, ca="x"), "key ca.crt: it holds no"),
        ({"metadata": {}, "data": {"tls.crt": "/w=="}}, "key tls.crt holds no text"),
    ],
)
def test_a_secret_that_makes_no_sense(given_secret: dict[str, Any], what: str) -> None:
    with pytest.raises(BadCertificate, match=what):
        certificates.read(given_secret)
    assert certificates.read_held({"worker": given_secret, "gateway": None}) == Held()


def test_what_is_held_comes_back_from_its_secrets() -> None:
    it = Cluster()
    it.look()
    secrets: dict[Role, dict[str, Any] | None] = {
        role: {
            "metadata": {"annotations": {certificates.CHANGED: str(int(it.held.changed))}},
            "data": certificates.data(it.held, role, "scheduler's"),
        }
        for role in ROLES
    }
    assert certificates.read_held(secrets) == it.held


# --- the operator's authority --------------------------------------------------------------------


def kept(state: Authorities, now: float) -> Authorities:
    """Through its Secret."""
    return from_secret(to_secret(state, {"metadata": {"name": "ca", "namespace": "ns"}}), now)


def test_an_authority_is_succeeded_in_time() -> None:
    state = first = kept(advance(None, NOW, "ca"), NOW)
    assert advance(state, NOW + DAY, "ca") is state
    due = NOW + authority.LIFETIME_S * 0.67
    state = kept(advance(state, due, "ca"), due)
    assert state.current == first.current, "the next is to be trusted everywhere first"
    assert state.next is not None
    assert len(pki.certificates(state.roots)) == 2
    assert advance(state, due + authority.OVERLAP_S - 1, "ca") is state
    over = due + authority.OVERLAP_S
    state, following = kept(advance(state, over, "ca"), over), state.next
    assert (state.current, state.next) == (following, None)
    assert len(pki.certificates(state.roots)) == 2, "certificates of the old are still about"
    state = kept(advance(state, over + authority.OVERLAP_S, "ca"), over + authority.OVERLAP_S)
    assert pki.certificates(state.roots) == pki.certificates(following.roots)


def test_an_authority_is_succeeded_when_asked() -> None:
    state = advance(None, NOW, "ca")
    body = to_secret(state, {"metadata": {"name": "ca"}})
    body["metadata"]["annotations"][authority.RENEW] = "yes"
    state = advance(from_secret(body, NOW + 5), NOW + 5, "ca")
    assert state.next is not None
    after = to_secret(state, body)
    assert authority.RENEW not in after["metadata"]["annotations"]
    assert advance(from_secret(after, NOW + 9), NOW + 9, "ca") == state


def test_a_brought_authority_stays_until_another_is_brought() -> None:
    brought = pki.Authority(CA.pair, CA.roots)
    foreign = _renamed(brought)
    body = secret(crt=foreign.pair.certificate, key=foreign.pair.key)
    state = from_secret(body, NOW)
    assert state.since == NOW
    assert advance(state, NOW + 29 * DAY, "ca").next is None
    body = to_secret(state, body)
    for key, text in (("next.crt", OTHER.pair.certificate), ("next.key", OTHER.pair.key)):
        body["data"][key] = base64.b64encode(text.encode()).decode()
    later = NOW + 3 * DAY
    state = from_secret(body, later)
    assert state.since == later, "it is new, so its time begins now"
    assert advance(state, later + 1, "ca") is state
    assert advance(state, later + authority.OVERLAP_S, "ca").current.pair == OTHER.pair


def _renamed(signer: pki.Authority) -> pki.Authority:
    """The same without the mark of its maker."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.x509.oid import NameOID

    key: Any = pki.private_key(signer.pair.key)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "corporate")])
    builder = pki._builder(name, name, key.public_key(), NOW, NOW + 30 * DAY)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=None), True)
    pem = pki.to_pem(builder.sign(key, hashes.SHA256()))
    return pki.given_authority(Pair(pem, signer.pair.key), None)


@pytest.mark.parametrize(
    ("body", "what"),
    [
        (secret(crt=CA.pair.certificate), "key tls.key is missing"),
        (secret(crt=issue(CA).certificate, key=issue(CA).key), "not the key"),
        (secret(crt="x", key="y"), "key tls.crt: it holds no PEM certificates"),
    ],
)
def test_an_authority_of_no_use(body: dict[str, Any], what: str) -> None:
    with pytest.raises(BadCertificate, match=what):
        from_secret(body, NOW)


class Refusing:
    """An API server that has no Secret and takes none."""

    async def get(self, *_: object) -> None:
        return None

    async def create(self, *_: object) -> None:
        raise ApiError(403, "Forbidden", "secrets is forbidden")


async def test_an_authority_that_cannot_be_made_keeps_nobody_waiting() -> None:
    wanted = Authority("system", "ca", "localhost", None)
    await asyncio.wait_for(wanted.start(Refusing()), 30)  # type: ignore[arg-type]
    with pytest.raises(BadCertificate, match=r"system/ca: it is missing .* secrets is forbidden"):
        _ = wanted.state
