"""A real Envoy between a client, a picker process and workers."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from ecoserve import gateway, headers
from tests.gateway.workers import Worker

CHAT = "/v1/chat/completions"
MESSAGE = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


async def until(
    what: str, check: Callable[[], Awaitable[Any]] | Callable[[], Any], limit_s: float = 15.0
) -> Any:
    """Asks until the answer is true; returns it."""
    deadline = time.monotonic() + limit_s
    while True:
        found = check()
        if asyncio.iscoroutine(found):
            found = await found
        if found:
            return found
        assert time.monotonic() < deadline, f"not within {limit_s} s: {what}"
        await asyncio.sleep(0.02)


class World:
    def __init__(self, directory: Path, workers: list[Worker], settings: dict[str, Any]) -> None:
        self.directory = directory
        self.workers = workers
        self.endpoints = directory / "endpoints.json"
        self.log = directory / "picker.jsonl"
        self._port = free_port()
        self.config = gateway.GatewayConfig(
            **{
                "listen": f"127.0.0.1:{free_port()}",
                "admin": f"127.0.0.1:{free_port()}",
                "scheduler": f"127.0.0.1:{self._port}",
                "cluster": "test",
                "health_interval_s": 0.1,
                **settings,
            }
        )
        self.client = httpx.AsyncClient(base_url=f"http://{self.config.listen}", timeout=20.0)
        self.admin = httpx.AsyncClient(base_url=f"http://{self.config.admin}", timeout=5.0)
        self.picker: subprocess.Popen[bytes] | None = None
        self.envoy: subprocess.Popen[bytes] | None = None

    # --- processes

    def start_picker(self) -> None:
        script = Path(__file__).with_name("picker_process.py")
        arguments = [str(self._port), str(self.endpoints), str(self.log)]
        self.picker = subprocess.Popen([sys.executable, str(script), *arguments])

    def start_envoy(self) -> None:
        bootstrap = self.directory / "envoy.json"
        bootstrap.write_text(self._bootstrap())
        command = gateway.command(self.config, bootstrap, threads=1)
        with (self.directory / "envoy.log").open("wb") as log:
            self.envoy = subprocess.Popen(command, stdout=log, stderr=log)

    def _bootstrap(self) -> str:
        """The gateway's own, with more headers told to a picker that is told some only."""
        built = gateway.build(self.config)
        (listener, *_) = built["static_resources"]["listeners"]
        manager = listener["filter_chains"][0]["filters"][0]["typed_config"]
        (picker,) = (f for f in manager["http_filters"] if f["name"].endswith("ext_proc"))
        attributes = picker["typed_config"]["request_attributes"]
        if attributes:
            more = ("x-test-pick", "x-test-mode", "authorization", *headers.INTERNAL)
            attributes += [f"request.headers['{name}']" for name in more]
        return json.dumps(built)

    def end_picker(self) -> None:
        if self.picker is not None:
            self.picker.kill()
            self.picker.wait()
            self.picker = None

    def signal_picker(self, number: signal.Signals) -> None:
        assert self.picker is not None
        os.kill(self.picker.pid, number)

    async def until_picked(self) -> None:
        """A picker runs, and its picks are obeyed."""
        if self.picker is None:
            self.start_picker()

        async def obeyed() -> bool:
            before = len(self.picked())
            for worker in self.workers:
                answer = await self.ask(pick=worker.address)
                if answer.status_code != 200 or answer.json()["worker"] != worker.address:
                    return False
            return len(self.picked()) == before + len(self.workers)

        await until("picks are obeyed", obeyed)

    async def stat(self, name: str) -> int:
        """The sum of Envoy's counters and gauges whose names end so."""
        text = (await self.admin.get("/stats", params={"filter": f"{name}$"})).text
        return sum(int(line.rpartition(": ")[2]) for line in text.splitlines())

    def tell_endpoints(self, workers: list[Worker]) -> None:
        new = self.endpoints.with_suffix(".new")
        new.write_text(json.dumps([w.address for w in workers]))
        new.rename(self.endpoints)

    async def hosts(self) -> dict[str, bool]:
        """Envoy's own view: which hosts there are, and whether they are healthy."""
        answer = (await self.admin.get("/clusters?format=json")).json()
        found = {}
        for cluster in answer["cluster_statuses"]:
            if cluster["name"] == "workers":
                for host in cluster.get("host_statuses", ()):
                    address = host["address"]["socket_address"]
                    status = host["health_status"]
                    well = not set(status) - {"eds_health_status"}
                    found[f"{address['address']}:{address['port_value']}"] = well
        return found

    async def until_hosts(self, workers: list[Worker]) -> None:
        """Exactly these are there and healthy."""
        wanted = {w.address for w in workers}

        async def same() -> bool:
            try:
                found = await self.hosts()
            except httpx.HTTPError:
                return False
            return {a for a, well in found.items() if well} == wanted

        await until(f"healthy hosts are {wanted}", same)

    # --- requests

    def request(self, *, pick: str = "", mode: str = "", **more: Any) -> httpx.Request:
        named = {"x-test-pick": pick, "x-test-mode": mode}
        given = {key: value for key, value in named.items() if value}
        given |= more.pop("headers", {})
        if "content" not in more:
            more.setdefault("json", MESSAGE)
        return self.client.build_request(
            more.pop("method", "POST"), more.pop("path", CHAT), headers=given, **more
        )

    async def ask(self, **request: Any) -> httpx.Response:
        return await self.client.send(self.request(**request))

    async def stream(self, **request: Any) -> httpx.Response:
        return await self.client.send(self.request(**request), stream=True)

    def picked(self) -> list[dict[str, Any]]:
        """What the picker was asked."""
        if not self.log.exists():
            return []
        return [json.loads(line) for line in self.log.read_text().splitlines()]


@asynccontextmanager
async def world(
    directory: Path, workers: int = 3, *, started: bool = True, **settings: Any
) -> AsyncIterator[World]:
    """With every worker known and healthy, or, not ``started``, with Envoy and no picker. Whatever
    runs is ended at the end."""
    team = [Worker() for _ in range(workers)]
    for worker in team:
        await worker.start()
    it = World(directory, team, settings)
    it.tell_endpoints(team)
    try:
        if started:
            it.start_picker()
        it.start_envoy()
        if started:
            await it.until_hosts(team)
        yield it
    finally:
        it.end_picker()
        if it.envoy is not None:
            it.envoy.kill()
            it.envoy.wait()
        await it.client.aclose()
        await it.admin.aclose()
        for worker in team:
            await worker.kill()
