"""The systems that are simulated, each at its honest best: what it is set to, and how it is built.

A system is a frozen dataclass of its settings, so that a search is a loop over ``replace``.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Sequence_
from dataclasses import dataclass, field
from typing import Literal, Protocol

from ecoserve.policy import DEFAULT, make
from ecoserve.policy.macro import MacroScheduler
from ecoserve.policy.phases import decode_step
from ecoserve.policy.state import EngineView, StepPlan
from ecoserve.sim.batch import Sequence
from ecoserve.sim.fronts import At, Direct, Disaggregated, Macro
from ecoserve.sim.fronts import Routing as Routing
from ecoserve.sim.instance import Front, Instance, Role
from ecoserve.sim.records import Cluster, Options
from ecoserve.sim.transfer import Port


class Serving(Front, Protocol):
    """A system at work."""

    @property
    def instances(self) -> Sequence_[Instance]:
        """All of its instances."""
        ...

    def arrive(self, sequence: Sequence) -> None:
        """A request has come."""
        ...


@dataclass(frozen=True, slots=True)
class Workshop:
    """What a system is built with: the hardware, a maker of instances, the event loop."""

    cluster: Cluster
    options: Options
    instance: Callable[[str, Role], Instance]
    clock: Callable[[], float]
    at: At
    shed: Callable[[Sequence], None]

    def instances(self, role: Role) -> list[Instance]:
        """All of the cluster's instances, alike."""
        return [self.instance(_name(i), role) for i in range(self.cluster.instances)]


class System(Protocol):
    """What ``engine.simulate`` needs of a system."""

    @property
    def name(self) -> str:
        """The name with the settings that matter, such as ``sarathi-512``."""
        ...

    def build(self, shop: Workshop) -> Serving:
        """The system on that hardware. ValueError, naming the setting, if it cannot be."""
        ...


@dataclass(frozen=True, slots=True)
class VLLM:
    """vLLM 0.7.3: prompts first, whole, in steps of their own; all decode when none waits.

    ``budget`` is the most prompt tokens of a step (max_num_batched_tokens); a longer prompt gets a
    step alone.
    """

    routing: Routing = "least-loaded"
    budget: int = 2048

    @property
    def name(self) -> str:
        return "vllm"

    def build(self, shop: Workshop) -> Serving:
        role = Role(PrefillFirst(_positive("vllm.budget", self.budget)), WHOLE)
        return Direct(shop.instances(role), self.routing)


@dataclass(frozen=True, slots=True)
class Sarathi:
    """Chunked prefill: every step holds all decodes and prompt tokens up to ``chunk`` in all.

    With ``chunk`` 2048 it is vLLM's present default.
    """

    chunk: int = 512
    routing: Routing = "least-loaded"

    @property
    def name(self) -> str:
        return f"sarathi-{self.chunk}"

    def build(self, shop: Workshop) -> Serving:
        role = Role(Chunked(_positive("sarathi.chunk", self.chunk)), self.chunk)
        return Direct(shop.instances(role), self.routing)


