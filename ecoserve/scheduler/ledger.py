"""What was routed and is not settled yet, and what is learnt of a call when it has ended."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ecoserve.policy.fair import OUTPUT_WEIGHT, work
from ecoserve.policy.state import Request
from ecoserve.proto.v1 import session_pb2
from ecoserve.scheduler.instance import Instance, Reservation
from ecoserve.scheduler.learning import Learnt
from ecoserve.scheduler.metrics import CLIENT_GONE, Metrics
from ecoserve.scheduler.work import Work

Charge = Callable[[str, str, float], None]
"""Told the macro instance, the tenant and how many weighted tokens more its request took."""
Failed = Callable[[Instance, str, float], None]
"""Told the instance at which a request failed, the request and the time."""

UNAVAILABLE = 503
# Calls remembered until they end; those forgotten teach nothing, no more.
MOST_IN_FLIGHT = 65536


@dataclass(frozen=True, slots=True)
class _InFlight:
    """A routed call until it has ended. ``matched`` are the prompt tokens that its instance was
    thought to hold, before that belief is discounted; ``charged`` is what its tenant was charged
    with."""

    instance: str
    text_bytes: int
    token_ids: int
    sequences: int
    matched: float
    tenant: str
    charged: float


class Ledger:
    """Which instance holds whose reservation; every reservation is in it once."""

    def __init__(
        self,
        cluster: str,
        instances: Mapping[str, Instance],
        learnt: Learnt,
        metrics: Metrics,
        charge: Charge,
        failed: Failed,
    ) -> None:
        self._cluster = cluster
        self._instances = instances
        self._learnt = learnt
        self._metrics = metrics
        self._charge = charge
        self._failed = failed
        self._reserved: dict[str, str] = {}
        self._in_flight: OrderedDict[str, _InFlight] = OrderedDict()

    def __len__(self) -> int:
        return len(self._reserved)

    def reserve(
        self, instance: Instance, request: Request, call: Work, output: float, now: float
    ) -> None:
        """A call goes to an instance; ``output`` is expected of each of its sequences."""
        instance.reserve(request, now, output)
        self._reserved[request.id] = instance.name
        trust = instance.prefixes.trust
        held = request.held.get(instance.name, 0)
        self._in_flight[request.id] = _InFlight(
            instance=instance.name,
            text_bytes=call.text_bytes,
            token_ids=call.tokens,
            sequences=request.sequences,
            matched=held / trust if trust > 0 else 0.0,
            tenant=request.tenant,
            charged=work(request, instance.name),
        )
        if len(self._in_flight) > MOST_IN_FLIGHT:
            self._in_flight.popitem(last=False)

    def cancel(self, request_id: str) -> None:
        """The call's client went away before it was answered."""
        owner = self._reserved.pop(request_id, None)
        if owner is not None:
            self._instances[owner].breaker.forget(request_id)
            self._instances[owner].release(request_id)
        self._in_flight.pop(request_id, None)

    def release_all(self, instance: Instance) -> None:
        """The instance is a new incarnation, or no longer a member."""
        for request_id in instance.reservations:
            self._reserved.pop(request_id, None)
        instance.release_all()

    def sweep(self, now: float) -> None:
        """Drops reservations that no report has named for too long."""
        for instance in self._instances.values():
            for request_id in instance.expired(now):
                self.cancel(request_id)

    def report(
        self, instance: Instance, message: session_pb2.Report, macro: str, now: float
    ) -> None:
        """Takes from a report which calls it covers and which have ended."""
        here = [*(p.id for p in message.waiting), *(d.id for d in message.running)]
        for request_id in message.present:
            self._seen_at(instance, request_id, macro, now)
        for request_id in here:
            self._cover(instance, request_id, macro, now)
        if instance.breaker.state != "closed":
            # A running request has its first token.
            for decode in message.running:
                instance.breaker.succeeded(decode.id)
        expected = instance.expected_output
        instance.expected_output = {i: expected[i] for i in here if i in expected}
        for finished in message.finished:
            self._cover(instance, finished.id, macro, now)
            instance.expected_output.pop(finished.id, None)
            if finished.number > instance.finished_seen:
                instance.finished_seen = finished.number
                self._finished(instance, finished, macro)
                self._judge(instance, finished, now)

    def _seen_at(self, instance: Instance, request_id: str, macro: str, now: float) -> None:
        """A call is at an instance, on its way to the engine."""
        owner = self._owner(instance, request_id)
        if owner is instance:
            instance.reservations[request_id].seen = now
        elif owner is not None:
            moved = self._moved(owner, instance, request_id, macro, now)
            instance.reserve(moved.request, now, moved.output, left=moved.left | {owner.name})
            self._reserved[request_id] = instance.name

    def _cover(self, instance: Instance, request_id: str, macro: str, now: float) -> None:
        """The engine of an instance has a call, or it has ended there."""
        owner = self._owner(instance, request_id)
        if owner is None:
            return
        reservation = (
            owner.release(request_id)
            if owner is instance
            else self._moved(owner, instance, request_id, macro, now)
        )
        assert reservation is not None
        del self._reserved[request_id]
        instance.expected_output[request_id] = reservation.output

    def _owner(self, instance: Instance, request_id: str) -> Instance | None:
        """Whose reservation of the call ``instance`` speaks of; None: of none. One that the call
        has left may go on speaking of it for a while, and says nothing by that."""
        name = self._reserved.get(request_id)
        if name is None:
            return None
        owner = self._instances[name]
        return None if instance.name in owner.reservations[request_id].left else owner

    def _moved(
        self, owner: Instance, instance: Instance, request_id: str, macro: str, now: float
    ) -> Reservation:
        """A call that was routed to ``owner`` was tried again at ``instance``."""
        reservation = owner.release(request_id)
        assert reservation is not None
        self._failed(owner, request_id, now)
        self._metrics.moved(self._cluster, macro, instance.name)
        return reservation

    def _judge(self, instance: Instance, done: session_pb2.Finished, now: float) -> None:
        """What the end of a request says of its instance."""
        if done.status == CLIENT_GONE:
            instance.breaker.forget(done.id)
        elif done.broken or done.status >= 500:
            self._failed(instance, done.id, now)
        else:
            instance.breaker.succeeded(done.id)

    def _finished(self, instance: Instance, done: session_pb2.Finished, macro: str) -> None:
        # After a worker's 503 the gateway tries another.
        call = None if done.status == UNAVAILABLE else self._in_flight.pop(done.id, None)
        answered = done.status < 400 and not done.broken
        if call is not None:
            computed = done.prompt_tokens - done.cached_tokens
            took = computed + OUTPUT_WEIGHT * done.generated
            self._charge(macro, call.tenant, took - call.charged)
        if call is not None and answered and done.prompt_tokens:
            if not call.token_ids:
                self._learnt.prompt(call.text_bytes, done.prompt_tokens)
            if call.instance == instance.name:
                instance.prefixes.correct(call.matched, done.cached_tokens)
        if done.generated and answered:
            self._learnt.answer(done.generated, call.sequences if call else 1)
        self._metrics.finished(self._cluster, macro, instance.name, done)
