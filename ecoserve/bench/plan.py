"""What a bench is to do, checked."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from ecoserve.bench.endpoint import Promise
from ecoserve.bench.prompts import Api
from ecoserve.numbers import CV, SECONDS, SEED, WAIT, Allowed

Kind = Literal["concurrency", "rate"]
MOST_CONCURRENT = 1024

RATE = Allowed(0, 100_000, above=True, of="requests a second")
CONCURRENCY = Allowed(1, 10_000, whole=True)
_FEW = Allowed(1, 1000, whole=True)
_ALLOWED = {
    **{"cv": CV, "think": WAIT, "seconds": SECONDS, "warmup": WAIT, "timeout": SECONDS},
    **dict.fromkeys(("turns", "repeats", "unloaded_calls", "most_rates"), _FEW),
    **{"seed": SEED, "salt": SEED},
}


@dataclass(frozen=True, slots=True)
class Plan:
    """Settings of a bench. Times are seconds, rates requests a second.

    ``concurrency`` and ``rates`` are the steps to play; with neither, concurrency doubles from one
    until too few calls meet their SLOs. ``search`` then looks for the goodput: the highest rate at
    which ``attainment`` of the calls meet both SLOs, over ``repeats`` runs of different seeds.

    Raises ``ValueError`` that names the option.
    """

    url: str
    api_key: str | None = None
    model: str | None = None
    api: Api = "chat"
    concurrency: tuple[int, ...] = ()
    rates: tuple[float, ...] = ()
    search: bool = True
    data: str | None = None
    prompt: str = "200"
    output: str = "64"
    cv: float | None = None
    turns: int = 1
    think: float = 1.0
    ttft: Promise = field(default_factory=lambda: Promise(5.0, multiple=True))
    tpot: Promise = field(default_factory=lambda: Promise(2.0, multiple=True))
    attainment: float = 0.9
    seconds: float = 60.0
    warmup: float = 10.0
    repeats: int = 2
    unloaded_calls: int = 8
    precision: float = 0.05
    most_rates: int = 10
    timeout: float | None = 600.0
    seed: int = 1
    salt: int = field(default_factory=lambda: secrets.randbits(32))
    out: Path | None = None

    def __post_init__(self) -> None:
        def must(good: bool, what: str) -> None:
            if not good:
                raise ValueError(what)

        must(
            self.url.startswith(("http://", "https://")),
            f"--url must begin with http:// or https://, not {self.url!r}",
        )
        for rate in self.rates:
            RATE.check("--rate", rate)
        for users in self.concurrency:
            CONCURRENCY.check("--concurrency", users)
        for name, allowed in _ALLOWED.items():
            value = getattr(self, name)
            if value is not None:
                allowed.check(f"--{name.replace('_', '-')}", value)
        must(0 < self.attainment < 1, f"--attainment must be within 0 and 1, not {self.attainment}")
        must(
            self.warmup < self.seconds,
            f"--warmup must be less than --seconds ({self.seconds:g}), not {self.warmup:g}",
        )
        must(0 < self.precision < 1, f"--precision must be within 0 and 1, not {self.precision}")

    def users(self) -> Iterator[int]:
        """The steps of concurrency, each to be played while the one before was good enough."""
        if self.concurrency or self.rates:
            return iter(self.concurrency)
        return itertools.takewhile(
            lambda users: users <= MOST_CONCURRENT, (2**i for i in itertools.count())
        )

    @property
    def open_ended(self) -> bool:
        """Whether steps go on until one is not good enough."""
        return not (self.concurrency or self.rates)


def numbers(text: str | None, name: str) -> tuple[float, ...]:
    """``1,2,4`` as numbers; ValueError names ``name``."""
    if text is None:
        return ()
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"{name} must be numbers with commas between, not {text!r}") from None


def whole_numbers(text: str | None, name: str) -> tuple[int, ...]:
    """``1,2,4`` as whole numbers; ValueError names ``name``."""
    found = numbers(text, name)
    if not all(number.is_integer() for number in found):
        raise ValueError(f"{name} must be whole numbers with commas between, not {text!r}")
    return tuple(int(number) for number in found)
