"""Dynamic batch size."""

from __future__ import annotations

import math


def next_limit(
    limit: int,
    use: float,
    low: int,
    high: int,
    *,
    running: int = 0,
    grow: float = 1.2,
    shrink: float = 0.9,
    above: float = 0.8,
    below: float = 0.6,
) -> int:
    """The most sequences that an instance should run from now on.

    Grows by ``grow`` while use is above ``above``, shrinks by ``shrink`` while it is below
    ``below``, within [``low``, ``high``]. Between the two it stays, so that it does not swing. A
    limit that ``running`` sequences have reached grows too: what it keeps out is kept out of use as
    well, so use alone would hold a limit down that is the only thing in the way.

    Ask now and then, and at every step while the limit is reached: what is kept out meanwhile may
    miss its TTFT.
    """
    if use > above or running >= limit:
        limit = max(math.ceil(limit * grow), limit + 1)
    elif use < below:
        limit = math.floor(limit * shrink)
    return min(max(limit, low), high)
