"""The controller's process, put together."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from ecoserve.tasks import lasting
from ecoserve_operator import health
from ecoserve_operator.authority import Authority
from ecoserve_operator.cluster_api import ApiError, ClusterApi, Kind, connect
from ecoserve_operator.controller import WATCHED, Controller
from ecoserve_operator.lease import Lease
from ecoserve_operator.membership import Membership
from ecoserve_operator.objects import KINDS, OPTIONAL
from ecoserve_operator.render import Render
from ecoserve_operator.watch import watch

log = logging.getLogger("ecoserve.operator")


Connect: TypeAlias = Callable[[Callable[[], None]], Awaitable[ClusterApi]]


@dataclass(frozen=True, slots=True)
class Options:
    """``namespaces`` empty: all. ``scheduler`` is host:port of its Admin service; ``health_port``
    0: any free port. ``optional_groups`` are the API groups of others that it may use; which of
    them are installed is looked up every ``discovery`` seconds.

    ``scheduler_name`` is the DNS name in the scheduler's certificate, ``scheduler_files`` the
    folder where that is written (None: nowhere). The Secret of the certificate authority is
    ``authority_name``, beside the lease."""

    identity: str
    lease_namespace: str
    scheduler: str
    scheduler_name: str = "localhost"
    scheduler_files: Path | None = None
    namespaces: tuple[str, ...] = ()
    lease_name: str = "ecoserve-operator"
    authority_name: str = "ecoserve-operator-ca"
    health_port: int = 8081
    optional_groups: tuple[str, ...] = tuple(dict.fromkeys(kind.group for kind in OPTIONAL))
    discovery: float = 60.0


class LeaseLost(Exception):
    """Another controller holds the lease."""


async def run(options: Options, render: Render, connect: Connect = connect) -> None:
    """Runs the controller until cancelled; ``LeaseLost`` when another has taken over, and
    ``TaskFailed`` when a part of it has failed.

    ``connect`` makes a connection to the API server, given what to call before each write.
    """
    lease = Lease(options.lease_namespace, options.lease_name, options.identity)
    lost = asyncio.get_running_loop().create_future()

    def give_up() -> None:
        if not lost.done():
            lost.set_exception(LeaseLost(f"the lease {options.lease_name} is held by another now"))

    async with await connect(lambda: None) as plain, await connect(lease.check) as api:
        membership = Membership(options.scheduler)
        authority = Authority(
            options.lease_namespace,
            options.authority_name,
            options.scheduler_name,
            options.scheduler_files,
        )
        controller = Controller(
            api, membership, render, lease, authority, namespaces=options.namespaces
        )
        membership.changed = controller.wake
        optional = await _installed(plain, options.optional_groups)
        controller.objects.kinds = (*KINDS, *optional)

        probes = await health.serve(
            options.health_port, lambda: controller.queue.age, lambda: lease.valid
        )
        tasks = [
            asyncio.create_task(lasting("keeping the lease", lease.keep, plain, give_up)),
            asyncio.create_task(lasting("watching", _watch, options, plain, controller, optional)),
            asyncio.create_task(lasting("talking to the scheduler", membership.run)),
            asyncio.create_task(lasting("the controller", controller.run)),
        ]
        try:
            done, _ = await asyncio.wait([*tasks, lost], return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            lost.cancel()
            with contextlib.suppress(Exception):
                async with asyncio.timeout(3.0):
                    await lease.release(plain)
            await membership.close()
            await probes.cleanup()


async def _watch(
    options: Options, api: ClusterApi, controller: Controller, optional: tuple[Kind, ...]
) -> None:
    """Watches all kinds, also those of others that are installed later; runs until cancelled."""
    while True:
        kinds = (*WATCHED, *controller.objects.kinds)
        async with asyncio.TaskGroup() as group:
            watches = [
                group.create_task(lasting("watching", watch, kinds, namespace, controller.heard))
                for namespace in options.namespaces or (None,)
            ]
            optional = await _installed_otherwise(options, api, optional)
            for task in watches:
                task.cancel()
        names = ", ".join(kind.name for kind in optional) or "none"
        log.info("other kinds are installed now: %s", names)
        controller.objects.kinds = (*KINDS, *optional)
        controller.look_again()


async def _installed_otherwise(
    options: Options, api: ClusterApi, before: tuple[Kind, ...]
) -> tuple[Kind, ...]:
    """Waits until other optional kinds are installed than before; returns them."""
    found = before
    while found == before:
        await asyncio.sleep(options.discovery)
        try:
            found = await _installed(api, options.optional_groups)
        except ApiError as error:
            log.info("looking up what is installed: %s", error)
    return found


async def _installed(api: ClusterApi, groups: tuple[str, ...]) -> tuple[Kind, ...]:
    wanted = [kind for kind in OPTIONAL if kind.group in groups]
    served = {kind: await api.served(kind.group, kind.version) for kind in wanted}
    return tuple(kind for kind in wanted if kind.plural in served[kind])
