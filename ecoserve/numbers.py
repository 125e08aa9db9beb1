"""Numbers that people give: which are allowed, and how one that is not is told.

Every command, file and header that takes a number says by an ``Allowed`` which it takes, so that
none is infinite, no number at all or absurd, and all errors read alike.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from typing import Any, TypeVar

N = TypeVar("N", int, float)

DAY_S = 86_400.0


@dataclass(frozen=True, slots=True)
class Allowed:
    """Finite numbers from ``least`` (without it, if ``above``) to ``most``, whole ones if
    ``whole``. ``of`` is their unit."""

    least: float = -math.inf
    most: float = math.inf
    above: bool = False
    whole: bool = False
    of: str = ""

    def __contains__(self, value: float) -> bool:
        if isinstance(value, float) and not math.isfinite(value):
            return False
        if self.whole and value != int(value):
            return False
        return (self.least < value if self.above else self.least <= value) and value <= self.most

    def __str__(self) -> str:
        kind = "whole number" if self.whole else "number"
        unit = f" of {self.of}" if self.of else ""
        most = _plain(self.most)
        if self.above and self.least == 0:
            return f"a positive {kind}{unit}" + (f", {most} at most" if most else "")
        bounds = f" {'above' if self.above else 'from'} {_plain(self.least)}"
        return f"a {kind}{unit}{bounds}" + (f" to {most}" if most else "")

    def valid(self, value: N) -> N:
        """The value; ``ValueError``, to be put behind a name, if it is not allowed."""
        if value not in self:
            raise ValueError(f"must be {self}, not {_plain(value) or value}")
        return value

    def check(self, name: str, value: float) -> None:
        """Raises ``ValueError`` that names ``name`` if the value is not allowed."""
        try:
            self.valid(value)
        except ValueError as error:
            raise ValueError(f"{name} {error}") from None

    def read(self, text: str) -> Any:
        """The number in a text; ``ValueError``, to be put behind a name, if it is not allowed."""
        try:
            value = int(text) if self.whole else float(text)
        except ValueError:
            value = math.nan
        if value not in self:
            raise ValueError(f"must be {self}, not {text[:64]!r}")
        return value

    def argument(self, text: str) -> Any:
        """``type`` of an option of argparse."""
        try:
            return self.read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    def option(self, value: Any) -> Any:
        """``callback`` of an option of typer that has one value, a list of them, or None."""
        import typer

        try:
            for one in value if isinstance(value, list) else [value]:
                if one is not None:
                    self.valid(one)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None
        return value


SHARE = Allowed(0, 1)
CV = Allowed(0, 100, above=True)
COUNT = Allowed(1, 1_000_000, whole=True)
SEED = Allowed(0, 2**63 - 1, whole=True)
SECONDS = Allowed(0, DAY_S, above=True, of="seconds")
WAIT = Allowed(0, DAY_S, of="seconds")
PORT = Allowed(1, 65_535, whole=True)


def _plain(value: float) -> str:
    """As people write it; empty for what is not finite."""
    if isinstance(value, int):
        return str(value)
    if not math.isfinite(value):
        return ""
    return str(int(value)) if value.is_integer() and abs(value) < 1e15 else f"{value:g}"
