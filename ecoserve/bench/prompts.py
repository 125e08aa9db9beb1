"""The bodies of calls: text of a wanted length, and answers of a wanted length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from ecoserve.sim.records import BLOCK, Arrival

Api = Literal["chat", "completions"]
PATHS: dict[Api, str] = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}

# Some hundred common words of one token each in the tokenizers of most models.
_WORDS = """
time year people way day man thing woman life child world school state family student group
country problem hand part place case week company system program question work government
number night point home water room mother area money story fact month lot right study book
eye job word business issue side kind head house service friend father power hour game line
end member law car city community name president team minute idea body information back
parent face others level office door health person art war history party result change
morning reason research girl guy moment air teacher force education
""".split()  # noqa: SIM905 (a list of a hundred literals would hide the words)


def words(count: int, seed: int | Sequence[int]) -> str:
    """About ``count`` tokens of text; different seeds share no prefix."""
    rng = np.random.default_rng(seed)
    return " ".join(rng.choice(_WORDS, size=max(count, 1)))


def chat(
    model: str, prompt: str, tokens: int, *, stream: bool = True, system: str | None = None
) -> dict[str, Any]:
    """A chat body whose answer is exactly ``tokens`` long (vLLM's ``ignore_eos``)."""
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": prompt})
    body: dict[str, Any] = {
        "model": model,
        "messages": messages,
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": stream,
    }
    if stream:
        body["stream_options"] = {"include_usage": True}
    return body


@dataclass(frozen=True, slots=True)
class Writer:
    """Writes the bodies for one endpoint.

    ``overhead`` and ``tokens_per_word`` are what its tokenizer and chat template make of the text,
    as ``usage`` tells, so that prompts have the tokens that the workload wants. ``limit_field`` is
    the name under which the answer's length goes; ``extra`` goes into every body. Another ``salt``
    makes all text anew, so that a run does not find its prompts in the caches of the one before.
    """

    model: str
    api: Api = "chat"
    overhead: float = 0.0
    tokens_per_word: float = 1.0
    limit_field: str = "max_tokens"
    salt: int = 0
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def path(self) -> str:
        """Path of the calls, from the endpoint's root."""
        return PATHS[self.api]

    def text(self, arrival: Arrival, seed: int) -> str:
        """A prompt as long as the arrival's. Blocks with equal hashes have equal text; the rest is
        new for each ``seed``."""
        count = max(round((arrival.prompt - self.overhead) / self.tokens_per_word), 1)
        block = max(round(BLOCK / self.tokens_per_word), 1)
        pieces = [
            words(block, (self.salt, 0, abs(name))) for name in arrival.blocks[: count // block]
        ]
        left = count - block * len(pieces)
        return " ".join([*pieces, *([words(left, (self.salt, 1, seed))] if left else [])])

    def body(self, said: Sequence[str], tokens: int) -> dict[str, Any]:
        """The body of a call: what the user and the model have said in turn, the user first and
        last, and the tokens that the answer is to have."""
        body: dict[str, Any] = {"model": self.model}
        if self.api == "chat":
            roles = ("user", "assistant")
            body["messages"] = [
                {"role": roles[i % 2], "content": text} for i, text in enumerate(said)
            ]
        else:
            body["prompt"] = "\n".join(said)
        body |= {self.limit_field: tokens, "stream": True, "temperature": 0}
        return body | {"stream_options": {"include_usage": True}} | dict(self.extra)
