"""What is asked of an endpoint: conversations of one turn or more, in order of arrival."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ecoserve.policy.state import SLO
from ecoserve.sim.records import Arrival
from ecoserve.sim.tracefile import read
from ecoserve.sim.workload import DATASETS, Lengths, Lognormal, Recorded, Synthetic

# The lengths of a workload have nothing to do with its promises here; they come from elsewhere.
_NO_SLO = SLO(1.0, 1.0)
LONGEST = 1 << 20


@dataclass(frozen=True, slots=True)
class Fixed:
    """One length for all."""

    tokens: int

    def draw(self, rng: np.random.Generator, count: int) -> NDArray[np.int64]:
        return np.full(count, self.tokens, dtype=np.int64)


def lengths(text: str, name: str) -> Lengths:
    """``200``: all alike; ``148:344``: lognormal of that median and mean. ValueError names
    ``name``."""
    parts = text.split(":")
    try:
        numbers = [float(part) for part in parts]
    except ValueError:
        numbers = []
    good = all(1 <= number <= LONGEST for number in numbers)
    if good and len(numbers) == 1 and numbers[0].is_integer():
        return Fixed(int(numbers[0]))
    if good and len(numbers) == 2 and numbers[0] < numbers[1]:
        return Lognormal(numbers[0], numbers[1], LONGEST)
    raise ValueError(
        f"{name} must be tokens (200) or MEDIAN:MEAN of a lognormal distribution, the mean above"
        f" the median (148:344), not {text!r}"
    )


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns of one user: each is asked ``think`` seconds after the answer to the one before.

    ``turns[0].at`` is when it begins; ``prompt`` of each turn is what it adds. ``seed`` makes its
    text.
    """

    turns: tuple[Arrival, ...]
    think: float
    seed: int


@dataclass(frozen=True, slots=True)
class Workload:
    """Where conversations come from; ``longest`` is what the model can hold, prompt and answer.

    Requests beyond ``longest`` are left out and the next ones take their place, as the trace says;
    in a conversation all its turns together must fit.
    """

    source: Synthetic | Recorded
    turns: int = 1
    think: float = 0.0
    longest: int = LONGEST

    def conversations(self, rate: float, count: int, seed: int) -> list[Conversation]:
        """``count`` requests, in whole conversations, at ``rate`` requests a second on average.

        The same seed gives the same prompts at every rate. Raises ``ValueError`` if none fits.
        """
        wanted = max(count // self.turns, 1)
        drawn = wanted
        while True:
            groups = self._groups(rate, drawn, seed)
            fitting = [group for group in groups if self._tokens(group) <= self.longest]
            if len(fitting) >= wanted:
                break
            if not fitting:
                raise ValueError(f"no request of the workload fits into {self.longest} tokens")
            drawn = math.ceil(drawn * 1.2 * wanted / len(fitting)) + 1
        # The arrivals of the first ``wanted``, whichever are left out, so that the rate holds.
        return [
            Conversation(
                (replace(turns[0], at=groups[i][0].at), *turns[1:]), self.think, _seed(seed, i)
            )
            for i, turns in enumerate(fitting[:wanted])
        ]

    def _groups(self, rate: float, count: int, seed: int) -> list[Sequence[Arrival]]:
        each = self.turns
        starts = self.source.arrivals(rate / each, count, seed)
        if each == 1:
            return [(start,) for start in starts]
        # Lengths of all turns, the beginnings of the conversations only.
        all_turns = self.source.arrivals(rate, count * each, seed)
        return [
            tuple(
                replace(turn, at=starts[i].at if not k else 0.0, blocks=())
                for k, turn in enumerate(all_turns[i * each : (i + 1) * each])
            )
            for i in range(count)
        ]

    @staticmethod
    def _tokens(turns: Sequence[Arrival]) -> int:
        return sum(turn.prompt + turn.output for turn in turns)


def _seed(seed: int, number: int) -> int:
    return seed * 1_000_003 + number


def source(
    *,
    data: str | None,
    prompt: str,
    output: str,
    cv: float | None,
) -> Synthetic | Recorded:
    """The workload of a data set's name, of a trace file, or of given lengths.

    ``cv`` is the spread of the gaps between arrivals (1 is Poisson); None: as the trace has them,
    Poisson for all else. Raises ``ValueError`` with what is wrong.
    """
    if data is None:
        return Synthetic(
            "synthetic",
            _NO_SLO,
            lengths(prompt, "--prompt-tokens"),
            lengths(output, "--output-tokens"),
            1.0 if cv is None else cv,
        )
    if data in DATASETS:
        return replace(DATASETS[data], cv=1.0 if cv is None else cv)
    path = Path(data)
    if not path.is_file():
        raise ValueError(f"--data must be one of {', '.join(DATASETS)} or a trace file, not {data}")
    return Recorded(path.name, _NO_SLO, read(path), cv)
