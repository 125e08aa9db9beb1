"""Checks of the policies' settings: a wrong one is told with its name and what is allowed."""

from __future__ import annotations

import math


def at_least(policy: object, field: str, low: float) -> None:
    """Raises ``ValueError`` unless the field is a finite number >= ``low``."""
    value = getattr(policy, field)
    if not math.isfinite(value) or value < low:
        raise ValueError(f"policy setting {field} must be a number from {low}, not {value!r}")


def within(policy: object, field: str, low: float, high: float) -> None:
    """Raises ``ValueError`` unless the field is a number in [``low``, ``high``]."""
    value = getattr(policy, field)
    if not low <= value <= high:
        raise ValueError(
            f"policy setting {field} must be a number from {low} to {high}, not {value!r}"
        )
