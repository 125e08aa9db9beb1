"""The systems that are simulated, each at its honest best: what it is set to, and how it is built.

A system is a frozen dataclass of its settings, so that a search is a loop over ``replace``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, Protocol

from ecoserve.policy import DEFAULT

Routing = Literal["round-robin", "least-loaded"]


class System(Protocol):
    """What ``engine.simulate`` needs of a system."""

    @property
    def name(self) -> str:
        """The name with the settings that matter, such as ``sarathi-512``."""
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
