"""KV memory of an instance: paged blocks, some of them shared by prompts that begin alike."""

from __future__ import annotations

from collections import OrderedDict, defaultdict

from ecoserve.sim.batch import Sequence
from ecoserve.sim.records import BLOCK


class Memory:
    """Blocks of ``block`` tokens.

    With ``sharing``, whole blocks of ``records.BLOCK`` tokens of a finished prefill can be held by
    several sequences, and stay after them until the room is needed, the least recently used first.
    """

    def __init__(self, tokens: int, block: int, watermark: float, sharing: bool) -> None:
        if sharing and BLOCK % block:
            raise ValueError(f"options.block must divide {BLOCK} for prefix sharing, not {block}")
        self.block = block
        self.total = tokens // block
        self.sharing = sharing
        self.reserve = int(watermark * self.total)
        self.free = self.total
        self._unit = BLOCK // block
        self._holders: dict[int, int] = defaultdict(int)
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._shared: dict[Sequence, tuple[int, ...]] = {}

    @property
    def available(self) -> int:
        """Blocks that can be had, cached ones that nobody holds included."""
        return self.free + self._unit * len(self._idle)

    def blocks(self, tokens: int) -> int:
        """Blocks that so many tokens of KV take."""
        return -(-tokens // self.block)

    def take(self, blocks: int) -> None:
        """Takes blocks that are available."""
        while self.free < blocks:
            self._idle.popitem(last=False)
            self.free += self._unit
        self.free -= blocks

    def hit(self, sequence: Sequence) -> int:
        """Tokens of its prompt that are cached; one at least is left to compute."""
        return len(self._cached(sequence)) * BLOCK

    def _cached(self, sequence: Sequence) -> tuple[int, ...]:
        names = sequence.outcome.arrival.blocks
        if not self.sharing or not names:
            return ()
        hits = 0
        for name in names[: (sequence.prompt - 1) // BLOCK]:
            if name not in self._holders and name not in self._idle:
                break
            hits += 1
        return names[:hits]

    def has_room(self, sequence: Sequence, tokens: int) -> bool:
        """Whether ``tokens`` of KV for the sequence leave the reserve alone."""
        names = self._cached(sequence)
        idle = sum(name in self._idle for name in names)
        own = self.blocks(tokens) - len(names) * self._unit
        return own <= self.available - idle * self._unit - self.reserve

    def admit(self, sequence: Sequence, tokens: int) -> int:
        """Takes what the sequence needs for ``tokens`` of KV, for which there is room; returns how
        many of them are cached."""
        names = self._cached(sequence)
        for name in names:
            self._hold(name)
        if names:
            self._shared[sequence] = names
        self.take(self.blocks(tokens) - len(names) * self._unit)
        return len(names) * BLOCK

    def share(self, sequence: Sequence) -> None:
        """Its prefill is done: the whole blocks of its prompt can be held by others."""
        if not self.sharing:
            return
        names = sequence.outcome.arrival.blocks[: sequence.prompt // BLOCK]
        for name in names[len(self._shared.get(sequence, ())) :]:
            if name in self._holders or name in self._idle:
                self.free += self._unit  # computed twice: one copy is enough
            self._hold(name)
        if names:
            self._shared[sequence] = names

    def release(self, sequence: Sequence, tokens: int) -> None:
        """Gives back everything of a sequence that has ``tokens`` of KV."""
        names = self._shared.pop(sequence, ())
        self.free += self.blocks(tokens) - len(names) * self._unit
        for name in reversed(names):
            self._holders[name] -= 1
            if not self._holders[name]:
                del self._holders[name]
                self._idle[name] = None

    def _hold(self, name: int) -> None:
        self._idle.pop(name, None)
        self._holders[name] += 1
