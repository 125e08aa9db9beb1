"""The Helm chart: what it renders, what it refuses, what it grants."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from ecoserve_operator import __main__ as controller
from ecoserve_operator.api import EcoServeCluster
from ecoserve_operator.builders import Builders, Installation

import ecoserve
from tests.operator.kube_api import ApiServer
from tests.operator.pod_security import violations

Json = dict[str, Any]

ROOT = Path(__file__).parents[2]
CHART = ROOT / "charts/ecoserve"
VALUES: Json = yaml.safe_load((CHART / "values.yaml").read_text())
EXAMPLES = sorted((CHART / "examples").glob("*.yaml"))

PEERS = [{"namespaceSelector": {"matchLabels": {"name": "monitoring"}}}]
VARIANTS: dict[str, Json] = {
    "default": {},
    "namespaced": {"namespaces": ["one", "two"]},
    "all": {
        "images": {"gateway": "envoy:1", "pullSecrets": ["registry"], "pullPolicy": "Never"},
        "scheduler": {"debug": True},
        "monitoring": {"enabled": True, "labels": {"release": "prometheus"}},
        "inferencePools": {"enabled": True},
        "networkPolicy": {"prometheus": PEERS, "gateways": PEERS},
        "mtls": {"authority": "corporate-ca"},
        "serviceAccount": {"name": "mine", "annotations": {"a": "b"}},
        "podAnnotations": {"a": "b"},
        "podLabels": {"team": "nlp", "app.kubernetes.io/component": "other"},
        "nodeSelector": {"zone": "a"},
        "tolerations": [{"key": "a", "operator": "Exists"}],
        "affinity": {"podAntiAffinity": {}},
        "priorityClassName": "system-cluster-critical",
    },
    "all, namespaced": {
        "namespaces": ["one"],
        "monitoring": {"enabled": True},
        "inferencePools": {"enabled": True},
        "networkPolicy": {"enabled": False},
    },
}


def helm(*arguments: str, values: Json | None = None) -> subprocess.CompletedProcess[str]:
    """Runs Helm; skips the test where there is none, or fails it in CI."""
    folder = os.environ.get("KUBEBUILDER_ASSETS", "")
    found = shutil.which("helm", path=os.pathsep.join((folder, os.environ["PATH"])))
    if found is None:
        how = "helm is neither on PATH nor in KUBEBUILDER_ASSETS: see https://helm.sh"
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(how)
    more = () if values is None else ("--values", "-")
    return subprocess.run(
        [found, *arguments, *more],
        input=None if values is None else json.dumps(values),
        capture_output=True,
        text=True,
        timeout=60,
        env={"PATH": os.environ["PATH"], "HOME": "/nonexistent", "KUBECONFIG": "/dev/null"},
    )


def rendered(name: str) -> list[Json]:
    done = helm("template", "eco", str(CHART), "-n", "system", values=VARIANTS[name])
    assert done.returncode == 0, done.stderr
    return [item for item in yaml.safe_load_all(done.stdout) if item]


def one(objects: list[Json], kind: str, name: str | None = None) -> Json:
    (found,) = [
        item
        for item in objects
        if item["kind"] == kind and name in (None, item["metadata"]["name"])
    ]
    return found


def operator_pod(objects: list[Json]) -> Json:
    template: Json = one(objects, "Deployment")["spec"]["template"]
    return template


def container(pod: Json, name: str) -> Json:
    return next(c for c in pod["spec"]["containers"] if c["name"] == name)


# --- without Helm --------------------------------------------------------------------------------


def test_the_crds_are_the_generated_ones() -> None:
    names = sorted(path.name for path in (ROOT / "crds").glob("*.yaml"))
    assert names == sorted(path.name for path in (CHART / "crds").iterdir())
    for name in names:
        same = (CHART / "crds" / name).read_text() == (ROOT / "crds" / name).read_text()
        assert same, "run `make crds`"


def test_versions_agree() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["appVersion"] == ecoserve.__version__
    images = [VALUES["images"]["operator"], VALUES["images"]["worker"]]
    images += re.findall(r"image: (\S+-smollm2\S+)", (CHART / "examples/cpu.yaml").read_text())
    assert [image.rpartition(":")[2] for image in images] == [ecoserve.__version__] * 3


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_can_be_built(path: Path) -> None:
    body = yaml.safe_load(path.read_text())
    body["metadata"] |= {"namespace": "default", "uid": "1"}
    given = EcoServeCluster.model_validate(body)
    # What the API server would drop as unknown.
    assert _names(body["spec"]) <= _names(given.spec.dump())
    builders = Builders(Installation("worker:1", "operator:1", "scheduler:9002", "scheduler:9004"))
    assert not violations(builders.worker(given, f"{given.metadata.name}-0")["spec"])
    assert builders.objects(given)


def _names(value: Any, path: str = "") -> set[str]:
    if isinstance(value, dict):
        return set().union(*({f"{path}.{k}"} | _names(v, f"{path}.{k}") for k, v in value.items()))
    if isinstance(value, list):
        return set().union(*(_names(item, f"{path}[]") for item in value)) if value else set()
    return set()


def test_examples_are_those_of_the_readme() -> None:
    assert [path.stem for path in EXAMPLES] == ["a800", "cpu", "l20"]


# --- rendered ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", VARIANTS)
def test_lint(name: str) -> None:
    done = helm("lint", "--strict", str(CHART), values=VARIANTS[name])
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", VARIANTS)
def test_every_pod_is_restricted(name: str) -> None:
    objects = rendered(name)
    pods = [operator_pod(objects)["spec"], one(objects, "Pod")["spec"]]
    for spec in pods:
        assert violations(spec) == []
        for item in spec["containers"]:
            assert item["securityContext"]["readOnlyRootFilesystem"] is True
            assert item["resources"]


@pytest.mark.parametrize("name", VARIANTS)
def test_names_are_unique_and_namespaces_right(name: str) -> None:
    objects = rendered(name)
    keys = [(o["kind"], o["metadata"].get("namespace"), o["metadata"]["name"]) for o in objects]
    assert len(keys) == len(set(keys))
    allowed = {"system", *VARIANTS[name].get("namespaces", ())}
    for kind, namespace, _ in keys:
        assert (namespace is None) if kind.startswith("Cluster") else namespace in allowed


@pytest.mark.parametrize("name", VARIANTS)
def test_the_processes_take_their_arguments(name: str) -> None:
    objects = rendered(name)
    pod = operator_pod(objects)
    arguments = container(pod, "controller")["args"]
    options, installation = controller.parse(arguments)
    values = VARIANTS[name]
    assert options.namespaces == tuple(values.get("namespaces", ()))
    assert (options.lease_namespace, options.lease_name) == ("system", "eco")
    service = one(objects, "Service")
    targets = {item["port"]: item["targetPort"] for item in service["spec"]["ports"]}
    for address, target in (
        (installation.scheduler, "grpc"),
        (installation.scheduler_tls, "grpc-tls"),
    ):
        host, _, port = address.partition(":")
        assert host == f"{service['metadata']['name']}.system.svc"
        assert targets[int(port)] == target
    assert options.scheduler_name == installation.scheduler_tls.partition(":")[0]
    brought = values.get("mtls", {}).get("authority")
    made = [item["metadata"] for item in objects if item["kind"] == "Secret"]
    if brought:
        assert (options.authority_name, made) == (brought, [])
    else:
        (secret,) = made
        assert (secret["name"], secret["namespace"]) == (options.authority_name, "system")
    assert installation.worker_image == VALUES["images"]["worker"]
    assert (
        installation.gateway_image == values.get("images", {}).get("gateway")
        or (VALUES["images"]["operator"])
    )
    assert installation.inference_pools is values.get("inferencePools", {}).get("enabled", False)

    parser = argparse.ArgumentParser()
    for option in ("--grpc", "--http", "--tls", "--tls-files"):
        parser.add_argument(option)
    parser.add_argument("--debug_mode", action="store_true")
    given = parser.parse_args(container(pod, "scheduler")["args"])
    ports = {p["name"]: p["containerPort"] for p in container(pod, "scheduler")["ports"]}
    assert given.grpc == f"0.0.0.0:{ports['grpc']}"
    assert given.http == f"0.0.0.0:{ports['http']}"
    assert given.tls == f"0.0.0.0:{ports['grpc-tls']}"
    # What the controller writes is what the scheduler reads.
    assert given.tls_files == str(options.scheduler_files)
    mounts = [
        {m["mountPath"]: m["name"] for m in container(pod, which)["volumeMounts"]}
        for which in ("controller", "scheduler")
    ]
    assert mounts[0][given.tls_files] == mounts[1][given.tls_files]
    assert given.debug_mode is values.get("scheduler", {}).get("debug", False)


@pytest.mark.parametrize("name", ["default", "namespaced"])
def test_the_api_server_takes_every_object(kube: ApiServer, name: str) -> None:
    for namespace in ("system", *VARIANTS[name].get("namespaces", ())):
        kube.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}})
    objects = rendered(name)
    done = kube.kubectl(
        *("apply", "--server-side", "--dry-run=server", "--validate=strict", "-f", "-"),
        stdin=yaml.safe_dump_all(objects),
    )
    assert len(done.stdout.splitlines()) == len(objects)


def test_labels_of_the_selector_are_not_for_values_to_change() -> None:
    objects = rendered("all")
    deployment = one(objects, "Deployment")["spec"]
    labels = deployment["template"]["metadata"]["labels"]
    assert deployment["selector"]["matchLabels"].items() <= labels.items()
    assert one(objects, "Service")["spec"]["selector"].items() <= labels.items()
    assert labels["team"] == "nlp"


def test_the_token_is_the_controllers_alone() -> None:
    pod = operator_pod(rendered("default"))
    assert pod["spec"]["automountServiceAccountToken"] is False
    mounted = [
        item["name"]
        for item in pod["spec"]["containers"]
        if any("serviceaccount" in m["mountPath"] for m in item.get("volumeMounts", []))
    ]
    assert mounted == ["controller"]


def test_workers_and_gateways_reach_the_scheduler() -> None:
    policy = one(rendered("default"), "NetworkPolicy")["spec"]
    peer = policy["ingress"][0]["from"][0]
    builders = Builders(Installation("worker:1", "operator:1", "scheduler:9002", "scheduler:9004"))
    body = yaml.safe_load((CHART / "examples/cpu.yaml").read_text())
    body["metadata"] |= {"namespace": "default", "uid": "1"}
    given = EcoServeCluster.model_validate(body)
    gateway = next(o for o in builders.objects(given) if o["kind"] == "Deployment")
    for pod in (builders.worker(given, "smollm2-0"), gateway["spec"]["template"]):
        labels = pod["metadata"]["labels"]
        assert peer["podSelector"]["matchLabels"].items() <= labels.items()
        (requirement,) = peer["podSelector"]["matchExpressions"]
        assert labels[requirement["key"]] in requirement["values"]
    assert peer["namespaceSelector"] == {}
    ports = {port["port"] for port in policy["ingress"][0]["ports"]}
    assert ports == {9002, 9004}
    narrow = one(rendered("namespaced"), "NetworkPolicy")["spec"]["ingress"][0]["from"][0]
    (requirement,) = narrow["namespaceSelector"]["matchExpressions"]
    assert requirement["values"] == ["one", "two"]


def test_the_test_pod_runs_python_that_compiles() -> None:
    for name in VARIANTS:
        item = one(rendered(name), "Pod")["spec"]["containers"][0]
        compile(item["args"][0], "test", "exec")
        assert "http://eco.system.svc:9003/state" in item["args"][0]


# --- what it grants ------------------------------------------------------------------------------


def rules(objects: list[Json]) -> list[Json]:
    return [rule for o in objects if o["kind"] in ("Role", "ClusterRole") for rule in o["rules"]]


@pytest.mark.parametrize("name", VARIANTS)
def test_nothing_is_granted_wholesale(name: str) -> None:
    for rule in rules(rendered(name)):
        every = [*rule["apiGroups"], *rule["resources"], *rule["verbs"]]
        assert "*" not in every
        assert not {"pods/exec", "roles", "rolebindings"} & set(rule["resources"])
        if "secrets" in rule["resources"] and "resourceNames" not in rule:
            # Certificates are written there; whoever else's Secrets are, they are not removed.
            assert set(rule["verbs"]) <= {"get", "list", "watch", "create", "patch"}
        assert not {"escalate", "bind", "impersonate", "deletecollection"} & set(rule["verbs"])


@pytest.mark.parametrize("name", VARIANTS)
def test_rights_are_bound_to_the_operator_where_it_works(name: str) -> None:
    objects = rendered(name)
    account = one(objects, "ServiceAccount")["metadata"]["name"]
    pod = operator_pod(objects)["spec"]
    assert pod["serviceAccountName"] == account
    bindings = [o for o in objects if o["kind"].endswith("RoleBinding")]
    for binding in bindings:
        (subject,) = binding["subjects"]
        assert (subject["name"], subject["namespace"]) == (account, "system")
        role = one(
            [
                o
                for o in objects
                if o["metadata"].get("namespace") == binding["metadata"].get("namespace")
            ],
            binding["roleRef"]["kind"],
            binding["roleRef"]["name"],
        )
        assert role["rules"]
    namespaces = VARIANTS[name].get("namespaces", [])
    assert [o["kind"] for o in objects if o["kind"].startswith("Cluster")] == (
        [] if namespaces else ["ClusterRole", "ClusterRoleBinding"]
    )
    where = {o["metadata"].get("namespace") for o in bindings}
    assert where == {"system", *(namespaces or [None])}


def test_optional_rights_come_with_their_values() -> None:
    def groups(name: str) -> set[str]:
        return set(itertools.chain.from_iterable(r["apiGroups"] for r in rules(rendered(name))))

    optional = {"monitoring.coreos.com", "inference.networking.k8s.io", "discovery.k8s.io"}
    assert not groups("default") & optional
    assert groups("all") >= optional
    assert groups("all, namespaced") >= optional


# --- what it refuses -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"image": "x"}, "image"),
        ({"images": {"operator": "no spaces"}}, "operator"),
        ({"images": {"worker": ""}}, "worker"),
        ({"images": {"pullPolicy": "Sometimes"}}, "pullPolicy"),
        ({"namespaces": ["Upper"]}, "namespaces"),
        ({"namespaces": ["a", "a"]}, "namespaces"),
        ({"controller": {"resources": {"limits": {"memory": "much"}}}}, "memory"),
        ({"scheduler": {"replicas": 2}}, "replicas"),
        ({"monitoring": {"enabled": "yes"}}, "enabled"),
        ({"monitoring": {"interval": "often"}}, "interval"),
        ({"networkPolicy": {"prometheus": [{}]}}, "prometheus"),
        ({"networkPolicy": {"gateways": [{"pods": {}}]}}, "gateways"),
        ({"serviceAccount": {"name": "Not A Name"}}, "name"),
        ({"mtls": {"authority": "Not A Name"}}, "authority"),
        ({"tolerations": "none"}, "tolerations"),
    ],
)
def test_bad_values_are_named(values: Json, field: str) -> None:
    done = helm("template", "eco", str(CHART), values=values)
    assert done.returncode != 0
    assert field in done.stderr


@pytest.mark.parametrize(
    "image",
    [
        "ecoserve-operator:0.1.0",
        "localhost/ecoserve:dev",
        "registry.example.com:5000/team/ecoserve:v1.2",
        "ecoserve@sha256:" + "0" * 64,
        "r.example.com/e:1@sha256:" + "a" * 64,
    ],
)
def test_images_by_tag_or_digest(image: str) -> None:
    done = helm("template", "eco", str(CHART), values={"images": {"operator": image}})
    assert done.returncode == 0, done.stderr


def test_the_notes_name_what_there_is() -> None:
    done = helm("install", "eco", str(CHART), "-n", "system", "--dry-run=client", values={})
    assert done.returncode == 0, done.stderr
    notes = done.stdout.partition("NOTES:")[2]
    example = yaml.safe_load((CHART / "examples/cpu.yaml").read_text())
    name = example["metadata"]["name"]
    assert f"service/{name} 8000:80" in notes
    assert f'"model": "{example["spec"]["model"]["name"]}"' in notes
    assert "deployment/eco" in notes
