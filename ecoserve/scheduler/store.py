"""All clusters, and the timer that has their waiting calls decided."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from functools import partial

from ecoserve.memory import GivesBack
from ecoserve.scheduler.cluster import Cluster
from ecoserve.scheduler.config import ClusterSpec
from ecoserve.scheduler.metrics import Gauges, Metrics, Row

log = logging.getLogger("ecoserve.scheduler")

SWEEP_S = 0.5


class Store:
    """Clusters by name. Everything runs in one event loop, so nothing is locked."""

    def __init__(self, *, debug: bool = False, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.debug = debug
        self._memory = GivesBack()
        self.started_at = clock()
        self.metrics = Metrics()
        self.clusters: dict[str, Cluster] = {}
        self._listeners: set[Callable[[], None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0

    def apply(self, spec: ClusterSpec) -> None:
        """Declares a cluster, or declares it anew."""
        cluster = self.clusters.get(spec.name)
        now = self.clock()
        if cluster is None:
            self.clusters[spec.name] = Cluster(spec, now, self.metrics, debug=self.debug)
        else:
            cluster.apply(spec, now)
        self.changed()

    def remove(self, name: str) -> None:
        """Forgets a cluster; one that is not known is forgotten already."""
        cluster = self.clusters.pop(name, None)
        if cluster is not None:
            cluster.close()
            self.changed()

    # -- listeners ------------------------------------------------------------------------------

    def listen(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Has ``callback`` called whenever membership or states may have changed; returns what
        ends that."""
        self._listeners.add(callback)
        return lambda: self._listeners.discard(callback)

    def changed(self) -> None:
        """Membership or the state of an instance may have changed."""
        for callback in list(self._listeners):
            callback()

    # -- time -----------------------------------------------------------------------------------

    def wake(self) -> None:
        """Sets the timer for the next moment at which a waiting call may be decided."""
        now = self.clock()
        times = [t for c in self.clusters.values() if (t := c.next_wakeup(now)) is not None]
        if not times:
            return
        soonest = min(times)
        if self._timer is not None:
            if self._timer_at <= soonest:
                return
            self._timer.cancel()
        self._timer_at = soonest
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(max(soonest - now, 0.0), self._pump)

    def _pump(self) -> None:
        self._timer = None
        now = self.clock()
        self._each(partial(Cluster.pump, now=now))
        self.wake()

    async def sweep_forever(self) -> None:
        """Drops what has expired, and tells the listeners of what time alone has changed."""
        while True:
            await asyncio.sleep(SWEEP_S)
            now = self.clock()
            self._each(partial(Cluster.sweep, now=now))
            self.changed()
            self._memory.at(now)

    def _each(self, act: Callable[[Cluster], None]) -> None:
        """Does what is due of each cluster. A fault in one must not stop the clock of all."""
        for cluster in self.clusters.values():
            try:
                act(cluster)
            except Exception:
                log.exception("cluster %s: a fault of the scheduler", cluster.name)

    # -- gauges ---------------------------------------------------------------------------------

    def gauges(self) -> Gauges:
        """The gauges of this moment."""
        return Gauges(list(self._instance_rows()), list(self._queue_rows()))

    def _instance_rows(self) -> Iterator[Row]:
        now = self.clock()
        for cluster in self.clusters.values():
            for instance in cluster.instances.values():
                reported, hello, model = instance.reported, instance.hello, instance.latency
                if not instance.connected or reported is None or hello is None or model is None:
                    continue
                view = instance.view(now)
                figures = {
                    "instance_accepted": float(instance.routable),
                    "instance_prefill": float(view.phase == "prefill"),
                    "instance_backlog_seconds": view.backlog,
                    "instance_use": reported.use,
                    "instance_busy": reported.busy,
                    "instance_free_kv_tokens": float(reported.kv_free),
                    "instance_kv_tokens": float(hello.limits.kv_tokens),
                    "instance_running": float(reported.running),
                    "instance_waiting": float(reported.waiting),
                    "instance_batch_limit": float(
                        reported.batch_limit or hello.limits.max_num_seqs
                    ),
                    "instance_mixing_penalty": model.mixing,
                    "instance_reservations": float(len(instance.reservations)),
                }
                if view.decodes.count:
                    figures["instance_least_slack_seconds"] = view.decodes.least_slack
                    figures["instance_mean_slack_seconds"] = view.decodes.mean_slack
                macro = cluster.members.get(instance.name, "")
                yield (cluster.name, macro, instance.name), figures

    def _queue_rows(self) -> Iterator[Row]:
        for cluster in self.clusters.values():
            for name, queue in cluster.macros.items():
                yield (
                    (cluster.name, name),
                    {
                        "macro_waiting": float(len(queue.waiting)),
                        "macro_late": float(len(queue.late)),
                    },
                )
