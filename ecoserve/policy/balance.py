"""Which macro instance a conversation belongs to: rendezvous hashing, bounded by load.

Each instance gets a score from the hash of its name and the key, and the key goes to the macro
instance of the highest (Thaler and Ravishankar 1998). So shares follow sizes, and a conversation
moves only with its instance: a split moves those of the instances that it takes along and no
others, a merge those of the macro instance that ends, a joining instance its own share.

The bound is that of consistent hashing with bounded loads (Mirrokni, Thorup and Zadimoghaddam
2018): a macro instance that would hold more than ``factor`` times its share of all requests is
passed over for the next in the key's own order.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

FACTOR = 1.25


@lru_cache(maxsize=16384)
def _seed(instance: str) -> int:
    return int.from_bytes(blake2b(instance.encode(), digest_size=8).digest())


class Places:
    """The macro instances, by name, with those of their instances that can take requests."""

    def __init__(self, groups: Mapping[str, Sequence[str]]) -> None:
        self.names = tuple(groups)
        sizes = [len(instances) for instances in groups.values()]
        members = [_seed(name) for instances in groups.values() for name in instances]
        self._seeds = np.array(members, dtype=np.uint64)
        self._owner = np.repeat(np.arange(len(sizes)), sizes)
        self._sizes = sizes
        self._some_empty = 0 in sizes

    def _scores(self, key: bytes) -> NDArray[np.uint64]:
        hashed = blake2b(key, digest_size=8, person=b"ecoserve").digest()
        # Both sides are hashes already; the middle of splitmix64's finaliser (Steele, Lea and Flood
        # 2014) is enough to mix them, since the upper bits decide.
        x = self._seeds ^ np.uint64(int.from_bytes(hashed))
        x *= np.uint64(0xBF58476D1CE4E5B9)
        x ^= x >> np.uint64(27)
        x *= np.uint64(0x94D049BB133111EB)
        return x

    def ranked(self, key: bytes) -> list[str]:
        """The macro instances in the key's own order, those without an instance left out."""
        order = self._owner[np.argsort(self._scores(key))[::-1]]
        return [self.names[group] for group in dict.fromkeys(order.tolist())]

    def choose(self, key: bytes, loads: Sequence[float], factor: float = FACTOR) -> str | None:
        """The macro instance that ``key`` belongs to; None if none has an instance.

        ``loads`` are the requests that each holds, waiting and running, in the order of ``names``.
        ``factor`` is at least 1; the nearer to 1, the evener the load and the more keys are moved.
        """
        capacity = len(self._seeds)
        if not capacity:
            return None
        scores = self._scores(key)
        first = int(self._owner[scores.argmax()])
        held = loads
        if self._some_empty:
            held = [load if size else 0 for load, size in zip(loads, self._sizes, strict=True)]
        share = factor * (sum(held) + 1) / capacity
        if held[first] + 1 <= math.ceil(share * self._sizes[first]):
            return self.names[first]
        room = [load + 1 <= math.ceil(share * n) for load, n in zip(held, self._sizes, strict=True)]
        if any(room):
            # No hash is likely to be 0, and if one is, nothing but the order changes.
            able = np.where(np.array(room)[self._owner], scores, 0)
            return self.names[int(self._owner[able.argmax()])]
        # Loads are whole numbers of requests, so one is always within its bound; with fractions
        # the least loaded for its size is the nearest to it.
        some = [group for group, size in enumerate(self._sizes) if size]
        return self.names[min(some, key=lambda group: held[group] / self._sizes[group])]
