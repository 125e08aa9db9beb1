"""Plays conversations against an endpoint: open loop, each at its time, or closed loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from ecoserve.bench.load import Call, Client, Outcome
from ecoserve.bench.prompts import Writer
from ecoserve.bench.workload import Conversation

_AFTER_FAILURE_S = 0.1


@dataclass(slots=True)
class Run:
    """A run under way, or over: what has ended so far.

    An answer that takes longer than ``patience`` seconds is given up; None: none is. ``stop`` ends
    the run before its time; calls under way are then broken off and do not count.
    """

    client: Client
    writer: Writer
    patience: float | None = None
    outcomes: list[Outcome] = field(default_factory=list)
    stopped: bool = False
    on_outcome: Callable[[Outcome], None] | None = None
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)

    def stop(self) -> None:
        """Breaks off what is under way."""
        self.stopped = True
        for task in self._tasks:
            task.cancel()

    def add(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)
        if self.on_outcome is not None:
            self.on_outcome(outcome)

    async def _all(self, tasks: list[asyncio.Task[None]]) -> None:
        self._tasks = tasks
        try:
            for result in await asyncio.gather(*tasks, return_exceptions=True):
                if isinstance(result, Exception):
                    raise result
        finally:
            for task in tasks:
                task.cancel()

    async def open_loop(self, load: Sequence[Conversation]) -> None:
        """Begins each conversation at its time, whatever became of those before, and waits for all
        of them."""
        # Bodies are written ahead: a large one takes milliseconds.
        texts = [self.writer.text(c.turns[0], c.seed) for c in load]
        start = time.perf_counter() + 0.05

        async def one(conversation: Conversation, text: str) -> None:
            due = conversation.turns[0].at
            await asyncio.sleep(max(0.0, start + due - time.perf_counter()))
            await self._converse(conversation, text, due, start)

        await self._all(
            [asyncio.create_task(one(c, text)) for c, text in zip(load, texts, strict=True)]
        )

    async def closed_loop(
        self, load: Iterator[Conversation], concurrency: int, seconds: float
    ) -> None:
        """Keeps ``concurrency`` conversations going for ``seconds``, then waits for the last."""
        start = time.perf_counter()

        async def user() -> None:
            while time.perf_counter() - start < seconds:
                conversation = next(load)
                text = self.writer.text(conversation.turns[0], conversation.seed)
                due = time.perf_counter() - start
                if not await self._converse(conversation, text, due, start):
                    # An endpoint that refuses at once is not to be stormed.
                    await asyncio.sleep(_AFTER_FAILURE_S)

        await self._all([asyncio.create_task(user()) for _ in range(concurrency)])

    async def _converse(
        self, conversation: Conversation, text: str, due: float, start: float
    ) -> bool:
        """Whether all turns were answered; after a failure there are no more."""
        writer = self.writer
        said = [text]
        for number, turn in enumerate(conversation.turns):
            if number:
                said.append(writer.text(turn, conversation.seed + number * 7_368_787))
                await asyncio.sleep(max(0.0, start + due - time.perf_counter()))
            body = writer.body(said, turn.output)
            call = Call(due, body, writer.path, cancel_after=self.patience)
            outcome = await self.client.call(call, start)
            self.add(outcome)
            if not outcome.ok:
                return False
            said.append(outcome.text)
            due = outcome.end + conversation.think
        return True
