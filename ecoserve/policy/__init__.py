"""Every scheduling decision, as pure functions of snapshots: no I/O, no clock, no engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import get_type_hints

from ecoserve.policy.base import Policy
from ecoserve.policy.paced import Paced
from ecoserve.policy.padg import PaDG
from ecoserve.policy.paper import Paper
from ecoserve.policy.window import Window

POLICIES: Mapping[str, type[Policy]] = {
    policy.name: policy for policy in (Paper, PaDG, Window, Paced)
}
DEFAULT = Paced.name


def make(name: str, settings: Mapping[str, float] | None = None) -> Policy:
    """The policy of that name with those settings.

    Raises ``ValueError`` that names the field and what is allowed.
    """
    if name not in POLICIES:
        raise ValueError(f"policy must be one of {', '.join(POLICIES)}, not {name!r}")
    kind = POLICIES[name]
    fields = {f.name for f in dataclasses.fields(kind) if f.init}  # type: ignore[arg-type]
    types = get_type_hints(kind)
    values: dict[str, float] = {}
    for field, value in (settings or {}).items():
        if field not in fields:
            allowed = ", ".join(sorted(fields)) or "none"
            raise ValueError(f"policy {name} has no setting {field!r}; it has: {allowed}")
        if types[field] is int:
            if not float(value).is_integer():
                raise ValueError(f"policy setting {field} must be a whole number, not {value!r}")
            value = int(value)
        values[field] = value
    return kind(**values)
