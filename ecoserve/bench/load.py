"""Calls to a live OpenAI-compatible endpoint, each at its time, and what became of them.

TTFT is from the moment a call was due to its first text, so that a generator (or a server) that
falls behind does not flatter itself; how late calls went out is reported beside it.
TPOT = (end - first token) / (tokens - 1). Tokens are the server's own count (``usage``).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import aiohttp
import msgspec

from ecoserve.bench.judge import attainment, percentile
from ecoserve.bench.prompts import chat, words
from ecoserve.policy.state import SLO

__all__ = ["Call", "Client", "Outcome", "attainment", "chat", "percentile", "play", "words"]

Body = Mapping[str, Any]

# A line of a stream holds one event; with log-probabilities that can be long.
_LONGEST_LINE = 2**24


@dataclass(frozen=True, slots=True)
class Call:
    """One call: seconds after the start at which it is due, and what it asks."""

    due: float
    body: Body
    path: str = "/v1/chat/completions"
    headers: Mapping[str, str] = field(default_factory=dict)
    # Closes the connection so many seconds after the call went out; None: waits for the answer.
    cancel_after: float | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a call. Times are seconds after the run's start; 0 where it never came.

    ``gaps`` are the seconds between an answer's events with text, after the first.
    ``prompt_tokens`` and ``tokens`` are of the prompt and of the answer.
    """

    call: Call
    sent: float
    first: float
    end: float
    tokens: int
    status: int
    text: str = ""
    error: str = ""
    cancelled: bool = False
    whole: bool = False  # a stream that ended in [DONE] with no error in it, or a JSON answer
    prompt_tokens: int = 0
    gaps: tuple[float, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether a whole answer came."""
        return self.status == 200 and self.whole and not self.error

    @property
    def late(self) -> float:
        """Seconds between when the call was due and when it went out."""
        return self.sent - self.call.due

    @property
    def ttft(self) -> float:
        """Seconds from when the call was due to its first text."""
        return self.first - self.call.due

    @property
    def tpot(self) -> float:
        """Seconds for each token after the first; 0 for an answer of one token."""
        return (self.end - self.first) / (self.tokens - 1) if self.tokens > 1 else 0.0

    @property
    def e2e(self) -> float:
        """Seconds from when the call was due to the end of its answer."""
        return self.end - self.call.due

    def meets(self, slo: SLO) -> bool:
        """Joint attainment: both promises kept for a whole answer."""
        return self.ok and self.ttft <= slo.ttft and self.tpot <= slo.tpot


class Client:
    """Connections to one endpoint; ``url`` is without /v1. Use as an async context manager."""

    def __init__(self, url: str, *, api_key: str | None = None) -> None:
        self.url = url
        self._auth = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._http: aiohttp.ClientSession

    async def __aenter__(self) -> Self:
        self._http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            # No time limit: a slow answer is a result.
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=30),
            headers=self._auth,
            read_bufsize=_LONGEST_LINE,
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._http.close()

    async def get(self, path: str) -> Any:
        """A JSON document; raises ``aiohttp.ClientError`` and ``msgspec.DecodeError``."""
        async with self._http.get(self.url + path) as response:
            response.raise_for_status()
            return msgspec.json.decode(await response.read())

    async def call(self, call: Call, start: float) -> Outcome:
        """Makes a call now, whenever it was due; ``start`` is the run's, on ``perf_counter``."""
        data = msgspec.json.encode(call.body)
        headers = {"Content-Type": "application/json", **call.headers}
        reply = _Reply(call, start)
        try:
            async with asyncio.timeout(call.cancel_after):
                async with self._http.post(
                    self.url + call.path, data=data, headers=headers
                ) as response:
                    reply.status = response.status
                    if response.content_type == "text/event-stream":
                        await reply.read_stream(response)
                    else:
                        reply.take_json(await response.read())
        except TimeoutError:
            reply.cancelled = True
        except (aiohttp.ClientError, ConnectionError) as error:
            reply.error = f"{type(error).__name__}: {error}"
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            reply.error = f"an event that is not as OpenAI's API has it: {error}"
        return reply.outcome()


async def play(
    url: str,
    calls: Sequence[Call],
    *,
    api_key: str | None = None,
    progress: Callable[[Outcome], None] | None = None,
) -> list[Outcome]:
    """Plays ``calls`` against ``url`` (without /v1), each at its time whatever became of those
    before; outcomes come in the order of the calls."""
    async with Client(url, api_key=api_key) as client:
        start = time.perf_counter() + 0.05

        async def one(call: Call) -> Outcome:
            await asyncio.sleep(max(0.0, start + call.due - time.perf_counter()))
            outcome = await client.call(call, start)
            if progress is not None:
                progress(outcome)
            return outcome

        return list(await asyncio.gather(*(one(call) for call in calls)))


class _Delta(msgspec.Struct):
    content: str | None = None
    # What reasoning models say before they answer, by either of its names.
    reasoning_content: str | None = None
    reasoning: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta | None = None
    message: _Delta | None = None
    text: str | None = None
    token_ids: list[int] | None = None

    def said(self) -> str:
        said = self.delta or self.message
        if said is None:
            return self.text or ""
        return said.content or said.reasoning_content or said.reasoning or ""


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Event).decode


