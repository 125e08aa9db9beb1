"""kubectl and Helm on the cluster that ``KUBECONFIG`` names."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

Json = dict[str, Any]

ROOT = Path(__file__).parents[2]
CHART = ROOT / "charts/ecoserve"
HOW = (
    "KUBECONFIG is not set: these tests need a cluster that has the images, such as kind's after "
    "`kind load docker-image`; they make namespaces, nodes and CRDs in it"
)
DEADLINE = 180.0  # seconds for whatever is waited for


def miss(why: str) -> None:
    """Skips the test, or fails it in CI."""
    (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(why)


def until(what: Callable[[], Any], why: str, seconds: float = DEADLINE) -> Any:
    """Polls until ``what()`` is true; returns its value."""
    end = time.monotonic() + seconds
    while not (value := what()):
        if time.monotonic() > end:
            raise AssertionError(f"not within {seconds:.0f} s: {why}")
        time.sleep(0.3)
    return value


@dataclass(frozen=True)
class Kube:
    """``kubectl`` and ``helm`` are paths, ``environment`` is what they run with."""

    kubectl: str
    helm_path: str
    environment: Mapping[str, str] = field(repr=False)

    def run(
        self,
        *command: str,
        stdin: str | None = None,
        check: bool = True,
        seconds: float = DEADLINE,
    ) -> str:
        """Runs a command; returns what it printed. A failure raises with what it said unless
        ``check`` is off."""
        done = subprocess.run(
            command,
            env=dict(self.environment),
            input=stdin,
            capture_output=True,
            text=True,
            timeout=seconds,
        )
        if check and done.returncode:
            raise AssertionError(f"{' '.join(command)[:300]}: {done.stderr or done.stdout}")
        return done.stdout

    def ctl(self, *arguments: str, **options: Any) -> str:
        """kubectl."""
        return self.run(self.kubectl, *arguments, **options)

    def helm(self, *arguments: str, **options: Any) -> str:
        """Helm."""
        return self.run(self.helm_path, *arguments, **options)

    def apply(self, *manifests: Json) -> None:
        """Server-side apply, in order."""
        text = yaml.safe_dump_all(manifests)
        self.ctl("apply", "--server-side", "--force-conflicts", "-f", "-", stdin=text)

    def items(self, kind: str, namespace: str, *, selector: str = "") -> list[Json]:
        """The objects of a kind in a namespace; empty: of those that have none, or of all."""
        where = ("-n", namespace) if namespace else ("-A",)
        labels = ("-l", selector) if selector else ()
        text = self.ctl("get", kind, *where, *labels, "-o", "json")
        found: list[Json] = json.loads(text)["items"]
        return found

    def get(self, kind: str, name: str, namespace: str = "") -> Json | None:
        """An object, None if there is none."""
        where = ("-n", namespace) if namespace else ()
        text = self.ctl("get", kind, name, *where, "--ignore-not-found", "-o", "json")
        return json.loads(text) if text.strip() else None

    def named(self, kind: str, name: str, namespace: str = "") -> Json:
        """An object that is there."""
        found = self.get(kind, name, namespace)
        assert found is not None, f"there is no {kind} {name}"
        return found

    def namespace(self, name: str, *, restricted: bool = True) -> None:
        """Makes a namespace in which Pods must be ``restricted``."""
        labels = {"pod-security.kubernetes.io/enforce": "restricted"} if restricted else {}
        metadata = {"name": name, "labels": labels}
        self.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": metadata})

    def clear_namespace(self, name: str) -> None:
        """Deletes the EcoServeClusters of a namespace and waits until its Pods are gone: those that
        Kubernetes finds while it deletes the namespace, it looks for again only after half of the
        time that they may take."""
        for what in (("esc", "--all"), ("pods", "-l", "!app.kubernetes.io/name")):
            self.ctl("-n", name, "delete", *what, "--timeout=60s", check=False)
        until(lambda: not self.items("pods", name), f"Pods of {name} do not end")

    def drop_namespace(self, name: str) -> None:
        """Deletes a namespace with all that is in it, and waits until it is gone."""
        self.ctl("delete", "namespace", name, "--ignore-not-found", "--timeout=180s", seconds=200)


def connect(folder: Path, namespace: str = "default") -> Kube:
    """The cluster of ``KUBECONFIG``; skips the test where none is named, or fails it in CI. The
    file is copied to ``folder``, with another namespace for what says none."""
    if "KUBECONFIG" not in os.environ:
        miss(HOW)
    more = os.environ.get("KUBEBUILDER_ASSETS", "")
    path = os.pathsep.join(filter(None, (more, os.environ["PATH"])))
    found = {name: shutil.which(name, path=path) for name in ("kubectl", "helm")}
    for name, place in found.items():
        if place is None:
            miss(f"{name} is neither on PATH nor in KUBEBUILDER_ASSETS")
    config = folder / "kubeconfig"
    environment = {
        **os.environ,
        "PATH": path,
        "KUBECONFIG": str(config),
        "HOME": str(folder),
        "KUBECTL_KUBERC": "false",
    }
    kube = Kube(str(found["kubectl"]), str(found["helm"]), environment)
    given = {**environment, "KUBECONFIG": os.environ["KUBECONFIG"]}
    text = Kube(kube.kubectl, "", given).ctl("config", "view", "--raw", "--flatten")
    config.touch(mode=0o600)
    config.write_text(text)
    kube.ctl("config", "set-context", "--current", f"--namespace={namespace}")
    return kube


@dataclass(frozen=True)
class Images:
    """What the cluster's nodes have: ``operator`` of Dockerfile.operator, ``worker`` of
    Dockerfile.worker for CPUs with the small model in it (empty: none)."""

    operator: str
    worker: str


@dataclass
class Release:
    """The chart, installed or not."""

    kube: Kube
    images: Images
    namespace: str
    values: Json = field(default_factory=dict)
    name: str = "ecoserve"

    def install(self) -> None:
        """Installs it and waits until it is ready."""
        self.kube.apply(*crds())
        self.kube.namespace(self.namespace)
        self._helm("install")

    def upgrade(self, **values: Any) -> None:
        """Upgrades it to other values and waits until it is ready."""
        self.values = {**self.values, **values}
        self._helm("upgrade")

    def uninstall(self) -> None:
        """Uninstalls it, if it is installed, and waits until its objects are gone."""
        self.kube.helm(
            *("uninstall", self.name, "-n", self.namespace),
            *("--ignore-not-found", "--cascade", "foreground", "--wait", "--timeout", "2m"),
        )

    def pod(self) -> Json:
        """The operator's Pod, one that is not about to end."""
        found = self.kube.items(
            "pods", self.namespace, selector="app.kubernetes.io/component=operator"
        )
        (pod,) = [pod for pod in found if "deletionTimestamp" not in pod["metadata"]]
        return pod

    def ready(self) -> None:
        """Waits until the operator's Pod is."""
        self.kube.ctl(
            *("-n", self.namespace, "rollout", "status", f"deployment/{self.name}", "--timeout=2m")
        )

    def _helm(self, what: str) -> None:
        images = {"operator": self.images.operator, "worker": self.images.operator}
        self.kube.helm(
            *(what, self.name, str(CHART), "-n", self.namespace, "--values", "-"),
            *("--wait", "--timeout", "3m"),
            stdin=json.dumps({"images": images, **self.values}),
            seconds=200,
        )


@contextmanager
def installed(kube: Kube, images: Images, **values: Any) -> Iterator[Release]:
    """The chart in a namespace of its own, which goes with it."""
    release = Release(kube, images, f"system-{uuid.uuid4().hex[:6]}", values)
    try:
        release.install()
        yield release
    finally:
        release.uninstall()
        kube.drop_namespace(release.namespace)


def crds() -> list[Json]:
    """The chart's CRDs."""
    return [yaml.safe_load(path.read_text()) for path in sorted((CHART / "crds").glob("*.yaml"))]


def conditions(item: Json) -> dict[str, str]:
    """The states of an object's conditions, by type."""
    return {c["type"]: c["status"] for c in item.get("status", {}).get("conditions", ())}


def identity(pods: Sequence[Json]) -> dict[str, tuple[str, str | None]]:
    """UIDs and start times of Pods, by name."""
    return {
        pod["metadata"]["name"]: (pod["metadata"]["uid"], pod["status"].get("startTime"))
        for pod in pods
    }
