"""A Prometheus in the cluster that scrapes what the chart's PodMonitor names, with its rules."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import yaml

from e2e.kube.kube import CHART, Json, Release, until
from e2e.kube.world import pod
from tests.scaling.prometheus_server import binary

NAME = "prometheus"
INTERVAL = "2s"
PEERS = [{"podSelector": {"matchLabels": {"app": NAME}}}]
"""For the chart's ``networkPolicy.prometheus``."""
RUN = f"""until [ -e /tmp/ready ]; do sleep 0.1; done
exec /tmp/{NAME} --config.file=/etc/{NAME}/{NAME}.yml --storage.tsdb.path=/tmp/data"""
PUT = f"cat > /tmp/{NAME} && chmod +x /tmp/{NAME} && touch /tmp/ready"


@dataclass
class Prometheus:
    """Runs in the release's namespace. Its program is this machine's own, put into a Pod of the
    operator's image: Debian's, or one that is linked statically."""

    release: Release

    @property
    def url(self) -> str:
        """Where the operator finds it."""
        return f"http://{NAME}.{self.release.namespace}.svc:9090"

    def start(self) -> None:
        """Starts it, without any history, and waits until it answers."""
        kube, namespace = self.release.kube, self.release.namespace
        program = Path(binary("prometheus"))
        kube.apply(*self._objects())
        running = "--for=jsonpath={.status.phase}=Running"
        kube.ctl("-n", namespace, "wait", f"pod/{NAME}", running, "--timeout=60s")
        with program.open("rb") as content:
            done = subprocess.run(
                [kube.kubectl, "-n", namespace, "exec", "-i", NAME, "--", "sh", "-c", PUT],
                env=dict(kube.environment),
                stdin=content,
                capture_output=True,
                text=True,
                timeout=180,
            )
        assert done.returncode == 0, done.stderr
        until(lambda: self._get("-/ready", check=False), "Prometheus does not answer")

    def kill(self) -> None:
        """Ends it, if it is there."""
        self.release.kube.ctl(
            *("-n", self.release.namespace, "delete", "pod", NAME, "--now", "--ignore-not-found")
        )

    def value(self, query: str) -> float | None:
        """The one sample that a query finds now, None if there is none."""
        found = json.loads(self._get(f"api/v1/query?query={quote(query)}"))["data"]["result"]
        return float(found[0]["value"][1]) if found else None

    def _get(self, path: str, *, check: bool = True) -> str:
        place = f"/api/v1/namespaces/{self.release.namespace}/pods/{NAME}:9090/proxy/{path}"
        return self.release.kube.ctl("get", "--raw", place, check=check)

    def _objects(self) -> list[Json]:
        namespace = self.release.namespace
        metadata = {"name": NAME, "namespace": namespace}
        body = pod(NAME, namespace, self.release.images, ["sh", "-c", RUN])
        body["spec"]["volumes"] = [{"name": "config", "configMap": {"name": NAME}}]
        (container,) = body["spec"]["containers"]
        container["volumeMounts"] = [{"name": "config", "mountPath": f"/etc/{NAME}"}]
        files = {
            f"{NAME}.yml": yaml.safe_dump(self._config()),
            "rules.yaml": (CHART / "rules.yaml").read_text(),
        }
        spec = {"selector": {"app": NAME}, "ports": [{"port": 9090}]}
        return [
            {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": files},
            {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": spec},
            body,
        ]

    def _config(self) -> Json:
        text = self.release.kube.helm(
            *("template", self.release.name, str(CHART), "-n", self.release.namespace),
            *("--show-only", "templates/podmonitor.yaml"),
            *("--set", f"monitoring.enabled=true,monitoring.interval={INTERVAL}"),
        )
        return {
            "global": {"evaluation_interval": INTERVAL},
            "rule_files": [f"/etc/{NAME}/rules.yaml"],
            "scrape_configs": self._scrapes(yaml.safe_load(text)["spec"]),
        }

    def _scrapes(self, monitor: Json) -> list[Json]:
        """What the Prometheus operator makes of a PodMonitor, for the Pods that there are now:
        Debian's build finds none by itself."""
        labels = monitor["selector"]["matchLabels"].items()
        pods = self.release.kube.items(
            "pods", self.release.namespace, selector=",".join(f"{k}={v}" for k, v in labels)
        )
        return [
            {
                "job_name": endpoint["port"],
                "honor_labels": endpoint.get("honorLabels", False),
                "metrics_path": endpoint["path"],
                "scrape_interval": endpoint["interval"],
                "static_configs": [
                    {
                        "targets": [f"{found['status']['podIP']}:{port['containerPort']}"],
                        "labels": {
                            "namespace": self.release.namespace,
                            "pod": found["metadata"]["name"],
                            "container": container["name"],
                        },
                    }
                    for found in pods
                    for container in found["spec"]["containers"]
                    for port in container["ports"]
                    if port["name"] == endpoint["port"]
                ],
            }
            for endpoint in monitor["podMetricsEndpoints"]
        ]
