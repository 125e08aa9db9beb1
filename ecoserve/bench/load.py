"""An open-loop load generator: each call goes out at its time, whatever became of those before.

TTFT is from the moment a call was due to its first token, so that a generator (or a server) that
falls behind does not flatter itself; how late calls went out is reported beside it.
TPOT = (end - first token) / (tokens - 1).
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import numpy as np

from ecoserve.policy.state import SLO

Body = Mapping[str, Any]


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
    """What became of a call. Times are seconds after the run's start; 0 where it never came."""

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
        return self.first - self.call.due

    @property
    def tpot(self) -> float:
        return (self.end - self.first) / (self.tokens - 1) if self.tokens > 1 else 0.0

    def meets(self, slo: SLO) -> bool:
        """Joint attainment: both promises kept for a whole answer."""
        return self.ok and self.ttft <= slo.ttft and self.tpot <= slo.tpot


async def play(
    url: str,
    calls: Sequence[Call],
    *,
    api_key: str | None = None,
    progress: Callable[[Outcome], None] | None = None,
) -> list[Outcome]:
    """Plays ``calls`` against ``url`` (without /v1); outcomes come in the order of the calls."""
    auth = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    connector = aiohttp.TCPConnector(limit=0)
    # No time limit: a slow answer is a result.
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=30)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, headers=auth) as http:
        start = time.perf_counter() + 0.05

        async def one(call: Call) -> Outcome:
            await asyncio.sleep(max(0.0, start + call.due - time.perf_counter()))
            outcome = await _call(http, url + call.path, call, start)
            if progress is not None:
                progress(outcome)
            return outcome

        return list(await asyncio.gather(*(one(call) for call in calls)))


async def _call(http: aiohttp.ClientSession, url: str, call: Call, start: float) -> Outcome:
    reply = _Reply(call, start)
    try:
        async with asyncio.timeout(call.cancel_after):
            async with http.post(url, json=dict(call.body), headers=dict(call.headers)) as response:
                reply.status = response.status
                if response.content_type == "text/event-stream":
                    await reply.read_stream(response)
                else:
                    reply.take_json(await response.read())
    except TimeoutError:
        reply.cancelled = True
    except (aiohttp.ClientError, ConnectionError) as error:
        reply.error = f"{type(error).__name__}: {error}"
    return reply.outcome()


class _Reply:
    """An answer as it comes in."""

    def __init__(self, call: Call, start: float) -> None:
        self._call = call
        self._start = start
        self._sent = self._now()
        self._first = self._last = 0.0
        self._chunks = self._counted = 0
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
            event = json.loads(data)
            if "error" in event:
                self.error = str(event["error"])
                continue
            self._take_event(event)
        self._whole = self._done

    def _take_event(self, event: Any) -> None:
        if event.get("usage"):
            self._counted = event["usage"]["completion_tokens"]
        for choice in event.get("choices") or ():
            delta = choice.get("delta")
            text = (delta.get("content") if delta is not None else choice.get("text")) or ""
            # The first event of a chat stream names the role; it comes with the first token.
            self._last = self._now()
            if not self._first:
                self._first = self._last
            if text or choice.get("token_ids"):
                self._chunks += 1
                self._text.append(text)

    def take_json(self, raw: bytes) -> None:
        self._first = self._last = self._now()
        try:
            answer = json.loads(raw)
        except ValueError:
            self.error = raw[:500].decode(errors="replace")
            return
        if self.status != 200:
            self.error = json.dumps(answer.get("error", answer))
            return
        self._counted = (answer.get("usage") or {}).get("completion_tokens", 0)
        for choice in answer.get("choices") or ():
            message = choice.get("message")
            self._text.append((message or {}).get("content") or choice.get("text") or "")
        self._whole = True

    def outcome(self) -> Outcome:
        return Outcome(
            call=self._call,
            sent=self._sent,
            first=self._first,
            end=self._last or self._now(),
            # Usage counts tokens; without it an event with text is taken for one.
            tokens=self._counted or self._chunks,
            status=self.status,
            text="".join(self._text),
            error=self.error,
            cancelled=self.cancelled,
            whole=self._whole,
        )


def attainment(outcomes: Sequence[Outcome], slo: SLO) -> float:
    """Share of the calls that met both promises; failures count as misses."""
    return sum(o.meets(slo) for o in outcomes) / len(outcomes) if outcomes else 1.0


def percentile(values: Sequence[float], q: float) -> float:
    """The q-th percentile (0 to 100), 0 of nothing."""
    return float(np.percentile(values, q)) if len(values) else 0.0


# Some hundred common words of one token each in the tokenizers of the models served here.
_WORDS = """
time year people way day man thing woman life child world school state family student group
country problem hand part place case week company system program question work government
number night point home water room mother area money story fact month lot right study book
eye job word business issue side kind head house service friend father power hour game line
end member law car city community name president team minute idea body information back
parent face others level office door health person art war history party result change
morning reason research girl guy moment air teacher force education
""".split()  # noqa: SIM905 (a list of a hundred literals would hide the words)


def words(count: int, seed: int) -> str:
    """About ``count`` tokens of text; different seeds share no prefix."""
    rng = np.random.default_rng(seed)
    return " ".join(rng.choice(_WORDS, size=max(count, 1)))


def poisson(rate: float, seconds: float, seed: int) -> list[float]:
    """Times of a Poisson process of ``rate`` a second, within ``seconds``."""
    rng = np.random.default_rng(seed)
    count = int(rate * seconds * 2 + 20)
    times = np.cumsum(rng.exponential(1 / rate, count))
    return [float(t) for t in times if t < seconds]


def chat(
    model: str, prompt: str, tokens: int, *, stream: bool = True, system: str | None = None
) -> dict[str, Any]:
    """A chat body whose answer is exactly ``tokens`` long (vLLM's ``ignore_eos``)."""
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": prompt})
    body: dict[str, Any] = {
        "model": model,
        "messages": messages,
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": stream,
    }
    if stream:
        body["stream_options"] = {"include_usage": True}
    return body
