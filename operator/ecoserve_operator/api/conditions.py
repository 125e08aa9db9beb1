"""What statuses are made of."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from ecoserve_operator.fields import Object


class Condition(Object):
    """One aspect of the object's state."""

    type: Annotated[
        str, StringConstraints(min_length=1, max_length=316, pattern=r"^[A-Za-z][A-Za-z0-9.-]*$")
    ]
    """Name of the aspect, e.g. Ready."""
    status: Literal["True", "False", "Unknown"]
    """Whether it holds."""
    reason: Annotated[
        str, StringConstraints(min_length=1, max_length=1024, pattern=r"^[A-Za-z][A-Za-z0-9_]*$")
    ]
    """Why, in one CamelCase word."""
    message: Annotated[str, StringConstraints(max_length=32768)] = ""
    """Why, for people."""
    last_transition_time: Annotated[str, Field(json_schema_extra={"format": "date-time"})]
    """When the status last changed."""
    observed_generation: Annotated[int, Field(ge=0)] | None = None
    """The metadata.generation that the condition is about."""


Count = Annotated[int, Field(ge=0)]
Time = Annotated[str, Field(json_schema_extra={"format": "date-time"})]
Conditions = Annotated[
    list[Condition],
    Field(
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]}
    ),
]
