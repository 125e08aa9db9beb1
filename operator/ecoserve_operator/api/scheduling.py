"""What is promised to requests, and how they are scheduled."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from ecoserve.policy import DEFAULT, POLICIES
from ecoserve_operator.fields import Duration, Object, Rule, Within


class SLO(Object):
    """What is promised to each request; a request may bring its own in headers."""

    ttft: Annotated[Duration, Within("1ms", "1h")]
    """Time to first token, e.g. 5s."""
    tpot: Annotated[Duration, Within("1ms", "1m")]
    """Time per output token after the first, e.g. 100ms."""


def _policy_rule(name: str) -> Rule:
    allowed = sorted(f.name for f in dataclasses.fields(POLICIES[name]) if f.init)  # type: ignore[arg-type]
    return Rule(
        f"self.name != '{name}' || !has(self.settings) || self.settings.all(k, k in {allowed})",
        f"must be settings of policy {name}, which has: {', '.join(allowed) or 'none'}",
        lambda self: self.name != name or set(self.settings) <= set(allowed),
        ".settings",
    )


def _known_policy(name: str) -> str:
    if name not in POLICIES:
        raise ValueError(f"must be one of {', '.join(POLICIES)}, not {name!r}")
    return name


class Policy(Object):
    """How requests are scheduled."""

    rules = tuple(map(_policy_rule, POLICIES))

    name: Annotated[
        str, AfterValidator(_known_policy), Field(json_schema_extra={"enum": list(POLICIES)})
    ] = DEFAULT
    """The scheduling policy."""
    settings: Annotated[dict[str, float], Field(max_length=16)] = {}
    """Settings of the policy by name, e.g. backlog, busy and margin of padg: the thresholds between
    prefill and decode."""
    late: Literal["serve", "shed"] = "serve"
    """What becomes of a request whose TTFT can no longer be met: served when there is room, or
    answered with 429."""
    late_wait: Annotated[Duration, Within("0s", "24h")] | None = None
    """A late request is served at the latest after this time; unset: the scheduler's default."""
    queue_limit: Annotated[int, Field(ge=1, le=1_000_000)] = 1024
    """Requests that may wait; of more, one is answered with 429."""
    ramp: Annotated[Duration, Within("0s", "1h")] = 20.0
    """Time over which a new instance's share of the requests rises to full."""
    debug: bool = False
    """Log each phase switch with its reason."""
