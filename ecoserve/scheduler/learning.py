"""What is learnt from requests that ended: bytes a token, tokens an answer."""

from __future__ import annotations

# Beliefs before anything was seen, and how many tokens or answers they weigh.
BYTES_PER_TOKEN = 4.0
OUTPUT_TOKENS = 128.0
BELIEF_TOKENS = 500.0
BELIEF_ANSWERS = 4.0
# Every request takes this share from all before it.
FORGET = 0.005
# A ratio beyond this is no text.
LEAST_RATIO, MOST_RATIO = 0.5, 64.0


class Learnt:
    """Ratios of sums with forgetting, so that a long prompt counts for its length."""

    def __init__(self) -> None:
        self._bytes = BYTES_PER_TOKEN * BELIEF_TOKENS
        self._tokens = BELIEF_TOKENS
        self._generated = OUTPUT_TOKENS * BELIEF_ANSWERS
        self._answers = BELIEF_ANSWERS

    @property
    def bytes_per_token(self) -> float:
        """Bytes of prompt text for each prompt token, chat template and all."""
        return min(max(self._bytes / self._tokens, LEAST_RATIO), MOST_RATIO)

    @property
    def output_tokens(self) -> float:
        """Mean tokens of an answer, one sequence."""
        return self._generated / self._answers

    def prompt(self, text_bytes: int, tokens: int) -> None:
        """A prompt of so many bytes of text had so many tokens."""
        if text_bytes > 0 and tokens > 0:
            self._bytes = (1 - FORGET) * self._bytes + text_bytes
            self._tokens = (1 - FORGET) * self._tokens + tokens

    def answer(self, generated: int, sequences: int) -> None:
        """``sequences`` answers had so many tokens in all."""
        self._generated = (1 - FORGET) * self._generated + generated
        self._answers = (1 - FORGET) * self._answers + sequences
