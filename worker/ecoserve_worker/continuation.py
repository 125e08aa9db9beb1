"""What the stream relay needs of a worker to continue an answer that another worker began."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from ecoserve.relay.messages import Limits, Text, TextQuestion
from ecoserve.scheduler.work import CHAT, COMPLETIONS


class Continuation:
    """``limits`` tells by the path of a call what bounds its answer; a path that is not there has
    answers that cannot be continued."""

    def __init__(self, tokenizer: Any, limits: Mapping[str, Limits]) -> None:
        self._tokenizer = tokenizer
        self._headers = {path: limit.header().encode() for path, limit in limits.items()}

    @classmethod
    def of(cls, state: Any) -> Continuation | None:
        """That of a vLLM app, by its state; None for a model that generates no text."""
        completions, chat = state.openai_serving_completion, state.openai_serving_chat
        if completions is None:
            return None
        # As in vLLM's `get_max_tokens`.
        limits = Limits(
            completions.model_config.max_model_len,
            completions.default_sampling_params.get("max_tokens"),
            completions.override_max_tokens,
        )
        paths = {COMPLETIONS: limits}
        if chat is not None and not _parses(chat):
            paths[CHAT] = limits
        return cls(completions.renderer.tokenizer, paths)

    def header(self, path: str) -> bytes | None:
        """The value of ``headers.LIMITS`` on a stream that answers a call of ``path``, if any."""
        return self._headers.get(path)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI app of ``TEXT_PATH``."""
        try:
            question = msgspec.json.decode(await Request(scope, receive).body(), type=TextQuestion)
        except msgspec.DecodeError as error:
            await JSONResponse({"error": {"message": str(error), "code": 400}}, 400)(
                scope, receive, send
            )
            return
        # Of a long answer it takes a while, and other answers go on.
        told = await asyncio.to_thread(text, self._tokenizer, question)
        answer = Response(msgspec.json.encode(told), media_type="application/json")
        await answer(scope, receive, send)


def text(tokenizer: Any, question: TextQuestion) -> Text:
    """The text that vLLM streams for these tokens, by its own detokenizer."""
    from vllm import SamplingParams
    from vllm.v1.engine.detokenizer import IncrementalDetokenizer

    parameters = SamplingParams(
        skip_special_tokens=question.skip_special_tokens,
        spaces_between_special_tokens=question.spaces_between_special_tokens,
    )
    request = SimpleNamespace(
        request_id="text",
        prompt_token_ids=question.prompt,
        prompt_embeds=None,
        sampling_params=parameters,
    )
    detokenizer = IncrementalDetokenizer.from_new_request(tokenizer, request)
    ends = []
    for token in question.tokens:
        detokenizer.update([token], False)
        ends.append(len(detokenizer.output_text))
    return Text(detokenizer.output_text, ends)


def _parses(chat: Any) -> bool:
    """Whether what the model says is made into something else (reasoning, tool calls) even for a
    call without tools. Most parsers of tool calls leave it as it is then."""
    from vllm.parser.abstract_parser import DelegatingParser

    parser = chat.parser_cls
    if parser is None:
        return False
    return (
        parser.parse_delta is not DelegatingParser.parse_delta
        or parser.reasoning_parser_cls is not None
        or parser.tool_parser_cls.engine_based_streaming
    )
