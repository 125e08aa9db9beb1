"""Recording rules and alerts, by Prometheus' own tool."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import yaml
from ecoserve_operator.api import EcoServeCluster
from ecoserve_operator.builders import monitoring

from ecoserve.scaling.rules import dump
from tests.operator.manifests import example
from tests.scaling.prometheus_server import DEADLINE, binary

RULES = Path(__file__).parents[2] / "charts/ecoserve/rules.yaml"

Json = dict[str, Any]


def promtool(*arguments: object) -> None:
    command = [binary("promtool"), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE)
    assert done.returncode == 0, done.stdout + done.stderr


def cluster_rules() -> Json:
    """What the operator makes for one cluster."""
    cluster = EcoServeCluster.model_validate(example())
    made = monitoring.objects(cluster)
    (rule,) = [item for item in made if item["kind"] == "PrometheusRule"]
    spec: Json = rule["spec"]
    return spec


def series(name: str, values: str, cluster: str = "default/demo", **labels: str) -> Json:
    text = ",".join(f'{k}="{v}"' for k, v in {"cluster": cluster, **labels}.items())
    return {"series": f"{name}{{{text}}}", "values": values}


def instance(number: int, use: str, accepted: str = "1x240") -> list[Json]:
    """An instance's gauges, scraped every 15 s for an hour."""
    labels = {"macro_instance": "m-0", "instance": f"i-{number}"}
    return [
        series("ecoserve_instance_accepted", accepted, **labels),
        series("ecoserve_instance_use", use, **labels),
    ]


def counters(answered: int, violated: int, seconds: int, shed: int = 0) -> list[Json]:
    """Counters that grow by so much every 15 s, for an hour."""
    labels = {"macro_instance": "m-0", "instance": "i-0"}
    return [
        series("ecoserve_ttft_seconds_count", f"0+{answered}x240", **labels),
        series("ecoserve_ttft_seconds_sum", f"0+{seconds}x240", **labels),
        series("ecoserve_routed_total", f"0+{answered}x240", **labels),
        series("ecoserve_slo_violations_total", f"0+{violated}x240", kind="joint", **labels),
        series("ecoserve_requests_total", f"0+{answered}x240", outcome="ok", **labels),
        series("ecoserve_sheds_total", f"0+{shed}x240", macro_instance="m-0"),
    ]


def queue(waiting: int, late: int) -> list[Json]:
    return [
        series("ecoserve_macro_waiting", f"{waiting}x240", macro_instance="m-0"),
        series("ecoserve_macro_late", f"{late}x240", macro_instance="m-0"),
    ]


def recorded(name: str, *values: float) -> Json:
    samples = [{"labels": f'{name}{{cluster="default/demo"}}', "value": v} for v in values]
    return {"expr": name, "eval_time": "20m", "exp_samples": samples}


def case(inputs: list[Json], samples: list[Json], alerts: Json) -> Json:
    """``alerts`` are those that fire after 40 minutes, with their summaries; all others do not."""
    severity = {"severity": "warning"}
    return {
        "interval": "15s",
        "input_series": inputs,
        "promql_expr_test": samples,
        "alert_rule_test": [
            {
                "eval_time": "40m",
                "alertname": name,
                "exp_alerts": [
                    {
                        "exp_labels": severity | labels,
                        "exp_annotations": {"summary": summary},
                    }
                    for labels, summary in alerts.get(name, ())
                ],
            }
            for name in (
                "EcoServeMetricsGone",
                "EcoServeRequestsWait",
                "EcoServeNoInstance",
                "EcoServeSloViolations",
                "EcoServeShedding",
                "EcoServeSaturated",
            )
        ],
    }


DEMO = {"cluster": "default/demo"}
CASES = [
    # Three instances take requests, one of them idle; a fourth drains.
    case(
        [
            *instance(0, "0.9x240"),
            *instance(1, "0.6x240"),
            *instance(2, "0.0x240"),
            *instance(3, "0.8x240", "0x240"),
            *counters(answered=150, violated=3, seconds=300),
            *queue(0, 1),
            series("DCGM_FI_DEV_GPU_UTIL", "40x240", "", namespace="default", pod="demo-0"),
            series("DCGM_FI_DEV_GPU_UTIL", "60x240", "", namespace="default", pod="demo-12"),
            series("DCGM_FI_DEV_GPU_UTIL", "99x240", "", namespace="default", pod="other-1"),
        ],
        [
            recorded("ecoserve:instances:accepted", 3),
            recorded("ecoserve:use:mean", 0.5),
            recorded("ecoserve:instances:idle_ratio", 1 / 3),
            recorded("ecoserve:slo_violations:ratio", 0.02),
            recorded("ecoserve:ttft_seconds:mean", 2),
            recorded("ecoserve:requests:waiting", 1),
            recorded("ecoserve:requests:arrivals_rate", 10),
            recorded("ecoserve:gpu_util:mean", 0.5),
        ],
        {},
    ),
    # No request at all: no violation, and no mean of nothing.
    case(
        [*instance(0, "0x240"), *counters(0, 0, 0), *queue(0, 0)],
        [
            recorded("ecoserve:slo_violations:ratio", 0),
            recorded("ecoserve:ttft_seconds:mean"),
            recorded("ecoserve:requests:arrivals_rate", 0),
        ],
        {},
    ),
    # Overloaded.
    case(
        [
            *instance(0, "0.97x240"),
            *counters(answered=90, violated=30, seconds=900, shed=30),
            *queue(2, 1),
        ],
        [recorded("ecoserve:slo_violations:ratio", 0.5)],
        {
            "EcoServeRequestsWait": [
                (DEMO, "3 requests wait per instance of default/demo: it has too few, or is at its"
                 " largest.")
            ],
            "EcoServeSloViolations": [
                ({}, "demo breaks its promises of TTFT or TPOT, or turns away, 50% of its "
                 "requests.")
            ],
            "EcoServeShedding": [({}, "demo turns requests away: 2 a second.")],
            "EcoServeSaturated": [({}, "demo is at 97% of what it can serve on time.")],
        },
    ),
    # The scheduler is not scraped any more after half an hour.
    case(
        [*instance(0, "0.5x120", "1x120")],
        [recorded("ecoserve:instances:accepted", 1)],
        {
            "EcoServeMetricsGone": [
                (DEMO, "The scheduler has no figures of default/demo: nothing scales it meanwhile.")
            ]
        },
    ),
]  # fmt: skip


def test_the_chart_has_what_the_code_says() -> None:
    assert RULES.read_text(encoding="utf-8") == dump(), "run `make rules`"


def test_prometheus_takes_the_rules(tmp_path: Path) -> None:
    mine = tmp_path / "cluster.yaml"
    mine.write_text(yaml.safe_dump(cluster_rules()))
    promtool("check", "rules", "--lint=all", "--lint-fatal", RULES, mine)


def test_rules_say_what_they_should(tmp_path: Path) -> None:
    mine = tmp_path / "cluster.yaml"
    mine.write_text(yaml.safe_dump(cluster_rules()))
    tests = tmp_path / "tests.yaml"
    tests.write_text(
        yaml.safe_dump({"rule_files": [str(RULES), str(mine)], "evaluation_interval": "15s"}
                       | {"tests": CASES})
    )  # fmt: skip
    promtool("test", "rules", tests)
