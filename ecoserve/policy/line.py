"""Requests that wait in order, in blocks that can be passed over whole.

Every check is monotone (see ``Policy.check``): what an instance cannot take of a request that is
easier in every respect, it cannot take of a harder one. So a block is asked about once, by a
request that is no harder than any in it, and only what passes is looked at one by one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain

from ecoserve.policy.latency import LatencyModel
from ecoserve.policy.state import SLO, InstanceView, Request

BLOCK = 16
# Well above what rounding moves a moment by, well below what matters.
_MARGIN_S = 1e-6


def easiest(requests: Iterable[Request]) -> Request:
    """A request that is no harder than any of them on any instance."""
    requests = list(requests)
    return Request(
        id="",
        arrived=max(r.arrived for r in requests),
        prompt_tokens=min(
            max(r.sequences, r.prompt_tokens - max(r.held.values(), default=0)) for r in requests
        ),
        output_tokens=min(r.output_tokens for r in requests),
        slo=SLO(max(r.slo.ttft for r in requests), max(r.slo.tpot for r in requests)),
        sequences=min(r.sequences for r in requests),
    )


def allowed(request: Request, instances: tuple[InstanceView, ...]) -> tuple[InstanceView, ...]:
    """Those of the instances that may serve the request."""
    if request.allowed is None:
        return instances
    return tuple(i for i in instances if i.name in request.allowed)


def shortest_prefill(request: Request, instances: tuple[InstanceView, ...]) -> float:
    """Seconds of its prefill on that of the instances where it is shortest; 0 if there is none."""
    return min((i.prefill_seconds(request) for i in allowed(request, instances)), default=0.0)


class Block:
    """A few requests in order, and what is the same for all of them."""

    def __init__(self) -> None:
        self.requests: dict[str, Request] = {}
        self._easiest: Request | None = None
        self._shortest: dict[str, float] = {}
        self._pressed_at: float | None = None
        self._measured_with: object = None

    def __len__(self) -> int:
        return len(self.requests)

    def add(self, request: Request) -> None:
        self.requests[request.id] = request
        self._easiest = self._pressed_at = None

    def remove(self, request_id: str) -> Request:
        self._shortest.pop(request_id, None)
        self._easiest = self._pressed_at = None
        return self.requests.pop(request_id)

    @property
    def easiest(self) -> Request:
        """No harder than any of its requests."""
        if self._easiest is None:
            self._easiest = easiest(self.requests.values())
        return self._easiest

    def shortest(self, instances: tuple[InstanceView, ...], models: object) -> dict[str, float]:
        """The shortest prefill of each request, seconds. ``models`` is another object whenever the
        instances or their latency models are others."""
        if self._measured_with is not models:
            self._measured_with = models
            self._shortest.clear()
            self._pressed_at = None
        found = self._shortest
        if len(found) < len(self.requests):
            for name, request in self.requests.items():
                if name not in found:
                    found[name] = shortest_prefill(request, instances)
        return found

    def is_pressed(self, now: float) -> bool:
        """Whether one of them may have no more than twice its shortest prefill left, as measured
        last."""
        if self._pressed_at is None:
            self._pressed_at = min(
                request.deadline - 2 * self._shortest[name]
                for name, request in self.requests.items()
            )
        return now > self._pressed_at - _MARGIN_S


class Line:
    """Requests in order of priority, the lower first, then of being added."""

    def __init__(self) -> None:
        self._ranks: dict[int, list[Block]] = {}
        self._block_of: dict[str, Block] = {}
        self._tokens = 0
        self._pairs = 0

    def __len__(self) -> int:
        return len(self._block_of)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._block_of

    def __iter__(self) -> Iterator[Request]:
        for block in self.blocks:
            yield from block.requests.values()

    @property
    def blocks(self) -> tuple[Block, ...]:
        """As they are now; none is empty."""
        return tuple(chain.from_iterable(self._ranks.values()))

    def add(self, request: Request) -> None:
        """Behind those of the same priority."""
        blocks = self._ranks.get(request.priority)
        if blocks is None:
            blocks = self._ranks[request.priority] = []
            self._ranks = dict(sorted(self._ranks.items()))
        if not blocks or len(blocks[-1]) >= BLOCK:
            blocks.append(Block())
        blocks[-1].add(request)
        self._block_of[request.id] = blocks[-1]
        self._count(request, 1)

    def remove(self, request_id: str) -> None:
        """Takes a request out; KeyError if it is not there."""
        block = self._block_of.pop(request_id)
        request = block.remove(request_id)
        if not len(block):
            blocks = self._ranks[request.priority]
            blocks.remove(block)
            if not blocks:
                del self._ranks[request.priority]
        self._count(request, -1)

    def prefill_seconds(self, model: LatencyModel) -> float:
        """Seconds of all their prefills, one after the other, if nothing of them is held."""
        work = model.prefill_token * self._tokens + model.prefill_pair * self._pairs
        return model.prefill_fixed * len(self) + work

    def _count(self, request: Request, sign: int) -> None:
        tokens = request.prompt_tokens
        self._tokens += sign * tokens
        self._pairs += sign * (tokens * tokens // 2)
