"""Moving KV between instances."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ecoserve.sim.records import Wire


@dataclass(slots=True)
class Port:
    """One end of a wire, one direction: transfers go one after the other, in order of asking."""

    wire: Wire
    free_at: float = 0.0


def transfer(
    asked: float, size: float, *ports: Port, rest: float = 0.0, computed: float = -math.inf
) -> float:
    """When ``size`` bytes, asked for at ``asked``, are through all the ports.

    They take up the ports together from when the last of them is free; the slowest wire sets the
    pace. ``rest`` of them exist only from ``computed`` on.
    """
    start = max(asked, *(port.free_at for port in ports))
    end = start + max(port.wire.seconds(size) for port in ports)
    end = max(end, computed + max(port.wire.seconds(rest) for port in ports))
    for port in ports:
        port.free_at = end
    return end
