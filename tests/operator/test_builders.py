"""What is made of an EcoServeCluster beside its worker Pods, and what is true of all of it."""

from __future__ import annotations

import dataclasses
import json

import pytest
from ecoserve_operator.builders import Builders
from ecoserve_worker.options import parse

from tests.operator.built import (
    BUILDERS,
    INSTALLATION,
    SPECS,
    Json,
    cluster,
    container,
    objects,
    pods,
    worker,
)
from tests.operator.kube_api import ApiServer
from tests.operator.pod_security import violations

# --- all of them ---------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", SPECS)
def test_every_pod_is_restricted_and_writes_to_volumes_alone(spec: str) -> None:
    for pod in pods(spec):
        assert violations(pod["spec"]) == []
        for item in pod["spec"]["containers"]:
            if item["name"] != "sidecar":
                assert item["securityContext"]["readOnlyRootFilesystem"] is True
        assert pod["spec"]["automountServiceAccountToken"] is False


def test_the_check_itself_finds_violations() -> None:
    spec = worker()["spec"]
    assert violations({**spec, "hostNetwork": True}) == ["hostNetwork"]
    assert violations({**spec, "volumes": [{"name": "x", "hostPath": {}}]}) == ["volumes[x]"]
    assert violations({**spec, "securityContext": {}}) == [
        "containers[worker].runAsNonRoot",
        "containers[worker].seccompProfile",
    ]
    bare = {**container({"spec": spec}), "securityContext": {"privileged": True}}
    assert violations({**spec, "containers": [bare]}) == [
        "containers[worker].privileged",
        "containers[worker].allowPrivilegeEscalation",
        "containers[worker].capabilities.drop",
    ]


@pytest.mark.parametrize("spec", SPECS)
def test_objects_are_the_clusters_own(spec: str) -> None:
    made = BUILDERS.objects(cluster(spec))
    names = [(item["kind"], item["metadata"]["name"]) for item in made]
    assert len(names) == len(set(names))
    for item in made:
        metadata = item["metadata"]
        assert metadata["namespace"] == "default"
        assert metadata["labels"]["ecoserve.io/cluster"] == "demo"
        (owner,) = metadata["ownerReferences"]
        assert owner["kind"] == "EcoServeCluster"
        assert owner["controller"] is True


@pytest.mark.parametrize("spec", SPECS)
def test_builders_are_pure(spec: str) -> None:
    given = cluster(spec)
    before = given.model_dump_json()
    first = json.dumps([BUILDERS.worker(given, "demo-0"), BUILDERS.objects(given)], sort_keys=True)
    again = json.dumps([BUILDERS.worker(given, "demo-0"), BUILDERS.objects(given)], sort_keys=True)
    assert first == again
    assert given.model_dump_json() == before


def test_the_api_server_takes_them_in_a_restricted_namespace(
    kube: ApiServer, namespace: str
) -> None:
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    kube.client.patch(
        f"/api/v1/namespaces/{namespace}",
        json={"metadata": {"labels": labels}},
        headers={"Content-Type": "application/merge-patch+json"},
    ).raise_for_status()
    account = {"metadata": {"name": "demo-worker"}}
    kube.client.post(f"/api/v1/namespaces/{namespace}/serviceaccounts", json=account)
    kinds = {
        "Pod": "api/v1/pods",
        "ServiceAccount": "api/v1/serviceaccounts",
        "ConfigMap": "api/v1/configmaps",
        "Service": "api/v1/services",
        "Deployment": "apis/apps/v1/deployments",
        "PodDisruptionBudget": "apis/policy/v1/poddisruptionbudgets",
        "NetworkPolicy": "apis/networking.k8s.io/v1/networkpolicies",
        "EndpointSlice": "apis/discovery.k8s.io/v1/endpointslices",
    }
    refused = {}
    for name in SPECS:
        given = cluster(name)
        for item in [BUILDERS.worker(given, "demo-0"), *BUILDERS.objects(given)]:
            if item["kind"] not in kinds or (name, item["kind"]) == ("on GPUs", "Pod"):
                continue  # priority and runtime classes are looked up, and are not there
            item["metadata"]["namespace"] = namespace
            group, _, plural = kinds[item["kind"]].rpartition("/")
            answer = kube.client.post(
                f"/{group}/namespaces/{namespace}/{plural}",
                params={"dryRun": "All", "fieldValidation": "Strict"},
                json=item,
            )
            warnings = answer.headers.get_list("warning")
            known = answer.is_error and answer.json()["reason"] == "AlreadyExists"
            if warnings or (answer.is_error and not known):
                refused[name, item["kind"]] = (answer.text, warnings)
    assert refused == {}


