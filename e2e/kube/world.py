"""What the tests put into the cluster: EcoServeClusters of stand-ins, clients, other Pods."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from e2e.kube.kube import Images, Json, Kube, conditions, until

PODS = Path(__file__).parent / "pods"
WORKERS = "app.kubernetes.io/component=worker"


def script(name: str) -> list[str]:
    """The command that runs a script of ``pods/`` in the operator's image."""
    return ["python", "-c", (PODS / f"{name}.py").read_text()]


def pod(
    name: str,
    namespace: str,
    images: Images,
    command: Sequence[str],
    *,
    labels: dict[str, str] | None = None,
) -> Json:
    """A Pod of the operator's image, as ``restricted`` wants it."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": namespace, "labels": labels or {"app": name}},
        "spec": {
            "restartPolicy": "Never",
            "automountServiceAccountToken": False,
            "terminationGracePeriodSeconds": 1,
            "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
            "containers": [
                {
                    "name": "main",
                    "image": images.operator,
                    "imagePullPolicy": "IfNotPresent",
                    "command": list(command),
                    "securityContext": {
                        "allowPrivilegeEscalation": False,
                        "capabilities": {"drop": ["ALL"]},
                    },
                }
            ],
        },
    }


def standins(name: str, namespace: str, images: Images, replicas: int, **spec: Any) -> Json:
    """An EcoServeCluster of workers without an engine; they start in a second or two."""
    resources = {"requests": {"cpu": "20m", "memory": "96Mi"}, "limits": {"memory": "384Mi"}}
    worker = {"name": "worker", "command": script("standin")}
    return {
        "apiVersion": "ecoserve.io/v1alpha1",
        "kind": "EcoServeCluster",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {
            "model": {"name": "m", "source": {"image": {"path": "/tmp"}}},
            "slo": {"ttft": "10s", "tpot": "500ms"},
            "device": {"type": "cpu"},
            "minReplicas": 1,
            "maxReplicas": 16,
            "replicas": replicas,
            "macro": {"lower": 3, "upper": 6, "mergeCooldown": "0s"},
            "engine": {
                "image": images.operator,
                "imagePullPolicy": "IfNotPresent",
                "resources": resources,
                "sharedMemory": "16Mi",
            },
            "podTemplate": {"spec": {"containers": [worker]}},
            "gateway": {"replicas": 1},
            "drain": {"timeout": "60s"},
            **spec,
        },
    }


def workers(kube: Kube, namespace: str, cluster: str) -> list[Json]:
    """The worker Pods of a cluster."""
    return kube.items("pods", namespace, selector=f"{WORKERS},ecoserve.io/cluster={cluster}")


def settled(kube: Kube, namespace: str, cluster: str, *sizes: int) -> bool:
    """Whether macro instances of these sizes run, and nothing else does, by what the cluster, its
    MacroInstances and the labels and conditions of its Pods say."""
    item = kube.named("esc", cluster, namespace)
    status = item.get("status", {})
    if status.get("observedGeneration") != item["metadata"]["generation"]:
        return False
    selector = f"ecoserve.io/cluster={cluster}"
    macros = kube.items("mi", namespace, selector=selector)
    wanted = {macro["metadata"]["name"]: macro["spec"]["replicas"] for macro in macros}
    found = dict.fromkeys(wanted, 0)
    for worker in workers(kube, namespace, cluster):
        macro = worker["metadata"]["labels"].get("ecoserve.io/macro-instance")
        if conditions(worker).get("Ready") != "True" or "deletionTimestamp" in worker["metadata"]:
            return False
        found[macro] = found.get(macro, 0) + 1
    return bool(
        sorted(wanted.values()) == sorted(sizes)
        and found == wanted
        and {group["name"]: group["replicas"] for group in status.get("groups", ())} == wanted
        and status.get("readyReplicas") == status.get("updatedReplicas") == sum(sizes)
        and conditions(item).get("Ready") == "True"
    )


def settle(
    kube: Kube, namespace: str, cluster: str, *sizes: int, seconds: float = 180.0
) -> list[Json]:
    """Waits until that is so; returns the worker Pods."""
    try:
        until(lambda: settled(kube, namespace, cluster, *sizes), f"sizes {sizes}", seconds)
    except AssertionError as error:
        told = kube.ctl("-n", namespace, "describe", "esc", cluster)
        there = kube.ctl("-n", namespace, "get", "esc,mi,pods", "-o", "wide")
        raise AssertionError(f"{error}\n{there}\n{told}") from None
    return workers(kube, namespace, cluster)


def gateway_ready(kube: Kube, namespace: str, cluster: str) -> None:
    """Waits until a cluster's gateway answers."""
    name = f"deployment/{cluster}-gateway"
    until(lambda: kube.get("deployment", f"{cluster}-gateway", namespace), "no gateway")
    kube.ctl("-n", namespace, "rollout", "status", name, "--timeout=2m")


def output(kube: Kube, namespace: str, name: str) -> str:
    """What a Pod has printed when it has ended well."""

    def ended() -> bool:
        phase = kube.named("pod", name, namespace)["status"].get("phase")
        if phase == "Failed":
            raise AssertionError(f"{name} failed: {kube.ctl('-n', namespace, 'logs', name)}")
        return bool(phase == "Succeeded")

    until(ended, f"{name} does not end")
    return kube.ctl("-n", namespace, "logs", name)


@dataclass
class Load:
    """A Pod that asks a cluster all the time."""

    kube: Kube
    images: Images
    namespace: str
    cluster: str
    model: str = "m"
    clients: int = 4
    tokens: int = 60
    name: str = "load"

    def start(self) -> None:
        """Begins, and waits for the first answers, plain and streamed."""
        url = f"http://{self.cluster}.{self.namespace}.svc/v1"
        command = [*script("load"), url, self.model, str(self.clients), str(self.tokens)]
        self.kube.apply(pod(self.name, self.namespace, self.images, command))
        until(lambda: self.told().get("stream") and self.told().get("plain"), "no answers")

    def told(self) -> Json:
        """What it last said."""
        lines = self.kube.ctl(
            *("-n", self.namespace, "logs", self.name, "--tail=1"), check=False
        ).splitlines()
        return json.loads(lines[-1]) if lines and lines[-1].startswith("{") else {}

    def goes_on(self, answers: int = 20) -> None:
        """Waits until so many more came, streams among them."""
        began = self.told()

        def more() -> bool:
            now = self.told()
            both = now["plain"] + now["stream"] - began["plain"] - began["stream"]
            return bool(both >= answers and now["stream"] > began["stream"])

        until(more, f"no more answers: {self.told()}")

    def stop(self) -> None:
        """Lets the last answers come; no request may have failed."""
        self.kube.ctl("-n", self.namespace, "exec", self.name, "--", "touch", "/tmp/stop")
        last = json.loads(output(self.kube, self.namespace, self.name).splitlines()[-1])
        self.kube.ctl("-n", self.namespace, "delete", "pod", self.name)
        assert last["ended"]
        assert not last["failures"], f"{last['failures']} failed, among them {last['failed']}"
