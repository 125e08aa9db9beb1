"""An answer that is cut anywhere, as often as one likes, is the answer that was not cut."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ecoserve.relay.answer import Answer, Broke, Lost
from ecoserve.relay.messages import Limits, Text, TextQuestion
from ecoserve.relay.request import read
from tests.relay.engine import CHAT, COMPLETIONS, CONTEXT, LIMITS, Engine, ids, tokenizer, told

PROMPT = "the cat?"
PAUSE = tokenizer().convert_tokens_to_ids("<|pause|>")


def body(path: str, **more: Any) -> dict[str, Any]:
    asked: dict[str, Any] = {"model": "m", "stream": True, "temperature": 0, **more}
    if path == CHAT:
        return {**asked, "messages": [{"role": "user", "content": PROMPT}]}
    return {**asked, "prompt": PROMPT}


@dataclass
class Seen:
    """What a client has seen of a stream."""

    heads: set[str]
    roles: int
    text: str
    ends: list[tuple[str, Any]]
    usage: list[dict[str, int]]

    @classmethod
    def of(cls, events: list[dict[str, Any]]) -> Seen:
        heads = {json.dumps([e[n] for n in ("id", "object", "created", "model")]) for e in events}
        choices = [choice for event in events for choice in event["choices"]]
        deltas = [choice.get("delta") or {"content": choice.get("text")} for choice in choices]
        assert all(choice.get("token_ids") is None for choice in choices)
        assert all(choice.get("prompt_token_ids") is None for choice in (*choices, *events))
        return cls(
            heads,
            sum("role" in delta for delta in deltas),
            "".join(delta.get("content") or "" for delta in deltas),
            [(c["finish_reason"], c.get("stop_reason")) for c in choices if c["finish_reason"]],
            [event["usage"] for event in events if not event["choices"]],
        )

    def shape(self) -> Any:
        return len(self.heads), self.roles, self.text, self.ends, self.usage


def relayed(engine: Engine, path: str, asked: dict[str, Any], cuts: list[int]) -> list[Any]:
    """The events that the client gets when each worker dies after so many of its own; the last
    does not."""
    ask = read(path, json.dumps(asked).encode())
    answer = Answer(ask)
    given: list[bytes] = []
    call = path, ask.first()
    for cut in [*cuts, None]:
        events = [json.dumps(e).encode() for e in engine.stream(call[0], json.loads(call[1]))]
        for event in [*events, b"[DONE]"][:cut]:
            made = answer.take(event)
            given += [made] if made is not None else []
            if answer.stopped:
                given += answer.settle(told(answer.question()))
            if answer.whole:
                break
        if answer.finished and not answer.whole:
            given += answer.closing()
        if answer.whole:
            break
        if answer.prompt is not None:
            known = told(answer.question()) if answer.tokens else Text("", [])
            rest = answer.resume(known, LIMITS)
            if rest is None:
                given += answer.settle(known)
                break
            call = COMPLETIONS, rest
    assert given.pop() == b"[DONE]"
    return [json.loads(event) for event in given]


def fields(event: dict[str, Any]) -> Any:
    """Which fields an event has."""
    return set(event), [set(choice) for choice in event["choices"]], set(event.get("usage") or ())


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    pieces = st.sampled_from(["the cat", " and", "abc", "ab", ", ", "é", "你好", "🙂", "�", "x"])
    words = draw(st.lists(pieces, min_size=1, max_size=12))
    answer = ids("".join(words))
    if draw(st.booleans()):
        answer.insert(draw(st.integers(0, len(answer))), PAUSE)
    said = "".join(words)
    begin = st.integers(0, len(said) - 1)
    stops = [said[at : at + draw(st.integers(1, 6))] for at in draw(st.lists(begin, max_size=2))]
    more = {"stop": stops} if stops else {}
    if draw(st.booleans()):
        more["include_stop_str_in_output"] = True
    if draw(st.booleans()):
        more["skip_special_tokens"] = False
    if draw(st.booleans()):
        more["max_tokens"] = draw(st.integers(1, len(answer) + 2))
    usage = draw(st.sampled_from([None, {}, {"continuous_usage_stats": True}]))
    if usage is not None:
        more["stream_options"] = {"include_usage": True, **usage}
    return {"words": said, "answer": answer, "more": more}


@given(
    case=cases(),
    path=st.sampled_from([CHAT, COMPLETIONS]),
    grouping=st.integers(0, 50),
    cuts=st.lists(st.integers(0, 12), max_size=4),
)
def test_cut_anywhere_it_is_the_same_answer(
    case: dict[str, Any], path: str, grouping: int, cuts: list[int]
) -> None:
    engine = Engine(grouping=grouping)
    engine.give(ids(PROMPT), case["answer"])
    asked = body(path, **case["more"])
    uncut = list(engine.stream(path, asked))
    cut = relayed(engine, path, asked, cuts)
    assert Seen.of(cut).shape() == Seen.of(uncut).shape()


def test_cut_at_every_event_of_a_long_answer() -> None:
    answer = ids("the 🙂 cat, 你好 and abcabc the dog. " * 4)
    engine = Engine()
    engine.give(ids(PROMPT), answer)
    for path in (CHAT, COMPLETIONS):
        usage = {"include_usage": True, "continuous_usage_stats": True}
        asked = body(path, max_tokens=90, stop=["og. the"], stream_options=usage)
        events = list(engine.stream(path, asked))
        uncut, kinds = Seen.of(events), [fields(event) for event in events]
        assert uncut.ends == [("stop", "og. the")]
        for cut in range(100):
            got = relayed(engine, path, asked, [cut])
            assert Seen.of(got).shape() == uncut.shape(), cut
            assert all(fields(event) in kinds for event in got)


@pytest.mark.parametrize("with_stop", [False, True])
def test_a_stop_string_across_one_break_or_two(with_stop: bool) -> None:
    """The tokens that a worker gives ahead of the text that it holds back do not count."""
    engine = Engine()
    engine.give(ids(PROMPT), ids("a cat, 你好 and more"))
    more = {"stop": ["t, 你好 an", "x"], "include_stop_str_in_output": with_stop}
    asked = body(COMPLETIONS, max_tokens=90, stream_options={"include_usage": True}, **more)
    uncut = Seen.of(list(engine.stream(COMPLETIONS, asked)))
    assert uncut.text == ("a cat, 你好 an" if with_stop else "a ca")
    for first, second, engine.grouping in itertools.product(range(12), range(5), range(3)):
        seen = Seen.of(relayed(engine, COMPLETIONS, asked, [first, second]))
        assert seen.shape() == uncut.shape(), (first, second, engine.grouping)


def test_an_answer_without_a_limit_of_its_own_ends_with_the_context() -> None:
    engine = Engine()
    engine.give(ids(PROMPT), ids("x, ") * CONTEXT)
    asked = body(CHAT, stream_options={"include_usage": True})
    uncut = Seen.of(list(engine.stream(CHAT, asked)))
    assert uncut.usage[0]["total_tokens"] == CONTEXT
    assert Seen.of(relayed(engine, CHAT, asked, [30, 30])).shape() == uncut.shape()


def test_the_models_own_limits_count() -> None:
    assert Limits(100).answer(60, None) == 40
    assert Limits(100, default=16).answer(60, None) == 16
    assert Limits(100, default=16).answer(60, 30) == 30
    assert Limits(100, most=20).answer(60, 30) == 20
    assert Limits(100, default=50).answer(60, None) == 40


@given(st.integers(1, 10**6), st.none() | st.integers(0), st.none() | st.integers(0))
def test_limits_are_read_as_they_are_written(
    context: int, default: int | None, most: int | None
) -> None:
    limits = Limits(context, default, most)
    assert Limits.parse(limits.header()) == limits


@pytest.mark.parametrize("header", ["", "context", "context=a", "other=1", "default=3"])
def test_bad_limits_are_an_error(header: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        Limits.parse(header)


def test_an_error_of_the_worker_is_a_break_and_one_of_the_call_is_not() -> None:
    answer = Answer(read(CHAT, json.dumps(body(CHAT)).encode()))
    for code in (500, 503, "broken", None):
        with pytest.raises(Broke):
            answer.take(json.dumps({"error": {"message": "dead", "code": code}}).encode())
    event = json.dumps({"error": {"message": "bad", "code": 400}}).encode()
    assert answer.take(event) == event
    assert answer.whole


def test_a_worker_that_reads_tokens_otherwise_is_not_followed() -> None:
    engine = Engine()
    engine.give(ids(PROMPT), ids("the cat"))
    answer = Answer(read(CHAT, json.dumps(body(CHAT)).encode()))
    for event in list(engine.stream(CHAT, json.loads(body_of(answer))))[:-1]:
        answer.take(json.dumps(event).encode())
    with pytest.raises(Lost):
        answer.resume(Text("a dog", [5] * len(answer.tokens)), LIMITS)


def body_of(answer: Answer) -> bytes:
    return answer._ask.first()


def test_tokens_within_a_character_come_again() -> None:
    """The engine takes a prompt that ends within a character for one without text, and would give
    the whole prompt out again with that character."""
    smile = ids("🙂")
    assert len(smile) > 1
    tokens = [*ids("cat"), *smile[:-1]]
    found = told(TextQuestion(ids(PROMPT), tokens))
    assert found.text == "cat"
    assert found.settled == len(ids("cat"))
    assert told(TextQuestion(ids(PROMPT), [])).settled == 0
