"""What the models of the custom resources are made of.

One model serves both sides: pydantic checks and fills in what Python reads, and the CRD is
generated from it, so that the API server checks and fills in the same. A ``Rule`` therefore holds
its condition twice, in CEL and in Python.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Self, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    PlainSerializer,
    StringConstraints,
    ValidationError,
    ValidationInfo,
    WithJsonSchema,
    model_validator,
)
from pydantic.alias_generators import to_camel
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema


@dataclass(frozen=True, slots=True)
class Rule:
    """A condition on an object's fields.

    ``cel`` is what the API server evaluates, ``holds`` the same in Python (None: only the API
    server can, because it is about a change). ``path`` (e.g. ".upper") is the field that the error
    names; empty: the object itself.
    """

    cel: str
    message: str
    holds: Callable[[Any], bool] | None = None
    path: str = ""

    def schema(self) -> dict[str, str]:
        """The rule as an item of ``x-kubernetes-validations``."""
        item = {"rule": self.cel, "message": self.message}
        return item | {"fieldPath": self.path} if self.path else item


def immutable(why: str) -> Rule:
    """The rule of a field that never changes."""
    return Rule("self == oldSelf", f"is immutable: {why}")


class Object(BaseModel):
    """Base of all models: camelCase outside, snake_case inside; unknown fields are dropped, as the
    API server drops them."""

    model_config = ConfigDict(
        alias_generator=to_camel,
        validate_by_name=True,
        validate_by_alias=True,
        validate_default=True,
        use_attribute_docstrings=True,
        extra="ignore",
        frozen=True,
    )

    rules: ClassVar[tuple[Rule, ...]] = ()

    @model_validator(mode="after")
    def _check_rules(self, info: ValidationInfo) -> Self:
        for rule in self.rules if info.context is not _WITHOUT_RULES else ():
            if rule.holds is not None and not rule.holds(self):
                raise ValueError(f"{rule.path.lstrip('.')} {rule.message}".strip())
        return self

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        schema = handler.resolve_ref_schema(handler(core))
        if cls.rules:
            schema["x-kubernetes-validations"] = [rule.schema() for rule in cls.rules]
        return schema

    def dump(self) -> dict[str, Any]:
        """As the API server knows it; fields that are not set are left out."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)


_WITHOUT_RULES = {"rules": False}
_Model = TypeVar("_Model", bound=Object)


def salvaged(model: type[_Model], item: dict[str, Any]) -> _Model | None:
    """What an object still says that an earlier version has stored and that is not valid any more:
    rules count for nothing, and fields that cannot be read have their defaults. None if a field is
    needed that has none."""
    item = deepcopy(item)
    try:
        model.model_validate(item, context=_WITHOUT_RULES)
    except ValidationError as error:
        # From the end, so that the places of other items in a list stay what they are.
        for problem in reversed(error.errors()):
            *way, last = problem["loc"]
            within: Any = item
            try:
                for step in way:
                    within = within[step]
                del within[last]
            except (LookupError, TypeError):
                return None
    try:
        return model.model_validate(item, context=_WITHOUT_RULES)
    except ValidationError:
        return None


_UNITS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_DURATION = r"^([0-9]+(\.[0-9]+)?(ms|s|m|h))+$"


def parse_duration(value: object) -> object:
    """ "1h30m", "2.5s" or "100ms" as seconds; a number is taken as seconds."""
    if not isinstance(value, str):
        return value
    if not re.fullmatch(_DURATION[1:-1], value):
        raise ValueError(f"must be a duration such as 100ms, 5s, 10m or 1h30m, not {value!r}")
    parts = re.findall(r"([0-9]+(?:\.[0-9]+)?)(ms|s|m|h)", value)
    return sum(float(number) * _UNITS[unit] for number, unit in parts)


def format_duration(seconds: float) -> str:
    """Seconds as a duration of the API, whole milliseconds."""
    left = round(seconds * 1000)
    if left == 0:
        return "0s"
    text = ""
    for unit, size in (("h", 3_600_000), ("m", 60_000), ("s", 1000), ("ms", 1)):
        count, left = divmod(left, size)
        text += f"{count}{unit}" if count else ""
    return text


