"""Sets spec.replicas by what Prometheus reports, where spec.autoscaling is enabled.

Signals are read in threads, each cluster's every ``spec.autoscaling.interval``; what to do is the
pure ``ecoserve.policy.autoscale``. What was done is told by events, by ``status.scaling`` (which is
also the history that cooldowns go by) and by the condition ``Autoscaling``. A step is one write of
spec.replicas, which fails if anybody has changed the object since it was read.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeAlias

from pydantic import ValidationError

from ecoserve.policy.autoscale import Decision, Step, decide
from ecoserve.policy.signals import Signals
from ecoserve.scaling.prometheus import Prometheus
from ecoserve.scaling.queries import Unavailable
from ecoserve.scaling.signals import read
from ecoserve_operator import status, views
from ecoserve_operator.api import EcoServeCluster, EcoServeClusterSpec
from ecoserve_operator.cluster_api import CLUSTERS, ApiError, ClusterApi, Json
from ecoserve_operator.events import Events
from ecoserve_operator.execute import Executor, Stale
from ecoserve_operator.lease import NotHeld
from ecoserve_operator.status import Condition
from ecoserve_operator.store import Key, Store

log = logging.getLogger("ecoserve.operator")

KEPT = 10  # steps in the status
TICK_S = 0.25
THREADS = 8

Read: TypeAlias = Callable[[Key, EcoServeClusterSpec], Signals]


def measure(key: Key, spec: EcoServeClusterSpec) -> Signals:
    """The signals of a cluster; blocks. Raises ``Unavailable``."""
    given = spec.autoscaling
    assert given.prometheus is not None
    fresh = given.stale_after
    with Prometheus(given.prometheus, "/".join(key), fresh=fresh, step=fresh / 4) as source:
        return read(source, spec.slo.ttft, views.scaling(given), capacity=given.capacity)


class Autoscaler:
    """Scales the clusters in the store."""

    def __init__(
        self,
        api: ClusterApi,
        store: Store,
        executor: Executor,
        events: Events,
        measure: Read = measure,
    ) -> None:
        self._api, self._store, self._executor, self._events = api, store, executor, events
        self._measure = measure
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="autoscaler")
        self._due: dict[Key, float] = {}
        self._looking: dict[Key, asyncio.Task[None]] = {}
        self._seen: dict[Key, int] = {}
        self._by_others: dict[Key, Step] = {}
        self._untold: dict[Key, list[Json]] = {}  # steps that no status tells of yet, newest first

    async def run(self) -> None:
        """Scales until cancelled."""
        try:
            while True:
                self._start()
                await asyncio.sleep(TICK_S)
        finally:
            looking = list(self._looking.values())
            for task in looking:
                task.cancel()
            await asyncio.gather(*looking, return_exceptions=True)
            self._threads.shutdown(wait=False, cancel_futures=True)

    def _start(self) -> None:
        """Looks at each cluster whose time has come, unless it is being looked at still."""
        now = time.monotonic()
        known = self._store.clusters()
        for key in self._due.keys() - set(known):
            del self._due[key]
            self._seen.pop(key, None)
            self._by_others.pop(key, None)
            self._untold.pop(key, None)
        for key in known:
            if key in self._looking or now < self._due.get(key, 0.0):
                continue
            item = self._store.cluster(key)
            # Most clusters are not scaled, and reading one takes a while.
            if item is None or not item["spec"].get("autoscaling", {}).get("enabled"):
                continue
            cluster = self._cluster(key)
            if cluster is None:
                continue
            self._due[key] = now + cluster.spec.autoscaling.interval
            self._looking[key] = asyncio.create_task(self._look(key, cluster.spec))

    def _cluster(self, key: Key) -> EcoServeCluster | None:
        item = self._store.cluster(key)
        if item is None or "deletionTimestamp" in item["metadata"]:
            return None
        try:
            return EcoServeCluster.model_validate(item)
        except ValidationError:
            return None  # the reconciliation tells of it

    async def _look(self, key: Key, spec: EcoServeClusterSpec) -> None:
        try:
            loop = asyncio.get_running_loop()
            found: Signals | str
            try:
                found = await loop.run_in_executor(self._threads, self._measure, key, spec)
            except Unavailable as error:
                found = str(error)
            cluster, item = self._cluster(key), self._store.cluster(key)
            if cluster is None or item is None or cluster.spec.autoscaling != spec.autoscaling:
                return
            await self._act(key, cluster, item, found)
        except (ApiError, Stale, NotHeld) as error:
            log.info("%s/%s: not scaled: %s", *key, error or "it has changed")
        except Exception:
            log.exception("%s/%s: not scaled", *key)
        finally:
            del self._looking[key]

    async def _act(
        self, key: Key, cluster: EcoServeCluster, item: Json, found: Signals | str
    ) -> None:
        spec, now = cluster.spec, time.time()
        given, count = spec.autoscaling, spec.desired
        history = self._history(key, item, count, now, dry_run=given.dry_run)
        if isinstance(found, str):
            await self._tell(
                key, given.dry_run, Decision(count, count, "PrometheusUnavailable", found, (found,))
            )
            return
        settings = views.scaling(given)
        decision = decide(
            found, count, spec.min_replicas, spec.max_replicas, settings, history, now
        )
        if decision.action != "hold":
            step: Json = {
                "time": views.stamp(now),
                "before": decision.before,
                "after": decision.after,
                "reason": decision.reason,
            } | ({"dryRun": True} if given.dry_run else {})
            if not given.dry_run:
                await self._scale(key, item, decision.after)
            self._untold.setdefault(key, []).insert(0, step)
            self._announce(item, decision, dry_run=given.dry_run)
        await self._tell(key, given.dry_run, decision)

    def _history(
        self, key: Key, item: Json, count: int, now: float, *, dry_run: bool
    ) -> list[Step]:
        """The latest steps. A number that others have set counts as a step of the moment when it is
        noticed, so that they are not overruled at once."""
        known = {"scaling": self._steps(key, item)}
        steps = views.steps(known, dry_run=dry_run)
        taken = views.steps(known, dry_run=False)
        seen = self._seen.get(key, taken[0].after if taken else count)
        if count != seen:
            self._by_others[key] = Step(now, seen, count)
        self._seen[key] = count
        return [*steps, self._by_others[key]] if key in self._by_others else steps

    def _steps(self, key: Key, item: Json) -> list[Json]:
        """The latest steps as the status has them, or will."""
        told: list[Json] = item.get("status", {}).get("scaling", [])
        return [*self._untold.get(key, ()), *told][:KEPT]

    async def _scale(self, key: Key, item: Json, replicas: int) -> None:
        metadata = item["metadata"]
        body = {
            "metadata": {"uid": metadata["uid"], "resourceVersion": metadata["resourceVersion"]},
            "spec": {"replicas": replicas},
        }
        self._store.put(CLUSTERS, await self._api.patch(CLUSTERS, *key, body))
        self._seen[key] = replicas

    def _announce(self, item: Json, decision: Decision, *, dry_run: bool) -> None:
        done = "Expanded" if decision.action == "expand" else "Contracted"
        change = f"from {decision.before} to {decision.after} instances"
        if dry_run:
            self._events.tell(item, "DryRun", f"would go {change}: {decision.reason}")
        else:
            self._events.tell(item, done, f"{change}: {decision.reason}")

    async def _tell(self, key: Key, dry_run: bool, decision: Decision) -> None:
        """Writes the condition, and the latest steps. One that cannot be written now, as when
        somebody else writes too, is written the next time."""
        item = self._store.cluster(key)
        if item is None:
            return
        old, generation = item.get("status", {}), item["metadata"]["generation"]
        others = [c for c in old.get("conditions", ()) if c["type"] != "Autoscaling"]
        conditions = status.with_times([condition(decision, dry_run)], old, generation, time.time())
        told = old | {"conditions": others + conditions}
        if steps := self._steps(key, item):
            told["scaling"] = steps
        await self._executor.write_status(key, told)
        self._untold.pop(key, None)


def condition(decision: Decision, dry_run: bool) -> Condition:
    """What a decision says of the cluster: True if all that was asked for is known; the reason is
    what has moved it, or keeps it where it is."""
    message = decision.message
    if decision.action != "hold":
        message = f"from {decision.before} to {decision.after} instances: {message}"
    if dry_run:
        message = f"dry run: {message}"
    return Condition(
        "Autoscaling", "False" if decision.unknown else "True", decision.cause, message
    )
