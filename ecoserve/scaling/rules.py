"""Recording rules and alerts of all clusters, as the Helm chart ships them.

``python -m ecoserve.scaling.rules FILE`` writes them (``make rules``). The recorded series are what
the autoscaler goes by, for people: it asks for the raw ones itself and needs no rules.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import yaml

from ecoserve.scaling.promql import promql
from ecoserve.scaling.queries import (
    ACCEPTED,
    ANSWERED,
    LATE,
    ROUTED,
    SHED,
    TTFT,
    USE,
    VIOLATED,
    WAITING,
    Query,
)
from ecoserve.scaling.signals import IDLE_USE

FRESH_S = 60.0
HEAD = "# Made by `make rules` from ecoserve/scaling/rules.py.\n"

Json = dict[str, Any]


def _all(query: Query) -> str:
    return promql(query, "", FRESH_S, by="cluster")


def groups() -> list[Json]:
    """The rule groups; every series has the label ``cluster``."""
    answered, shed = _all(ANSWERED), _all(SHED)
    # Each instance's use where it takes requests, as 1 is what accepted is then.
    taking = f"({_all(USE)} and on (cluster, instance) {_all(ACCEPTED)} == 1)"
    # No requests, no violations: what 0 / 0 would leave out is 0.
    asked = f"({answered} + {shed})"
    violations = f"(({_all(VIOLATED)} + {shed}) / ({asked} > 0) or {asked} * 0)"
    # A worker's Pod is named after its cluster and an index, see DCGM's exporter for its labels.
    gpus = 'label_join(DCGM_FI_DEV_GPU_UTIL{pod!=""}, "key", "/", "namespace", "pod")'
    gpus = f'label_replace({gpus}, "cluster", "$1", "key", "(.+)-[0-9]+")'
    recorded = {
        "ecoserve:instances:accepted": f"sum by (cluster) ({_all(ACCEPTED)})",
        "ecoserve:slo_violations:ratio": violations,
        "ecoserve:ttft_seconds:mean": f"({_all(TTFT)} / ({answered} > 0))",
        "ecoserve:use:mean": f"avg by (cluster) {taking}",
        "ecoserve:instances:idle_ratio": (
            f"sum by (cluster) ({taking} < bool {IDLE_USE:g}) / count by (cluster) {taking}"
        ),
        "ecoserve:requests:waiting": f"({_all(WAITING)} + {_all(LATE)})",
        "ecoserve:requests:arrivals_rate": f"({_all(ROUTED)} + {shed})",
        "ecoserve:gpu_util:mean": (
            f"avg by (cluster) ({gpus}) / 100 and on (cluster) ecoserve:instances:accepted"
        ),
    }
    alerts = [
        {
            "alert": "EcoServeMetricsGone",
            "expr": (
                "ecoserve:instances:accepted offset 15m unless on (cluster) "
                "ecoserve:instances:accepted"
            ),
            "for": "5m",
            "labels": {"severity": "warning"},
            "annotations": {
                "summary": "The scheduler has no figures of {{ $labels.cluster }}: "
                "nothing scales it meanwhile.",
            },
        },
        {
            "alert": "EcoServeRequestsWait",
            "expr": "ecoserve:requests:waiting / ecoserve:instances:accepted > 1",
            "for": "10m",
            "labels": {"severity": "warning"},
            "annotations": {
                "summary": "{{ $value | humanize }} requests wait per instance of "
                "{{ $labels.cluster }}: it has too few, or is at its largest.",
            },
        },
    ]
    return [
        {
            "name": "ecoserve-signals",
            "rules": [{"record": name, "expr": text} for name, text in recorded.items()],
        },
        {"name": "ecoserve-alerts", "rules": alerts},
    ]


def dump() -> str:
    """The file, as Prometheus itself takes it too."""
    return HEAD + yaml.safe_dump({"groups": groups()}, sort_keys=False, width=100)


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(dump(), encoding="utf-8")
