"""Certificates by a real API server: made, renewed, given, refused."""

from __future__ import annotations

import base64
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from ecoserve_operator import certificates, controller, issuer, pki
from ecoserve_operator.authority import Authority, from_secret
from ecoserve_operator.cluster_api import CLUSTERS, SECRETS, Json
from ecoserve_operator.pki import Role

from ecoserve import tls
from tests.operator.control_world import until
from tests.operator.kube_api import ApiServer
from tests.operator.operated import Operator, operator

NAMES: dict[Role, str] = {"gateway": "demo-gateway-tls", "worker": "demo-worker-tls"}


@pytest.fixture
async def esc(
    kube: ApiServer, namespace: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> AsyncIterator[Operator]:
    monkeypatch.setenv("KUBECONFIG", str(kube.kubeconfig))
    # What it looks at now and then it looks at all the time.
    monkeypatch.setattr(issuer, "_LOOK_S", 0.0)
    monkeypatch.setattr(controller, "RESYNC_S", 0.2)
    async with operator(namespace, given={"scheduler_files": tmp_path / "scheduler"}) as found:
        yield found


async def secret(esc: Operator, name: str) -> Json:
    found = await esc.api.get(SECRETS, esc.namespace, name)
    assert found is not None, f"there is no Secret {name}"
    return found


async def held(esc: Operator, role: Role) -> tuple[pki.Pair, str]:
    return certificates.read(await secret(esc, NAMES[role]))


async def write(esc: Operator, role: Role, data: Json) -> None:
    """Somebody meddles."""
    await esc.api.patch(SECRETS, esc.namespace, NAMES[role], {"data": data})


def coded(pair: pki.Pair, roots: str) -> dict[str, str]:
    texts = {tls.CERTIFICATE: pair.certificate, tls.KEY: pair.key, tls.CA: roots}
    return {key: base64.b64encode(text.encode()).decode() for key, text in texts.items()}


def dns(esc: Operator, role: Role) -> str:
    return f"{role}.demo.{esc.namespace}.svc"


async def give(esc: Operator, name: str, pair: pki.Pair, roots: str) -> None:
    body: Json = {"metadata": {"name": name, "namespace": esc.namespace}}
    await esc.api.apply(SECRETS, body | {"data": coded(pair, roots)})


async def test_made_renewed_and_made_again(
    esc: Operator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(certificates, "SETTLE_S", 0.0)
    await esc.create(minReplicas=1)
    await esc.settle(1)
    owner = (await esc.cluster())["metadata"]["uid"]
    now = time.time()
    for role, name in NAMES.items():
        found = await secret(esc, name)
        assert found["type"] == "kubernetes.io/tls"
        assert [o["uid"] for o in found["metadata"]["ownerReferences"]] == [owner]
        pair, roots = certificates.read(found)
        pki.check(pair, roots, role, dns(esc, role), now)
    (pod,) = await esc.pods()
    mounted = {v["name"]: v for v in pod["spec"]["volumes"]}["mtls"]["secret"]
    assert mounted["secretName"] == NAMES["worker"]
    # Another controller need not wait for the lease to provide its scheduler.
    other = Authority(esc.namespace, "ecoserve-operator-ca", "localhost", tmp_path / "other")
    await other.prepare(esc.api, (esc.namespace,))
    trusted = (tmp_path / "other" / tls.CA).read_text()
    pki.check((await held(esc, "worker"))[0], trusted, "worker", dns(esc, "worker"), now)
    shown = pki.Pair(*((tmp_path / "other" / n).read_text() for n in (tls.CERTIFICATE, tls.KEY)))
    pki.check(shown, trusted, "scheduler", "localhost", now)
    told = esc.scheduler.clusters[f"{esc.namespace}/demo"].mtls
    assert (told.gateway, told.worker) == (dns(esc, "gateway"), dns(esc, "worker"))
    # The scheduler can show who it is, and trusts who comes.
    files = {name: (tmp_path / "scheduler" / name).read_text() for name in tls_files()}
    pair = pki.Pair(files[tls.CERTIFICATE], files[tls.KEY])
    data = (await secret(esc, NAMES["worker"]))["data"]
    theirs = base64.b64decode(data[tls.SCHEDULER_CA]).decode()
    pki.check(pair, theirs, "scheduler", "localhost", now)
    pki.check((await held(esc, "worker"))[0], files[tls.CA], "worker", dns(esc, "worker"), now)

    # One is close to its end.
    ca = from_secret(await secret(esc, "ecoserve-operator-ca"), now).current
    name = dns(esc, "worker")
    old = pki.issue(ca, "worker", [name], now - 1000, 1100)
    gateway = await held(esc, "gateway")
    await write(esc, "worker", coded(old, ca.roots))

    async def renewed() -> bool:
        pair, _ = await held(esc, "worker")
        return pair != old and not pki.is_due(pair.certificate, now)

    await until(renewed)
    assert await held(esc, "gateway") == gateway, "it had time left"
    await esc.tells("CertificateRenewed")

    # One is deleted, and one is nonsense.
    item = await secret(esc, NAMES["worker"])
    uid = item["metadata"]["uid"]
    await esc.api.delete(SECRETS, esc.namespace, NAMES["worker"], uid)

    async def again() -> bool:
        found = await esc.api.get(SECRETS, esc.namespace, NAMES["worker"])
        return found is not None and found["metadata"]["uid"] != uid

    await until(again)
    await write(esc, "gateway", {tls.KEY: base64.b64encode(b"x").decode()})

    async def well() -> bool:
        try:
            pair, roots = await held(esc, "gateway")
        except pki.BadCertificate:
            return False
        return pair != gateway[0] and bool(roots)

    await until(well)
    assert (await esc.condition("Degraded"))["status"] == "False"
    before = await esc.uids()
    assert set(before) == {"demo-0"}, "no Pod was replaced for any of it"


def tls_files() -> tuple[str, ...]:
    return (tls.CERTIFICATE, tls.KEY, tls.CA)


async def test_given_secrets_are_taken_and_bad_ones_named(
    esc: Operator, monkeypatch: pytest.MonkeyPatch
) -> None:
    await esc.create(minReplicas=1)
    await esc.settle(1)
    pods = await esc.uids()
    own = {role: await held(esc, role) for role in NAMES}
    now = time.time()
    theirs = pki.make_authority("corporate", now, 3600)
    pairs = {role: pki.issue(theirs, role, [dns(esc, role)], now, 1800) for role in NAMES}
    await give(esc, "gw", pairs["gateway"], theirs.roots)
    await esc.change(mtls={"gatewaySecret": "gw", "workerSecret": "wk"})

    async def complains(*texts: str) -> bool:
        found = await esc.condition("Degraded")
        return found.get("reason") == "BadCertificate" and all(
            text in found["message"] for text in texts
        )

    await until(lambda: complains("spec.mtls.workerSecret: Secret wk: there is no such Secret"))
    await give(esc, "wk", pki.issue(theirs, "worker", ["x"], now, 1800), theirs.roots)
    await until(lambda: complains("spec.mtls.workerSecret", "it has x", dns(esc, "worker")))
    assert {role: await held(esc, role) for role in NAMES} == own, "what was good stays"

    await give(esc, "wk", pairs["worker"], theirs.roots)

    async def trusted() -> bool:
        return all([pki.holds((await held(esc, role))[1], theirs.roots) for role in NAMES])

    await until(trusted)
    await esc.becomes("Degraded", "False")
    assert {role: (await held(esc, role))[0] for role in NAMES} == {
        role: pair for role, (pair, _) in own.items()
    }, "nobody may show what not everyone trusts yet"
    monkeypatch.setattr(certificates, "SETTLE_S", 0.0)

    async def taken() -> bool:
        return {role: (await held(esc, role))[0] for role in NAMES} == pairs

    await until(taken)

    async def forgotten() -> bool:
        found = [(await held(esc, role))[1] for role in NAMES]
        return all(pki.certificates(f) == pki.certificates(theirs.roots) for f in found)

    await until(forgotten)
    clusters, key = esc.scheduler.clusters, f"{esc.namespace}/demo"
    await until(lambda: pki.certificates(clusters[key].mtls.ca) == pki.certificates(theirs.roots))
    assert await esc.uids() == pods, "no Pod was replaced for any of it"


async def test_off_by_the_switch(esc: Operator) -> None:
    await esc.create(minReplicas=1, mtls={"enabled": False})
    await esc.settle(1)
    for name in NAMES.values():
        assert await esc.api.get(SECRETS, esc.namespace, name) is None
    assert not esc.scheduler.clusters[f"{esc.namespace}/demo"].HasField("mtls")
    (pod,) = await esc.pods()
    assert "--tls-files" not in pod["spec"]["containers"][0]["args"]


async def test_an_authority_of_no_use_is_named(esc: Operator) -> None:
    name = "ecoserve-operator-ca"
    await until(lambda: esc.api.get(SECRETS, esc.namespace, name))
    await esc.stop()
    await esc.api.patch(SECRETS, esc.namespace, name, {"data": {"tls.key": "eA=="}})
    await esc.start()
    await esc.create(minReplicas=1)

    async def told() -> bool:
        found = await esc.condition("Degraded")
        return found.get("reason") == "NoAuthority" and "key tls.crt" in found["message"]

    await until(told)
    cluster = await esc.cluster()
    await esc.api.delete(CLUSTERS, esc.namespace, "demo", cluster["metadata"]["uid"])