class _Reply:
    """An answer as it comes in."""

    def __init__(self, call: Call, start: float) -> None:
        self._call = call
        self._start = start
        self._sent = self._now()
        self._first = self._last = self._text_at = 0.0
        self._gaps: list[float] = []
        self._chunks = 0
        self._usage = _Usage()
        self._text: list[str] = []
        self._done = self._whole = False
        self.status = 0
        self.error = ""
        self.cancelled = False

    def _now(self) -> float:
        return time.perf_counter() - self._start

    async def read_stream(self, response: aiohttp.ClientResponse) -> None:
        async for line in response.content:
            if not line.startswith(b"data:"):
                continue
            data = line[5:].strip()
            if data == b"[DONE]":
                self._done = True
                continue
            event = _decode(data)
            if event.error is not None:
                self.error = _plain(event.error)
                continue
            self._take_event(event)
        self._whole = self._done

    def _take_event(self, event: _Event) -> None:
        if event.usage is not None:
            self._usage = event.usage
        for choice in event.choices:
            self._last = self._now()
            text = choice.said()
            # The first event of a chat stream only names the role.
            if not text and not choice.token_ids:
                continue
            if self._chunks:
                self._gaps.append(self._last - self._text_at)
            else:
                self._first = self._last
            self._text_at = self._last
            self._chunks += 1
            self._text.append(text)

    def take_json(self, raw: bytes) -> None:
        self._first = self._last = self._now()
        try:
            answer = _decode(raw)
        except (msgspec.DecodeError, UnicodeDecodeError):
            self.error = raw[:500].decode(errors="replace") or f"status {self.status}, no body"
            return
        if self.status != 200:
            self.error = _plain(answer.error) if answer.error else raw[:500].decode()
            return
        self._usage = answer.usage or self._usage
        self._text = [choice.said() for choice in answer.choices]
        self._whole = True

    def outcome(self) -> Outcome:
        return Outcome(
            call=self._call,
            sent=self._sent,
            # An answer of tokens without text has its events' time for what it is worth.
            first=self._first or self._last,
            end=self._last or self._now(),
            # Usage counts tokens; without it an event with text is taken for one.
            tokens=self._usage.completion_tokens or self._chunks,
            status=self.status,
            text="".join(self._text),
            error=self.error,
            cancelled=self.cancelled,
            whole=self._whole,
            prompt_tokens=self._usage.prompt_tokens,
            gaps=tuple(self._gaps),
        )


def _plain(error: Any) -> str:
    return error if isinstance(error, str) else msgspec.json.encode(error).decode()
