"""How much work a call is, read from its body without a tokenizer and without judging it.

A body that is not what its path wants is for a worker to answer; here it is a small piece of work.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import msgspec

from ecoserve.scheduler.prefixes import BLOCK_BYTES, MOST_HEAD_BYTES, Chain, chain

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"

# Completions calls generate so much when they do not say.
COMPLETIONS_TOKENS = 16
# A prompt's head that may be shared: a system prompt, or so much of a completions prompt.
HEAD_BYTES = 4 * BLOCK_BYTES
LEAST_HEAD_BYTES = BLOCK_BYTES
# Given as token ids, a prompt is hashed four bytes a token.
TOKEN_BYTES = 4


class _Part(msgspec.Struct):
    text: str | None = None


class _Message(msgspec.Struct):
    role: str = ""
    content: str | list[_Part] | None = None
    tool_calls: msgspec.Raw = msgspec.Raw(b"")
    tool_call_id: str | None = None


class _Common(msgspec.Struct):
    model: str | None = None
    n: int | None = None
    max_tokens: int | None = None
    prompt_cache_key: str | None = None
    user: str | None = None
    priority: int | None = None


class _Chat(_Common):
    messages: list[_Message] = []
    max_completion_tokens: int | None = None
    tools: msgspec.Raw = msgspec.Raw(b"")


class _Completions(_Common):
    prompt: str | list[str | int | list[int]] | None = None


class _OnlyModel(msgspec.Struct):
    model: str | None = None


_decode_chat = msgspec.json.Decoder(_Chat).decode
_decode_completions = msgspec.json.Decoder(_Completions).decode
_decode_common = msgspec.json.Decoder(_Common).decode
_decode_model = msgspec.json.Decoder(_OnlyModel).decode


@dataclass(frozen=True, slots=True)
class Head:
    """The beginning of a prompt that other calls may share: its key, and as a call of one token
    that loads it."""

    key: int
    path: str
    text: bytes
    tools: bytes = b""

    def body(self, model: str) -> bytes:
        """An OpenAI call that prefills the head and generates one token."""
        text = self.text.decode(errors="replace")
        call: dict[str, object] = {"model": model, "max_tokens": 1, "temperature": 0}
        if self.path == CHAT:
            call["messages"] = [
                {"role": "system", "content": text},
                {"role": "user", "content": "."},
            ]
            if self.tools:
                call["tools"] = msgspec.Raw(self.tools)
        else:
            call["prompt"] = text
        return msgspec.json.encode(call)


@dataclass(frozen=True, slots=True)
class Work:
    """What a call asks for.

    ``text_bytes`` are the bytes of all prompts given as text, ``tokens`` the token ids given as
    such. ``sequences`` are prompts x n. ``most_output`` bounds the output of one sequence (None:
    the model's own limit). ``priority`` is vLLM's, the lower the sooner. ``valid`` is False for a
    body that a worker will turn down.
    """

    model: str | None
    text_bytes: int
    tokens: int
    sequences: int
    most_output: int | None
    conversation: bytes
    chains: tuple[Chain, ...]
    head: Head | None
    priority: int = 0
    valid: bool = True


def read(path: str, body: bytes) -> Work:
    """Reads a call's body; never raises."""
    try:
        if path == CHAT:
            return _chat(_decode_chat(body))
        if path == COMPLETIONS:
            return _completions(_decode_completions(body))
        return _other(_decode_common(body), body)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return _unreadable(body)


def _chat(call: _Chat) -> Work:
    tools = bytes(call.tools)
    pieces = [tools] if tools else []
    system = first_user = b""
    for message in call.messages:
        text = _text(message)
        if message.role in ("system", "developer") and not system:
            system = text
        elif message.role == "user" and not first_user:
            first_user = text
        pieces.append(message.role.encode())
        pieces.append(text)
        if message.tool_calls:
            pieces.append(bytes(message.tool_calls))
    prompt = b"\n".join(pieces)
    head = None
    is_of_use = len(system) >= LEAST_HEAD_BYTES and len(system) + len(tools) <= MOST_HEAD_BYTES
    if is_of_use and call.messages[0].role == "system":
        head = Head(hash((CHAT, system, tools)), CHAT, system, tools)
    return _work(
        call,
        prompts=(prompt,),
        tokens=0,
        most_output=call.max_completion_tokens or call.max_tokens,
        conversation=system + b"\n" + first_user,
        head=head,
    )


def _text(message: _Message) -> bytes:
    content = message.content
    if content is None:
        return b""
    if isinstance(content, str):
        return content.encode()
    # Parts without text are pictures and sound; what they cost in tokens is not in their bytes.
    return "".join(part.text for part in content if part.text).encode()


def _completions(call: _Completions) -> Work:
    given = call.prompt
    texts: list[bytes] = []
    ids: list[list[int]] = []
    if isinstance(given, str):
        texts = [given.encode()]
    elif given and all(isinstance(item, int) for item in given):
        ids = [[item for item in given if isinstance(item, int)]]
    elif given:
        texts = [item.encode() for item in given if isinstance(item, str)]
        ids = [item for item in given if isinstance(item, list)]
    tokens = sum(len(item) for item in ids)
    prompts = (*texts, *(_packed(item) for item in ids))
    first = prompts[0] if prompts else b""
    head = None
    if len(texts) == 1 and len(first) >= HEAD_BYTES:
        text = first[:HEAD_BYTES]
        head = Head(hash((COMPLETIONS, text)), COMPLETIONS, text)
    return _work(
        call,
        prompts=prompts,
        tokens=tokens,
        most_output=COMPLETIONS_TOKENS if call.max_tokens is None else call.max_tokens,
        conversation=first[:BLOCK_BYTES],
        head=head,
    )


def _packed(ids: list[int]) -> bytes:
    return array("I", (i & 0xFFFFFFFF for i in ids)).tobytes()


def _other(call: _Common, body: bytes) -> Work:
    return _work(
        call,
        prompts=(body,),
        tokens=0,
        most_output=call.max_tokens,
        conversation=body[:BLOCK_BYTES],
        head=None,
    )


def _work(
    call: _Common,
    *,
    prompts: tuple[bytes, ...],
    tokens: int,
    most_output: int | None,
    conversation: bytes,
    head: Head | None,
) -> Work:
    key = call.prompt_cache_key or call.user
    n = call.n if call.n and call.n > 0 else 1
    return Work(
        model=call.model,
        text_bytes=sum(len(prompt) for prompt in prompts) - TOKEN_BYTES * tokens,
        tokens=tokens,
        sequences=max(len(prompts), 1) * n,
        most_output=most_output if most_output is None else max(most_output, 0),
        conversation=key.encode() if key else conversation,
        chains=tuple(chain(prompt) for prompt in prompts),
        head=head,
        priority=call.priority or 0,
    )


def _unreadable(body: bytes) -> Work:
    # A wrong field elsewhere must not hide an unknown model.
    try:
        model = _decode_model(body).model
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        model = None
    return Work(
        model=model,
        text_bytes=0,
        tokens=0,
        sequences=1,
        most_output=0,
        conversation=body[:BLOCK_BYTES],
        chains=(),
        head=None,
        valid=False,
    )
