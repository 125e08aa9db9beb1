"""One cluster: its macro instances, its instances, the calls that wait and those on their way.

Pure of I/O and of the clock: times are the caller's monotonic seconds. Calls are decided through
``Ticket.decide``; whoever drives this calls ``pump`` at ``next_wakeup``.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import replace

from ecoserve.policy import fair
from ecoserve.policy.macro import RETRY_EVERY, MacroScheduler, Routed, Shed
from ecoserve.policy.routing import load
from ecoserve.policy.state import SLO, MacroView, Request
from ecoserve.proto.v1 import session_pb2
from ecoserve.scheduler.config import ClusterSpec
from ecoserve.scheduler.hello import Hello
from ecoserve.scheduler.homes import Homes
from ecoserve.scheduler.instance import RETURN_S, SILENT_S, Instance
from ecoserve.scheduler.learning import Learnt
from ecoserve.scheduler.ledger import Ledger
from ecoserve.scheduler.metrics import Metrics
from ecoserve.scheduler.prefixes import BLOCK_BYTES, FrequentHeads
from ecoserve.scheduler.requests import Picked, Ticket, Turned
from ecoserve.scheduler.work import TOKEN_BYTES, Work

log = logging.getLogger("ecoserve.scheduler")

UNAVAILABLE_RETRY_S = 2.0


class Cluster:
    """State of one declared cluster."""

    def __init__(
        self, spec: ClusterSpec, now: float, metrics: Metrics, *, debug: bool = False
    ) -> None:
        self.name = spec.name
        self.applied_at = now
        self.learnt = Learnt()
        self.heads = FrequentHeads()
        self.instances: dict[str, Instance] = {}
        self.macros: dict[str, MacroScheduler] = {}
        self.tickets: dict[str, Ticket] = {}
        self.ledger = Ledger(
            self.name, self.instances, self.learnt, metrics, self._charge, self._failed
        )
        self._homeless: dict[str, Ticket] = {}
        self._swept_at = now
        # Until when no gateway's patience ends.
        self._patient_until = math.inf
        self._metrics = metrics
        self._debug = debug
        self.spec = spec
        self.homes = Homes()
        self.apply(spec, now)

    # -- membership -----------------------------------------------------------------------------

    def apply(self, spec: ClusterSpec, now: float) -> None:
        """Puts a declaration in force. Waiting calls keep their places, or find new ones."""
        kept = {}
        same = all(
            getattr(spec, field) == getattr(self.spec, field)
            for field in ("policy", "policy_settings", "late", "queue_limit", "late_wait_s")
        )
        for macro in spec.macro_instances:
            old = self.macros.get(macro.name)
            kept[macro.name] = old if old is not None and same else self._queue(spec)
        for name, macro_scheduler in self.macros.items():
            if kept.get(name) is not macro_scheduler:
                self._evict(macro_scheduler)
        self.macros = kept
        self.spec = spec
        for macro in spec.macro_instances:
            for name in macro.instances:
                self.instances.setdefault(name, Instance(name, self.homes.touched))
        self.homes.declare(spec.macro_instances, self.instances)
        for macro in spec.macro_instances:
            self._metrics.declare(self.name, macro.name, macro.instances)
        for name, instance in list(self.instances.items()):
            if name not in self.members:
                instance.refuse("not in any macro instance of its cluster")
                self.ledger.release_all(instance)
                if not instance.connected:
                    self._remove(name)
        self.pump(now)

    @staticmethod
    def _queue(spec: ClusterSpec) -> MacroScheduler:
        return MacroScheduler(
            spec.make_policy(),
            late=spec.late,
            queue_limit=spec.queue_limit,
            late_wait=spec.late_wait_s,
        )

    def close(self) -> None:
        """The cluster is no more: what waits is turned away."""
        for ticket in list(self.tickets.values()):
            self._turn(ticket, _unavailable("the cluster was removed"))
        for name in list(self.instances):
            self._remove(name)
        self._metrics.forget_cluster(self.name)

    def _remove(self, name: str) -> None:
        self.ledger.release_all(self.instances[name])
        del self.instances[name]
        self._metrics.forget(self.name, name)

    def connect(self, hello: Hello) -> Instance:
        """A session of an instance began; whether it is a member is not asked here."""
        instance = self.instances.setdefault(
            hello.instance, Instance(hello.instance, self.homes.touched)
        )
        known = instance.hello is not None and instance.hello.incarnation == hello.incarnation
        if not known:
            self.ledger.release_all(instance)
        instance.connect(hello)
        if hello.instance not in self.members:
            instance.refuse("not in any macro instance of its cluster")
        return instance

    def disconnect(self, instance: Instance, now: float) -> None:
        """The session of an instance broke."""
        instance.disconnect(now)
        if instance.name not in self.members:
            self._remove(instance.name)
        self.pump(now)

    @property
    def members(self) -> Mapping[str, str]:
        """Each instance's macro instance."""
        return self.homes.members

    @property
    def models(self) -> set[str]:
        """The names under which its instances serve."""
        return {i.hello.model for i in self.instances.values() if i.hello is not None}

    def _serves(self, model: str) -> bool:
        """Whether an instance has the model, or nobody is there to tell."""
        told = False
        for instance in self.instances.values():
            if instance.hello is not None:
                if instance.hello.model == model:
                    return True
                told = True
        return not told

    # -- reports --------------------------------------------------------------------------------

    def report(self, instance: Instance, message: session_pb2.Report, now: float) -> None:
        """Takes a worker's report in and gives the instance what it now has room for."""
        self.ledger.report(instance, message, self.members.get(instance.name, ""), now)
        instance.report(message, now, self.learnt.output_tokens)
        assert instance.hello is not None
        capacity = instance.hello.limits.kv_tokens * self.learnt.bytes_per_token / BLOCK_BYTES
        instance.prefixes.capacity = max(int(capacity), 1)
        if self.debug:
            for switch in message.switches:
                log.info("%s: phase %s: %s", instance.name, switch.phase, switch.reason)
        if self._homeless:
            self.pump(now)
        elif self.tickets:
            # The other macro instances know nothing new; they are looked at when they want to be.
            home = self.members.get(instance.name)
            if home is not None and len(self.macros[home]):
                self._dispatch(home, now)

    def _charge(self, macro: str, tenant: str, tokens: float) -> None:
        if macro in self.macros:
            self.macros[macro].charge(tenant, tokens)

    def _failed(self, instance: Instance, request_id: str, now: float) -> None:
        """A request failed at an instance. Of a macro instance no more are left alone for it than
        are well: what fails everywhere is not the instances' fault."""
        if instance.name not in self.members or instance.draining:
            return
        others = self.homes.others(instance)
        # One that is on trial, or is to be, is not known to be well.
        failing = sum(one.breaker.state != "closed" for one in others)
        well = sum(one.routable and one.breaker.state == "closed" for one in others)
        if instance.failed(request_id, now, may_open=failing + 1 <= well):
            log.warning(
                "%s/%s is left alone for %.0f s: its answers failed",
                self.name, instance.name, instance.breaker.until - now,
            )  # fmt: skip
            self._metrics.opened(self.name, self.members[instance.name], instance.name)

    def sweep(self, now: float) -> None:
        """Drops reservations that nobody has heard of for too long, and finds who has fallen silent
        or may be tried again; call it now and then."""
        self.ledger.sweep(now)
        # After a pause of this process the reports that came meanwhile are still to be read.
        if now - self._swept_at < SILENT_S / 2:
            for instance in self.instances.values():
                instance.tick(now)
        self._swept_at = now
        if self.tickets:
            self.pump(now)

    # -- calls ----------------------------------------------------------------------------------

    @property
    def debug(self) -> bool:
        return self._debug or self.spec.debug

    def offer(
        self,
        request_id: str,
        work: Work,
        slo: SLO,
        now: float,
        *,
        patience: float,
        conversation: bytes = b"",
        allowed: frozenset[str] | None = None,
        tenant: str = "",
        priority: int | None = None,
    ) -> Ticket:
        """A call asks for an instance; see ``Ticket`` for how it is told.

        ``patience`` is how long the gateway lets it wait, seconds. ``allowed`` are addresses to
        which it is limited. ``priority`` None: what the call itself says.
        """
        key = conversation or work.conversation
        if priority is None:
            priority = work.priority
        request, output = self._request(request_id, work, slo, now, allowed, tenant, priority)
        # Chosen first, since only its instances are asked what they hold of the prompt.
        chosen = self._macro_for(key, request.allowed)
        if chosen is not None:
            request = replace(request, held=self._held(chosen, work, request.prompt_tokens))
        ticket = Ticket(request, work, key, now + patience, output)
        if work.model is not None and not self._serves(work.model):
            ticket.outcome = Turned(
                404,
                "model_not_found",
                f"The model `{work.model}` does not exist.",
                param="model",
            )
            return ticket
        self.tickets[request_id] = ticket
        self._patient_until = min(self._patient_until, ticket.serve_by)
        self._enter(ticket, chosen, now)
        if ticket.macro is not None:
            self._dispatch(ticket.macro, now)
        return ticket

    def cancel(self, request_id: str) -> None:
        """The client went away before its call was answered: nothing of it remains."""
        ticket = self.tickets.pop(request_id, None)
        if ticket is not None:
            self._homeless.pop(request_id, None)
            if ticket.macro in self.macros:
                self.macros[ticket.macro].cancel(request_id)
        self.ledger.cancel(request_id)

    def any_address(self, allowed: frozenset[str] | None) -> Picked | Turned:
        """Where a call without work (no body) goes: the least loaded instances."""
        able = sorted(self._eligible(self.homes.routable(), allowed), key=lambda i: i.load)
        if not able:
            return self._nobody(allowed)
        return Picked(able[0].name, _addresses(able[:3]), 0.0, False, "no body")

    def _request(
        self,
        request_id: str,
        work: Work,
        slo: SLO,
        now: float,
        allowed: frozenset[str] | None,
        tenant: str,
        priority: int,
    ) -> tuple[Request, float]:
        ratio = self.learnt.bytes_per_token
        prompt_tokens = max(work.tokens + int(work.text_bytes / ratio), 1)
        output = self.learnt.output_tokens
        if work.most_output is not None:
            output = min(output, float(work.most_output))
        names = None
        if allowed is not None:
            eligible = self._eligible(self.homes.routable(), allowed)
            names = frozenset(instance.name for instance in eligible)
        request = Request(
            id=request_id,
            arrived=now,
            prompt_tokens=prompt_tokens,
            output_tokens=int(output * work.sequences),
            slo=slo,
            sequences=work.sequences,
            allowed=names,
            tenant=tenant,
            priority=priority,
        )
        return request, output

    def _held(self, macro: str, work: Work, prompt_tokens: int) -> dict[str, int]:
        """Prompt tokens that each instance of the macro instance is thought to hold."""
        unit = self.learnt.bytes_per_token if work.text_bytes else float(TOKEN_BYTES)
        held = {}
        for instance in self.homes.routable(macro) if work.chains else ():
            matched = instance.prefixes.held(work.chains)
            if matched:
                assert instance.hello is not None
                block = instance.hello.limits.block_tokens
                tokens = int(matched / unit * instance.prefixes.trust)
                held[instance.name] = min(tokens - tokens % block, prompt_tokens)
        return held

    @staticmethod
    def _eligible(instances: Iterable[Instance], allowed: frozenset[str] | None) -> list[Instance]:
        return [
            instance
            for instance in instances
            if allowed is None
            or (instance.hello is not None and str(instance.hello.address) in allowed)
        ]

    def _nobody(self, allowed: frozenset[str] | None) -> Turned:
        if allowed is not None:
            return _unavailable("none of the endpoints that the gateway allows can take requests")
        return _unavailable("no worker can take requests now")

    def _place(self, ticket: Ticket, now: float) -> None:
        """Finds a place anew for a call that has lost its own."""
        request = ticket.request
        chosen = self._macro_for(ticket.key, request.allowed)
        if chosen is not None:
            held = self._held(chosen, ticket.work, request.prompt_tokens)
            ticket.request = replace(request, held=held)
        self._enter(ticket, chosen, now)

    def _enter(self, ticket: Ticket, chosen: str | None, now: float) -> None:
        """Puts a call into the queue of a macro instance, or turns it away, or holds it if an
        instance may be back at any moment."""
        permitted = ticket.request.allowed
        if chosen is not None:
            ticket.macro = chosen
            self._homeless.pop(ticket.request.id, None)
            self.macros[chosen].offer(ticket.request)
            return
        may_return = permitted is None and (
            any(self.instances[name].returning(now) for name in self.members)
            or now - self.applied_at <= RETURN_S
        )
        if may_return and now < ticket.serve_by:
            ticket.macro = None
            self._homeless[ticket.request.id] = ticket
        else:
            self._turn(ticket, self._nobody(permitted))

    def _macro_for(self, key: bytes, permitted: frozenset[str] | None) -> str | None:
        waiting = [len(queue) for queue in self.macros.values()] if self.tickets else []
        return self.homes.choose(key, waiting, permitted)

    def _evict(self, queue: MacroScheduler) -> None:
        for request in (*queue.waiting, *queue.late):
            queue.cancel(request.id)
            ticket = self.tickets[request.id]
            ticket.macro = None
            self._homeless[request.id] = ticket

    def pump(self, now: float) -> None:
        """Decides whatever can be decided now."""
        for name, queue in self.macros.items():
            if len(queue) and not self.homes.routable(name):
                self._evict(queue)
        for ticket in list(self._homeless.values()):
            self._place(ticket, now)
        for name, queue in self.macros.items():
            if len(queue):
                self._dispatch(name, now)
        if now >= self._patient_until:
            for ticket in list(self.tickets.values()):
                if now >= ticket.serve_by:
                    self._serve_anyway(ticket, now)
            self._patient_until = min((t.serve_by for t in self.tickets.values()), default=math.inf)

    def next_wakeup(self, now: float) -> float | None:
        """When to ``pump`` again if nothing happens before; None: no need."""
        if not self.tickets:
            return None
        if len(self._homeless) == len(self.tickets):
            return now + 0.1
        return now + RETRY_EVERY

    def _dispatch(self, macro: str, now: float) -> None:
        queue = self.macros[macro]
        view = MacroView(now, tuple(instance.view(now) for instance in self.homes.routable(macro)))
        for decision in queue.dispatch(view):
            ticket = self.tickets[decision.request.id]
            if isinstance(decision, Shed):
                self._shed(ticket, decision)
            else:
                self._route(ticket, decision, now)

    def _serve_anyway(self, ticket: Ticket, now: float) -> None:
        request = ticket.request
        if ticket.macro is not None:
            queue = self.macros[ticket.macro]
            ahead = queue.is_ahead(request, now)
            queue.cancel(request.id)
            if ahead:
                why = "others wait for their share"
                self._shed(ticket, Shed(request, why, UNAVAILABLE_RETRY_S))
                return
            queue.charge(request.tenant, fair.work(request))
        able = [
            instance
            for instance in self.homes.routable()
            if request.allowed is None or instance.name in request.allowed
        ]
        if not able:
            self._turn(ticket, self._nobody(request.allowed))
            return
        able.sort(key=lambda instance: load(instance.view(now)))
        reason = "late, and the gateway waits no longer"
        names = tuple(instance.name for instance in able)
        self._route(ticket, Routed(request, names[0], names[1:3], True, reason), now)

    def _route(self, ticket: Ticket, routed: Routed, now: float) -> None:
        request, work = ticket.request, ticket.work
        instance = self.instances[routed.instance]
        held = request.held.get(instance.name, 0)
        self.ledger.reserve(instance, request, work, ticket.output, now)
        instance.prefixes.add(work.chains)
        if work.head is not None and not self.heads.seen(work.head.key):
            model = instance.hello.model if instance.hello is not None else ""
            self.heads.add(work.head.key, work.head.path, work.head.body(model))
        ways = [instance, *(self.instances[name] for name in routed.fallbacks)]
        waited = now - request.arrived
        self.tickets.pop(request.id, None)
        self._metrics.routed(
            self.name,
            self.members.get(instance.name, ""),
            instance.name,
            waited=waited,
            late=routed.late,
            held=held,
            prompt=request.prompt_tokens,
        )
        if self.debug:
            log.info(
                "%s -> %s after %.3f s: %s (about %d prompt tokens, %d of them held)",
                request.id,
                instance.name,
                waited,
                routed.reason,
                request.prompt_tokens,
                held,
            )
        ticket.decide(Picked(instance.name, _addresses(ways), waited, routed.late, routed.reason))

    def _shed(self, ticket: Ticket, shed: Shed) -> None:
        self._metrics.shed(self.name, ticket.macro or "")
        message = f"The service is overloaded: {shed.reason}. Try again later."
        self._turn(ticket, Turned(429, "rate_limit_exceeded", message, shed.retry_after))

    def _turn(self, ticket: Ticket, turned: Turned) -> None:
        request_id = ticket.request.id
        self.tickets.pop(request_id, None)
        self._homeless.pop(request_id, None)
        if self.debug:
            log.info("%s turned away with %d: %s", request_id, turned.status, turned.message)
        ticket.decide(turned)


def _addresses(instances: Iterable[Instance]) -> tuple[str, ...]:
    return tuple(str(i.hello.address) for i in instances if i.hello is not None)


def _unavailable(why: str) -> Turned:
    return Turned(503, "service_unavailable", f"{why[0].upper()}{why[1:]}.", UNAVAILABLE_RETRY_S)
