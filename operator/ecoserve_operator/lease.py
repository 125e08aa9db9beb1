"""One controller at a time: a Lease of ``coordination.k8s.io``.

As client-go's leader election: a holder that has not renewed for ``DURATION_S`` is replaced, judged
by how long its record has not changed on our own clock, so that no clocks are compared. A holder
stops writing ``MARGIN_S`` before that.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from datetime import UTC, datetime

from ecoserve_operator.cluster_api import LEASES, ApiError, ClusterApi, Json

log = logging.getLogger("ecoserve.operator")

DURATION_S = 15
RENEW_S = 4.0
MARGIN_S = 5.0


class NotHeld(Exception):
    """A write was about to be made without the lease."""


class Lease:
    """A claim to the lease ``name``. ``lost`` is called when another holds what we held."""

    def __init__(
        self,
        namespace: str,
        name: str,
        identity: str,
        *,
        duration: int = DURATION_S,
        renew: float = RENEW_S,
        margin: float = MARGIN_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._namespace, self._name, self._identity = namespace, name, identity
        self._duration, self._renew, self._margin = duration, renew, margin
        self._clock = clock
        self._until = float("-inf")
        self._seen: tuple[str | None, float] = (None, 0.0)
        self.held = asyncio.Event()
        self.interrupted = False

    @property
    def valid(self) -> bool:
        """Whether it is ours, and will be for a while."""
        return self._clock() < self._until

    def check(self) -> None:
        """Raises ``NotHeld`` unless it is ours."""
        if not self.valid:
            raise NotHeld(f"the lease {self._namespace}/{self._name} is not held")

    async def keep(self, api: ClusterApi, lost: Callable[[], None]) -> None:
        """Acquires and renews; runs until cancelled. ``api`` must not be guarded by this lease."""
        while True:
            started = self._clock()
            try:
                ours = await self._try(api)
            except ApiError as error:
                # A conflict is a race, with ourselves even: an update that timed out may have been
                # made. Whose it is is seen the next time.
                if error.status != 409:
                    self.interrupted = True
                    log.warning("lease %s: %s", self._name, error)
            else:
                if ours:
                    self._until = started + self._duration - self._margin
                    if not self.held.is_set():
                        log.info("holding the lease %s as %s", self._name, self._identity)
                        self.held.set()
                elif self.held.is_set():
                    self._until = float("-inf")
                    self.held.clear()
                    lost()
            await asyncio.sleep(self._renew if self.valid else self._renew / 4)

    async def release(self, api: ClusterApi) -> None:
        """Lets the next one have it at once."""
        if self.held.is_set() and self.valid:
            self._until = float("-inf")
            current = await api.get(LEASES, self._namespace, self._name)
            if current is not None and current["spec"].get("holderIdentity") == self._identity:
                current["spec"] |= {"holderIdentity": "", "leaseDurationSeconds": 1}
                await api.replace(LEASES, current)

    async def _try(self, api: ClusterApi) -> bool:
        current = await api.get(LEASES, self._namespace, self._name)
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        spec: Json = {
            "holderIdentity": self._identity,
            "leaseDurationSeconds": self._duration,
            "renewTime": now,
        }
        if current is None:
            metadata = {"namespace": self._namespace, "name": self._name}
            await api.create(LEASES, {"metadata": metadata, "spec": spec | {"acquireTime": now}})
            return True
        old = current.get("spec", {})
        holder = old.get("holderIdentity") or ""
        if holder not in ("", self._identity) and not self._expired(current):
            return False
        if holder != self._identity:
            transitions = old.get("leaseTransitions", 0) + 1
            spec |= {"acquireTime": now, "leaseTransitions": transitions}
        await api.replace(LEASES, current | {"spec": old | spec})
        return True

    def _expired(self, lease: Json) -> bool:
        version = lease["metadata"]["resourceVersion"]
        if version != self._seen[0]:
            self._seen = (version, self._clock())
        duration = float(lease["spec"].get("leaseDurationSeconds", self._duration))
        return self._clock() - self._seen[1] > duration
