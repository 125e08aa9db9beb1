"""An engine that streams as vLLM does, with vLLM's own detokenizer, and whose answers are given.

It is "greedy": what comes after a beginning of an answer is the rest of that answer.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from types import SimpleNamespace
from typing import Any

from ecoserve_worker.continuation import text
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from vllm import SamplingParams
from vllm.v1.engine.detokenizer import IncrementalDetokenizer

from ecoserve.relay.messages import Limits, Text, TextQuestion

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
CONTEXT = 400
LIMITS = Limits(CONTEXT)
Event = dict[str, Any]


@cache
def tokenizer() -> Any:
    """Byte-level, with so few merges that characters beyond ASCII are several tokens."""
    from transformers import PreTrainedTokenizerFast  # vLLM has to be imported before

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|end|>", "<|pause|>"],
        show_progress=False,
    )
    made.train_from_iterator(["the cat and the dog, the end. abc abcabc"] * 3, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|end|>")


def ids(words: str) -> list[int]:
    return list(tokenizer().encode(words, add_special_tokens=False))


def told(question: TextQuestion) -> Text:
    """What a worker says about an answer's text."""
    return text(tokenizer(), question)


@dataclass
class Engine:
    """``answers`` by prompt. Several tokens may come in one event (``grouping`` seeds which)."""

    answers: dict[tuple[int, ...], list[int]] = field(default_factory=dict)
    grouping: int = 0
    requests: int = 0

    def give(self, prompt: list[int], answer: list[int]) -> None:
        end = tokenizer().eos_token_id
        self.answers[tuple(prompt)] = [*answer, end]

    def stream(self, path: str, body: dict[str, Any]) -> Iterator[Event]:
        """The events of an answer as vLLM 0.32 words them, without the last, ``[DONE]``."""
        self.requests += 1
        rng = random.Random(self.grouping * 1000 + self.requests)
        prompt, rest = self._rest(path, body)
        asked = body.get("max_completion_tokens") or body.get("max_tokens")
        if asked is None and path == COMPLETIONS:
            asked = 16
        most = LIMITS.answer(len(prompt), asked)
        head = {
            "id": f"{'chatcmpl' if path == CHAT else 'cmpl'}-eco-{self.requests:016x}",
            "object": "chat.completion.chunk" if path == CHAT else "text_completion",
            "created": 1000 + self.requests,
            "model": body["model"],
        }
        wants = bool(body.get("return_token_ids"))
        options = body.get("stream_options") or {}
        throughout = options.get("include_usage") and options.get("continuous_usage_stats")
        count = 0

        def event(choices: list[Event], usage: Any = None, **more: Any) -> Event:
            made = {**head, "choices": choices, **more}
            if usage:
                made["usage"] = {
                    "prompt_tokens": len(prompt),
                    "total_tokens": len(prompt) + count,
                    "completion_tokens": count,
                }
            return made

        if path == CHAT:
            role = {"index": 0, "delta": {"role": "assistant", "content": ""}}
            given = prompt if wants else None
            yield event(
                [{**role, "logprobs": None, "finish_reason": None}],
                throughout,
                prompt_token_ids=given,
            )
        first = True
        for tokens, said, finish, reason in _grouped(_steps(prompt, rest, most, body), rng):
            count += len(tokens)
            choice: Event = {"index": 0}
            if path == CHAT:
                # With a parser of tool calls, tokens without text have events for their ids alone.
                if not said and finish is None and not wants:
                    continue
                choice["delta"] = {"content": said} if said or finish else {}
            else:
                choice["text"] = said
            choice |= {"logprobs": None, "finish_reason": finish}
            if finish is not None or path == COMPLETIONS:
                choice["stop_reason"] = reason
            if path == COMPLETIONS:
                choice["prompt_token_ids"] = prompt if wants and first else None
            choice["token_ids"] = tokens if wants else None
            first = False
            yield event([choice], throughout)
        if options.get("include_usage"):
            yield event([], True)

    def _rest(self, path: str, body: dict[str, Any]) -> tuple[list[int], list[int]]:
        if path == CHAT:
            prompt = ids("".join(message["content"] for message in body["messages"]))
        else:
            given = body["prompt"]
            prompt = ids(given) if isinstance(given, str) else given
        for length in range(len(prompt), -1, -1):
            answer = self.answers.get(tuple(prompt[:length]))
            if answer is not None:
                begun = prompt[length:]
                assert answer[: len(begun)] == begun, "it goes on from something else"
                return prompt, answer[len(begun) :]
        raise AssertionError("not a prompt of this test")


Step = tuple[list[int], str, str | None, Any]


def _steps(prompt: list[int], rest: list[int], most: int, body: dict[str, Any]) -> Iterator[Step]:
    """What vLLM's output processor makes of the tokens, one at a time."""
    parameters = SamplingParams(
        stop=body.get("stop") or [],
        include_stop_str_in_output=bool(body.get("include_stop_str_in_output")),
        skip_special_tokens=body.get("skip_special_tokens", True),
        max_tokens=most,
    )
    request = SimpleNamespace(
        request_id="r", prompt_token_ids=prompt, prompt_embeds=None, sampling_params=parameters
    )
    detokenizer = IncrementalDetokenizer.from_new_request(tokenizer(), request)
    for number, token in enumerate(rest, 1):
        ended = token == tokenizer().eos_token_id
        finish = "stop" if ended else "length" if number == most else None
        stop = detokenizer.update([token], ended)
        if stop is not None:
            finish = "stop"
        said = detokenizer.get_next_output_text(finish is not None, True)
        yield [token], said, finish, stop
        if finish is not None:
            return


def _grouped(steps: Iterator[Step], rng: random.Random) -> Iterator[Step]:
    """As vLLM's front end has them when it falls behind its engine."""
    held: Step | None = None
    for tokens, said, finish, reason in steps:
        held = (
            (held[0] if held else []) + tokens,
            (held[1] if held else "") + said,
            finish,
            reason,
        )
        if finish is not None or rng.random() < 0.7:
            yield held
            held = None
