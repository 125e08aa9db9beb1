"""Which calls the relay can continue, and what it asks for when it does. Pure.

An answer is continued by a completions call whose prompt are the token ids of the prompt and of
what is there of the answer. What would then come out other than without the break is left alone:
a field that is not known here to be harmless is one that cannot be continued.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from ecoserve.relay.messages import Limits
from ecoserve.scheduler.work import CHAT, COMPLETIONS, COMPLETIONS_TOKENS

Body = dict[str, Any]

# Fields that a continuation has as the call had them.
_KEPT = frozenset(
    (
        "model",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "repetition_penalty",
        "stop",
        "stop_token_ids",
        "include_stop_str_in_output",
        "ignore_eos",
        "min_tokens",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "logit_bias",
        "allowed_token_ids",
        "user",
        "priority",
        "cache_salt",
        "session_id",
        "stream_interval",
        "stream_options",
        "prompt_cache_key",
    )
)
# Fields that are spent when the prompt has been made of them, or have no effect on the answer.
_SPENT = frozenset(
    (
        "messages",
        "prompt",
        "stream",
        "max_tokens",
        "max_completion_tokens",
        "chat_template",
        "chat_template_kwargs",
        "add_generation_prompt",
        "continue_final_message",
        "add_special_tokens",
        "documents",
        "reasoning_effort",
        "truncate_prompt_tokens",
        "truncation_side",
        "request_id",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_retention",
        "seed",
    )
)
# Fields that may be there as long as they ask for nothing. Those for which vLLM keeps a state that
# a continuation would begin anew (penalties, grammars, parsers of tool calls) are among them.
_WITHOUT_EFFECT: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "top_logprobs": (0,),
    "bad_words": ([],),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none",),
    "parallel_tool_calls": (True, False),
    "include_reasoning": (True,),
    "response_format": ({"type": "text"},),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (True, False),
}


class NotContinued(ValueError):
    """The relay cannot continue the answer to a call; the message says why, in a few words."""


@dataclass(frozen=True, slots=True)
class Ask:
    """A call whose answer the relay can continue. ``limit`` is its own, in tokens (None: none)."""

    path: str
    body: Body
    stops: tuple[str, ...]
    limit: int | None

    @property
    def chat(self) -> bool:
        return self.path == CHAT

    @property
    def with_stop(self) -> bool:
        """Whether a stop string is part of the answer."""
        return bool(self.body.get("include_stop_str_in_output"))

    @property
    def usage(self) -> bool:
        """Whether the stream ends with the usage."""
        return bool((self.body.get("stream_options") or {}).get("include_usage"))

    @property
    def usage_throughout(self) -> bool:
        """Whether each event of the stream tells the usage."""
        options = self.body.get("stream_options") or {}
        return self.usage and bool(options.get("continuous_usage_stats"))

    def flag(self, name: str) -> bool:
        """A field of which the default is true."""
        return self.body.get(name) is not False

    def first(self) -> bytes:
        """The body of the call itself: it also asks for the token ids."""
        return msgspec.json.encode({**self.body, "return_token_ids": True})

    def rest(self, prompt: list[int], tokens: list[int], limits: Limits) -> bytes:
        """The body of a completions call for what is to come after ``tokens``."""
        kept = {k: v for k, v in self.body.items() if k in _KEPT and v is not None}
        left = limits.answer(len(prompt), self.limit) - len(tokens)
        call = {
            **kept,
            "prompt": [*prompt, *tokens],
            "max_tokens": max(left, 1),
            "stream": True,
            "return_token_ids": True,
        }
        if "min_tokens" in call:
            call["min_tokens"] = max(call["min_tokens"] - len(tokens), 0)
        return msgspec.json.encode(call)


def read(path: str, raw: bytes) -> Ask:
    """Reads a call; raises ``NotContinued`` for one that is to be passed on as it is."""
    if path not in (CHAT, COMPLETIONS):
        raise NotContinued(path)
    try:
        body = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        raise NotContinued("no JSON") from None
    if not isinstance(body, dict):
        raise NotContinued("no object")
    if body.get("stream") is not True:
        raise NotContinued("no stream")
    for name, value in body.items():
        _check(path, name, value)
    if path == CHAT:
        _check_messages(body.get("messages"))
        limit = body.get("max_completion_tokens")
        limit = body.get("max_tokens") if limit is None else limit
    else:
        _check_prompt(body.get("prompt"))
        limit = body.get("max_tokens")
        limit = COMPLETIONS_TOKENS if limit is None else limit
    if body.get("seed") is not None and body.get("temperature") != 0:
        raise NotContinued("seed")
    stop = body.get("stop") or []
    stops = [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list) or not all(isinstance(one, str) and one for one in stops):
        raise NotContinued("stop")
    least = body.get("min_tokens") or 0
    for name, number in (("max_tokens", 1 if limit is None else limit), ("min_tokens", least)):
        if not isinstance(number, int):
            raise NotContinued(name)
    # Where a stop string counts from would have to be known across the break.
    if stops and least:
        raise NotContinued("min_tokens with stop")
    if not isinstance(body.get("stream_options") or {}, dict):
        raise NotContinued("stream_options")
    return Ask(path, body, tuple(stops), limit)


def _check(path: str, name: str, value: Any) -> None:
    if name == "tool_choice" and value is None:
        raise NotContinued(name)  # to vLLM it is not "none"
    if value is None or name in _KEPT or name in _SPENT:
        return
    if name == "logprobs":
        # In completions, even 0 asks for that of the token itself.
        if path == CHAT and value is False:
            return
    elif any(value == idle for idle in _WITHOUT_EFFECT.get(name, ())):
        return
    raise NotContinued(name)


def _check_messages(messages: Any) -> None:
    """Pictures and the like are in the prompt, but not in its token ids."""
    for message in messages if isinstance(messages, list) else []:
        content = message.get("content") if isinstance(message, dict) else None
        for part in content if isinstance(content, list) else []:
            if isinstance(part, dict) and part.get("type") != "text":
                raise NotContinued(f"messages with {part.get('type')}")


def _check_prompt(prompt: Any) -> None:
    if isinstance(prompt, list) and len(prompt) != 1 and not all(type(i) is int for i in prompt):
        raise NotContinued("several prompts")
