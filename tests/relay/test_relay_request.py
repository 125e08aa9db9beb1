"""Which calls the relay continues, and what it then asks for."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ecoserve.relay.messages import Limits
from ecoserve.relay.request import NotContinued, read

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
PICTURE = {"type": "image_url", "image_url": {"url": "data:,"}}


def raw(**fields: Any) -> bytes:
    return json.dumps({"model": "m", "stream": True, **fields}).encode()


@pytest.mark.parametrize(
    ("path", "fields", "reason"),
    [
        (CHAT, {"n": 2}, "n"),
        (CHAT, {"logprobs": True}, "logprobs"),
        (COMPLETIONS, {"logprobs": 0}, "logprobs"),
        (CHAT, {"top_logprobs": 3}, "top_logprobs"),
        (CHAT, {"prompt_logprobs": 1}, "prompt_logprobs"),
        (CHAT, {"tools": [TOOL]}, "tools"),
        (CHAT, {"tool_choice": "auto"}, "tool_choice"),
        (CHAT, {"tool_choice": None}, "tool_choice"),
        (CHAT, {"functions": [TOOL]}, "functions"),
        (COMPLETIONS, {"best_of": 3}, "best_of"),
        (COMPLETIONS, {"echo": True}, "echo"),
        (COMPLETIONS, {"suffix": "end"}, "suffix"),
        (COMPLETIONS, {"use_beam_search": True}, "use_beam_search"),
        (COMPLETIONS, {"prompt": ["a", "b"]}, "several prompts"),
        (COMPLETIONS, {"prompt": [[1], [2]]}, "several prompts"),
        (COMPLETIONS, {"prompt_embeds": "AA"}, "prompt_embeds"),
        (CHAT, {"response_format": {"type": "json_object"}}, "response_format"),
        (CHAT, {"structured_outputs": {"choice": ["a"]}}, "structured_outputs"),
        (CHAT, {"presence_penalty": 0.5}, "presence_penalty"),
        (CHAT, {"frequency_penalty": -1}, "frequency_penalty"),
        (CHAT, {"bad_words": ["damn"]}, "bad_words"),
        (CHAT, {"seed": 1}, "seed"),
        (CHAT, {"seed": 1, "temperature": 0.5}, "seed"),
        (CHAT, {"return_token_ids": True}, "return_token_ids"),
        (CHAT, {"stop": "x", "min_tokens": 3}, "min_tokens with stop"),
        (CHAT, {"messages": [{"role": "user", "content": [PICTURE]}]}, "messages with image_url"),
        (CHAT, {"unheard_of": 1}, "unheard_of"),
        (CHAT, {"stream": False}, "no stream"),
        ("/v1/responses", {}, "/v1/responses"),
        ("/v1/embeddings", {}, "/v1/embeddings"),
    ],
)
def test_what_cannot_be_continued_is_named(path: str, fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(NotContinued) as raised:
        read(path, raw(**{"messages": HI, **fields}))
    assert str(raised.value) == reason


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b'"x"', b'{"stream": 1}', b'{"stream": true, "stop": [3]}']
)
def test_what_the_worker_will_refuse_is_left_to_it(body: bytes) -> None:
    with pytest.raises(NotContinued):
        read(CHAT, body)


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (
            CHAT,
            {"n": 1, "logprobs": False, "top_logprobs": 0, "tools": None, "tool_choice": "none"},
        ),
        (CHAT, {"response_format": {"type": "text"}, "presence_penalty": 0.0, "seed": None}),
        (CHAT, {"seed": 3, "temperature": 0, "user": "u", "metadata": {"a": "b"}}),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]}),
        (CHAT, {"chat_template_kwargs": {"enable_thinking": False}, "max_completion_tokens": 3}),
        (COMPLETIONS, {"prompt": "a", "best_of": 1, "echo": False, "logprobs": None}),
        (COMPLETIONS, {"prompt": [1, 2, 3], "stop": ["a"], "ignore_eos": True}),
        (COMPLETIONS, {"prompt": [[1, 2, 3]], "min_tokens": 3}),
    ],
)
def test_what_asks_for_nothing_special_is_continued(path: str, fields: dict[str, Any]) -> None:
    ask = read(path, raw(messages=HI, **fields) if "messages" not in fields else raw(**fields))
    assert json.loads(ask.first())["return_token_ids"] is True


def test_a_continuation_asks_for_the_rest_in_the_same_way() -> None:
    fields = {
        "messages": HI,
        "max_completion_tokens": 10,
        "temperature": 0.5,
        "logit_bias": {"7": 2},
        "stream_options": {"include_usage": True},
        "reasoning_effort": "low",
        "min_tokens": 4,
        "top_p": None,
    }
    rest = json.loads(read(CHAT, raw(**fields)).rest([1, 2], [3, 4, 5], Limits(100)))
    assert rest == {
        "model": "m",
        "prompt": [1, 2, 3, 4, 5],
        "max_tokens": 7,
        "min_tokens": 1,
        "stream": True,
        "temperature": 0.5,
        "logit_bias": {"7": 2},
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }


@pytest.mark.parametrize(
    ("path", "fields", "left"),
    [
        (CHAT, {}, 97),
        (CHAT, {"max_tokens": 10}, 9),
        (CHAT, {"max_tokens": 10, "max_completion_tokens": 5}, 4),
        (CHAT, {"max_tokens": 1000}, 97),
        (COMPLETIONS, {}, 15),
        (COMPLETIONS, {"max_tokens": None}, 15),
    ],
)
def test_what_is_left_of_the_limit(path: str, fields: dict[str, Any], left: int) -> None:
    ask = read(path, raw(messages=HI, **fields))
    assert json.loads(ask.rest([1, 2], [3], Limits(100)))["max_tokens"] == left