# --- the gateway ---------------------------------------------------------------------------------


def test_gateway_with_tls_and_keys() -> None:
    made = objects("with TLS and keys")
    deployment = made["Deployment/demo-gateway"]["spec"]
    assert deployment["replicas"] == 3
    assert deployment["strategy"]["rollingUpdate"]["maxUnavailable"] == 0
    pod = deployment["template"]
    assert deployment["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    assert pod["spec"]["priorityClassName"] == "high"
    volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
    assert volumes["tls"]["secret"] == {"secretName": "cert"}
    assert volumes["api-keys"]["secret"] == {"secretName": "keys"}
    service = made["Service/demo"]
    assert service["metadata"]["annotations"] == {"lb": "internal"}
    assert service["spec"]["type"] == "LoadBalancer"
    assert service["spec"]["ports"][0]["port"] == 8443
    assert BUILDERS.url(cluster("with TLS and keys")) == "https://demo.default.svc:8443/v1"
    files = made["ConfigMap/demo-gateway"]["data"]
    assert json.loads(files["tls.json"])["resources"][0]["name"] == "gateway"
    assert "keys.json" not in json.dumps(
        json.loads(files["envoy.json"])["static_resources"]["clusters"]
    )
    assert made["Deployment/demo-gateway"]["spec"]["template"]["spec"]["containers"][0][
        "image"
    ] == ("operator:1")


def test_mutual_tls_is_off_by_its_switch_only() -> None:
    for spec in SPECS:
        worker_pod = worker(spec)
        made = objects(spec)
        mounted = {v["name"]: v for v in worker_pod["spec"]["volumes"]}["mtls"]
        assert mounted["secret"] == {"secretName": "demo-worker-tls"}
        folder = parse(container(worker_pod)["args"]).tls_files
        assert {"name": "mtls", "mountPath": str(folder), "readOnly": True} in container(
            worker_pod
        )["volumeMounts"]
        if "Deployment/demo-gateway" not in made:
            continue
        pod = made["Deployment/demo-gateway"]["spec"]["template"]
        mounted = {v["name"]: v for v in pod["spec"]["volumes"]}["mtls"]
        assert mounted["secret"] == {"secretName": "demo-gateway-tls"}
        mounts = {m["name"]: m["mountPath"] for m in container(pod, "envoy")["volumeMounts"]}
        files = made["ConfigMap/demo-gateway"]["data"]
        for upstream in ("workers", "scheduler"):
            context = cluster_of(files, upstream)["transport_socket"]["typed_config"]
            tls = context["common_tls_context"]
            (identity,) = tls["tls_certificate_sds_secret_configs"]
            checks = tls["combined_validation_context"]
            trusted = checks["validation_context_sds_secret_config"]
            for secret in (identity, trusted):
                path = secret["sds_config"]["path_config_source"]["path"]
                text = files[path.removeprefix(f"{mounts['config']}/")]
                assert f"{mounts['mtls']}/" in text
    secure = cluster_of(objects()["ConfigMap/demo-gateway"]["data"], "scheduler")
    assert "ecoserve.system.svc" in json.dumps(secure["transport_socket"])
    assert json.dumps(secure["load_assignment"]).count("9004") == 1
    plain: Json = {"mtls": {"enabled": False}}
    assert "tls" not in json.dumps([worker(plain), objects(plain)])
    assert "9004" not in json.dumps([worker(plain), objects(plain)])
    assert BUILDERS.revision(cluster(plain)) != BUILDERS.revision(cluster())


def cluster_of(files: Json, name: str) -> Json:
    clusters = json.loads(files["envoy.json"])["static_resources"]["clusters"]
    return next(item for item in clusters if item["name"] == name)


def test_another_configuration_is_another_gateway_pod() -> None:
    def digest(spec: Json) -> str:
        template = objects({"gateway": spec})["Deployment/demo-gateway"]["spec"]["template"]
        return str(template["metadata"]["annotations"]["ecoserve.io/config"])

    assert digest({}) == digest({"replicas": 4})
    assert digest({}) != digest({"bodyLimit": "1Mi"})


def test_a_relay_shares_its_sockets_with_envoy_and_nothing_else() -> None:
    made = objects("with a relay")
    pod = made["Deployment/demo-gateway"]["spec"]["template"]
    envoy, relay = container(pod, "envoy"), container(pod, "relay")
    assert relay["image"] == envoy["image"]
    assert relay["resources"] == {"requests": {"cpu": "2"}}
    (mount,) = relay["volumeMounts"]
    assert mount in envoy["volumeMounts"]
    assert relay["args"][:2] == ["--sockets", mount["mountPath"]]
    config = json.loads(made["ConfigMap/demo-gateway"]["data"]["envoy.json"])
    assert f"{mount['mountPath']}/" in json.dumps(config)
    assert "relay" not in json.dumps(objects()["Deployment/demo-gateway"])


def test_urls() -> None:
    assert BUILDERS.url(cluster()) == "http://demo.default.svc/v1"
    assert BUILDERS.url(cluster({"gateway": {"service": {"port": 81}}})) == (
        "http://demo.default.svc:81/v1"
    )
    tls = {"tls": {"secretName": "x"}}
    assert BUILDERS.url(cluster({"gateway": tls})) == "https://demo.default.svc/v1"


# --- the network ---------------------------------------------------------------------------------


def test_gateways_alone_reach_workers() -> None:
    policy = objects()["NetworkPolicy/demo-worker"]["spec"]
    assert policy["podSelector"]["matchLabels"].items() <= worker()["metadata"]["labels"].items()
    assert policy["policyTypes"] == ["Ingress"]
    (rule,) = policy["ingress"]
    (peer,) = rule["from"]
    gateway = objects()["Deployment/demo-gateway"]["spec"]["template"]["metadata"]["labels"]
    assert peer["podSelector"]["matchLabels"].items() <= gateway.items()
    assert [port["port"] for port in rule["ports"]] == [8000, 8001]


def test_peers() -> None:
    made = objects("with peers")
    _, foreign, metrics = made["NetworkPolicy/demo-worker"]["spec"]["ingress"]
    assert foreign["from"][0]["podSelector"]["matchLabels"] == {"app": "gw"}
    assert [port["port"] for port in foreign["ports"]] == [8000]
    assert metrics["from"][0]["namespaceSelector"]["matchLabels"] == {"name": "monitoring"}
    assert [port["port"] for port in metrics["ports"]] == [8001]
    clients, status = made["NetworkPolicy/demo-gateway"]["spec"]["ingress"]
    assert clients["from"][0]["podSelector"]["matchLabels"] == {"may": "ask"}
    assert status["from"] == metrics["from"]
    assert [port["port"] for port in status["ports"]] == [8081]
    assert objects()["NetworkPolicy/demo-gateway"]["spec"]["ingress"] == [
        {"ports": [{"protocol": "TCP", "port": 8080}]}
    ]


@pytest.mark.parametrize(
    ("replicas", "unavailable", "stay"), [(5, 1, 4), (5, 2, 3), (1, 1, 0), (0, 1, 0), (99, 1, 7)]
)
def test_the_budget_follows_the_size(replicas: int, unavailable: int, stay: int) -> None:
    spec = {"minReplicas": 0, "maxReplicas": 8, "replicas": replicas}
    made = objects({**spec, "disruption": {"maxUnavailable": unavailable}})
    budget = made["PodDisruptionBudget/demo-worker"]["spec"]
    assert budget["minAvailable"] == stay
    assert "maxUnavailable" not in budget


def test_what_is_switched_off_is_not_made() -> None:
    assert sorted(objects("bare")) == [
        "PodDisruptionBudget/demo-worker",
        "ServiceAccount/demo-worker",
    ]


def test_the_pool_needs_its_crd_and_a_scheduler() -> None:
    made = objects()
    pool = made["InferencePool/demo"]["spec"]
    assert pool["selector"]["matchLabels"].items() <= worker()["metadata"]["labels"].items()
    picker = pool["endpointPickerRef"]
    assert picker["name"] == "demo-picker"
    slice_ = made["EndpointSlice/demo-picker"]
    assert slice_["metadata"]["labels"]["kubernetes.io/service-name"] == picker["name"]
    assert slice_["endpoints"][0]["addresses"] == ["10.1.2.3"]
    assert "selector" not in made["Service/demo-picker"]["spec"]
    names = {port["name"] for port in made["Service/demo-picker"]["spec"]["ports"]}
    assert names == {port["name"] for port in slice_["ports"]}
    for change in ({"inference_pools": False}, {"scheduler_ip": None}):
        without = objects(builders=Builders(dataclasses.replace(INSTALLATION, **change)))
        assert not [name for name in without if "picker" in name or "Pool" in name]


def test_monitoring_finds_what_it_scrapes() -> None:
    made = objects({"monitoring": {"labels": {"release": "prometheus"}, "interval": "5s"}})
    monitor = made["PodMonitor/demo-worker"]
    assert monitor["metadata"]["labels"]["release"] == "prometheus"
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    assert endpoint["interval"] == "5s"
    assert endpoint["port"] in [port["name"] for port in container(worker())["ports"]]
    rules = made["PrometheusRule/demo"]["spec"]["groups"][0]["rules"]
    assert all('cluster="default/demo"' in rule["expr"] for rule in rules)
