"""Carries out the actions of a plan."""

from __future__ import annotations

import time

from ecoserve_operator.actions import (
    Action,
    ApplyMacro,
    CreatePod,
    DeleteMacro,
    DeletePod,
    Drain,
    FillReplicas,
    MarkLeaving,
    MovePod,
    Resume,
    SetGate,
    Unmark,
    WriteRoster,
)
from ecoserve_operator.api import EcoServeCluster
from ecoserve_operator.cluster_api import CLUSTERS, MACROS, PODS, ApiError, ClusterApi, Json, Kind
from ecoserve_operator.events import Events
from ecoserve_operator.membership import Membership
from ecoserve_operator.names import (
    CLUSTER_LABEL,
    GATE,
    LEAVING_REASON,
    LEAVING_SINCE,
    MACRO_LABEL,
    REVISION_LABEL,
)
from ecoserve_operator.render import Render
from ecoserve_operator.states import Roster
from ecoserve_operator.status import roster_fields
from ecoserve_operator.store import Key, Store
from ecoserve_operator.views import stamp

# A Pod that is deleted has nothing left to do, or no time left for it.
GRACE_S = 30


class Stale(Exception):
    """What the plan was made from is not what is there; it has been looked up, so plan anew."""


class Executor:
    """Carries out one cluster's actions, and puts what comes of them into the store."""

    def __init__(
        self,
        api: ClusterApi,
        store: Store,
        membership: Membership,
        events: Events,
        render: Render,
    ) -> None:
        self._api, self._store, self._membership = api, store, membership
        self._events, self._render = events, render

    async def carry_out(self, key: Key, cluster: EcoServeCluster, action: Action) -> None:
        """Does what the action says. ``ApiError`` if the API server did not, ``Stale`` if there was
        no sense in it any more."""
        match action:
            case FillReplicas(replicas):
                # Not over what somebody else has set meanwhile.
                read = {"resourceVersion": cluster.metadata.resource_version}
                body: Json = {"metadata": read, "spec": {"replicas": replicas}}
                await self._patch(CLUSTERS, key, key[1], body, cluster.metadata.uid)
            case WriteRoster(roster, event, message):
                await self._write_roster(key, roster)
                if event is not None:
                    self._tell(key, event, message)
            case ApplyMacro(name, replicas):
                await self._apply_macro(key, cluster, name, replicas)
            case DeleteMacro(name, uid):
                await self._delete(MACROS, key, name, uid)
                self._tell(key, "MacroInstanceRemoved", f"macro instance {name} is empty")
            case CreatePod(name, _, macro):
                await self._create_pod(key, cluster, name, macro)
            case MovePod(name, uid, macro):
                await self._patch(PODS, key, name, {"metadata": self._home(key, macro)}, uid)
                self._tell(key, "Moved", f"instance {name} now belongs to macro instance {macro}")
            case MarkLeaving(name, uid, reason, message):
                notes = {LEAVING_SINCE: stamp(time.time()), LEAVING_REASON: reason}
                await self._patch(PODS, key, name, {"metadata": {"annotations": notes}}, uid)
                self._tell(key, "Draining", f"instance {name} is retired ({reason}): {message}")
            case Unmark(name, uid):
                none = {LEAVING_SINCE: None, LEAVING_REASON: None}
                await self._patch(PODS, key, name, {"metadata": {"annotations": none}}, uid)
                self._tell(key, "Kept", f"instance {name} is needed after all")
            case Drain(name, timeout):
                await self._membership.drain(key, name, timeout)
            case Resume(name):
                await self._membership.resume(key, name)
            case DeletePod(name, uid, event, message):
                await self._delete(PODS, key, name, uid, GRACE_S)
                warning = event in ("Failed", "DrainTimeout")
                self._tell(key, event, f"instance {name} is deleted: {message}", warning=warning)
            case SetGate(name, uid, accepted):
                await self._set_gate(key, name, uid, accepted)

    def _tell(self, key: Key, reason: str, message: str, *, warning: bool = False) -> None:
        item = self._store.cluster(key)
        if item is not None:
            self._events.tell(item, reason, message, "Warning" if warning else "Normal")

    async def write_status(self, key: Key, status: Json) -> None:
        """Writes the status unless it is so already; fails if the object has changed meanwhile."""
        item = self._store.cluster(key)
        if item is None:
            raise Stale
        if item.get("status", {}) == status:
            return
        metadata = item["metadata"]
        body = {
            "metadata": {
                "namespace": key[0],
                "name": key[1],
                "resourceVersion": metadata["resourceVersion"],
            },
            "status": status,
        }
        try:
            after = await self._api.apply(CLUSTERS, body, "status")
            self._store.put(CLUSTERS, after)
            self._tell_trouble(key, item.get("status", {}), status)
        except ApiError as error:
            if error.status in (404, 409):
                await self._look_up(CLUSTERS, key, key[1])
            raise

    def _tell_trouble(self, key: Key, before: Json, after: Json) -> None:
        """Something is wrong that was not, or for another reason."""
        old, new = _degraded(before), _degraded(after)
        if new.get("status") == "True" and (old.get("status"), old.get("reason")) != (
            "True",
            new["reason"],
        ):
            self._tell(key, new["reason"], new["message"], warning=True)

    async def _write_roster(self, key: Key, roster: Roster) -> None:
        item = self._store.cluster(key)
        old = item.get("status", {}) if item is not None else {}
        kept = {
            name: value
            for name, value in old.items()
            if name not in ("lastSplitTime", "lastMergeTime")
        }
        await self.write_status(key, kept | roster_fields(roster))

    async def write_macro_status(self, key: Key, name: str, status: Json) -> None:
        """The same of a MacroInstance, where nobody else writes."""
        item = self._store.find(MACROS, key, name)
        if item is not None and item.get("status") != status:
            body = {"metadata": {"namespace": key[0], "name": name}, "status": status}
            self._store.put(MACROS, await self._api.apply(MACROS, body, "status"))

    async def _apply_macro(
        self, key: Key, cluster: EcoServeCluster, name: str, replicas: int
    ) -> None:
        new = self._store.find(MACROS, key, name) is None
        body = {
            "metadata": {
                "namespace": key[0],
                "name": name,
                "labels": {CLUSTER_LABEL: key[1]},
                "ownerReferences": [
                    _owner(CLUSTERS, key[1], cluster.metadata.uid or ""),
                ],
            },
            "spec": {"cluster": key[1], "replicas": replicas},
        }
        self._store.put(MACROS, await self._api.apply(MACROS, body))
        if new:
            message = f"macro instance {name} is made, for {replicas} instances"
            self._tell(key, "MacroInstanceMade", message)

    def _home(self, key: Key, macro: str) -> Json:
        item = self._store.find(MACROS, key, macro)
        if item is None:
            raise Stale
        return {
            "labels": {CLUSTER_LABEL: key[1], MACRO_LABEL: macro},
            "ownerReferences": [_owner(MACROS, macro, item["metadata"]["uid"])],
        }

    async def _create_pod(self, key: Key, cluster: EcoServeCluster, name: str, macro: str) -> None:
        body = self._render.worker(cluster, name)
        home = self._home(key, macro)
        metadata = body.setdefault("metadata", {})
        metadata |= {"namespace": key[0], "name": name, "ownerReferences": home["ownerReferences"]}
        metadata["labels"] = {
            **metadata.get("labels", {}),
            **home["labels"],
            REVISION_LABEL: self._render.revision(cluster),
        }
        try:
            self._store.put(PODS, await self._api.create(PODS, body))
        except ApiError as error:
            if error.status == 409 and error.reason == "AlreadyExists":
                await self._look_up(PODS, key, name)
            raise
        self._tell(key, "Created", f"instance {name} is made, in macro instance {macro}")

    async def _set_gate(self, key: Key, name: str, uid: str, accepted: bool) -> None:
        condition = {
            "type": GATE,
            "status": "True" if accepted else "False",
            "reason": "Accepted" if accepted else "Draining",
            "message": "the scheduler routes to it" if accepted else "it finishes its requests",
            "lastTransitionTime": stamp(time.time()),
        }
        body = {"metadata": {"uid": uid}, "status": {"conditions": [condition]}}
        try:
            self._store.put(PODS, await self._api.patch_status(PODS, key[0], name, body))
        except ApiError as error:
            await self._gone(PODS, key, name, error)
        if accepted:
            self._tell(key, "Accepted", f"instance {name} takes requests")

    async def _patch(self, kind: Kind, key: Key, name: str, body: Json, uid: str | None) -> None:
        body.setdefault("metadata", {})["uid"] = uid
        try:
            self._store.put(kind, await self._api.patch(kind, key[0], name, body))
        except ApiError as error:
            await self._gone(kind, key, name, error)

    async def _delete(
        self, kind: Kind, key: Key, name: str, uid: str, grace: int | None = None
    ) -> None:
        known = self._store.find(kind, key, name)
        left = await self._api.delete(kind, key[0], name, uid, grace=grace)
        if left is not None and "deletionTimestamp" in left["metadata"]:
            self._store.put(kind, left)
        elif known is not None:
            self._store.drop(kind, known)

    async def _gone(self, kind: Kind, key: Key, name: str, error: ApiError) -> None:
        """An object was not as it was thought to be: finds out how it is."""
        if error.status in (404, 409):
            await self._look_up(kind, key, name)
            raise Stale from error
        raise error

    async def _look_up(self, kind: Kind, key: Key, name: str) -> None:
        found = await self._api.get(kind, key[0], name)
        known = self._store.find(kind, key, name)
        if found is not None:
            if known is not None and known["metadata"]["uid"] != found["metadata"]["uid"]:
                self._store.drop(kind, known)
            self._store.put(kind, found)
        elif known is not None:
            self._store.drop(kind, known)


def _degraded(status: Json) -> Json:
    return next((c for c in status.get("conditions", ()) if c["type"] == "Degraded"), {})


def _owner(kind: Kind, name: str, uid: str) -> Json:
    return {
        "apiVersion": kind.api_version,
        "kind": kind.name,
        "name": name,
        "uid": uid,
        "controller": True,
        "blockOwnerDeletion": False,
    }
