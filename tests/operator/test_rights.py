"""The chart's roles: what they grant is what the controller does, no more and no less."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from ecoserve_operator import __main__ as controller
from ecoserve_operator.builders import Builders
from ecoserve_operator.cluster_api import CLUSTERS, MACROS, PODS, ApiError, Json
from ecoserve_operator.crd import crds
from ecoserve_operator.objects import KINDS, OPTIONAL

from e2e.kube.audit import POLICY, granted, used
from tests.operator.control_world import Mortal, until
from tests.operator.kube_api import ApiServer, api_server, kubeconfig_of
from tests.operator.manifests import foreign_crd
from tests.operator.operated import Operator, operator
from tests.operator.test_chart import VARIANTS, container, operator_pod, rendered

SYSTEM = "system"  # where the chart is rendered for


class Disturbed(Mortal):
    """A connection that is disturbed: ``before`` is called ahead of each write, ``cut`` has the
    answer to one get lost."""

    before: Callable[[str, str], Awaitable[None]] | None = None
    cut = False

    async def _write(self, method: str, path: str, *rest: Any) -> Json:
        if self.before is not None:
            await self.before(method, path)
        answer = await super()._write(method, path, *rest)
        if self.cut:
            self.cut = False
            raise ApiError(0, "Unreachable", "the connection was lost")
        return answer


@pytest.fixture(scope="module")
def audited(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """An API server that writes down what service accounts ask for, with the kinds of others that
    the operator can use."""
    folder = tmp_path_factory.mktemp("audited")
    (folder / "policy.yaml").write_text(yaml.safe_dump(POLICY))
    flags = (f"--audit-policy-file={folder / 'policy.yaml'}", f"--audit-log-path={_log(folder)}")
    with api_server(folder, *flags) as server:
        foreign = [foreign_crd(kind) for kind in OPTIONAL if kind.group != "discovery.k8s.io"]
        server.install([*crds().values(), *foreign])
        server.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": SYSTEM}})
        yield server


def _log(folder: Path) -> Path:
    return folder / "audit.log"


def install(server: ApiServer, objects: list[Json], folder: Path) -> Path:
    """Applies service account, lease, roles and bindings; returns a kubeconfig of the account."""
    roles = ("Role", "ClusterRole", "RoleBinding", "ClusterRoleBinding")
    kinds = ("ServiceAccount", "Lease", "Secret", *roles)
    for item in objects:
        if item["kind"] == "Secret":  # an authority that is there already would not be written
            path = f"/api/v1/namespaces/{SYSTEM}/secrets/{item['metadata']['name']}"
            assert server.client.delete(path).status_code in (200, 404)
    server.apply([item for item in objects if item["kind"] in kinds])
    account = next(item for item in objects if item["kind"] == "ServiceAccount")["metadata"]["name"]
    answer = server.client.post(
        f"/api/v1/namespaces/{SYSTEM}/serviceaccounts/{account}/token",
        json={"spec": {"expirationSeconds": 3600}},
    )
    token = answer.raise_for_status().json()["status"]["token"]
    file = folder / "operator.kubeconfig"
    file.write_text(yaml.safe_dump(kubeconfig_of(server.url, server.ca, token)))
    return file


@pytest.mark.parametrize("name", ["default", "all, namespaced"])
async def test_rights_granted_are_rights_used(
    audited: ApiServer, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The namespace of the variant, where it has one.
    namespace = VARIANTS[name].get("namespaces", ["three"])[0]
    audited.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}})
    objects = rendered(name)
    account = operator_pod(objects)["spec"]["serviceAccountName"]
    arguments = container(operator_pod(objects), "controller")["args"]
    values = {"$(POD_NAME)": "test", "$(POD_IP)": "10.0.0.1"}
    for variable, value in values.items():
        arguments = [argument.replace(variable, value) for argument in arguments]
    options, installation = controller.parse(arguments)
    given = {
        field: getattr(options, field)
        for field in (
            "lease_namespace",
            "lease_name",
            "authority_name",
            "namespaces",
            "optional_groups",
        )
    }
    monkeypatch.setenv("KUBECONFIG", str(audited.kubeconfig))
    account_of = install(audited, objects, tmp_path)
    _log(audited.kubeconfig.parent).write_text("")
    async with operator(
        namespace,
        account_of,
        render=Builders(installation),
        given=given,
        connection=Disturbed,
    ) as esc:
        await _live(esc)
    rights, refused = used(
        _log(audited.kubeconfig.parent), f"system:serviceaccount:{SYSTEM}:{account}"
    )
    assert not refused
    assert rights - granted(objects) == set(), "used, though not granted by the chart"
    assert granted(objects) - rights == set(), "granted, but nothing that was done needs it"


async def _live(esc: Operator) -> None:
    """All kinds of things that the controller ever does."""
    await esc.create(minReplicas=3, maxReplicas=16)
    await esc.settle(3)
    await esc.change(minReplicas=1)
    connection = esc.mortal
    assert isinstance(connection, Disturbed)

    # Split, merge, retirement.
    await esc.scale(7)
    await esc.settle(4, 3)
    await esc.scale(4)
    await esc.settle(4)

    # An answer is lost: it looks up how things are.
    connection.cut = True
    await esc.scale(3)
    await esc.settle(3)

    # A Pod is gone, and the cluster another one, just before they are written.
    taken: list[str] = []

    async def meddle(method: str, path: str) -> None:
        if path.endswith("/ecoserveclusters/demo/status") and "cluster" not in taken:
            taken.append("cluster")
            note = {"metadata": {"annotations": {"note": "another"}}}
            await esc.api.patch(CLUSTERS, esc.namespace, "demo", note)
        parts = path.split("/")
        if method == "PATCH" and parts[-2] == "pods" and "pod" not in taken:
            taken.append("pod")
            pod = await esc.api.get(PODS, esc.namespace, parts[-1])
            assert pod is not None
            await esc.api.delete(PODS, esc.namespace, parts[-1], pod["metadata"]["uid"], grace=0)

    connection.before = meddle
    await esc.scale(2)
    await until(lambda: len(taken) == 2, f"only {taken} was disturbed")
    await esc.settle(2)

    # What is optional is taken back.
    parts = ("gateway", "monitoring", "networkPolicy", "inferencePool")
    await esc.change(**{part: {"enabled": False} for part in parts})
    groups = esc.given["optional_groups"]
    kinds = [kind for kind in KINDS if kind.plural in ("services", "networkpolicies")]
    kinds += [kind for kind in OPTIONAL if kind.group in groups]

    async def gone() -> bool:
        return not [i for k in kinds for i in (await esc.api.list_all(k, esc.namespace))[0]]

    await until(gone, "what is switched off is still there")
    cluster = await esc.cluster()
    await esc.api.delete(CLUSTERS, esc.namespace, "demo", cluster["metadata"]["uid"])
    kinds += [MACROS, PODS]
    await until(gone, "something outlives the cluster")
