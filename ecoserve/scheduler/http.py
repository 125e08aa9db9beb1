"""The scheduler's HTTP: metrics for Prometheus, state and phases as JSON for people."""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import Callable
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from ecoserve.scheduler.cluster import Cluster
from ecoserve.scheduler.instance import Instance
from ecoserve.scheduler.store import Store


def app(store: Store) -> Starlette:
    """The ASGI application."""

    def route(path: str, answer: Callable[[], Response]) -> Route:
        async def serve(_request: Request) -> Response:
            return answer()

        return Route(path, serve)

    async def metrics(_request: Request) -> Response:
        # Of a thousand instances the text takes a second to write, in which picks must go on.
        text = await asyncio.to_thread(store.metrics.exposition, store.gauges())
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    return Starlette(
        routes=[
            route("/healthz", lambda: PlainTextResponse("ok\n")),
            Route("/metrics", metrics),
            route("/state", lambda: _json(state(store))),
            route("/timeline", lambda: _json(timeline(store))),
        ]
    )


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


def state(store: Store) -> dict[str, Any]:
    """Everything a person would want to know now; times in seconds, ``age`` back from now."""
    now = store.clock()
    return {
        "uptime": now - store.started_at,
        "clusters": {name: _cluster(cluster, now) for name, cluster in store.clusters.items()},
    }


def _cluster(cluster: Cluster, now: float) -> dict[str, Any]:
    return {
        **cluster.spec.model_dump(exclude={"macro_instances", "name"}),
        "models": sorted(cluster.models),
        "learnt": {
            "bytes_per_token": cluster.learnt.bytes_per_token,
            "output_tokens": cluster.learnt.output_tokens,
        },
        "macro_instances": {
            macro.name: {
                "waiting": len(cluster.macros[macro.name].waiting),
                "late": len(cluster.macros[macro.name].late),
                "last": cluster.macros[macro.name].last,
                "instances": [_instance(cluster.instances[name], now) for name in macro.instances],
            }
            for macro in cluster.spec.macro_instances
        },
        "others": [
            _instance(instance, now)
            for name, instance in cluster.instances.items()
            if name not in cluster.members
        ],
        "waiting": [
            {
                "id": ticket.request.id,
                "macro_instance": ticket.macro,
                "age": now - ticket.request.arrived,
                "ttft_slo": ticket.request.slo.ttft,
                "prompt_tokens": ticket.request.prompt_tokens,
                "sequences": ticket.request.sequences,
            }
            for ticket in cluster.tickets.values()
        ],
    }


def _instance(instance: Instance, now: float) -> dict[str, Any]:
    hello, reported = instance.hello, instance.reported
    facts: dict[str, Any] = {
        "name": instance.name,
        "state": instance.state,
        "reason": instance.reason,
        "weight": instance.weight(now),
        "prefix_blocks": len(instance.prefixes),
        "prefix_trust": instance.prefixes.trust,
        "reservations": [
            {
                "id": request_id,
                "age": now - reservation.request.arrived,
                "seconds": reservation.seconds,
                "kv_tokens": reservation.kv,
            }
            for request_id, reservation in instance.reservations.items()
        ],
    }
    if hello is not None:
        facts |= {
            "incarnation": hello.incarnation,
            "address": str(hello.address),
            "model": hello.model,
            "version": hello.version,
            "limits": dataclasses.asdict(hello.limits),
        }
    if instance.latency is not None:
        facts["latency"] = dataclasses.asdict(instance.latency)
    if reported is not None:
        view = instance.view(now)
        facts |= {
            "report_age": now - instance.reported_at,
            "phase": view.phase,
            "since_switch": view.since_switch,
            "backlog": view.backlog,
            "least_slack": _finite(view.decodes.least_slack),
            "mean_slack": _finite(view.decodes.mean_slack),
            "room": view.room,
            "free_kv": view.free_kv,
            "kv_free_reported": reported.kv_free,
            "waiting": reported.waiting,
            "running": reported.running,
            "batch_limit": reported.batch_limit,
            "use": reported.use,
            "busy": reported.busy,
            "step": reported.step_kind,
        }
    return facts


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def timeline(store: Store) -> dict[str, Any]:
    """The latest phase switches of each instance, oldest first, with their ages in seconds."""
    now = store.clock()
    return {
        name: {
            instance.name: {
                "macro_instance": cluster.members.get(instance.name, ""),
                "phase": instance.reported.phase if instance.reported is not None else None,
                "switches": [
                    {"age": now - switch.at, "phase": switch.phase, "reason": switch.reason}
                    for switch in instance.switches
                ],
            }
            for instance in cluster.instances.values()
        }
        for name, cluster in store.clusters.items()
    }
