"""Two hundred clusters of eight instances on nodes of KWOK's: what they cost the controller."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from e2e.kube.fake_gpus import fake_nodes
from e2e.kube.kube import Images, Json, Kube, Release, conditions, until
from e2e.kube.world import WORKERS, standins
from ecoserve.local.machine import free_ports

CLUSTERS, INSTANCES = 200, 8
QUIET_S = 60

pytestmark = [pytest.mark.soak, pytest.mark.timeout(3600)]

Figures = dict[tuple[str, frozenset[tuple[str, str]]], float]


@contextmanager
def metrics_of(release: Release) -> Iterator[str]:
    """The URL of the controller's metrics."""
    (port,) = free_ports(1)
    kube = release.kube
    command = [kube.kubectl, "-n", release.namespace, "port-forward", f"deployment/{release.name}"]
    process = subprocess.Popen(
        [*command, f"{port}:8081"], env=dict(kube.environment), stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        process.stdout.readline()
        yield f"http://127.0.0.1:{port}/metrics"
    finally:
        process.terminate()
        process.wait(10)


def figures(url: str) -> Figures:
    """All that the controller measures of itself."""
    text = httpx.get(url, timeout=30).raise_for_status().text
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def since(before: Figures, after: Figures) -> Figures:
    return {key: value - before.get(key, 0.0) for key, value in after.items()}


def by_label(found: Figures, name: str, label: str) -> dict[str, float]:
    """The samples of a metric by one of its labels, summed over the others."""
    sums: dict[str, float] = {}
    for (sample, labels), value in found.items():
        if sample == name:
            key = dict(labels)[label]
            sums[key] = sums.get(key, 0.0) + value
    return sums


def total(found: Figures, name: str) -> float:
    return sum(value for (sample, _), value in found.items() if sample == name)


def mean(found: Figures, name: str) -> float:
    return total(found, f"{name}_sum") / max(total(found, f"{name}_count"), 1.0)


def at_most(found: Figures, name: str, share: float) -> float:
    """The bucket's bound below which this share of the observations lies."""
    buckets = sorted(
        (float(le), count) for le, count in by_label(found, f"{name}_bucket", "le").items()
    )
    return next(le for le, count in buckets if count >= share * buckets[-1][1])


def ready(kube: Kube, namespace: str) -> int:
    return sum(conditions(i).get("Ready") == "True" for i in kube.items("esc", namespace))


def test_a_fleet_at_rest_costs_nothing(
    kube: Kube, release: Release, namespace: str, images: Images
) -> None:
    release.upgrade(controller={"resources": {"limits": {"memory": "2Gi"}}})
    with fake_nodes(kube, 20) as placement, metrics_of(release) as url:
        empty = figures(url)
        off = {"enabled": False}
        fleet = [
            standins(
                *(f"fleet-{number}", namespace, images, INSTANCES),
                placement=placement,
                gateway=off,
                mtls=off,
                macro={"lower": 4, "upper": 8},
            )
            for number in range(CLUSTERS)
        ]
        for body in fleet:
            body["spec"]["podTemplate"] = {}
        began = time.monotonic()
        kube.apply(*fleet)
        until(lambda: ready(kube, namespace) == CLUSTERS, "not all are ready", 1800)
        took = time.monotonic() - began
        assert len(kube.items("pods", namespace, selector=WORKERS)) == CLUSTERS * INSTANCES
        made = figures(url)

        quiet(url)
        before, at = figures(url), time.monotonic()
        until(lambda: time.monotonic() - at >= QUIET_S, "", QUIET_S + 10)
        after, minutes = figures(url), (time.monotonic() - at) / 60
        rest = since(before, after)
        calls = by_label(rest, "ecoserve_controller_api_calls_total", "method")

        at = time.monotonic()
        kube.ctl("-n", namespace, "scale", "esc/fleet-7", f"--replicas={INSTANCES + 1}")
        until(lambda: kube.get("pod", f"fleet-7-{INSTANCES}", namespace), "no new instance")
        reacted = time.monotonic() - at
        # While there is somebody to end their Pods.
        kube.ctl("-n", namespace, "delete", "esc", "--all", "--timeout=10m", seconds=660)
        until(lambda: not kube.items("pods", namespace), "Pods outlive their clusters", 600)

    name = "ecoserve_controller_reconcile_seconds"
    making = since(empty, made)
    calls_made = total(making, "ecoserve_controller_api_calls_total")
    found: Json = {
        "clusters": CLUSTERS,
        "instances": CLUSTERS * INSTANCES,
        "ready_s": round(took, 1),
        "calls_to_make_one": round(calls_made / CLUSTERS, 1),
        "reconcile_mean_s": round(mean(making, name), 4),
        "reconcile_p50_at_most_s": at_most(making, name, 0.5),
        "reconcile_p99_at_most_s": at_most(making, name, 0.99),
        "rest_calls_a_minute": {m: round(c / minutes, 1) for m, c in calls.items() if c},
        "rest_reconciles_a_minute": round(total(rest, f"{name}_count") / minutes, 1),
        "rest_reconcile_mean_s": round(mean(rest, name), 5),
        "rest_cpu_share": round(total(rest, "process_cpu_seconds_total") / minutes / 60, 3),
        "memory_mib": round(total(after, "process_resident_memory_bytes") / 2**20),
        "scale_to_new_pod_s": round(reacted, 2),
    }
    print(json.dumps(found, indent=2))
    if "FLEET_OUT" in os.environ:
        Path(os.environ["FLEET_OUT"]).write_text(json.dumps(found, indent=2) + "\n")
    # The lease is read and renewed; nothing else is asked, and nothing written.
    assert {method for method, count in calls.items() if count} <= {"GET", "PUT"}
    assert abs(calls["GET"] - calls["PUT"]) <= 1


def quiet(url: str) -> None:
    """Waits until the controller has nothing left to write."""
    seen: list[float] = []

    def still() -> bool:
        calls = by_label(figures(url), "ecoserve_controller_api_calls_total", "method")
        seen.append(sum(count for method, count in calls.items() if method not in ("GET", "PUT")))
        return len(seen) > 10 and len(set(seen[-10:])) == 1

    until(still, "it goes on writing", 600)
