"""Kubernetes events: what the controller did, for people."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections import OrderedDict
from typing import Literal

from ecoserve_operator.cluster_api import EVENTS, MANAGER, ApiError, ClusterApi, Json
from ecoserve_operator.lease import NotHeld
from ecoserve_operator.views import stamp

log = logging.getLogger("ecoserve.operator")

_PENDING = 1000
_KNOWN = 2000


class Events:
    """Writes events one after the other, apart from what they tell of; the same one again only
    raises its count. When too many wait, new ones are dropped."""

    def __init__(self, api: ClusterApi) -> None:
        self._api = api
        self._queue: asyncio.Queue[Json] = asyncio.Queue(_PENDING)
        self._known: OrderedDict[str, tuple[int, str]] = OrderedDict()

    def tell(
        self, item: Json, reason: str, message: str, kind: Literal["Normal", "Warning"] = "Normal"
    ) -> None:
        """Something happened to an object."""
        metadata = item["metadata"]
        log.info("%s/%s: %s: %s", metadata["namespace"], metadata["name"], reason, message)
        identity = "\0".join((metadata["uid"], kind, reason, message))
        digest = hashlib.sha256(identity.encode()).hexdigest()[:16]
        count, first = self._known.get(digest, (0, stamp(time.time())))
        self._known[digest] = (count + 1, first)
        if len(self._known) > _KNOWN:
            self._known.popitem(last=False)
        event = {
            "metadata": {
                "namespace": metadata["namespace"],
                "name": f"{metadata['name']}.{digest}",
            },
            "involvedObject": {
                "apiVersion": item["apiVersion"],
                "kind": item["kind"],
                "namespace": metadata["namespace"],
                "name": metadata["name"],
                "uid": metadata["uid"],
            },
            "reason": reason,
            "message": message[:1024],
            "type": kind,
            "count": count + 1,
            "firstTimestamp": first,
            "lastTimestamp": stamp(time.time()),
            "source": {"component": MANAGER},
            "reportingComponent": MANAGER,
            "reportingInstance": MANAGER,
        }
        if not self._queue.full():
            self._queue.put_nowait(event)

    async def run(self) -> None:
        """Writes them; runs until cancelled."""
        while True:
            event = await self._queue.get()
            try:
                await self._api.apply(EVENTS, event)
            except (ApiError, NotHeld) as error:
                log.debug("event %s: %s", event["reason"], error)
