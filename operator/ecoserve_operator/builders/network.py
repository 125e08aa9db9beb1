"""Who may connect to the Pods of a cluster, and how many workers may be away."""

from __future__ import annotations

from ecoserve_operator.api import EcoServeCluster
from ecoserve_operator.api.network import Peer
from ecoserve_operator.builders import common
from ecoserve_operator.builders.common import (
    GATEWAY,
    GATEWAY_HEALTH_PORT,
    GATEWAY_PORT,
    WORKER,
    WORKER_HEALTH_PORT,
    WORKER_PORT,
    Json,
)


def objects(cluster: EcoServeCluster) -> list[Json]:
    """The NetworkPolicies; none if they are switched off. The kubelet's probes always pass."""
    spec = cluster.spec
    if not spec.network_policy.enabled:
        return []
    own = [{"podSelector": {"matchLabels": common.selector(cluster, GATEWAY)}}]
    policy = spec.network_policy
    workers = [
        _rule(own, WORKER_PORT, WORKER_HEALTH_PORT),
        _rule(_peers(policy.gateways), WORKER_PORT),
        _rule(_peers(policy.prometheus), WORKER_HEALTH_PORT),
    ]
    found = [_policy(cluster, WORKER, workers)]
    if spec.gateway.enabled:
        anyone = {"ports": [_port(GATEWAY_PORT)]}
        gateways = [
            _rule(_peers(policy.clients), GATEWAY_PORT) if policy.clients else anyone,
            _rule(_peers(policy.prometheus), GATEWAY_HEALTH_PORT),
        ]
        found.append(_policy(cluster, GATEWAY, gateways))
    return found


def budget(cluster: EcoServeCluster) -> Json:
    """The PodDisruptionBudget of the workers.

    It says how many have to stay: for how many may go, Kubernetes would have to know how many there
    should be, which it asks a Pod's owner's /scale for, and a MacroInstance has none.
    """
    spec = cluster.spec
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": common.metadata(cluster, f"{cluster.metadata.name}-{WORKER}", WORKER),
        "spec": {
            "minAvailable": max(0, spec.desired - spec.disruption.max_unavailable),
            "selector": {"matchLabels": common.selector(cluster, WORKER)},
            # One that is not ready serves nobody.
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
        },
    }


def _policy(cluster: EcoServeCluster, component: str, rules: list[Json | None]) -> Json:
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": common.metadata(cluster, f"{cluster.metadata.name}-{component}", component),
        "spec": {
            "podSelector": {"matchLabels": common.selector(cluster, component)},
            "policyTypes": ["Ingress"],
            "ingress": [rule for rule in rules if rule is not None],
        },
    }


def _rule(peers: list[Json], *ports: int) -> Json | None:
    """None without peers: an empty ``from`` would let anyone in."""
    return {"from": peers, "ports": [_port(port) for port in ports]} if peers else None


def _port(port: int) -> Json:
    return {"protocol": "TCP", "port": port}


def _peers(peers: list[Peer]) -> list[Json]:
    return [peer.dump() for peer in peers]
