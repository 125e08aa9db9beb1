"""The fluid bound: the rate at which the hardware is used up however well it is scheduled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ecoserve.policy.state import SLO
from ecoserve.sim.records import DEFAULTS, Arrival, Cluster, Options


@dataclass(frozen=True, slots=True)
class Bound:
    """Requests a second of the whole cluster.

    ``mixed``: all instances alike, prompts and decodes in the same steps. ``separate``: the same in
    steps of their own. ``any``: instances may differ (disaggregation among them).
    """

    mixed: float
    separate: float
    any: float

    @property
    def alike(self) -> float:
        """The bound of systems whose instances are all alike."""
        return max(self.mixed, self.separate)


def fluid_bound(
    cluster: Cluster, arrivals: Sequence[Arrival], slo: SLO, options: Options = DEFAULTS
) -> Bound:
    """The bound for requests of these lengths; when they arrive does not matter."""
    raise NotImplementedError
