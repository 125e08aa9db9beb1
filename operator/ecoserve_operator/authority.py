"""The operator's certificate authority: in a Secret beside it, with a successor before it ends.

A successor is trusted everywhere for ``OVERLAP_S`` before it signs, and what it succeeds for as
long after. A person brings an authority by making the Secret before the operator does, and another
by adding it there as the next; those are not replaced unless that is asked for.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from ecoserve import tls
from ecoserve_operator import certificates, pki
from ecoserve_operator.certificates import SETTLE_S
from ecoserve_operator.cluster_api import SECRETS, ApiError, ClusterApi, Json
from ecoserve_operator.lease import NotHeld
from ecoserve_operator.pki import BadCertificate
from ecoserve_operator.store import Key, selector_of

log = logging.getLogger("ecoserve.operator")

DAY_S = 86_400.0
OVERLAP_S = DAY_S
LIFETIME_S = 3650 * DAY_S
SCHEDULER_LIFETIME_S = 90 * DAY_S

SINCE, RENEW = "ecoserve.io/since", "ecoserve.io/renew"
_NEXT_CERTIFICATE, _NEXT_KEY, _RETIRED = "next.crt", "next.key", "retired.crt"
_LOOK_S = 60.0


@dataclass(frozen=True, slots=True)
class Authorities:
    """Who signs, who will, and who did. ``since`` is when that last changed, ``renew`` whether a
    person asked for a successor."""

    current: pki.Authority
    next: pki.Authority | None = None
    retired: str = ""
    since: float = 0.0
    renew: bool = False

    @property
    def roots(self) -> str:
        """All who are to be trusted."""
        after = self.next.roots if self.next is not None else ""
        return pki.merge(self.current.roots, after, self.retired)

    @property
    def phase(self) -> str:
        """What tells that it has changed since ``since``."""
        text = self.current.pair.certificate + (self.next.pair.certificate if self.next else "")
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def advance(known: Authorities | None, now: float, name: str) -> Authorities:
    """The authorities as they should be now."""
    if known is None:
        return Authorities(pki.make_authority(name, now, LIFETIME_S), since=now)
    over = now - known.since >= OVERLAP_S
    if known.next is not None:
        if not over:
            return known
        return Authorities(known.next, retired=known.current.roots, since=now)
    current = known.current.pair.certificate
    if known.renew or (pki.is_own(current) and pki.is_due(current, now)):
        following = pki.make_authority(name, now, LIFETIME_S)
        return replace(known, next=following, since=now, renew=False)
    if known.retired and over:
        return replace(known, retired="")
    return known


def from_secret(secret: Json, now: float) -> Authorities:
    """Raises ``BadCertificate`` that names the key."""
    texts = {
        key: base64.b64decode(value).decode(errors="replace")
        for key, value in secret["data"].items()
    }
    annotations = secret["metadata"].get("annotations") or {}
    current = _authority(texts, tls.CERTIFICATE, tls.KEY, texts.get(tls.CA))
    following = None
    if _NEXT_CERTIFICATE in texts:
        following = _authority(texts, _NEXT_CERTIFICATE, _NEXT_KEY, None)
    retired = pki.still_valid(texts.get(_RETIRED, ""), now)
    state = Authorities(current, following, retired, now, RENEW in annotations)
    since, _, phase = annotations.get(SINCE, "").partition("/")
    # What a person has put there begins now.
    known = since.isdecimal() and phase == state.phase
    return replace(state, since=float(since)) if known else state


def to_secret(state: Authorities, secret: Json) -> Json:
    """The Secret with what is to be kept of it in ``secret``, e.g. its name."""
    texts = {
        tls.CERTIFICATE: state.current.pair.certificate,
        tls.KEY: state.current.pair.key,
        tls.CA: state.current.roots,
    }
    if state.next is not None:
        texts |= {
            _NEXT_CERTIFICATE: state.next.pair.certificate,
            _NEXT_KEY: state.next.pair.key,
        }
    if state.retired:
        texts[_RETIRED] = state.retired
    old = secret["metadata"].get("annotations") or {}
    annotations = {key: value for key, value in old.items() if key != RENEW}
    annotations[SINCE] = f"{int(state.since)}/{state.phase}"
    coded = {key: base64.b64encode(text.encode()).decode() for key, text in texts.items()}
    metadata = {**secret["metadata"], "annotations": annotations}
    return {**secret, "metadata": metadata, "data": coded}


def _authority(
    texts: dict[str, str], certificate: str, key: str, roots: str | None
) -> pki.Authority:
    for name in (certificate, key):
        if name not in texts:
            raise BadCertificate(f"key {name} is missing")
    pair = pki.Pair(texts[certificate], texts[key])
    try:
        return pki.given_authority(pair, roots)
    except BadCertificate as error:
        raise BadCertificate(f"key {certificate}: {error}") from error


class Authority:
    """The authority of this operator, and the scheduler's certificate in ``folder`` (None: there is
    no scheduler to provide with one). ``changed`` is called when there is something new to sign
    with or to trust."""

    def __init__(
        self,
        namespace: str,
        name: str,
        scheduler: str,
        folder: Path | None,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.changed: Callable[[], None] = lambda: None
        self.problem = ""
        self._namespace, self._name = namespace, name
        self._scheduler, self._folder = scheduler, folder
        self._clock = clock
        self._state: Authorities | None = None
        self._trusted: dict[Key, str] = {}
        self._inherited = ("", 0.0)
        self._written: dict[str, str] = {}

    @property
    def state(self) -> Authorities:
        """Raises ``BadCertificate`` while there is none that can be used."""
        if self._state is None:
            raise BadCertificate(self.problem or "there is no certificate authority yet")
        return self._state

    async def prepare(self, api: ClusterApi, namespaces: tuple[str | None, ...]) -> None:
        """Provides the scheduler with what there is already. It only reads, so it need not wait for
        the lease, which a controller that was killed seems to hold for a while."""
        self._inherit()
        now = float(int(self._clock()))
        try:
            secret = await api.get(SECRETS, self._namespace, self._name)
            if secret is None or not secret.get("data"):
                return
            self._state = from_secret(secret, now)
            found = [self._inherited[0]]
            for namespace in namespaces:
                items, _ = await api.list_all(SECRETS, namespace, selector_of(SECRETS))
                found += [certificates.roots_of(item) for item in items]
        except (ApiError, BadCertificate) as error:
            log.warning("certificate authority: %s", error)
            return
        self._inherited = (pki.merge(*found), now)
        self.provide()

    async def start(self, api: ClusterApi) -> None:
        """Has an authority, the first time; tries until it does or finds one that is of no use."""
        delay = 0.25
        while True:
            try:
                await self.look(api)
                return
            except (ApiError, NotHeld) as error:
                log.warning("certificate authority: %s; again in %.1f s", error, delay)
                await asyncio.sleep(delay)
                delay = min(delay * 2, 10.0)

    async def run(self, api: ClusterApi) -> None:
        """Keeps it in order; runs until cancelled."""
        while True:
            await asyncio.sleep(_LOOK_S)
            try:
                await self.look(api)
            except (ApiError, NotHeld) as error:
                log.warning("certificate authority: %s", error)

    async def look(self, api: ClusterApi) -> None:
        """Reads it, takes it further and writes it if it is due."""
        now = float(int(self._clock()))
        secret = await api.get(SECRETS, self._namespace, self._name)
        if secret is None:
            # The chart makes one, empty, so that it goes with all else.
            body: Json = {"metadata": {"namespace": self._namespace, "name": self._name}}
            try:
                secret = await api.create(SECRETS, body)
            except ApiError as error:
                if error.status != 403:
                    raise
                # What needs no certificates goes on.
                self._useless(f"it is missing and cannot be made: {error}")
                return
        try:
            known = from_secret(secret, now) if secret.get("data") else None
        except BadCertificate as error:
            self._useless(str(error))
            return
        self.problem = ""
        state = advance(known, now, self._name)
        if (after := to_secret(state, secret)) != secret:
            await api.replace(SECRETS, after)
            log.info("the certificate authority %s was written", self._name)
        if state != self._state:
            self._state = state
            self.changed()
        self.provide()

    def _useless(self, why: str) -> None:
        self.problem = f"Secret {self._namespace}/{self._name}: {why}"
        log.error("certificate authority: %s", self.problem)

    def trust(self, key: Key, roots: str) -> None:
        """Has the scheduler take connections of those for whom a cluster's ``roots`` vouch."""
        if self._trusted.get(key) != roots:
            self._trusted[key] = roots
            self.provide()

    def distrust(self, key: Key) -> None:
        """The cluster is no more, or plain."""
        if self._trusted.pop(key, None) is not None:
            self.provide()

    def provide(self) -> None:
        """Writes the scheduler's files where they are not as they should be."""
        if self._folder is None or self._state is None:
            return
        now = self._clock()
        texts = {**self._written, tls.CA: self._all_roots(now)}
        if not self._is_current(now):
            names = [self._scheduler]
            pair = pki.issue(self._state.current, "scheduler", names, now, SCHEDULER_LIFETIME_S)
            texts |= {tls.CERTIFICATE: pair.certificate, tls.KEY: pair.key}
            log.info("the scheduler gets another certificate")
        for name, text in texts.items():
            if self._written.get(name) != text:
                write(self._folder / name, text)
        self._written = texts

    def _all_roots(self, now: float) -> str:
        inherited, at = self._inherited
        # Of clusters that were not looked at yet.
        others = inherited if now - at < SETTLE_S else ""
        return pki.merge(self.state.roots, *self._trusted.values(), others)

    def _is_current(self, now: float) -> bool:
        certificate, key = (self._written.get(name) for name in (tls.CERTIFICATE, tls.KEY))
        if certificate is None or key is None:
            return False
        return is_current(pki.Pair(certificate, key), self.state, "scheduler", self._scheduler, now)

    def _inherit(self) -> None:
        """What another controller of this Pod has left there."""
        if self._folder is None:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        for name in (tls.CERTIFICATE, tls.KEY, tls.CA):
            if (self._folder / name).exists():
                self._written[name] = (self._folder / name).read_text()
        self._inherited = (self._written.get(tls.CA, ""), self._clock())


def is_current(
    pair: pki.Pair, authorities: Authorities, role: pki.Role, name: str, now: float
) -> bool:
    """Whether a certificate is one that the operator would issue now, and has some time left."""
    try:
        pki.check(pair, authorities.current.roots, role, name, now)
    except BadCertificate:
        return False
    return not pki.is_due(pair.certificate, now)


def write(file: Path, text: str) -> None:
    """Replaces a file at once, for our own user alone."""
    new = file.with_name(f".{file.name}.new")
    with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as out:
        out.write(text)
    new.replace(file)
