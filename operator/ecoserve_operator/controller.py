"""The reconciliation: every EcoServeCluster that something happened to is looked at whole.

``Controller.run`` is a task of its own, apart from kopf, which only brings events. It holds the
lease while it writes. All that it knows is in the store; after anything that it cannot be sure of
it asks the API server for the truth.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import defaultdict, deque

from pydantic import ValidationError

from ecoserve.proto.v1 import admin_pb2
from ecoserve.tasks import lasting
from ecoserve_operator import status, views
from ecoserve_operator.actions import CreatePod, DeletePod
from ecoserve_operator.api import EcoServeCluster
from ecoserve_operator.authority import Authority
from ecoserve_operator.autoscaler import Autoscaler
from ecoserve_operator.builders.common import GATEWAY
from ecoserve_operator.cluster_api import CLUSTERS, MACROS, PODS, ApiError, ClusterApi, Json, Kind
from ecoserve_operator.events import Events
from ecoserve_operator.execute import Executor, Stale
from ecoserve_operator.fields import salvaged
from ecoserve_operator.issuer import Issuer
from ecoserve_operator.lease import Lease, NotHeld
from ecoserve_operator.membership import Membership, declare
from ecoserve_operator.names import CLUSTER_LABEL, pod_name, worker_selector
from ecoserve_operator.objects import DEPLOYMENTS, Objects
from ecoserve_operator.plan import Plan, View, plan
from ecoserve_operator.render import Render
from ecoserve_operator.states import Desired, Observed
from ecoserve_operator.status import Problem
from ecoserve_operator.store import Key, Store, selector_of, version
from ecoserve_operator.workqueue import WorkQueue

log = logging.getLogger("ecoserve.operator")

WORKERS = 8
# Every cluster is planned anew this often, out of the store, in case that something was missed.
RESYNC_S = 30.0
RELIST_S = 2.0
# Plans of a cluster in a row, before others have their turn.
ROUNDS = 50
# Failures within so long slow the making of new Pods down, to one in ``HOLD_MOST_S``.
FAILURES_S, HOLD_MOST_S = 600.0, 300.0
WATCHED: tuple[Kind, ...] = (CLUSTERS, MACROS, PODS)


class Controller:
    """Reconciles all EcoServeClusters, of the namespaces given or of all where none is."""

    def __init__(
        self,
        api: ClusterApi,
        membership: Membership,
        render: Render,
        lease: Lease,
        authority: Authority,
        *,
        namespaces: tuple[str, ...] = (),
    ) -> None:
        self.queue = WorkQueue()
        self.store = Store(self.queue.add)
        self.events = Events(api)
        self._api = api
        self._membership = membership
        membership.gone = self.is_gone
        self._render = render
        self._lease = lease
        self._namespaces: tuple[str | None, ...] = namespaces or (None,)
        self._executor = Executor(api, self.store, membership, self.events, render)
        self.objects = Objects(api, self.store)
        self._authority = authority
        authority.changed = self._wake_all
        self.issuer = Issuer(api, self.store, authority, self.events)
        self._autoscaler = Autoscaler(api, self.store, self._executor, self.events)
        self._doubtful: set[Key] = set()
        # Namespaces whose clusters have been listed, None: all.
        self._listed: set[str | None] = set()
        self._relisted = asyncio.Event()
        self._failures: dict[Key, deque[float]] = defaultdict(deque)

    def wake(self, key: Key) -> None:
        """Has a cluster looked at."""
        self.queue.add(key)

    def heard(self, kind: Kind, event: str | None, item: Json) -> None:
        """A watch tells of an object: what kind of event it was, None: it was listed."""
        if event == "DELETED":
            self.store.drop(kind, item, version(item))
        else:
            self.store.put(kind, item)
        if event is None:
            # A watch that has to begin anew lists what there is, and never tells what is gone.
            self.look_again()

    def look_again(self) -> None:
        """Has all there is looked up anew, soon."""
        self._relisted.set()

    def is_gone(self, key: Key) -> bool:
        """Whether a cluster is known to be no more. Of a namespace that is not looked at, or was
        not listed yet, nothing is known."""
        if self._listed.isdisjoint((None, key[0])):
            return False
        item = self.store.cluster(key)
        return item is None or "deletionTimestamp" in item["metadata"]

    def _wake_all(self) -> None:
        for key in self.store.clusters():
            self.queue.add(key)
        self._membership.tidy()

    async def run(self) -> None:
        """Reconciles until cancelled."""
        await self._authority.prepare(self._api, self._namespaces)
        await self._lease.held.wait()
        await self._authority.start(self._api)
        await self.look_up_all()
        self._wake_all()
        async with asyncio.TaskGroup() as group:
            group.create_task(lasting("writing events", self.events.run))
            group.create_task(lasting("looking through everything again", self._resync))
            group.create_task(lasting("autoscaling", self._autoscaler.run))
            group.create_task(lasting("the certificate authority", self._authority.run, self._api))
            for _ in range(WORKERS):
                group.create_task(lasting("reconciling", self._work))

    async def look_up_all(self) -> None:
        """Asks the API server for all there is, until it answers."""
        delay = 0.25
        while True:
            try:
                for kind in (*WATCHED, *self.objects.kinds):
                    await self._look_up(kind)
                return
            except ApiError as error:
                log.warning("listing: %s; again in %.1f s", error, delay)
                await asyncio.sleep(delay)
                delay = min(delay * 2, 10.0)

    async def _look_up(self, kind: Kind) -> None:
        # Each list has a version of its own, and says nothing of what came after it.
        for namespace in self._namespaces:
            try:
                items, at = await self._api.list_all(kind, namespace, selector_of(kind))
            except ApiError as error:
                if namespace is None or error.status != 403:
                    raise
                # One of several namespaces may be gone, and our role with it.
                log.warning("namespace %s: %s", namespace, error)
                continue
            self.store.replace(kind, items, at, namespace)
            if kind == CLUSTERS:
                self._listed.add(namespace)

    async def _resync(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RESYNC_S):
                    await self._relisted.wait()
            if self._relisted.is_set() or (self._lease.interrupted and self._lease.valid):
                # The watches may have missed what was deleted meanwhile. They tell of what is there
                # one by one, and one after the other.
                await asyncio.sleep(RELIST_S)
                self._relisted.clear()
                self._lease.interrupted = False
                await self.look_up_all()
            self._wake_all()

    async def _work(self) -> None:
        while True:
            key = await self.queue.take()
            try:
                wake_in = await self._reconcile(key)
            except (ApiError, Stale, NotHeld) as error:
                delay = self.queue.failed(key)
                log.info("%s/%s: %s; again in %.1f s", *key, error or "it has changed", delay)
                if isinstance(error, ApiError) and not error.is_final:
                    self._doubtful.add(key)
            except Exception:
                delay = self.queue.failed(key)
                log.exception("%s/%s: again in %.1f s", *key, delay)
            else:
                self.queue.done(key)
                if wake_in is not None:
                    self.queue.add(key, wake_in)

    async def _reconcile(self, key: Key) -> float | None:
        """Brings a cluster as far as it can be brought now; returns in how many seconds to look
        again if nothing happens before."""
        if key in self._doubtful:
            await self._make_sure(key)
        item = self.store.cluster(key)
        if item is None or "deletionTimestamp" in item["metadata"]:
            # What it owned is the garbage collector's.
            self._membership.forget(key)
            self.objects.forget(key)
            self.issuer.forget(key)
            self._failures.pop(key, None)
            return None
        try:
            cluster = EcoServeCluster.model_validate(item)
        except ValidationError as error:
            await self._refuse(key, item, _explain(error))
            readable = salvaged(EcoServeCluster, item)
            if readable is not None:
                await _Pass(self, key, readable, self._render.revision(readable)).go_on()
            return None
        return await _Pass(self, key, cluster, self._render.revision(cluster)).run()

    async def _make_sure(self, key: Key) -> None:
        """Looks up all that there is of a cluster."""
        namespace, name = key
        found = await self._api.get(CLUSTERS, namespace, name)
        known = self.store.cluster(key)
        if found is not None:
            self.store.put(CLUSTERS, found)
        elif known is not None:
            self.store.drop(CLUSTERS, known)
        for kind, selector in (
            (MACROS, f"{CLUSTER_LABEL}={name}"),
            (PODS, worker_selector(name)),
        ):
            items, at = await self._api.list_all(kind, namespace, selector)
            self.store.replace(kind, items, at, namespace, name)
        self._doubtful.discard(key)

    async def _refuse(self, key: Key, item: Json, message: str) -> None:
        """The spec makes no sense; what there is stays as it is."""
        old, generation = item.get("status", {}), item["metadata"].get("generation", 0)
        problem = status.Condition("Degraded", "True", "InvalidSpec", message)
        others = [c for c in old.get("conditions", ()) if c["type"] != "Degraded"]
        conditions = status.with_times([problem], old, generation, time.time())
        await self._executor.write_status(
            key, old | {"observedGeneration": generation, "conditions": others + conditions}
        )

    def hold_until(self, key: Key, now: float) -> float:
        """Make no Pods of a cluster before, for so many have failed of late."""
        failures = self._failures[key]
        while failures and now - failures[0] > FAILURES_S:
            failures.popleft()
        if len(failures) < 2:
            return 0.0
        return failures[-1] + min(2.0 ** len(failures), HOLD_MOST_S)

    def count_failure(self, key: Key) -> None:
        """A Pod of a cluster has failed."""
        self._failures[key].append(time.time())


class _Pass:
    """One reconciliation of one cluster."""

    def __init__(
        self, controller: Controller, key: Key, cluster: EcoServeCluster, revision: str
    ) -> None:
        self._controller, self._key = controller, key
        self._store, self._executor = controller.store, controller._executor
        self._membership = controller._membership
        self._cluster, self._revision = cluster, revision
        # A spec that changes meanwhile is for the next pass: its objects are not applied by this.
        self._generation = cluster.metadata.generation or 0
        self._problems: list[Problem] = []
        self._mtls: admin_pb2.MutualTls | None = None

    async def run(self) -> float | None:
        failure: Exception | None = None
        done: Plan | None = None
        try:
            issued = await self._controller.issuer.issue(self._key, self._cluster)
            self._mtls = issued.mtls
            self._problems += issued.problems
            objects = self._made()
            self._problems += await self._controller.objects.sync(
                self._key, [*issued.secrets, *(objects or ())], whole=objects is not None
            )
            if objects is not None:
                done = await self._converge()
            else:
                # What there is stays as it is, and goes on serving.
                await self._declare()
        except ApiError as error:
            failure = error
        await self._tell(done)
        if failure is not None:
            raise failure
        if done is None or done.actions:
            return 0.0 if done is not None else None
        return None if done.wake_at is None else max(done.wake_at - time.time(), 0.05)

    async def go_on(self) -> None:
        """Changes nothing; a scheduler that knows nothing yet has to know what there is."""
        self._mtls = (await self._controller.issuer.issue(self._key, self._cluster)).mtls
        await self._declare()

    def _made(self) -> list[Json] | None:
        """The objects that belong to the cluster; None if the spec cannot be carried out."""
        render = self._controller._render
        try:
            # Whether a Pod can be made of it is known before an index is spent on one.
            render.worker(self._cluster, pod_name(self._key[1], 0))
            return render.objects(self._cluster)
        except ValueError as error:
            self._problems.append(Problem("InvalidSpec", str(error)))
            return None

    async def _converge(self) -> Plan:
        """Plans and acts until nothing is left to do, or others should have their turn."""
        for _ in range(ROUNDS):
            await self._declare()
            done = plan(self._desired(), self._observed())
            if not done.actions:
                break
            for action in done.actions:
                try:
                    await self._executor.carry_out(self._key, self._cluster, action)
                except ApiError as error:
                    if isinstance(action, CreatePod) and error.is_final:
                        message = f"instance {action.name} is refused: {error}"
                        self._problems.append(Problem("InstanceRefused", message))
                    raise
                if isinstance(action, DeletePod) and action.event == "Failed":
                    self._controller.count_failure(self._key)
            self._refresh()
        return done

    def _refresh(self) -> None:
        item = self._store.cluster(self._key)
        if item is None or "deletionTimestamp" in item["metadata"]:
            raise Stale
        if item["metadata"]["resourceVersion"] != self._cluster.metadata.resource_version:
            before = self._cluster.metadata.generation
            self._cluster = EcoServeCluster.model_validate(item)
            if self._cluster.metadata.generation != before:
                self._revision = self._controller._render.revision(self._cluster)

    def _desired(self) -> Desired:
        return views.desired(self._cluster, self._revision)

    def _observed(self) -> Observed:
        now = time.time()
        pods = (views.pod(item) for item in self._store.of(PODS, self._key))
        return Observed(
            now=now,
            roster=views.roster(self._cluster),
            pods=tuple(pod for pod in pods if pod is not None),
            macros=tuple(views.macro(item) for item in self._store.of(MACROS, self._key)),
            instances=self._membership.instances(self._key),
            hold_until=self._controller.hold_until(self._key, now),
        )

    async def _declare(self) -> None:
        """Has the scheduler know who belongs where. An instance belongs as long as its Pod is
        there, so that one that goes can finish what it has."""
        view = View(self._desired(), self._observed())
        members: dict[str, list[str]] = {name: [] for name in view.roster.sizes}
        pods = [pod for pod in view.observed.pods if not pod.failed and pod.macro]
        for pod in sorted(pods, key=lambda pod: pod.index):
            members.setdefault(pod.macro, []).append(pod.name)
        settled = all(pod.ready and not pod.terminating and not pod.leaving for pod in pods)
        await self._membership.declare(
            self._key,
            declare(self._key, self._cluster.spec, members, self._mtls),
            busy=not settled,
        )
        if refused := self._membership.refused(self._key):
            self._problems = [p for p in self._problems if p.reason != "SchedulerRefused"]
            self._problems.append(Problem("SchedulerRefused", f"the scheduler refuses: {refused}"))

    async def _tell(self, done: Plan | None) -> None:
        """Writes the statuses of the cluster and its macro instances."""
        self._refresh()
        view = View(self._desired(), self._observed())
        item = self._store.cluster(self._key)
        assert item is not None
        await self._executor.write_status(
            self._key,
            status.cluster_status(
                view,
                done,
                self._problems,
                item.get("status", {}),
                self._generation,
                self._controller._render.url(self._cluster),
                self._gateway(),
            ),
        )
        nodes = {
            pod["metadata"]["name"]: pod.get("spec", {}).get("nodeName")
            for pod in self._store.of(PODS, self._key)
        }
        for macro in list(self._store.of(MACROS, self._key)):
            name, metadata = macro["metadata"]["name"], macro["metadata"]
            if "deletionTimestamp" in metadata:
                continue
            old, generation = macro.get("status", {}), metadata["generation"]
            told = status.macro_status(view, name, nodes, old, generation)
            await self._executor.write_macro_status(self._key, name, told)

    def _gateway(self) -> str:
        """Why nobody can reach the gateway; empty if somebody can, or there is none."""
        if not self._cluster.spec.gateway.enabled:
            return ""
        name = f"{self._key[1]}-{GATEWAY}"
        return views.unavailable(self._store.find(DEPLOYMENTS, self._key, name))


def _explain(error: ValidationError) -> str:
    problems = []
    for item in error.errors():
        where = ".".join(str(part) for part in item["loc"])
        problems.append(f"{where}: {item['msg'].removeprefix('Value error, ')}")
    return "; ".join(problems)
