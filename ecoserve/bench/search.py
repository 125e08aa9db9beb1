"""The search for goodput: the highest rate at which enough calls meet their SLOs.

Pure: it names the rates to try and is told what came of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

# A search that still passes so far above its first rate, or fails so far below, has no bracket.
_DOUBLINGS = 12


@dataclass(slots=True)
class Bisection:
    """Brackets the goodput from ``first`` by doubling or halving, then bisects.

    Done when the bracket is within ``precision`` (relative, of the higher rate) or after ``most``
    rates. The middle is the geometric one: rates differ by factors.
    """

    first: float
    precision: float = 0.05
    most: int = 12
    tried: list[tuple[float, bool]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not 0 < self.first < math.inf:
            raise ValueError(f"first rate must be a positive number, not {self.first!r}")
        if not 0 < self.precision < 1:
            raise ValueError(f"precision must be within 0 and 1, not {self.precision!r}")
        if self.most < 1:
            raise ValueError(f"most must be at least 1, not {self.most!r}")

    @property
    def low(self) -> float:
        """The highest rate that passed below every rate that failed; 0 if none did."""
        return max((rate for rate, passed in self.tried if passed and rate < self.high), default=0)

    @property
    def high(self) -> float:
        """The lowest rate that failed; infinite if none did."""
        return min((rate for rate, passed in self.tried if not passed), default=math.inf)

    @property
    def next(self) -> float | None:
        """The rate to try next; None when the search is done."""
        if len(self.tried) >= self.most:
            return None
        if not self.tried:
            return self.first
        low, high = self.low, self.high
        if high == math.inf:
            return low * 2 if low < self.first * 2**_DOUBLINGS else None
        if low == 0:
            return high / 2 if high > self.first / 2**_DOUBLINGS else None
        if high - low <= self.precision * high:
            return None
        return math.sqrt(low * high)

    def tell(self, rate: float, passed: bool) -> None:
        """What came of a rate."""
        self.tried.append((rate, passed))

    @property
    def bracketed(self) -> bool:
        """Whether a rate passed and a higher one failed."""
        return self.low > 0 and self.high < math.inf


def sealed(missed: int, planned: int, target: float) -> bool:
    """Whether so many misses of ``planned`` calls leave the target share out of reach."""
    return planned > 0 and missed > planned * (1 - target) + 1e-9
