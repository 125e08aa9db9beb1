"""The event loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ecoserve.policy.state import SLO
from ecoserve.sim.records import DEFAULTS, Arrival, Cluster, Options, Outcome, Result
from ecoserve.sim.systems import System


def simulate(
    system: System,
    cluster: Cluster,
    arrivals: Sequence[Arrival],
    slo: SLO | Sequence[SLO],
    options: Options = DEFAULTS,
    stop: Callable[[Outcome], bool] | None = None,
) -> Result:
    """Plays the arrivals (any order) until all are served or shed.

    ``slo`` is one for all or one for each arrival. ``stop`` is told of each request that is done
    and ends the simulation by returning True: what is not done then keeps nan times. Raises
    ``ValueError`` that names the field for what cannot be simulated.
    """
    raise NotImplementedError
