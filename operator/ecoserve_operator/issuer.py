"""Provides the Pods of all clusters with certificates, by Secrets that they mount."""

from __future__ import annotations

import base64
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ecoserve import tls
from ecoserve.proto.v1 import admin_pb2
from ecoserve_operator import certificates, pki
from ecoserve_operator.api import EcoServeCluster
from ecoserve_operator.authority import Authorities, Authority, is_current
from ecoserve_operator.builders import common
from ecoserve_operator.certificates import CHANGED, ROLES, BadGiven, Held, Wanted
from ecoserve_operator.cluster_api import SECRETS, ApiError, ClusterApi, Json
from ecoserve_operator.events import Events
from ecoserve_operator.names import tls_secret
from ecoserve_operator.pki import BadCertificate, Pair, Role
from ecoserve_operator.status import Problem
from ecoserve_operator.store import Key, Store

# A Secret that the spec names is looked at again after this.
_LOOK_S = 20.0


@dataclass(frozen=True, slots=True)
class Issued:
    """What a cluster gets: the Secrets as they should be, and what the scheduler is told (None: it
    is plain)."""

    secrets: list[Json]
    mtls: admin_pb2.MutualTls | None
    problems: list[Problem]


class Issuer:
    """Certificates of all clusters, signed by ``authority`` or given by their specs."""

    def __init__(
        self,
        api: ClusterApi,
        store: Store,
        authority: Authority,
        events: Events,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._api, self._store, self._events = api, store, events
        self._authority = authority
        self._clock = clock
        self._looked: dict[tuple[str, str], tuple[float, Json | None]] = {}

    def forget(self, key: Key) -> None:
        """The cluster is no more."""
        self._authority.distrust(key)

    async def issue(self, key: Key, cluster: EcoServeCluster) -> Issued:
        """What the cluster is to have now. What cannot be had is a problem; what it has stays."""
        if not cluster.spec.mtls.enabled:
            self._authority.distrust(key)
            return Issued([], None, [])
        names = {role: tls_secret(key[1], role) for role in ROLES}
        secrets = {role: self._store.find(SECRETS, key, name) for role, name in names.items()}
        held = certificates.read_held(secrets)
        problems: list[Problem] = []
        roots = _scheduler_roots(secrets)
        try:
            state = self._authority.state
            roots = state.roots
            wanted = await self._wanted(cluster, state)
            now = float(int(self._clock()))
            after = certificates.step(held, wanted, now)
            self._tell(key, held, after)
            held = after
        except BadGiven as error:
            problems.append(_given_problem(cluster, error.role, str(error)))
        except BadCertificate as error:
            problems.append(Problem("NoAuthority", f"the operator's authority: {error}"))
        self._authority.trust(key, held.roots)
        mtls = admin_pb2.MutualTls(
            gateway=common.identity_of(cluster, "gateway"),
            worker=common.identity_of(cluster, "worker"),
            ca=held.vouchers or roots,
        )
        return Issued(_bodies(cluster, held, names, roots), mtls, problems)

    async def _wanted(self, cluster: EcoServeCluster, state: Authorities) -> Wanted:
        spec = cluster.spec.mtls
        names: dict[Role, str] = {role: common.identity_of(cluster, role) for role in ROLES}
        secrets: dict[Role, str | None] = {
            "gateway": spec.gateway_secret,
            "worker": spec.worker_secret,
        }
        given: dict[Role, Pair] = {}
        bundles = []
        for role, secret in secrets.items():
            if secret is not None:
                given[role], bundle = await self._given(cluster, role, secret)
                bundles.append(bundle)

        def current(role: Role, pair: Pair) -> bool:
            return is_current(pair, state, role, names[role], self._clock())

        def issue(role: Role) -> Pair:
            now = self._clock()
            return pki.issue(state.current, role, [names[role]], now, spec.lifetime)

        roots = pki.merge(*bundles) if bundles else state.roots
        return Wanted(names, roots, given, current, issue)

    async def _given(self, cluster: EcoServeCluster, role: Role, name: str) -> tuple[Pair, str]:
        place = (cluster.metadata.namespace or "", name)
        at, secret = self._looked.get(place, (float("-inf"), None))
        now = self._clock()
        if secret is None or now - at >= _LOOK_S:
            try:
                secret = await self._api.get(SECRETS, *place)
            except ApiError as error:
                if not error.is_final:
                    raise
                raise BadGiven(role, str(error)) from error
            self._looked[place] = (now, secret)
        if secret is None:
            raise BadGiven(role, "there is no such Secret")
        try:
            return certificates.read(secret)
        except BadCertificate as error:
            raise BadGiven(role, str(error)) from error

    def _tell(self, key: Key, before: Held, after: Held) -> None:
        item = self._store.cluster(key)
        if item is None:
            return
        for role, pair in after.pairs.items():
            if pair != before.pairs.get(role):
                end = pki.certificates(pair.certificate)[0].not_valid_after_utc
                message = f"the {role}s get another certificate, valid until {end:%FT%TZ}"
                self._events.tell(item, "CertificateRenewed", message)
        if before.roots and after.roots != before.roots:
            count = len(pki.certificates(after.roots))
            message = f"gateways and workers trust {count} certificate authorities now"
            self._events.tell(item, "TrustChanged", message)


def _given_problem(cluster: EcoServeCluster, role: Role, why: str) -> Problem:
    spec = cluster.spec.mtls
    name = spec.gateway_secret if role == "gateway" else spec.worker_secret
    return Problem("BadCertificate", f"spec.mtls.{role}Secret: Secret {name}: {why}")


def _scheduler_roots(secrets: Mapping[Role, Json | None]) -> str:
    for secret in secrets.values():
        coded = ((secret or {}).get("data") or {}).get(tls.SCHEDULER_CA)
        if coded:
            return base64.b64decode(coded).decode(errors="replace")
    return ""


def _bodies(
    cluster: EcoServeCluster, held: Held, names: Mapping[Role, str], scheduler_roots: str
) -> list[Json]:
    return [
        {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": common.metadata(
                cluster, names[role], role, annotations={CHANGED: str(int(held.changed))}
            ),
            "type": "kubernetes.io/tls",
            "data": certificates.data(held, role, scheduler_roots),
        }
        for role in held.pairs
    ]
