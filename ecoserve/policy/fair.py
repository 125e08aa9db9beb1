"""Fair shares of a macro instance between tenants that wait for it.

Each tenant has an account of the work that it was given, and whoever has the least is served next
(virtual token counters: Sheng et al., "Fairness in Serving Large Language Models", 2024). One that
comes back from a pause begins at the virtual time, the least account of those that wait, so that
nothing is saved up (start-time fair queueing: Goyal, Vin and Cheng, 1996). Of two tenants that wait
all the time, neither gets more than the other by more than one request of each.

Within a tenant the order is that of priority, then of arrival. Work is counted in tokens: prompt
tokens that are computed once, output tokens, which cost more, by ``OUTPUT_WEIGHT``.
"""

from __future__ import annotations

import math

from ecoserve.policy.latency import LatencyModel
from ecoserve.policy.line import Line
from ecoserve.policy.state import Request

OUTPUT_WEIGHT = 2.0
# Accounts of tenants of whom nothing waits are dropped beyond this many.
MOST_IDLE = 1024


def work(request: Request, instance: str | None = None) -> float:
    """Weighted tokens of a request on an instance; None: one that holds nothing of its prompt."""
    prompt = request.prompt_tokens if instance is None else request.uncached(instance)
    return prompt + OUTPUT_WEIGHT * request.output_tokens


class Flow:
    """What waits of one tenant, and the work that it was given.

    ``held_back_for`` is the request for whose sake others were last made to wait.
    """

    def __init__(self, tenant: str, served: float) -> None:
        self.tenant = tenant
        self.served = served
        self.seen = -math.inf
        self.waiting = Line()
        self.late = Line()
        self.held_back_for: str | None = None

    def __len__(self) -> int:
        return len(self.waiting) + len(self.late)


class Shares:
    """The flows of all tenants."""

    def __init__(self) -> None:
        self._flows: dict[str, Flow] = {}
        self._busy: dict[str, Flow] = {}
        self._virtual_time = 0.0

    @property
    def busy(self) -> tuple[Flow, ...]:
        """The flows in which something waits."""
        return tuple(self._busy.values())

    def wait(self, request: Request) -> None:
        """A request has come and waits."""
        flow = self._flows.get(request.tenant)
        if flow is None:
            if len(self._flows) - len(self._busy) >= MOST_IDLE:
                self._forget()
            flow = self._flows[request.tenant] = Flow(request.tenant, self._virtual_time)
        elif not len(flow):
            flow.served = max(flow.served, self._virtual_time)
        flow.seen = max(flow.seen, request.arrived)
        flow.waiting.add(request)
        self._busy[request.tenant] = flow

    def make_late(self, request: Request) -> None:
        """A request that waits has become late."""
        flow = self._flows[request.tenant]
        flow.waiting.remove(request.id)
        flow.late.add(request)
        self._pay(flow, request)

    def remove(self, request: Request) -> None:
        """A request waits no longer."""
        flow = self._flows[request.tenant]
        line = flow.waiting if request.id in flow.waiting else flow.late
        line.remove(request.id)
        if not len(flow):
            del self._busy[request.tenant]
        self._pay(flow, request)

    @staticmethod
    def _pay(flow: Flow, request: Request) -> None:
        """What others were made to wait for has come to nothing; it is paid for all the same, or a
        tenant could shut all others out with what can never be served."""
        if flow.held_back_for == request.id:
            flow.held_back_for = None
            flow.served += work(request)

    def serve(self, request: Request, instance: str) -> None:
        """A request that waits is given to an instance."""
        flow = self._flows[request.tenant]
        least = min(f.served for f in self._busy.values())
        self._virtual_time = max(self._virtual_time, least)
        flow.served += work(request, instance)
        flow.held_back_for = None
        self.remove(request)

    def charge(self, tenant: str, tokens: float) -> None:
        """The tenant took so much more than it was charged with; negative: less."""
        flow = self._flows.get(tenant)
        if flow is not None:
            flow.served += tokens

    def is_ahead(self, tenant: str, since: float) -> bool:
        """Whether the tenant was given more than another that has asked for something since."""
        flow = self._flows.get(tenant)
        return flow is not None and any(
            max(other.served, self._virtual_time) < flow.served
            for other in self._flows.values()
            if other is not flow and (len(other) or other.seen >= since)
        )

    def prefill_seconds(self, model: LatencyModel) -> float:
        """Seconds of all prefills that wait, one after the other, if nothing of them is held."""
        return sum(
            line.prefill_seconds(model)
            for flow in self._busy.values()
            for line in (flow.waiting, flow.late)
        )

    def _forget(self) -> None:
        """Drops the accounts that say nothing, since a tenant without one begins at the same place,
        and as many of the longest idle as it takes to halve them: tenants may be without end."""
        idle = sorted((f for f in self._flows.values() if not len(f)), key=lambda f: f.seen)
        for place, flow in enumerate(idle):
            if place < len(idle) // 2 or flow.served <= self._virtual_time:
                del self._flows[flow.tenant]
