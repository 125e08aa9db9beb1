"""Labels, annotations and names."""

from __future__ import annotations

import re
from collections.abc import Mapping

CLUSTER_LABEL = "ecoserve.io/cluster"
MACRO_LABEL = "ecoserve.io/macro-instance"
REVISION_LABEL = "ecoserve.io/revision"
LEAVING_SINCE = "ecoserve.io/leaving-since"
LEAVING_REASON = "ecoserve.io/leaving-reason"
GATE = "ecoserve.io/accepted"

WORKERS = "app.kubernetes.io/component=worker"


def tls_secret(cluster: str, component: str) -> str:
    """The name of the Secret with the certificate of a cluster's component."""
    return f"{cluster}-{component}-tls"


def identity(namespace: str, cluster: str, component: str) -> str:
    """The DNS name in the certificate of a cluster's component. No Service can have it, for it has
    a part more than theirs."""
    return f"{component}.{cluster}.{namespace}.svc"


def worker_selector(cluster: str) -> str:
    """The label selector of a cluster's worker Pods."""
    return f"{CLUSTER_LABEL}={cluster},{WORKERS}"


def pod_name(cluster: str, index: int) -> str:
    """The name of a worker Pod."""
    return f"{cluster}-{index}"


def index_of(name: str, labels: Mapping[str, str]) -> int | None:
    """The index in a worker Pod's name; None if it is no name of its cluster's."""
    match = re.fullmatch(re.escape(labels.get(CLUSTER_LABEL, "")) + r"-(\d{1,9})", name)
    return int(match[1]) if match else None
