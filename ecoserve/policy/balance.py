"""Which macro instance a conversation belongs to: rendezvous hashing, bounded by load.

Every group gets a score from the hash of its name and the key, and the key goes to the highest
score, so a group that comes or goes moves only its own share of the conversations (Thaler and
Ravishankar 1998; the weights follow Schindelhauer and Schomaker 2005). The bound is that of
consistent hashing with bounded loads (Mirrokni, Thorup and Zadimoghaddam 2018): a group that would
hold more than ``factor`` times its share of all requests is passed over for the next in the key's
own order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b

FACTOR = 1.25


@dataclass(frozen=True, slots=True)
class Group:
    """A macro instance: ``size`` is its share of the capacity (its instances), ``load`` the
    requests that it holds, waiting and running."""

    name: str
    size: float
    load: float


def _score(key: bytes, group: Group) -> float:
    digest = blake2b(key, digest_size=8, person=b"ecoserve", salt=_salt(group.name)).digest()
    # In (0, 1), so the logarithm is finite and negative.
    uniform = (int.from_bytes(digest) + 0.5) / 2.0**64
    return group.size / -math.log(min(uniform, 1 - 1e-16))


@lru_cache(maxsize=4096)
def _salt(name: str) -> bytes:
    return blake2b(name.encode(), digest_size=16).digest()


def ranked(key: bytes, groups: Sequence[Group]) -> list[Group]:
    """The groups with room in the key's own order of preference, groups of no size left out."""
    able = [group for group in groups if group.size > 0]
    return sorted(able, key=lambda group: (-_score(key, group), group.name))


def choose(key: bytes, groups: Sequence[Group], factor: float = FACTOR) -> str | None:
    """The name of the group that ``key`` belongs to, None if no group has any capacity.

    ``factor`` is at least 1; the nearer to 1, the evener the load and the more keys are moved.
    """
    order = ranked(key, groups)
    if not order:
        return None
    total = sum(group.load for group in order) + 1
    capacity = sum(group.size for group in order)
    for group in order:
        if group.load + 1 <= math.ceil(factor * total * group.size / capacity):
            return group.name
    # Loads are whole numbers of requests, so one group is always within its bound; with fractions
    # the least loaded for its size is the nearest to it.
    return min(order, key=lambda group: group.load / group.size).name
