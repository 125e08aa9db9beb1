"""Grows and shrinks a launcher's cluster with its load, by the policy that scales all others."""

from __future__ import annotations

import asyncio
import importlib.util
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, fields

import httpx

from ecoserve.local.admin import Admin
from ecoserve.local.engine import SetupError
from ecoserve.local.fleet import Drain, Fleet, Resume, Seen, Start, Stop, Task
from ecoserve.local.options import CLUSTER
from ecoserve.policy.autoscale import Step, decide
from ecoserve.policy.signals import Contract, Expand, Settings, Signals
from ecoserve.scaling.queries import QUERIES, Unavailable
from ecoserve.scaling.recorder import Recorder, parse
from ecoserve.scaling.signals import read

TICK_S = 0.5
SCRAPE_S = 5.0
DECIDE_S = 15.0


def check_prometheus(url: str | None) -> None:
    """Raises ``SetupError`` where a Prometheus is given and its client is not installed."""
    if url is not None and importlib.util.find_spec("prometheus_api_client") is None:
        raise SetupError(
            "--prometheus needs prometheus-api-client; pip install 'ecoserve[operator]'"
        )


def settings_of(given: Mapping[str, float]) -> Settings:
    """Autoscaling's settings, with those that are ``given`` as "expand.use" or "contract.idle_for".

    Raises ``SetupError`` that names the setting and what is allowed.
    """
    kinds = {"expand": Expand, "contract": Contract}
    known = {f"{part}.{f.name}": f.type for part, kind in kinds.items() for f in fields(kind)}
    chosen: dict[str, dict[str, float]] = {part: {} for part in kinds}
    for name, value in given.items():
        if name not in known:
            raise SetupError(f"--scaling has no setting {name!r}; it has: {', '.join(known)}")
        if known[name] == "int" and not value.is_integer():
            raise SetupError(f"--scaling {name} must be a whole number, not {value:g}")
        part, _, field = name.partition(".")
        chosen[part][field] = int(value) if known[name] == "int" else value
    try:
        expand, contract = Expand(**chosen["expand"]), Contract(**chosen["contract"])  # type: ignore[arg-type]
        return Settings(expand, contract)
    except ValueError as error:
        raise SetupError(f"--scaling: {error}") from error


@dataclass(frozen=True, slots=True)
class Hands:
    """What the scaler can do: start and stop a worker, declare the cluster as the fleet has it, and
    tell the user."""

    start: Callable[[str], Awaitable[None]]
    stop: Callable[[str], Awaitable[None]]
    declare: Callable[[], Awaitable[None]]
    tell: Callable[[str], None]


class Scaler:
    """Decides every ``DECIDE_S`` how many workers there are to be, ``minimum`` to ``maximum``.

    Signals come from the Prometheus at the URL ``prometheus``, or without one from the scheduler's
    own metrics at ``metrics``. ``ttft_slo`` in seconds.
    """

    def __init__(
        self,
        fleet: Fleet,
        settings: Settings,
        minimum: int,
        maximum: int,
        *,
        scheduler: Admin,
        metrics: str,
        ttft_slo: float,
        drain_timeout: float,
        hands: Hands,
        prometheus: str | None = None,
    ) -> None:
        self._fleet, self._settings = fleet, settings
        self._minimum, self._maximum = minimum, maximum
        self._scheduler, self._metrics, self._prometheus = scheduler, metrics, prometheus
        self._ttft_slo, self._drain_timeout, self._hands = ttft_slo, drain_timeout, hands
        expand, contract = settings.expand, settings.contract
        self._recorder = Recorder(
            SCRAPE_S,
            max(
                *(expand.violations_for, expand.use_for, expand.ttft_for, expand.waiting_for),
                *(contract.use_for, contract.idle_for, contract.saved_for),
            ),
        )
        self._steps: list[Step] = []
        self._told = self._scrape_told = ""

    async def run(self) -> None:
        """Scales until cancelled."""
        clock = time.monotonic
        scrape_at, decide_at = clock(), clock() + DECIDE_S
        async with httpx.AsyncClient(timeout=SCRAPE_S, trust_env=False) as client:
            while True:
                if clock() >= scrape_at and self._prometheus is None:
                    scrape_at = clock() + SCRAPE_S
                    await self._scrape(client)
                if clock() >= decide_at:
                    decide_at = clock() + DECIDE_S
                    await self._decide()
                await self._carry_out()
                await asyncio.sleep(TICK_S)

    async def _scrape(self, client: httpx.AsyncClient) -> None:
        try:
            answer = await client.get(self._metrics)
            answer.raise_for_status()
            found = parse(answer.text, CLUSTER, QUERIES)
        except (httpx.HTTPError, ValueError) as error:
            # What is not sampled goes stale, and nothing is decided by it.
            told = f"no metrics: {error or type(error).__name__}"
            if told != self._scrape_told:
                self._scrape_told = told
                self._hands.tell(told)
            return
        self._scrape_told = ""
        self._recorder.take(time.time(), found)

    async def _decide(self) -> None:
        try:
            signals = await self._signals()
        except Unavailable as error:
            self._tell_once(f"not scaled: {error}")
            return
        count, now = self._fleet.wanted, time.monotonic()
        decision = decide(
            signals, count, self._minimum, self._maximum, self._settings, self._steps, now
        )
        if decision.action != "hold":
            self._steps = [*self._steps[-9:], Step(now, count, decision.after)]
            self._fleet.wanted = decision.after
            self._hands.tell(f"from {count} to {_workers(decision.after)}: {decision.message}")
        else:
            self._tell_once(f"it stays at {_workers(count)}: {decision.message}")

    def _tell_once(self, text: str) -> None:
        if text != self._told:
            self._told = text
            self._hands.tell(text)

    async def _signals(self) -> Signals:
        url, settings = self._prometheus, self._settings
        if url is None:
            self._recorder.now = time.time()
            return read(self._recorder, self._ttft_slo, settings)

        def ask() -> Signals:
            from ecoserve.scaling.prometheus import Prometheus

            with Prometheus(url, CLUSTER) as source:
                return read(source, self._ttft_slo, settings)

        return await asyncio.to_thread(ask)

    async def _carry_out(self) -> None:
        state = await self._scheduler.get()
        if state is None:
            return
        seen = {i.name: Seen(i.state, i.waiting + i.running) for i in state.instances}
        before = self._fleet.groups
        tasks = self._fleet.advance(seen, time.monotonic())
        after = self._fleet.groups
        if after != before:
            self._describe(before, after)
            await self._hands.declare()
        for task in tasks:
            await self._do(task)

    def _describe(self, before: Mapping[str, list[str]], after: Mapping[str, list[str]]) -> None:
        if before.keys() != after.keys():
            parts = (f"{name} ({', '.join(members)})" for name, members in after.items())
            self._hands.tell(f"macro instances: {'; '.join(parts)}")

    async def _do(self, task: Task) -> None:
        match task:
            case Start(name):
                await self._hands.start(name)
            case Drain(name):
                await self._scheduler.drain(name, self._drain_timeout)
            case Resume(name):
                await self._scheduler.resume(name)
            case Stop(name):
                await self._hands.stop(name)


def _workers(count: int) -> str:
    return f"{count} worker{'s' * (count != 1)}"
