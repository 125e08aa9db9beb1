"""What an instance tells of itself, and what routing makes of it."""

from __future__ import annotations

from dataclasses import dataclass

from ecoserve.policy.latency import LatencyModel
from ecoserve.policy.state import NO_DECODES, Decodes, InstanceView, Phase
from ecoserve.sim.batch import Sequence


@dataclass(slots=True)
class Pending:
    """Sums over prompts that wait."""

    count: int = 0
    tokens: int = 0
    pairs: float = 0.0
    expected: int = 0

    def add(self, sequence: Sequence, sign: int) -> None:
        left = sequence.prompt + sequence.generated - sequence.computed
        self.count += sign
        self.tokens += sign * left
        self.pairs += sign * left * (sequence.computed + left / 2)
        self.expected += sign * max(sequence.expected - sequence.generated, 0)

    def seconds(self, latency: LatencyModel) -> float:
        return (
            latency.prefill_fixed * self.count
            + latency.prefill_token * self.tokens
            + latency.prefill_pair * self.pairs
        )


@dataclass(slots=True)
class Report:
    """The state before a step, as a worker sends it.

    ``backlog`` is seconds of all pending prefills, ``recent`` of those that came since the last
    phase switch. ``estimate`` is of the step that then begins, and ``prefills`` whether it holds
    prompt tokens; an idle instance's is 0.
    """

    at: float
    phase: Phase
    switched_at: float
    backlog: float
    recent: float
    decodes: Decodes
    settled_slack: float
    free_kv: int
    room: int
    use: float
    latency: LatencyModel
    estimate: float = 0.0
    prefills: bool = False
    # What was ever routed to the instance by then: seconds of prefill, tokens of KV, sequences.
    routed_seconds: float = 0.0
    routed_kv: int = 0
    routed_count: int = 0


class Reports:
    """An instance's reports on their way: each is known ``delay`` seconds after it was made."""

    def __init__(self, name: str, delay: float) -> None:
        self._name = name
        self._delay = delay
        self._reports: list[Report] = []
        self._seconds = 0.0
        self._kv = 0
        self._count = 0

    def routed(self, seconds: float, kv: int) -> None:
        """A request was routed to the instance, which a router knows without a report."""
        self._seconds += seconds
        self._kv += kv
        self._count += 1

    def file(self, report: Report) -> None:
        """The instance sends a report."""
        report.routed_seconds = self._seconds
        report.routed_kv = self._kv
        report.routed_count = self._count
        reports = self._reports
        if not self._delay:
            reports.clear()
        reports.append(report)
        self._forget(report.at)

    def view(self, now: float) -> InstanceView:
        """The newest report that is known, aged, with what was routed since laid over it."""
        self._forget(now)
        report = self._reports[0]
        age = now - report.at
        left = report.estimate - age if age < report.estimate else 0.0
        backlog = report.backlog
        if report.prefills:
            # What the step under way has done of its prompts is no longer pending.
            backlog -= min(report.estimate - left, backlog)
        seconds = self._seconds - report.routed_seconds
        decodes = report.decodes
        if decodes.count:
            decodes = Decodes(
                decodes.count,
                decodes.context,
                decodes.least_slack - age,
                decodes.mean_slack - age,
                decodes.tpot,
            )
        return InstanceView(
            self._name,
            report.phase,
            now - report.switched_at,
            backlog + seconds,
            min(report.recent, backlog) + seconds,
            decodes,
            report.settled_slack - age,
            left,
            report.free_kv - (self._kv - report.routed_kv),
            report.room - (self._count - report.routed_count),
            report.use,
            report.latency,
        )

    def _forget(self, now: float) -> None:
        """What is older than the newest that is known is never looked at again."""
        reports = self._reports
        while len(reports) > 1 and reports[1].at <= now - self._delay:
            del reports[0]


def together(parts: list[Decodes]) -> Decodes:
    """The decodes of all micro-batches as those of one instance."""
    some = [part for part in parts if part.count]
    if not some:
        return NO_DECODES
    count = sum(part.count for part in some)
    return Decodes(
        count,
        sum(part.context for part in some),
        min(part.least_slack for part in some),
        sum(part.mean_slack * part.count for part in some) / count,
        min(part.tpot for part in some),
    )
