"""What the benches share: the endpoint that `ecoserve up` printed, and its scheduler's view."""

from __future__ import annotations

import argparse
import asyncio
from typing import Any

import httpx
import numpy as np

from ecoserve.policy.state import SLO
from ecoserve.sim.workload import gaps


def arguments(description: str | None) -> argparse.ArgumentParser:
    """A parser with the two addresses that every bench needs."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the gateway, with no /v1")
    parser.add_argument("--scheduler", required=True, help="the scheduler's HTTP, as printed")
    return parser


async def get(url: str) -> Any:
    """A JSON document; raises ``httpx.HTTPError``."""
    async with httpx.AsyncClient(trust_env=False, timeout=10) as client:
        return (await client.get(url)).raise_for_status().json()


async def only_cluster(scheduler: str) -> dict[str, Any]:
    """State of the one cluster that the scheduler has."""
    (cluster,) = (await get(f"{scheduler}/state"))["clusters"].values()
    return dict(cluster)


def instances(cluster: dict[str, Any]) -> list[dict[str, Any]]:
    """All its instances, whatever their macro instance."""
    return [i for macro in cluster["macro_instances"].values() for i in macro["instances"]]


def slo(cluster: dict[str, Any]) -> SLO:
    """The promise in force."""
    return SLO(cluster["slo"]["ttft_s"], cluster["slo"]["tpot_s"])


async def idle(scheduler: str) -> None:
    """Waits until nothing runs, waits or is reserved, and the last window of use is over."""
    while True:
        cluster = await only_cluster(scheduler)
        busy = cluster["waiting"] or any(
            i["running"] or i["waiting"] or i["reservations"] or i["use"] > 0.001
            for i in instances(cluster)
        )
        if not busy:
            return
        await asyncio.sleep(0.2)


def poisson(rate: float, seconds: float, seed: int) -> list[float]:
    """Times of Poisson arrivals within ``seconds``."""
    enough = int(2 * rate * seconds) + 20
    return [float(t) for t in np.cumsum(gaps(enough, seed, 1.0, rate)) if t < seconds]