@dataclass(frozen=True, slots=True)
class Within:
    """Bounds of a ``Duration``, both included, as its field writes them: "1s", "24h"."""

    low: str
    high: str

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def _check(self, seconds: float) -> float:
        if not _seconds(self.low) <= seconds <= _seconds(self.high):
            raise ValueError(
                f"must be from {self.low} to {self.high}, not {format_duration(seconds)}"
            )
        return seconds

    def __get_pydantic_json_schema__(
        self, core: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        rule = Rule(
            f"self >= duration('{self.low}') && self <= duration('{self.high}')",
            f"must be from {self.low} to {self.high}",
        )
        return handler(core) | {"x-kubernetes-validations": [rule.schema()]}


def _seconds(text: str) -> float:
    return float(parse_duration(text))  # type: ignore[arg-type]


Duration = Annotated[
    float,
    BeforeValidator(parse_duration),
    PlainSerializer(format_duration, return_type=str),
    WithJsonSchema({"type": "string", "format": "duration", "pattern": _DURATION, "maxLength": 32}),
]
"""Seconds in Python, a string such as 100ms, 5s, 10m or 1h30m outside."""

_QUANTITY = r"^[0-9]+(\.[0-9]+)?(m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei)?$"
_SUFFIXES = {"": 1.0, "m": 1e-3} | {
    prefix + suffix: base**power
    for suffix, base in (("", 1000.0), ("i", 1024.0))
    for power, prefix in enumerate(("k" if base == 1000 else "K", "M", "G", "T", "P", "E"), 1)
}


def _quantity(value: object) -> object:
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


def quantity_value(text: str) -> float:
    """A quantity such as "16Mi" or "500m" as a number."""
    match = re.fullmatch(r"([0-9.]+)([A-Za-z]*)", text)
    if match is None or match[2] not in _SUFFIXES:
        raise ValueError(f"must be a quantity such as 500m, 4 or 16Gi, not {text!r}")
    return float(match[1]) * _SUFFIXES[match[2]]


Quantity = Annotated[
    str,
    BeforeValidator(_quantity),
    StringConstraints(pattern=_QUANTITY),
    WithJsonSchema(
        {
            "anyOf": [{"type": "integer"}, {"type": "string"}],
            "pattern": _QUANTITY,
            "x-kubernetes-int-or-string": True,
        }
    ),
]
"""A Kubernetes quantity, e.g. 500m, 4 or 16Gi."""


@dataclass(frozen=True, slots=True)
class WithinQuantity:
    """Bounds of a ``Quantity``, both included, as its field writes them: "1Ki", "2Gi"."""

    low: str
    high: str

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def _check(self, text: str) -> str:
        if not quantity_value(self.low) <= quantity_value(text) <= quantity_value(self.high):
            raise ValueError(f"must be from {self.low} to {self.high}, not {text}")
        return text

    def __get_pydantic_json_schema__(
        self, core: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        value = "quantity(string(self))"
        rule = Rule(
            f"!{value}.isLessThan(quantity('{self.low}')) && "
            f"!{value}.isGreaterThan(quantity('{self.high}'))",
            f"must be from {self.low} to {self.high}",
        )
        return handler(core) | {"x-kubernetes-validations": [rule.schema()]}


# A DNS label that may begin a Service's name.
NAME = r"^[a-z]([-a-z0-9]*[a-z0-9])?$"

ObjectName = Annotated[
    str,
    StringConstraints(min_length=1, max_length=253, pattern=r"^[a-z0-9]([-.a-z0-9]*[a-z0-9])?$"),
]
"""The name of another object in the same namespace."""

_ANYTHING: dict[str, Any] = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}

PodOverlay = Annotated[
    dict[str, Any],
    WithJsonSchema(
        {
            "type": "object",
            "properties": {
                "metadata": _ANYTHING | {"description": "Labels and annotations of the Pod."},
                "spec": _ANYTHING | {"description": "Any field of a Pod's spec."},
            },
        }
    ),
]
"""A part of a Pod (metadata, spec) that is laid over what the operator makes; stored as it is."""
