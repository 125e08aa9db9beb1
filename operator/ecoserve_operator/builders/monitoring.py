"""Objects for the Prometheus operator: what it scrapes, and when it raises an alarm."""

from __future__ import annotations

from ecoserve.scaling.promql import promql
from ecoserve.scaling.queries import ANSWERED, SHED, VIOLATED
from ecoserve_operator.api import EcoServeCluster
from ecoserve_operator.builders import common
from ecoserve_operator.builders.common import GATEWAY, WORKER, Json
from ecoserve_operator.fields import format_duration


def objects(cluster: EcoServeCluster) -> list[Json]:
    """PodMonitors and the PrometheusRule; nothing if they are switched off."""
    if not cluster.spec.monitoring.enabled:
        return []
    components = (WORKER, GATEWAY) if cluster.spec.gateway.enabled else (WORKER,)
    return [*(_monitor(cluster, component) for component in components), _rules(cluster)]


def _metadata(cluster: EcoServeCluster, name: str, component: str) -> Json:
    more = cluster.spec.monitoring.labels
    return common.metadata(cluster, name, component, more=more)


def _monitor(cluster: EcoServeCluster, component: str) -> Json:
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PodMonitor",
        "metadata": _metadata(cluster, f"{cluster.metadata.name}-{component}", component),
        "spec": {
            "selector": {"matchLabels": common.selector(cluster, component)},
            "podTargetLabels": ["ecoserve.io/cluster", "ecoserve.io/macro-instance"],
            "podMetricsEndpoints": [
                {
                    "port": "health",
                    "path": "/metrics",
                    "interval": format_duration(cluster.spec.monitoring.interval),
                }
            ],
        },
    }


def _rules(cluster: EcoServeCluster) -> Json:
    name = cluster.metadata.name
    which = f'cluster="{common.key(cluster)}"'
    violated, answered, shed = (promql(query, which, 300.0) for query in (VIOLATED, ANSWERED, SHED))
    rules = [
        _alert(
            "EcoServeNoInstance",
            f"sum(ecoserve_instance_accepted{{{which}}}) == 0",
            "1m",
            "critical",
            f"No instance of {name} takes requests.",
        ),
        _alert(
            "EcoServeSloViolations",
            f"({violated} + {shed}) / ({answered} + {shed}) > 0.05",
            "10m",
            "warning",
            f"{name} breaks its promises of TTFT or TPOT, or turns away, "
            "{{ $value | humanizePercentage }} of its requests.",
        ),
        _alert(
            "EcoServeShedding",
            f"{shed} > 0",
            "5m",
            "warning",
            f"{name} turns requests away: " + "{{ $value | humanize }} a second.",
        ),
        _alert(
            "EcoServeSaturated",
            f"avg(ecoserve_instance_use{{{which}}}) > 0.95",
            "15m",
            "warning",
            f"{name} is at " + "{{ $value | humanizePercentage }} of what it can serve on time.",
        ),
    ]
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": _metadata(cluster, name, WORKER),
        "spec": {
            "groups": [{"name": f"ecoserve-{cluster.metadata.namespace}-{name}", "rules": rules}]
        },
    }


def _alert(name: str, expression: str, lasting: str, severity: str, summary: str) -> Json:
    return {
        "alert": name,
        "expr": expression,
        "for": lasting,
        "labels": {"severity": severity},
        "annotations": {"summary": summary},
    }
