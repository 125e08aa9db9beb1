"""What each instance holds of a prompt, guessed from what was routed to it.

A prompt's bytes are cut into blocks, and each block is named by a hash over it and all before it,
so equal names mean equal prefixes. An instance is taken to hold the blocks of the prompts routed to
it, the least recently used given up first, as its engine does with its KV blocks.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

BLOCK_BYTES = 256
# Prompts are named up to here; what is longer counts as not held from here on.
MOST_BLOCKS = 4096
# A head that is longer is not kept to warm instances with.
MOST_HEAD_BYTES = 65536

Chain = tuple[int, ...]


def chain(prompt: bytes) -> Chain:
    """Names of the prompt's whole blocks, each of all bytes up to its end."""
    name = 0
    names = []
    end = min(len(prompt) // BLOCK_BYTES, MOST_BLOCKS) * BLOCK_BYTES
    for start in range(0, end, BLOCK_BYTES):
        name = hash((name, prompt[start : start + BLOCK_BYTES]))
        names.append(name)
    return tuple(names)


class PrefixCache:
    """The blocks that one instance holds, and how far that can be believed.

    ``trust`` is the share of the tokens promised by ``held`` that the engine then really had
    cached: below 1 when it evicts sooner than is thought here, 0 when it caches nothing.
    """

    def __init__(self, capacity: int = 4096) -> None:
        self.capacity = capacity
        self._blocks: OrderedDict[int, None] = OrderedDict()
        # Sums with forgetting; the start is the belief that promises are kept.
        self._promised = 1.0
        self._kept = 1.0

    def __len__(self) -> int:
        return len(self._blocks)

    @property
    def trust(self) -> float:
        return self._kept / self._promised

    def held(self, chains: Sequence[Chain]) -> int:
        """Bytes of the prompts that the instance is thought to hold."""
        blocks = self._blocks
        # Whenever a block is used, all before it are used after it, so that it is given up before
        # them: what is held of a prompt is its beginning, and its end can be searched by halves.
        # Of most prompts not even the first block is held.
        count = sum(
            bisect_left(names, True, key=lambda name: name not in blocks)
            for names in chains
            if names and names[0] in blocks
        )
        return count * BLOCK_BYTES

    def add(self, chains: Sequence[Chain]) -> None:
        """The prompts go to this instance. A prompt's end is given up before its beginning."""
        blocks = self._blocks
        for names in chains:
            for name in reversed(names):
                if name in blocks:
                    blocks.move_to_end(name)
                else:
                    blocks[name] = None
        while len(blocks) > self.capacity:
            blocks.popitem(last=False)

    def correct(self, promised_tokens: float, cached_tokens: float) -> None:
        """What came of a promise, as the engine reports it."""
        if promised_tokens <= 0:
            return
        share = min(cached_tokens / promised_tokens, 1.0)
        self._promised = 0.9 * self._promised + 1
        self._kept = 0.9 * self._kept + share


@dataclass(slots=True)
class _Head:
    path: str
    body: bytes
    count: float


class FrequentHeads:
    """The heads of prompts that come most often, to warm new instances with.

    Bounded in number and in bytes. A full table gives up its rarest head for a new one, which takes
    over its count (Metwally's space saving, so that a head that is frequent is always found);
    counts halve after every ``halve_every`` requests, so that what was frequent once is forgotten.
    """

    def __init__(
        self, *, number: int = 64, most_bytes: int = MOST_HEAD_BYTES, halve_every: int = 2000
    ) -> None:
        self._number = number
        self._most_bytes = most_bytes
        self._halve_every = halve_every
        self._heads: dict[int, _Head] = {}
        self._since = 0

    def seen(self, key: int) -> bool:
        """Counts a request with the head ``key``; False if its body must be given by ``add``."""
        self._since += 1
        if self._since >= self._halve_every:
            self._since = 0
            self._heads = {k: h for k, h in self._heads.items() if h.count >= 1}
            for head in self._heads.values():
                head.count /= 2
        known = self._heads.get(key)
        if known is None:
            return False
        known.count += 1
        return True

    def add(self, key: int, path: str, body: bytes) -> None:
        """A head that was not known. One that is too long is not kept."""
        if len(body) > self._most_bytes:
            return
        count = 1.0
        if len(self._heads) >= self._number:
            rarest = min(self._heads, key=lambda k: self._heads[k].count)
            count = self._heads.pop(rarest).count + 1
        self._heads[key] = _Head(path, body, count)

    def most_frequent(
        self, number: int = 8, total_bytes: int = 262144, at_least: float = 3.0
    ) -> list[tuple[str, bytes]]:
        """Path and body of the heads to warm with, most frequent first."""
        chosen: list[tuple[str, bytes]] = []
        for head in sorted(self._heads.values(), key=lambda h: -h.count):
            if head.count < at_least or len(chosen) >= number:
                break
            if len(head.body) <= total_bytes:
                total_bytes -= len(head.body)
                chosen.append((head.path, head.body))
        return chosen
