"""Watches, by kopf: what happens to the objects comes into the controller's store.

kopf runs in a thread and a loop of its own, for it cancels tasks that are not its own when it ends,
and it ends (and is started again) when the API server refuses a watch, or answers with errors for
long. Each namespace has its own, so that one which is gone disturbs no other. Only event handlers
are used: timers, daemons and deletion handlers would put finalizers on objects, which then cannot
be deleted once the operator is gone.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, TypeAlias

import kopf

from ecoserve_operator.cluster_api import Json, Kind
from ecoserve_operator.store import selector_of

log = logging.getLogger("ecoserve.operator")

Sink: TypeAlias = Callable[[Kind, str | None, Json], None]
"""Takes a kind, the type of an event (None: listed) and the object."""

RESTART_S = 2.0
BACKOFFS_S = (0.5, 1.0, 2.0, 4.0)
# kopf may wait for ever for a watcher that it has cancelled. It is given so long to end; then its
# thread, which does nothing any more, is left to itself.
ENDS_S = 5.0

# It tells of every event that it delivers, and that it does not mind signals in a thread.
logging.getLogger("kopf").setLevel(logging.WARNING)
logging.getLogger("kopf._core.reactor.running").setLevel(logging.ERROR)


async def watch(kinds: Iterable[Kind], namespace: str | None, sink: Sink) -> None:
    """Has ``sink`` called, in this loop, with each event of a namespace (None: of all); runs until
    cancelled."""
    loop = asyncio.get_running_loop()

    def deliver(kind: Kind, event: str | None, item: Json) -> None:
        loop.call_soon_threadsafe(sink, kind, event, item)

    kinds = tuple(kinds)
    while True:
        stop, ended = threading.Event(), asyncio.Event()
        thread = threading.Thread(
            target=_run,
            args=(kinds, namespace, deliver, stop, partial(_set, loop, ended)),
            name="kopf",
            daemon=True,
        )
        thread.start()
        try:
            await ended.wait()
        finally:
            stop.set()
        log.warning("the watches have ended; they begin again in %.0f s", RESTART_S)
        await asyncio.sleep(RESTART_S)


def _set(loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(event.set)


def _run(
    kinds: tuple[Kind, ...],
    namespace: str | None,
    deliver: Sink,
    stop: threading.Event,
    ended: Callable[[], None],
) -> None:
    async def run() -> None:
        registry, ends = _registry(kinds, deliver), asyncio.Event()

        @kopf.on.cleanup(registry=registry)
        async def cleanup(**_: Any) -> None:
            ends.set()

        working = asyncio.create_task(
            kopf.operator(
                registry=registry,
                settings=_settings(kinds),
                clusterwide=namespace is None,
                namespaces=() if namespace is None else (namespace,),
                standalone=True,
                stop_flag=stop,
            )
        )
        ending = asyncio.create_task(ends.wait())
        try:
            await asyncio.wait({working, ending}, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait({working}, timeout=ENDS_S)
            if working.done():
                await working
        finally:
            # kopf waits for it in a thread, and the loop does not close before that has ended.
            stop.set()
            ended()

    try:
        asyncio.run(run())
    except Exception:
        log.exception("the watches have failed")


def _settings(kinds: tuple[Kind, ...]) -> kopf.OperatorSettings:
    settings = kopf.OperatorSettings()
    settings.posting.enabled = False
    settings.scanning.disabled = True
    settings.networking.request_timeout = 15.0
    settings.networking.connect_timeout = 5.0
    settings.networking.error_backoffs = BACKOFFS_S
    for kind in kinds:
        if selector := selector_of(kind):
            settings.watching.label_selectors[kind.group, kind.version, kind.plural] = selector
    return settings


def _registry(kinds: tuple[Kind, ...], deliver: Sink) -> kopf.OperatorRegistry:
    registry = kopf.OperatorRegistry()

    @kopf.on.login(registry=registry)
    def login(**kwargs: Any) -> kopf.ConnectionInfo | None:
        if "KUBECONFIG" in os.environ:
            return kopf.login_with_kubeconfig(**kwargs)
        return kopf.login_with_service_account(**kwargs) or kopf.login_with_kubeconfig(**kwargs)

    for kind in kinds:

        async def handle(*, event: kopf.RawEvent, _kind: Kind = kind, **_: Any) -> None:
            item = {"apiVersion": _kind.api_version, "kind": _kind.name} | dict(event["object"])
            deliver(_kind, event["type"], item)

        kopf.on.event(
            kind.group, kind.version, kind.plural, id=f"watch-{kind.plural}", registry=registry
        )(handle)
    return registry
