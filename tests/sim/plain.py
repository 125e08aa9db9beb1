"""A cost that can be worked out by hand, and systems that the simulator's tests look into."""

from __future__ import annotations

from dataclasses import dataclass, field

from ecoserve.sim.fronts import Direct
from ecoserve.sim.instance import Role, Steps
from ecoserve.sim.records import Arrival
from ecoserve.sim.systems import Serving, System, Workshop


@dataclass
class Plain:
    """10 ms a step, 0.1 ms a prompt token, 1 ms a decode; notes the largest context of a step."""

    stages: int = 1
    kv_tokens: int = 100_000
    kv_bytes: float = 1e5
    fixed: float = 0.01
    token: float = 1e-4
    pair: float = 0.0
    sequence: float = 1e-3
    each_context: float = 0.0
    hop: float = 0.0
    most_context: int = 0

    def step(self, tokens: int, pairs: float, batch: int, context: int) -> float:
        assert tokens >= 0
        assert batch >= 0
        self.most_context = max(self.most_context, context)
        if not tokens and not batch:
            return 0.0
        decode = self.sequence * batch + self.each_context * context
        return self.fixed + self.token * tokens + self.pair * pairs + decode

    def handoff(self, tokens: int) -> float:
        return self.hop


@dataclass(frozen=True)
class Alone:
    """A policy at the instances, round-robin in front of them."""

    policy: Steps
    step_budget: int = 2048
    name: str = "alone"

    def build(self, shop: Workshop) -> Serving:
        return Direct(shop.instances(Role(self.policy, self.step_budget)), "round-robin")


@dataclass
class Watched:
    """Another system; keeps what it built, to be looked into after the run."""

    system: System
    serving: Serving = field(init=False)

    @property
    def name(self) -> str:
        return self.system.name

    def build(self, shop: Workshop) -> Serving:
        self.serving = self.system.build(shop)
        if isinstance(shop.cluster.cost, Plain):
            shop.cluster.cost.most_context = 0  # what calibration asked for is no step
        return self.serving


def arrivals(*requests: tuple[float, int, int]) -> list[Arrival]:
    return [Arrival(*request) for request in requests]