@dataclass(frozen=True, slots=True)
class DistServe:
    """Prefill and decode instances within a node; KV is pulled over PCIe when there is room.

    ``prefill`` of the ``Cluster.per_node`` instances of every node are prefill instances. On a
    cluster with one instance a node, all are taken to be on one node.
    """

    prefill: int = 1
    routing: Routing = "least-loaded"
    budget: int = 2048

    @property
    def name(self) -> str:
        return f"distserve-{self.prefill}p"

    def prefills(self, cluster: Cluster) -> int:
        """How many instances of the cluster prefill."""
        return self.prefill * (cluster.instances // _together(cluster))

    def build(self, shop: Workshop) -> Serving:
        cluster = shop.cluster
        size = _together(cluster)
        if cluster.instances % size:
            raise ValueError(
                f"cluster.instances must be a multiple of per_node {size}, not {cluster.instances}"
            )
        _split("distserve.prefill", self.prefill, size)
        groups = []
        for node in range(0, cluster.instances, size):
            names = [_name(i) for i in range(node, node + size)]
            groups.append(_group(shop, names, self.prefill, self.budget))
        every = [i.name for prefills, decodes in groups for i in (*prefills, *decodes)]
        return Disaggregated(
            groups,
            {name: Port(cluster.pcie) for name in every},
            {name: Port(cluster.pcie) for name in every},
            shop.clock,
            shop.at,
            routing=self.routing,
            pool=False,
            layerwise=False,
        )


@dataclass(frozen=True, slots=True)
class MoonCake:
    """Prefill and decode instances over the network; KV goes through the nodes' NICs.

    ``prefill`` of all instances are prefill instances. ``hops`` 2: through a pool, which holds KV
    until a decode instance has room; 1: straight from the prefill instance, which holds it.
    ``layerwise`` sends each layer's KV while the next is computed.
    """

    prefill: int = 1
    routing: Routing = "least-loaded"
    budget: int = 2048
    hops: Literal[1, 2] = 2
    layerwise: bool = False

    @property
    def name(self) -> str:
        return f"mooncake-{self.prefill}p"

    def prefills(self, cluster: Cluster) -> int:
        """How many instances of the cluster prefill."""
        return self.prefill

    def build(self, shop: Workshop) -> Serving:
        cluster = shop.cluster
        _split("mooncake.prefill", self.prefill, cluster.instances)
        if self.hops not in (1, 2):
            raise ValueError(f"mooncake.hops must be 1 or 2, not {self.hops}")
        names = _spread([_name(i) for i in range(cluster.instances)], cluster.per_node)
        group = _group(shop, names, self.prefill, self.budget)
        nodes = -(-cluster.instances // cluster.per_node)
        out = [Port(cluster.network) for _ in range(nodes)]
        into = [Port(cluster.network) for _ in range(nodes)]
        node = {_name(i): i // cluster.per_node for i in range(cluster.instances)}
        return Disaggregated(
            [group],
            {name: out[i] for name, i in node.items()},
            {name: into[i] for name, i in node.items()},
            shop.clock,
            shop.at,
            routing=self.routing,
            pool=self.hops == 2,
            layerwise=self.layerwise,
        )


@dataclass(frozen=True, slots=True)
class EcoServe:
    """``ecoserve.policy``: a policy (`paper`, `padg`, `window`, `paced`) with the macro scheduler
    in front of all instances."""

    policy: str = DEFAULT
    settings: dict[str, float] = field(default_factory=dict)
    late: Literal["serve", "shed"] = "serve"
    queue_limit: int = 1024
    late_wait: float = 30.0

    @property
    def name(self) -> str:
        return self.policy

    def build(self, shop: Workshop) -> Serving:
        policy = make(self.policy, self.settings)
        role = Role(policy, shop.options.step_budget, adaptive=True)
        scheduler = MacroScheduler(
            policy, late=self.late, queue_limit=self.queue_limit, late_wait=self.late_wait
        )
        delay = shop.options.report_delay
        return Macro(shop.instances(role), scheduler, shop.clock, shop.at, delay, shop.shed)


WHOLE = 1 << 30
"""A step budget for engines that compute prompts whole."""


@dataclass(frozen=True, slots=True)
class PrefillFirst:
    """Whole prompts up to ``budget`` tokens in a step, one at least, before anything decodes."""

    budget: int

    def step(self, view: EngineView) -> StepPlan:
        if not view.waiting or view.blocked:
            return decode_step("no prompt can be admitted")
        tokens = 0
        for prompt in view.waiting:
            if tokens and tokens + prompt.tokens > self.budget:
                break
            tokens += prompt.tokens
        return StepPlan("prefill", tokens, "a prompt waits")


@dataclass(frozen=True, slots=True)
class Chunked:
    """All decodes, and prompt tokens up to ``chunk`` tokens in all."""

    chunk: int

    def step(self, view: EngineView) -> StepPlan:
        tokens = self.chunk - view.decodes.count
        if not view.waiting or tokens <= 0:
            return decode_step("no prompt waits, or no token is left for it")
        return StepPlan("mixed", tokens, "decodes first, then a chunk")


def _name(number: int) -> str:
    return f"i{number}"


def _positive(setting: str, value: int) -> int:
    if value < 1:
        raise ValueError(f"{setting} must be at least 1, not {value}")
    return value


def _together(cluster: Cluster) -> int:
    """Instances that DistServe takes to be on one node."""
    return cluster.per_node if cluster.per_node > 1 else cluster.instances


def _split(setting: str, prefill: int, of: int) -> None:
    if not 1 <= prefill < of:
        raise ValueError(f"{setting} must be 1 to {of - 1} of {of} instances, not {prefill}")


def _spread(names: list[str], per_node: int) -> list[str]:
    """The first of every node, then the second of every node, ...: NICs are shared evenly."""
    return [name for place in range(per_node) for name in names[place::per_node]]


def _group(
    shop: Workshop, names: list[str], prefill: int, budget: int
) -> tuple[list[Instance], list[Instance]]:
    """Of the instances, that many for prefill and the others for decode."""
    # Prompts whole, as DistServe batches them: a piece of one in a step delays all in it, and its
    # own first token comes no sooner.
    first = Role(PrefillFirst(_positive("budget", budget)), WHOLE, decodes=False)
    second = Role(PrefillFirst(budget), WHOLE, shares=False)
    return (
        [shop.instance(name, first) for name in names[:prefill]],
        [shop.instance(name, second) for name in names[prefill:]],
    )
