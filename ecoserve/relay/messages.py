"""What the relay and a worker tell each other about an answer that another worker began."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import msgspec

# A worker's route: POST a ``TextQuestion``, get a ``Text``, both as JSON.
TEXT_PATH = "/ecoserve/text"


class TextQuestion(msgspec.Struct, frozen=True):
    """Which text the engine makes of the ids ``tokens`` when they are the answer to ``prompt``."""

    prompt: list[int]
    tokens: list[int]
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True


class Text(msgspec.Struct, frozen=True):
    """``ends[i]``: how many characters of ``text`` the tokens up to and with number i have made.

    A token adds none while it leaves a character of several bytes unfinished.
    """

    text: str
    ends: list[int]

    @property
    def settled(self) -> int:
        """How many of the tokens made all of the text: those after them have added nothing yet.

        Only after these can an answer be continued: the engine takes a prompt that ends within a
        character for one without text, and gives all of it out again when the character is whole.
        """
        return self.ends.index(len(self.text)) + 1 if self.text else 0


@dataclass(frozen=True, slots=True)
class Limits:
    """What bounds an answer besides its own ``max_tokens``; all in tokens.

    ``context`` bounds prompt and answer together, ``default`` is the answer's limit where the
    request names none, ``most`` the limit whatever it names (vLLM's ``get_max_tokens``).
    """

    context: int
    default: int | None = None
    most: int | None = None

    def header(self) -> str:
        """As the value of the header ``headers.LIMITS``."""
        named = {"context": self.context, "default": self.default, "most": self.most}
        return "; ".join(f"{name}={value}" for name, value in named.items() if value is not None)

    @classmethod
    def parse(cls, header: str) -> Self:
        """Raises ``ValueError`` for what ``header()`` does not write."""
        named = dict(part.strip().split("=", 1) for part in header.split(";"))
        try:
            return cls(**{name: int(value) for name, value in named.items()})
        except TypeError as error:
            raise ValueError(f"not a header of limits: {header!r}") from error

    def answer(self, prompt: int, asked: int | None) -> int:
        """The most tokens of the answer to a prompt of so many, of which ``asked`` are asked."""
        limits = (self.context - prompt, self.default if asked is None else asked, self.most)
        return min(limit for limit in limits if limit is not None)
