"""Getting to know an endpoint: its model, what its bodies may hold, how it counts tokens, and how
fast it is when it has nothing else to do."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

import aiohttp
import msgspec

from ecoserve.bench.judge import failure, percentile
from ecoserve.bench.load import Call, Client, Outcome
from ecoserve.bench.prompts import Api, Writer, words
from ecoserve.bench.workload import LONGEST, Workload
from ecoserve.numbers import DAY_S, SECONDS, Allowed
from ecoserve.policy.state import SLO

# Words of the two prompts whose tokens are compared.
_SHORT, _LONG = 16, 144
# Salt of what is played before the first step.
_UNLOADED_SALT = 1
_MULTIPLE = Allowed(0, 10_000, above=True)


class EndpointError(Exception):
    """The endpoint cannot be benched; the message says why, and what to do."""


@dataclass(frozen=True, slots=True)
class Model:
    """A model as /v1/models lists it; ``longest`` is its context in tokens, if it is told."""

    name: str
    longest: int = LONGEST


async def discover(client: Client, wanted: str | None) -> Model:
    """The model to ask for: the wanted one, or the only one there is."""
    try:
        answer = await client.get("/v1/models")
        models = {str(m["id"]): m for m in answer["data"]}
    except aiohttp.ClientResponseError as error:
        raise EndpointError(
            f"{client.url}/v1/models answers {error.status}"
            + (": pass --api-key" if error.status in (401, 403) else "")
        ) from error
    except (aiohttp.ClientError, OSError) as error:
        raise EndpointError(f"{client.url} cannot be reached: {error}") from error
    except (msgspec.DecodeError, KeyError, TypeError) as error:
        raise EndpointError(f"{client.url}/v1/models lists no models") from error
    if not models:
        raise EndpointError(f"{client.url}/v1/models lists no models")
    if wanted is None and len(models) != 1:
        raise EndpointError(f"pass --model, one of: {', '.join(models)}")
    name = wanted if wanted is not None else next(iter(models))
    if name not in models:
        raise EndpointError(f"--model {name} is not served; there are: {', '.join(models)}")
    longest: Any = models[name].get("max_model_len")
    return Model(name, longest if isinstance(longest, int) else LONGEST)


async def writer(client: Client, model: str, api: Api) -> Writer:
    """Finds out which bodies the endpoint takes and how many tokens a word is.

    vLLM's ``ignore_eos`` makes an answer as long as asked; endpoints that refuse it end answers
    when they like. Some take ``max_completion_tokens`` only.
    """
    refused = ""
    for extra in ({"ignore_eos": True}, {}):
        for field in ("max_tokens", "max_completion_tokens"):
            trial = Writer(model, api, limit_field=field, extra=extra)
            short = await _ask(client, trial, _SHORT)
            if short.ok:
                return await _calibrated(client, trial, short)
            refused = refused or f"{failure(short)}: {short.error}"
            if short.status not in (400, 422):
                raise EndpointError(f"{client.url}{trial.path} fails: {refused}")
    raise EndpointError(f"{client.url}{trial.path} refuses every body: {refused}")


async def _ask(client: Client, writer: Writer, count: int) -> Outcome:
    body = writer.body([words(count, (time.time_ns(), count))], 4)
    return await client.call(Call(0.0, body, writer.path), time.perf_counter())


async def _calibrated(client: Client, writer: Writer, short: Outcome) -> Writer:
    long = await _ask(client, writer, _LONG)
    if not (long.ok and short.prompt_tokens and long.prompt_tokens > short.prompt_tokens):
        return writer
    slope = (long.prompt_tokens - short.prompt_tokens) / (_LONG - _SHORT)
    overhead = max(short.prompt_tokens - slope * _SHORT, 0.0)
    return replace(writer, overhead=overhead, tokens_per_word=slope)


@dataclass(frozen=True, slots=True)
class Unloaded:
    """Medians, seconds, of ``calls`` requests of the workload played one by one."""

    ttft: float
    tpot: float
    e2e: float
    calls: int


async def unloaded(client: Client, writer: Writer, workload: Workload, calls: int) -> Unloaded:
    """Plays the first turns of the workload alone, one after the other.

    Raises ``EndpointError`` if one fails.
    """
    found: list[Outcome] = []
    salted = replace(writer, salt=writer.salt + _UNLOADED_SALT)
    for conversation in workload.conversations(1.0, calls * workload.turns, seed=0):
        turn = conversation.turns[0]
        body = salted.body([salted.text(turn, conversation.seed)], turn.output)
        start = time.perf_counter()
        outcome = await client.call(Call(0.0, body, writer.path), start)
        if not outcome.ok:
            raise EndpointError(f"a call alone fails: {failure(outcome)}: {outcome.error[:300]}")
        found.append(outcome)
    tpots = [o.tpot for o in found if o.tokens > 1]
    return Unloaded(
        percentile([o.ttft for o in found], 50),
        percentile(tpots, 50),
        percentile([o.e2e for o in found], 50),
        len(found),
    )


@dataclass(frozen=True, slots=True)
class Promise:
    """An SLO as given: seconds, or a multiple of the unloaded figure."""

    value: float
    multiple: bool

    @staticmethod
    def parse(text: str, name: str) -> Promise:
        """``0.5`` is seconds, ``5x`` five times the unloaded figure; ValueError names ``name``."""
        multiple = text.endswith("x")
        try:
            value = float(text.removesuffix("x"))
        except ValueError:
            value = -1.0
        if value not in (_MULTIPLE if multiple else SECONDS):
            raise ValueError(
                f"{name} must be seconds (0.5, {DAY_S:.0f} at most) or a multiple of the unloaded"
                f" figure (5x, {_MULTIPLE.most}x at most), not {text!r}"
            )
        return Promise(value, multiple)

    def seconds(self, unloaded: float) -> float:
        """The promise in seconds."""
        return self.value * unloaded if self.multiple else self.value


def slo(ttft: Promise, tpot: Promise, alone: Unloaded) -> SLO:
    """The promises in seconds."""
    return SLO(ttft.seconds(alone.ttft), max(tpot.seconds(alone.tpot), 1e-9))
