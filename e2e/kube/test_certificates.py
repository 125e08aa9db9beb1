"""Under load: certificates of gateways and workers are replaced."""

from __future__ import annotations

import base64

import pytest

from e2e.kube.kube import Images, Kube, Release, identity, until
from e2e.kube.world import Load, gateway_ready, settle, standins, workers

pytestmark = pytest.mark.timeout(600)

FILE = "/etc/ecoserve/mtls/tls.crt"
ROLES = ("gateway", "worker")


def test_certificates_rotate_under_load(
    kube: Kube, release: Release, namespace: str, images: Images
) -> None:
    kube.apply(standins("demo", namespace, images, 2))
    before = identity(settle(kube, namespace, "demo", 2))
    gateway_ready(kube, namespace, "demo")
    load = Load(kube, images, namespace, "demo")
    load.start()
    old = {role: certificate(kube, namespace, role) for role in ROLES}
    for role in ROLES:
        kube.ctl("-n", namespace, "delete", "secret", f"demo-{role}-tls")

    def made() -> bool:
        return all(certificate(kube, namespace, role) not in ("", old[role]) for role in ROLES)

    until(made, "no certificates are made")
    for role in ROLES:
        for pod in kube.items("pods", namespace, selector=f"app.kubernetes.io/component={role}"):
            name = pod["metadata"]["name"]
            # The kubelet takes a minute or two.
            until(
                lambda name=name, role=role: (
                    kube.ctl("-n", namespace, "exec", name, "--", "cat", FILE).strip()
                    == certificate(kube, namespace, role)
                ),
                f"{name} does not have its new certificate",
            )
    load.goes_on(100)
    load.stop()
    assert identity(workers(kube, namespace, "demo")) == before, "nothing was restarted"


def certificate(kube: Kube, namespace: str, role: str) -> str:
    """What is in the Secret; empty while there is none."""
    secret = kube.get("secret", f"demo-{role}-tls", namespace)
    return base64.b64decode(secret["data"]["tls.crt"]).decode().strip() if secret else ""
