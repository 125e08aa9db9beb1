"""Under load: the API server is away, controller and scheduler are killed, workers come and go."""

from __future__ import annotations

import json
import os
import random
from functools import partial

import pytest

from e2e.kube.kube import Images, Json, Kube, Release, identity, until
from e2e.kube.world import Load, gateway_ready, pod, script, settle, standins, workers

KILLS = 30 if os.environ.get("ECOSERVE_SOAK") else 4
VICTIMS = ("controller", "pod", "scheduler")
PORT = 6443

pytestmark = pytest.mark.timeout(3600 if os.environ.get("ECOSERVE_SOAK") else 600)


def restarts(item: Json) -> int:
    return sum(status["restartCount"] for status in item["status"].get("containerStatuses", ()))


def test_up_and_down_and_a_rollout(
    kube: Kube, release: Release, namespace: str, images: Images
) -> None:
    kube.apply(standins("demo", namespace, images, 1))
    settle(kube, namespace, "demo", 1)
    gateway_ready(kube, namespace, "demo")
    load = Load(kube, images, namespace, "demo")
    load.start()
    for replicas in (2, 1):
        kube.ctl("-n", namespace, "scale", "esc/demo", f"--replicas={replicas}")
        before = identity(settle(kube, namespace, "demo", replicas))
        load.goes_on()
    env = '{"spec": {"engine": {"env": [{"name": "ROLLED", "value": "1"}]}}}'
    kube.ctl("-n", namespace, "patch", "esc", "demo", "--type=merge", "-p", env)
    until(
        lambda: not identity(workers(kube, namespace, "demo")).items() & before.items(),
        "the worker is not replaced",
    )
    settle(kube, namespace, "demo", 1)
    load.goes_on()
    load.stop()


def test_kills_during_splits_and_merges(
    kube: Kube, release: Release, namespace: str, images: Images
) -> None:
    kube.apply(standins("demo", namespace, images, 3))
    settle(kube, namespace, "demo", 3)
    gateway_ready(kube, namespace, "demo")
    load = Load(kube, images, namespace, "demo")
    load.start()
    steps = ((7, (4, 3)), (3, (3,)))
    for number in range(KILLS):
        replicas, sizes = steps[number % 2]
        kube.ctl("-n", namespace, "scale", "esc/demo", f"--replicas={replicas}")
        # Somewhere amid the work.
        some = random.randrange(3, 8)
        until(partial(reached, kube, namespace, some, replicas), "nothing happens")
        kill(kube, release, VICTIMS[number % len(VICTIMS)])
        settle(kube, namespace, "demo", *sizes)
        load.goes_on()
    load.stop()
    assert not any(restarts(worker) for worker in workers(kube, namespace, "demo"))


def reached(kube: Kube, namespace: str, *counts: int) -> bool:
    """Whether there are so many workers."""
    return len(workers(kube, namespace, "demo")) in counts


def kill(kube: Kube, release: Release, victim: str) -> None:
    """Ends a container of the operator, or all of its Pod without a warning."""
    before = release.pod()
    name = before["metadata"]["name"]
    where = ("-n", release.namespace)
    if victim == "pod":
        kube.ctl(*where, "delete", "pod", name, "--force", "--grace-period=0")
        release.ready()
        return
    # Nothing but what it handles reaches the first process of a container from within.
    kube.ctl(*where, "exec", name, "-c", victim, "--", "sh", "-c", "kill 1")
    until(lambda: restarts(release.pod()) > restarts(before), f"no new {victim}")


def test_the_api_server_is_away(
    kube: Kube, release: Release, namespace: str, images: Images
) -> None:
    kube.apply(standins("demo", namespace, images, 2))
    settle(kube, namespace, "demo", 2)
    gateway_ready(kube, namespace, "demo")
    proxied(kube, release, images)
    before = identity(settle(kube, namespace, "demo", 2))
    load = Load(kube, images, namespace, "demo")
    load.start()
    proxy = ("-n", release.namespace, "exec", "api-proxy", "--")

    # It hangs: connections stay, nothing comes.
    kube.ctl(*proxy, "sh", "-c", "kill -STOP $(cat /tmp/pid)")
    renewed = lease(kube, release)
    kube.ctl("-n", namespace, "scale", "esc/demo", "--replicas=3")
    load.goes_on(100)
    assert lease(kube, release) == renewed, "the controller still reaches the API server"
    assert identity(workers(kube, namespace, "demo")) == before
    kube.ctl(*proxy, "sh", "-c", "kill -CONT $(cat /tmp/pid)")
    after = identity(settle(kube, namespace, "demo", 3))
    assert before.items() <= after.items()

    # It is gone: connections break, new ones are refused.
    kube.ctl(*proxy, "sh", "-c", "kill -KILL $(cat /tmp/pid)", check=False)
    kube.ctl("-n", release.namespace, "delete", "pod", "api-proxy")
    renewed = lease(kube, release)
    gone = sorted(after)[0]
    kube.ctl("-n", namespace, "delete", "pod", gone, "--wait=false")
    load.goes_on(100)
    assert lease(kube, release) == renewed, "the controller still reaches the API server"
    start_proxy(kube, release, images)
    settle(kube, namespace, "demo", 3)
    survivors = identity(workers(kube, namespace, "demo"))
    assert len(survivors.items() & after.items()) == 2
    load.stop()


def lease(kube: Kube, release: Release) -> str:
    item = kube.named("lease", release.name, release.namespace)
    return str(item["spec"]["renewTime"])


def start_proxy(kube: Kube, release: Release, images: Images) -> None:
    """A proxy to the API server whose process is not its Pod's first, so that it can be halted."""
    command = ["sh", "-c", '"$@" & echo $! > /tmp/pid; wait', "sh", *script("proxy"), str(PORT)]
    kube.apply(pod("api-proxy", release.namespace, images, command))
    kube.ctl("-n", release.namespace, "wait", "pod/api-proxy", "--for=condition=Ready")


def proxied(kube: Kube, release: Release, images: Images) -> None:
    """Has the controller reach the API server by a proxy alone."""
    start_proxy(kube, release, images)
    kube.apply(
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": "api-proxy", "namespace": release.namespace},
            "spec": {
                "selector": {"app": "api-proxy"},
                "ports": [{"port": 443, "targetPort": PORT}],
            },
        }
    )
    ip = kube.named("service", "api-proxy", release.namespace)["spec"]["clusterIP"]
    host = "kubernetes.default.svc"  # a name that is in the API server's certificate
    environment = [
        {"name": "KUBERNETES_SERVICE_HOST", "value": host},
        {"name": "KUBERNETES_SERVICE_PORT", "value": "443"},
    ]
    patch = {
        "hostAliases": [{"ip": ip, "hostnames": [host]}],
        "containers": [{"name": "controller", "env": environment}],
    }
    kube.ctl(
        *("-n", release.namespace, "patch", "deployment", release.name, "-p"),
        json.dumps({"spec": {"template": {"spec": patch}}}),
    )
    release.ready()
