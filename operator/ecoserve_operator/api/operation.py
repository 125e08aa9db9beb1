"""How instances are retired, replaced, kept and watched."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from ecoserve_operator.api.common import MINUTE, Labels
from ecoserve_operator.fields import Duration, Object, Within


class Drain(Object):
    """How an instance is retired."""

    timeout: Annotated[Duration, Within("1s", "24h")] = 10 * MINUTE
    """How long requests under way may take to finish before the Pod is deleted all the same. It is
    the grace period of the Pods too."""


class Rollout(Object):
    """How a changed template reaches the instances: one at a time."""

    strategy: Literal["Auto", "Surge", "DrainFirst"] = "Auto"
    """Surge: start the new instance first. DrainFirst: retire the old one first. Auto: Surge, but
    DrainFirst when the new Pod finds no node."""
    ready_timeout: Annotated[Duration, Within("10s", "24h")] = 30 * MINUTE
    """How long a new instance may take to become ready before the rollout stops."""
    paused: bool = False
    """Replace no instance for a changed template."""


class Disruption(Object):
    """The PodDisruptionBudget of the workers."""

    max_unavailable: Annotated[int, Field(ge=1, le=512)] = 1
    """Workers that a node drain may take away at a time."""


class Monitoring(Object):
    """Objects for the Prometheus operator, made where its CRDs are installed."""

    enabled: bool = True
    """Make a PodMonitor and a PrometheusRule."""
    interval: Annotated[Duration, Within("1s", "10m")] = 15.0
    """Scrape interval."""
    labels: Labels = {}
    """Further labels of both, by which a Prometheus selects them."""
