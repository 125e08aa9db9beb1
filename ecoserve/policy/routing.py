"""In which order the instances of a macro instance are asked, and prefix affinity.

Sticking to the instance that took the previous request until its check fails, then going on to the
next, is what makes the activation roll: one instance gathers prompts while it is in its prefill
phase and the others decode.
"""

from __future__ import annotations

from ecoserve.policy.state import InstanceView, MacroView, Request

# Held prefixes are compared in quarters of the prompt: a block more or less of a system prompt that
# every instance holds must not decide, half a conversation must.
HELD_STEPS = 4


def cycle(view: MacroView) -> tuple[InstanceView, ...]:
    """All instances in cyclic order, from the one that took the previous request."""
    instances = view.instances
    start = next((i for i, one in enumerate(instances) if one.name == view.last), 0)
    return instances[start:] + instances[:start]


def load(instance: InstanceView) -> float:
    """What "lightest" compares: seconds of work that an instance owes within the next second.

    That is what is left of its step, its pending prefills, and the share of its time that its
    decodes need to keep their pace; by weight.
    """
    decodes = instance.decodes
    share = instance.latency.decode(decodes.count, decodes.context) / decodes.tpot
    return (instance.residue + instance.backlog + share) / instance.weight


def lightest(instances: tuple[InstanceView, ...]) -> list[InstanceView]:
    """By load; the order given breaks ties."""
    return sorted(instances, key=load)


def rolling(view: MacroView) -> list[InstanceView]:
    """Last-used first, then the next in the cycle, then the rest from the lightest."""
    around = cycle(view)
    return [*around[:2], *lightest(around[2:])]


def by_held_prefix(
    request: Request, instances: list[InstanceView] | tuple[InstanceView, ...]
) -> list[InstanceView]:
    """The same instances, those that hold more of the prompt first, else in the order given.

    Among those that satisfy the check a held prefix ranks first: a conversation returns to where
    its KV is, and its prefill is saved. It ranks only where it saves more time than it costs: a
    hot prefix must not pile its requests up on one instance while others idle.
    """
    if not request.held or request.prompt_tokens <= 0:
        return list(instances)
    least = min(map(load, instances), default=0.0)

    def quarters(instance: InstanceView) -> int:
        held = request.held.get(instance.name, 0)
        saved = instance.latency.prefill(request.prompt_tokens) - instance.prefill_seconds(request)
        if saved < load(instance) - least:
            return 0
        return HELD_STEPS * held // request.prompt_tokens

    return sorted(instances, key=quarters, reverse=True)


def soonest(request: Request, instances: tuple[InstanceView, ...]) -> list[InstanceView]:
    """By when each would be done with the request's prefill, a held prefix counted in."""
    return sorted(instances, key=lambda i: load(i) + i.prefill_seconds(request) / i.weight)
