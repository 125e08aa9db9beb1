"""One streamed answer, put together from what several workers gave of it. Pure.

The events of the first worker go to the client nearly as they are. A worker that continues the
answer gives events of a completions call; of them, events are made as the first one's were.
"""

from __future__ import annotations

from typing import Any

import msgspec

from ecoserve.relay.messages import Limits, Text, TextQuestion
from ecoserve.relay.request import Ask

Event = dict[str, Any]

_OTHERWISE = "another worker reads its tokens otherwise"

_decode = msgspec.json.decode
_encode = msgspec.json.encode


class Broke(Exception):
    """The worker says that it cannot go on; another one may."""


class Lost(Exception):
    """The answer cannot be continued; the message says why."""


class Answer:
    """What is there of an answer, and what of it the client has been given."""

    def __init__(self, ask: Ask) -> None:
        self.prompt: list[int] | None = None  # known from the first event on
        self.tokens: list[int] = []
        self.shown = ""
        self.finished = False  # the client knows how it ended
        self.whole = False  # the client has been given all of it
        # Set when a stop string that began before a break is complete: the worker at hand would
        # not notice. ``settle`` then ends the answer.
        self.stopped: tuple[str, str] | None = None  # all the text up to the stop, and the stop
        self._ask = ask
        self._head: Event = {}
        self._usage_told = False
        self._continued = False
        self._window = max((len(stop) for stop in ask.stops), default=1) - 1
        self._before = ""  # text before the last break
        self._since = ""  # and since it, as far as the worker has given it
        self._watching = False  # for a stop string across the break

    # --- the first worker

    def take(self, data: bytes) -> bytes | None:
        """The event for the client that is made of a worker's; None if there is none.

        Raises ``Broke`` for an error of the worker.
        """
        if data == b"[DONE]":
            self.whole = True
            return b"[DONE]"
        event = _decode(data)
        if event.get("error") is not None:
            return self._error(event, data)
        made = self._next(event) if self._continued else self._first(event)
        return None if made is None else _encode(made)

    def _error(self, event: Event, data: bytes) -> bytes:
        code = event["error"].get("code") if isinstance(event["error"], dict) else None
        if not isinstance(code, int) or code >= 500:
            raise Broke
        self.whole = True  # the call's own fault, wherever it is served: nothing comes after it
        return data

    def _first(self, event: Event) -> Event | None:
        self._head = self._head or {
            name: event.get(name) for name in ("id", "object", "created", "model")
        }
        if event.get("prompt_token_ids") is not None:
            self.prompt, event["prompt_token_ids"] = event["prompt_token_ids"], None
        for choice in event["choices"]:
            if choice.get("prompt_token_ids") is not None:
                self.prompt, choice["prompt_token_ids"] = choice["prompt_token_ids"], None
            self.tokens += choice.get("token_ids") or ()
            if "token_ids" in choice:
                choice["token_ids"] = None
            said = choice["delta"].get("content") if self._ask.chat else choice["text"]
            self.shown += said or ""
            self.finished |= choice.get("finish_reason") is not None
            if not choice.get("delta", True) and choice.get("finish_reason") is None:
                return None  # there for its token ids alone
        self._usage_told |= not event["choices"] and event.get("usage") is not None
        return event

    # --- a break

    def question(self) -> TextQuestion:
        """What a worker has to be asked before it can continue the answer."""
        return TextQuestion(
            self.prompt or [],
            self.tokens,
            self._ask.flag("skip_special_tokens"),
            self._ask.flag("spaces_between_special_tokens"),
        )

    def resume(self, told: Text, limits: Limits) -> bytes | None:
        """The body of the completions call that continues the answer; None if it is ``stopped``.

        Tokens of which nothing has been seen yet, because they end within a character, are
        dropped; they come again. Raises ``Lost``.
        """
        assert self.prompt is not None
        if not told.text.startswith(self.shown):
            raise Lost(_OTHERWISE)
        if self._watching and self._stop(told.text, 0):
            return None
        self.tokens = self.tokens[: told.settled]
        self._continued = True
        self._before, self._since = told.text, ""
        self._watching = self._window > 0 and bool(told.text)
        return self._ask.rest(self.prompt, self.tokens, limits)

    # --- a worker that continues it

    def _next(self, event: Event) -> Event | None:
        usage = event.get("usage")
        if not event["choices"]:
            if usage is None:
                return None
            self._usage_told = True
            return self._event([], event, usage=True)
        (choice,) = event["choices"]
        finish, reason = choice.get("finish_reason"), choice.get("stop_reason")
        self.tokens += choice.get("token_ids") or ()
        self._since += choice["text"]
        if self._watching:
            self._watch(finish, reason)
            if self.stopped or self._watching:
                return None
        said = (self._before + self._since)[len(self.shown) :]
        self.shown += said
        self.finished = finish is not None
        return self._event([self._choice(said, finish, reason)], event, usage=usage is not None)

    def _watch(self, finish: str | None, reason: Any) -> None:
        """Looks for a stop string that lies across the break."""
        since = self._since
        if isinstance(reason, str) and finish == "stop" and not self._ask.with_stop:
            since += reason  # the worker has cut off its own
        across = self._stop(self._before + since, len(self._before))
        if not across and (finish is not None or len(since) >= self._window):
            self._watching = False

    def _stop(self, text: str, after: int) -> bool:
        """Sets ``stopped`` if a stop string that ends after so many characters began before them
        (anywhere, if none).

        Of several the engine takes the one that is complete first, or else that comes first in the
        list (vLLM's ``check_stop_strings``).
        """
        found = []
        for place, stop in enumerate(self._ask.stops):
            start = text.find(stop, max(after - len(stop) + 1, 0))
            if start >= 0:
                found.append((start + len(stop), place, start, stop))
        if not found:
            return False
        end, _, start, stop = min(found)
        if after and start >= after:
            return False  # the worker at hand stops at it by itself
        self.stopped = text[:end], stop
        return True

    def settle(self, told: Text) -> list[bytes]:
        """The last events of an answer that is ``stopped``. Raises ``Lost``."""
        assert self.stopped is not None
        text, stop = self.stopped
        if not told.text.startswith(text):
            raise Lost(_OTHERWISE)
        # The token that completes the stop string is the last.
        count = next(i for i, end in enumerate(told.ends, 1) if end >= len(text))
        self.tokens = self.tokens[:count]
        if not self._ask.with_stop:
            text = text.removesuffix(stop)
        said = text[len(self.shown) :]
        self.shown += said
        self.finished = True
        last = self._event([self._choice(said, "stop", stop)], {}, usage=self._ask.usage_throughout)
        return [_encode(last), *self.closing()]

    def closing(self) -> list[bytes]:
        """The events after the one with the finish reason that the client has not been given."""
        events = []
        if self._ask.usage and not self._usage_told:
            events.append(_encode(self._event([], {}, usage=True)))
            self._usage_told = True
        self.whole = True
        return [*events, b"[DONE]"]

    # --- events as the first worker's

    def _choice(self, text: str, finish: str | None, reason: Any) -> Event:
        choice: Event = {"index": 0}
        if self._ask.chat:
            choice["delta"] = {"content": text}
        else:
            choice["text"] = text
        choice |= {"logprobs": None, "finish_reason": finish}
        if finish is not None or not self._ask.chat:
            choice["stop_reason"] = reason
        if not self._ask.chat:
            choice["prompt_token_ids"] = None
        return {**choice, "token_ids": None}

    def _event(self, choices: list[Event], given: Event, *, usage: bool) -> Event:
        event = {**self._head, "choices": choices}
        if given.get("system_fingerprint") is not None:
            event["system_fingerprint"] = given["system_fingerprint"]
        if usage:
            prompt, answer = len(self.prompt or ()), len(self.tokens)
            event["usage"] = {
                "prompt_tokens": prompt,
                "total_tokens": prompt + answer,
                "completion_tokens": answer,
            }
        return event
