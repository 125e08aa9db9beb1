"""The event loop, and a whole simulation."""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as Sequence_
from functools import cache
from heapq import heappop, heappush
from random import Random

from ecoserve.policy.latency import LatencyModel
from ecoserve.policy.state import SLO
from ecoserve.sim.batch import Sequence
from ecoserve.sim.calibrate import calibrate
from ecoserve.sim.instance import Instance, Role
from ecoserve.sim.records import (
    DEFAULTS,
    Arrival,
    Cluster,
    Options,
    Outcome,
    Result,
)
from ecoserve.sim.systems import System, Workshop


class Loop:
    """Actions in order of their time; those of the same time in the order of being asked for,
    ``early`` ones first."""

    def __init__(self) -> None:
        self.now = 0.0
        self.stopped = False
        self._events: list[tuple[float, bool, int, Callable[[], None]]] = []
        self._count = 0

    def clock(self) -> float:
        return self.now

    def at(self, time: float, action: Callable[[], None], early: bool = False) -> None:
        self._count += 1
        heappush(self._events, (time, not early, self._count, action))

    def run(self) -> None:
        """Until nothing is left to do, or ``stopped``."""
        events = self._events
        while events and not self.stopped:
            self.now, _, _, action = heappop(events)
            action()


class _Lengths:
    """Expected output lengths: a noisy foresight, or the mean of what ended, as the scheduler
    server keeps it."""

    def __init__(self, options: Options) -> None:
        self._error = options.output_error
        self._random = Random(f"{options.seed}/lengths")
        self._tokens = 128.0 * 4
        self._answers = 4.0

    def expect(self, output: int) -> int:
        if self._error is None:
            return int(self._tokens / self._answers)
        return max(1, round(output * math.exp(self._random.gauss(0.0, self._error))))

    def learn(self, output: int) -> None:
        self._tokens = 0.995 * self._tokens + output
        self._answers = 0.995 * self._answers + 1


def simulate(
    system: System,
    cluster: Cluster,
    arrivals: Sequence_[Arrival],
    slo: SLO | Sequence_[SLO],
    options: Options = DEFAULTS,
    stop: Callable[[float, Outcome], bool] | None = None,
) -> Result:
    """Plays the arrivals (any order) until all are served or shed.

    ``slo`` is one for all or one for each arrival. ``stop`` is told the time and the request
    whenever one has come or is done, and ends the simulation by returning True: what is not done
    then keeps nan times. A request that no instance has the KV for is shed. Raises ``ValueError``
    that names the field for what cannot be simulated.
    """
    promised = [slo] * len(arrivals) if isinstance(slo, SLO) else slo
    if len(promised) != len(arrivals):
        raise ValueError(f"slo: {len(promised)} given for {len(arrivals)} arrivals")
    pairs = sorted(zip(arrivals, promised, strict=True), key=lambda pair: pair[0].at)
    outcomes = [Outcome(_checked(arrival), own) for arrival, own in pairs]
    result = Result(outcomes)
    loop = Loop()
    lengths = _Lengths(options)

    @cache
    def latency(step_budget: int) -> LatencyModel:
        return calibrate(cluster.cost, options.max_num_seqs, step_budget)

    def instance(name: str, role: Role) -> Instance:
        model = latency(min(role.step_budget, options.step_budget))
        tpot = min((own.tpot for own in promised), default=math.inf)
        return Instance(
            name, cluster, role, options, model, tpot, loop.clock, loop.at, result.steps
        )

    def told(outcome: Outcome) -> None:
        if stop is not None and stop(loop.now, outcome):
            loop.stopped = True

    def shed(sequence: Sequence) -> None:
        sequence.outcome.shed = True
        told(sequence.outcome)

    def ended(sequence: Sequence) -> None:
        lengths.learn(sequence.output)
        told(sequence.outcome)

    serving = system.build(Workshop(cluster, options, instance, loop.clock, loop.at, shed))
    for one in serving.instances:
        one.start(serving, ended)
    coming = iter(enumerate(outcomes))

    def arrive(number: int, outcome: Outcome) -> None:
        arrival = outcome.arrival
        told(outcome)
        sequence = Sequence(number, outcome, lengths.expect(arrival.output))
        if serving.instances[0].fits(arrival.prompt, arrival.output):
            serving.arrive(sequence)
        else:
            shed(sequence)
        await_next()

    def await_next() -> None:
        following = next(coming, None)
        if following is not None:
            number, outcome = following
            loop.at(outcome.arrival.at, lambda: arrive(number, outcome), early=True)

    await_next()
    loop.run()
    result.seconds = loop.now
    return result


def _checked(arrival: Arrival) -> Arrival:
    if arrival.prompt < 1 or arrival.output < 1:
        raise ValueError(f"arrival: prompt and output must be at least 1 token, not {arrival}")
    if not 0 <= arrival.at < math.inf:
        raise ValueError(f"arrival.at must be 0 or more, not {arrival.at}")
    return arrival
