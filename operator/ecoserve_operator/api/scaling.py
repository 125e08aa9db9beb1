"""Sizes of macro instances, and scaling by what Prometheus reports."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from ecoserve_operator.api.common import MINUTE, Percent
from ecoserve_operator.fields import Duration, Object, Rule, Within


class Macro(Object):
    """Bounds of a macro instance's size. Unset: chosen by the GPUs of the cluster."""

    rules = (
        Rule(
            "!has(self.lower) || has(self.upper)",
            "must be set when lower is",
            lambda self: self.lower is None or self.upper is not None,
            ".upper",
        ),
        Rule(
            "!has(self.lower) || !has(self.upper) || self.upper + 1 >= 2 * self.lower",
            "must be at least 2 x lower - 1, or a split would leave less than lower",
            lambda self: (
                self.lower is None or self.upper is None or self.upper + 1 >= 2 * self.lower
            ),
            ".upper",
        ),
    )

    lower: Annotated[int, Field(ge=1, le=512)] | None = None
    """N_l: instances that a split gives to the new macro instance; below it a macro instance is
    merged with another. Unset: half of upper, rounded up."""
    upper: Annotated[int, Field(ge=1, le=1023)] | None = None
    """N_u: the most instances of a macro instance; one more, and it is split. Unset: 4 up to 16
    GPUs, 8 up to 64, 16 above."""
    merge_cooldown: Annotated[Duration, Within("0s", "24h")] = 5 * MINUTE
    """Least time after a split or a merge before the next merge."""


class Expand(Object):
    """When instances are added: any threshold, for as long as it says."""

    violation_percent: Percent = 5
    """Share of requests that break an SLO, in percent, above which the cluster grows."""
    violation_for: Annotated[Duration, Within("0s", "24h")] = MINUTE
    """How long it must stay above."""
    use_percent: Percent = 85
    """Device use in percent above which the cluster grows. Use is load as a share of the goodput
    within the SLOs."""
    use_for: Annotated[Duration, Within("0s", "24h")] = 5 * MINUTE
    """How long it must stay above."""
    ttft_percent: Annotated[int, Field(ge=0, le=10000)] = 100
    """Mean TTFT in percent of its SLO above which the cluster grows."""
    ttft_for: Annotated[Duration, Within("0s", "24h")] = MINUTE
    """How long it must stay above."""
    waiting: Annotated[int, Field(ge=0, le=10000)] = 1
    """Requests per instance that wait for room, above which the cluster grows."""
    waiting_for: Annotated[Duration, Within("0s", "24h")] = MINUTE
    """How long they must be more."""
    cooldown: Annotated[Duration, Within("0s", "24h")] = 3 * MINUTE
    """Least time after a step up before the next one."""
    starting_for: Annotated[Duration, Within("0s", "24h")] = 5 * MINUTE
    """Most time that a step up waits for the instances of the last one, while they start."""
    max_step: Annotated[int, Field(ge=1, le=512)] = 4
    """The most instances that one step adds."""


class Contract(Object):
    """When instances are removed: any threshold, for as long as it says, and nothing unknown."""

    use_percent: Percent = 40
    """Device use in percent below which the cluster shrinks."""
    use_for: Annotated[Duration, Within("0s", "24h")] = 10 * MINUTE
    """How long it must stay below."""
    idle_percent: Percent = 60
    """Share of idle instances, in percent, above which the cluster shrinks."""
    idle_for: Annotated[Duration, Within("0s", "24h")] = 10 * MINUTE
    """How long it must stay above."""
    saved_percent: Annotated[int, Field(ge=0, le=10000)] = 0
    """Mean saved TPOT of running requests, in percent of TTFT SLO x (n + 1) / n with n instances,
    above which the cluster shrinks. 100 is the published bound; 0: not used."""
    saved_for: Annotated[Duration, Within("0s", "24h")] = 10 * MINUTE
    """How long it must stay above."""
    cooldown: Annotated[Duration, Within("0s", "24h")] = 10 * MINUTE
    """Least time after any step before the next one down."""
    max_step: Annotated[int, Field(ge=1, le=512)] = 1
    """The most instances that one step removes."""


class Autoscaling(Object):
    """Scaling by what Prometheus reports. A missing metric never scales anything."""

    rules = (
        Rule(
            "!self.enabled || has(self.prometheus)",
            "must be set when autoscaling is enabled",
            lambda self: not self.enabled or self.prometheus is not None,
            ".prometheus",
        ),
        Rule(
            "self.contract.usePercent < self.expand.usePercent",
            "contract.usePercent must be less than expand.usePercent, or the size would swing",
            lambda self: self.contract.use_percent < self.expand.use_percent,
        ),
    )

    enabled: bool = False
    """Whether the operator sets spec.replicas. Off for kubectl scale or an HPA."""
    dry_run: bool = False
    """Decide and tell in the status, but do not scale."""
    strategy: Literal["Threshold", "Predictive"] = "Threshold"
    """Threshold: the bounds below. Predictive: also the fewest instances that serve the arrival
    rate within expand.usePercent, before use shows it."""
    capacity: Annotated[float, Field(ge=0.001, le=1e6)] | None = None
    """Requests a second that one instance serves within the SLOs, as `ecoserve plan` finds it, for
    Predictive. Unset: measured, from the arrival rate and the use that it makes."""
    prometheus: (
        Annotated[str, StringConstraints(pattern=r"^https?://[^\s/]+(/\S*)?$", max_length=2048)]
        | None
    ) = None
    """URL of the Prometheus server that scrapes the operator's scheduler, e.g.
    http://prometheus.monitoring:9090."""
    stale_after: Annotated[Duration, Within("10s", "15m")] = MINUTE
    """Age at which a sample no longer counts, and what rates are taken over: four scrapes or more.
    """
    interval: Annotated[Duration, Within("5s", "1h")] = 15.0
    """Time between two decisions."""
    expand: Expand = Expand()
    """When instances are added."""
    contract: Contract = Contract()
    """When instances are removed."""
