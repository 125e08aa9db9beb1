"""What the scheduler's metrics look like over time, written into a history."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from tests.scaling.prometheus_server import PAST, History

Value = Callable[[float], float | None]


def level(value: float | None) -> Value:
    """The same all the time."""
    return lambda at: value


def until(end: float, value: float) -> Value:
    """A value up to ``end`` seconds from now, then nothing."""
    return lambda at: value if at <= end else None


def from_to(before: float, at: float, after: float) -> Value:
    """One value before ``at`` seconds from now, another from then on."""
    return lambda now: before if now < at else after


@dataclass
class Load:
    """A cluster of ``count`` instances and what it is about, for as long as the history is.

    Rates are per second and constant, of the whole cluster; ``change`` replaces single metrics by
    any function of time (counters: their value), ``only`` those of single instances.
    """

    count: int = 4
    use: Value = field(default_factory=lambda: level(0.6))
    answered: float = 10.0
    violated: float = 0.0
    shed: float = 0.0
    ttft: float = 1.0
    waiting: float = 0.0
    late: float = 0.0
    saved: float | None = 5.0
    change: Mapping[str, Value] = field(default_factory=dict)
    only: Mapping[tuple[str, str], Value] = field(default_factory=dict)

    def write(self, history: History, cluster: str) -> None:
        """Adds the cluster's series."""
        macro = {"cluster": cluster, "macro_instance": "m-0"}

        def counter(rate: float) -> Value:
            return lambda at: rate * (at + PAST)

        def add(metric: str, value: Value, **labels: str) -> None:
            value = self.change.get(metric, value)
            if "instance" in labels:
                value = self.only.get((metric, labels["instance"]), value)
            history.add(metric, value, **macro, **labels)

        add("ecoserve_macro_waiting", level(self.waiting))
        add("ecoserve_macro_late", level(self.late))
        add("ecoserve_sheds_total", counter(self.shed))
        for name in (f"i-{n}" for n in range(self.count)):
            each = {"instance": name}
            add("ecoserve_instance_accepted", level(1.0), **each)
            add("ecoserve_instance_use", self.use, **each)
            add("ecoserve_instance_mean_slack_seconds", level(self.saved), **each)
            rate = self.answered / self.count
            add("ecoserve_routed_total", counter(rate), **each)
            add("ecoserve_ttft_seconds_count", counter(rate), **each)
            add("ecoserve_ttft_seconds_sum", counter(rate * self.ttft), **each)
            violated = self.violated / self.count
            add("ecoserve_slo_violations_total", counter(violated), **each, kind="joint")
            add("ecoserve_slo_violations_total", counter(violated), **each, kind="ttft")
