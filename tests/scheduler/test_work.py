"""How much work a call is."""

from __future__ import annotations

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ecoserve.scheduler.prefixes import BLOCK_BYTES
from ecoserve.scheduler.work import CHAT, COMPLETIONS, read


def chat(messages, **fields):
    return read(CHAT, json.dumps({"model": "m", "messages": messages, **fields}).encode())


def complete(prompt, **fields):
    return read(COMPLETIONS, json.dumps({"model": "m", "prompt": prompt, **fields}).encode())


def user(text):
    return {"role": "user", "content": text}


def test_chat() -> None:
    work = chat([user("x" * 1000)], n=3, max_tokens=7)
    assert work.valid
    assert work.model == "m"
    assert 1000 <= work.text_bytes < 1020
    assert (work.tokens, work.sequences, work.most_output) == (0, 3, 7)
    assert chat([user("x")], max_tokens=7, max_completion_tokens=5).most_output == 5
    assert chat([user("x")]).most_output is None


def test_tools_and_tool_calls_count() -> None:
    tools = [{"type": "function", "function": {"name": "f" * 500}}]
    calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "a" * 300}}]
    plain = chat([user("x")])
    assert chat([user("x")], tools=tools).text_bytes > plain.text_bytes + 500
    spoken = {"role": "assistant", "content": None, "tool_calls": calls}
    assert chat([user("x"), spoken]).text_bytes > plain.text_bytes + 300


def test_pictures_do_not_count_as_text() -> None:
    picture = {"type": "image_url", "image_url": {"url": "data:" + "A" * 100_000}}
    work = chat([user([{"type": "text", "text": "what is this?"}, picture])])
    assert work.valid
    assert work.text_bytes < 100


@pytest.mark.parametrize(
    ("prompt", "text_bytes", "tokens", "sequences"),
    [
        ("hello", 5, 0, 2),
        (["hello", "you"], 8, 0, 4),
        ([1, 2, 3], 0, 3, 2),
        ([[1, 2], [3]], 0, 3, 4),
        ([[1, 2**40, -1]], 0, 3, 2),
        ([], 0, 0, 2),
        (None, 0, 0, 2),
    ],
)
def test_completions(prompt, text_bytes, tokens, sequences) -> None:
    work = complete(prompt, n=2)
    assert work.valid
    assert (work.text_bytes, work.tokens, work.sequences) == (text_bytes, tokens, sequences)
    assert work.most_output == 16
    assert complete(prompt, max_tokens=0).most_output == 0


def test_conversation_keys() -> None:
    system = {"role": "system", "content": "be good"}
    first = chat([system, user("one")])
    later = chat([system, user("one"), {"role": "assistant", "content": "a"}, user("two")])
    assert first.conversation == later.conversation
    assert chat([system, user("two")]).conversation != first.conversation
    assert chat([user("x")], user="me").conversation == b"me"
    assert chat([user("x")], user="me", prompt_cache_key="k").conversation == b"k"


def test_a_longer_turn_extends_the_chain() -> None:
    messages = [user("word " * 500)]
    short = chat(messages)
    long = chat([*messages, {"role": "assistant", "content": "yes " * 500}])
    [a], [b] = short.chains, long.chains
    assert len(a) == short.text_bytes // BLOCK_BYTES
    assert b[: len(a)] == a
    assert len(b) > len(a)


def test_heads_load_what_they_say() -> None:
    system = {"role": "system", "content": "s" * 300}
    tools = [{"type": "function", "function": {"name": "f"}}]
    work = chat([system, user("one")], tools=tools)
    body = json.loads(work.head.body("m"))
    assert body["messages"][0] == system
    assert body["tools"] == tools
    assert body["max_tokens"] == 1
    assert chat([system, user("two")], tools=tools).head.key == work.head.key
    assert chat([user("x" * 9999)]).head is None
    assert chat([{"role": "system", "content": "s" * 70_000}, user("one")]).head is None
    assert json.loads(complete("p" * 5000).head.body("m"))["prompt"] == "p" * 1024


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=6,
)
fields = st.sampled_from(
    ["model", "messages", "prompt", "n", "max_tokens", "tools", "user", "prompt_cache_key"]
)


# How fast inputs are made depends on what else the machine does.
@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(
    st.sampled_from([CHAT, COMPLETIONS, "/v1/embeddings"]),
    st.binary(max_size=200)
    | st.dictionaries(fields, json_values, max_size=6).map(lambda d: json.dumps(d).encode()),
)
def test_any_body_is_read(path, body) -> None:
    work = read(path, body)
    assert work.text_bytes >= 0
    assert work.tokens >= 0
    assert work.sequences >= 1
    assert work.most_output is None or work.most_output >= 0
