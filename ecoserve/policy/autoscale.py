"""When to add instances and when to remove them.

``decide`` is a function of what was measured, how many instances there are, and the latest steps.
It expands as soon as one trigger holds, contracts when one holds and nothing speaks against it:

- Expansion: SLO violations, use, mean TTFT or waiting requests above their bound.
- Contraction: use below its bound, idle instances above theirs, or (where switched on) the
  published bound: mean saved TPOT above TTFT SLO x (n + 1) / n.

A signal is a value that held for its trigger's whole window, or is unknown. Expansion needs the
signals of its own trigger known, contraction needs all of them; whatever is unknown is told.

Against flapping: contraction leaves use at most half-way between its own bound and the one of
expansion (``Settings.aim``), expansion aims there too, and each direction has a cooldown and a
largest step, which together limit its rate.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from ecoserve.policy.signals import NAMES, Known, Settings, Signals, Unknown

_BEYOND_ALL = 1e9  # instances

# --- what is decided ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Step:
    """A step that was taken, by ``decide`` or by hand; ``at`` as ``now`` is."""

    at: float
    before: int
    after: int


@dataclass(frozen=True, slots=True)
class Decision:
    """``after`` instances are to be there. ``cause`` is one CamelCase word, ``reason`` is for
    people; of a decision to hold it does not change while nothing else does. ``unknown`` says of
    each unknown signal why."""

    before: int
    after: int
    cause: str
    reason: str
    unknown: tuple[str, ...] = ()

    @property
    def action(self) -> Literal["expand", "contract", "hold"]:
        if self.after == self.before:
            return "hold"
        return "expand" if self.after > self.before else "contract"

    @property
    def message(self) -> str:
        """The reason, with what is unknown and why where the reason does not say so itself."""
        missing = [text for text in self.unknown if text not in self.reason]
        return f"{self.reason}; not known: {_list(missing)}" if missing else self.reason


@dataclass(frozen=True, slots=True)
class _Trigger:
    """Holds, by these words, stable ones and the figures; ``wanted`` instances would do.

    ``lags``: it goes on holding until instances that start have taken their share."""

    cause: str
    what: str
    figure: str
    wanted: int
    lags: bool = False


def decide(
    signals: Signals,
    count: int,
    minimum: int,
    maximum: int,
    settings: Settings,
    history: Sequence[Step],
    now: float,
) -> Decision:
    """What to do now, of ``count`` instances wanted so far; ``after`` is in minimum..maximum.

    ``history`` are the latest steps in any order. The last instance is never removed: of none
    nothing could be measured. Raises ``ValueError`` if minimum is more than maximum.
    """
    if not 0 <= minimum <= maximum:
        raise ValueError(f"minimum must be from 0 to maximum {maximum}, not {minimum}")
    unknown = tuple(_unknown(signals, settings))

    def hold(cause: str, reason: str) -> Decision:
        return Decision(count, count, cause, reason, unknown)

    if not minimum <= count <= maximum:
        after = min(max(count, minimum), maximum)
        reason = f"{count} instances are not within {minimum} to {maximum}"
        return Decision(count, after, "OutOfBounds", reason, unknown)
    if count == 0:
        return hold("NoInstance", "there is no instance, so there is nothing to measure")
    ups = sorted(_expansions(signals, count, settings), key=lambda t: t.wanted, reverse=True)
    if ups:
        what = ups[0].what
        if count >= maximum:
            return hold("AtMaximum", f"{what}; {maximum} is the most allowed")
        if now - _last_up(history) < settings.expand.cooldown:
            cooldown = _span(settings.expand.cooldown)
            return hold("Cooldown", f"{what}; the last step up was less than {cooldown} ago")
        starting = _starting(signals, count, settings, history, now)
        up = next((t for t in ups if not (t.lags and starting)), None)
        if up is None:
            return hold("Starting", f"{what}; instances of the last step up still start")
        after = min(up.wanted, count + settings.expand.max_step, maximum)
        return Decision(count, after, up.cause, f"{up.what} ({up.figure})", unknown)
    down = min(_contractions(signals, count, settings), key=lambda t: t.wanted, default=None)
    if down is not None:
        least = max(minimum, 1)
        if count <= least:
            return hold("AtMinimum", f"{down.what}; {least} is the least allowed")
        if unknown:
            return hold("SignalsUnknown", f"{down.what}, but not all is known: {_list(unknown)}")
        if (why := _not_down(signals, count, settings, history, now)) is not None:
            return hold(why[0], f"{down.what}; {why[1]}")
        after = max(down.wanted, count - settings.contract.max_step, least)
        if after >= count:
            fewer = f"with one instance fewer use could pass {_percent(settings.aim)}"
            return hold("WouldOverload", f"{down.what}; {fewer}")
        return Decision(count, after, down.cause, f"{down.what} ({down.figure})")
    if unknown:
        return hold("SignalsUnknown", f"not all is known: {_list(unknown)}")
    return hold("WithinBounds", "all that is measured is within its bounds")


def _unknown(signals: Signals, settings: Settings) -> Iterator[str]:
    """Why each signal that the settings ask for is unknown."""
    told = set()
    for name, called in NAMES.items():
        signal = getattr(signals, name)
        if name == "saved" and not settings.contract.saved:
            continue
        if name in ("arrivals", "arrivals_high", "capacity") and settings.strategy == "threshold":
            continue
        if isinstance(signal, Unknown) and (text := f"{called}: {signal.why}") not in told:
            told.add(text)
            yield text


def _expansions(signals: Signals, count: int, settings: Settings) -> Iterator[_Trigger]:
    bounds = settings.expand
    violations, use, ttft = signals.violations, signals.use_low, signals.ttft
    waiting, accepted = signals.waiting, signals.accepted
    if isinstance(violations, Known) and violations.value > bounds.violations:
        yield _Trigger(
            "SloViolations",
            f"SLO violations stayed above {_percent(bounds.violations)} "
            f"for {_span(bounds.violations_for)}",
            f"{_percent(violations.value)} at least",
            count + max(math.ceil(count * violations.value), 1),
            lags=True,
        )
    if isinstance(use, Known) and isinstance(accepted, Known):
        # Instances that still start count as idle: they will take their share.
        share = use.value * min(accepted.value / count, 1.0)
        if share > bounds.use:
            yield _Trigger(
                "Use",
                f"use stayed above {_percent(bounds.use)} for {_span(bounds.use_for)}",
                f"{_percent(share)} at least",
                _enough(count * share, settings.aim),
            )
    if isinstance(ttft, Known) and ttft.value > bounds.ttft:
        yield _Trigger(
            "Ttft",
            f"mean TTFT stayed above {_percent(bounds.ttft)} of its SLO "
            f"for {_span(bounds.ttft_for)}",
            f"{_percent(ttft.value)} at least",
            count + 1,
            lags=True,
        )
    if isinstance(waiting, Known) and waiting.value > bounds.waiting:
        yield _Trigger(
            "Waiting",
            f"more than {bounds.waiting:g} waiting for each instance "
            f"for {_span(bounds.waiting_for)}",
            f"{waiting.value:.1f} at least",
            count + 1,
            lags=True,
        )
    if settings.strategy == "predictive":
        arrivals, capacity = signals.arrivals, signals.capacity
        if isinstance(arrivals, Known) and isinstance(capacity, Known) and capacity.value > 0:
            wanted = _enough(arrivals.value / capacity.value, bounds.use)
            if wanted > count:
                yield _Trigger(
                    "Arrivals",
                    f"the arrival rate asks for use above {_percent(bounds.use)}",
                    f"{arrivals.value:.1f} requests/s, {capacity.value:.2f} an instance",
                    wanted,
                )


def _last_up(history: Sequence[Step]) -> float:
    return max((step.at for step in history if step.after > step.before), default=-math.inf)


def _starting(
    signals: Signals, count: int, settings: Settings, history: Sequence[Step], now: float
) -> bool:
    """Whether some instances of the last step up do not take requests yet, or may not. Those that
    take longer than they may (for want of room, say) are not waited for."""
    accepted = signals.accepted
    missing = not isinstance(accepted, Known) or accepted.value < count
    return missing and now - _last_up(history) < settings.expand.starting


def _contractions(signals: Signals, count: int, settings: Settings) -> Iterator[_Trigger]:
    bounds = settings.contract
    use, idle, saved = signals.use_high, signals.idle, signals.saved
    total = _load(signals, count, settings)
    # Whether use is known is asked for later; as long as it is not, nothing can be removed.
    wanted = count if total is None else _enough(total, settings.aim)
    if settings.strategy == "predictive":
        if total is not None and wanted < count:
            yield _Trigger(
                "Arrivals",
                f"the arrival rate of the last {_span(bounds.use_for)} needs fewer instances",
                f"{total:.1f} instances' worth",
                wanted,
            )
    elif isinstance(use, Known) and use.value < bounds.use:
        yield _Trigger(
            "LowUse",
            f"use stayed below {_percent(bounds.use)} for {_span(bounds.use_for)}",
            f"{_percent(use.value)} at most",
            wanted,
        )
    if isinstance(idle, Known) and idle.value > bounds.idle:
        yield _Trigger(
            "Idle",
            f"more than {_percent(bounds.idle)} of the instances were idle "
            f"for {_span(bounds.idle_for)}",
            f"{_percent(idle.value)} at least",
            wanted,
        )
    if bounds.saved and isinstance(saved, Known):
        bound = bounds.saved * (count + 1) / count
        if saved.value > bound:
            yield _Trigger(
                "SavedTpot",
                f"saved TPOT stayed above {bound:.2f} x the TTFT SLO for {_span(bounds.saved_for)}",
                f"{saved.value:.2f} x at least",
                wanted,
            )


def _load(signals: Signals, count: int, settings: Settings) -> float | None:
    """The greatest load of contraction's window in instances' worth; None if it is unknown."""
    if not isinstance(signals.use_high, Known):
        return None
    load = signals.use_high.value * count
    if settings.strategy == "threshold":
        return load
    arrivals, capacity = signals.arrivals_high, signals.capacity
    if isinstance(arrivals, Known) and arrivals.value == 0:
        return load  # of no requests any capacity is enough
    if not (isinstance(arrivals, Known) and isinstance(capacity, Known) and capacity.value > 0):
        return None
    return max(load, arrivals.value / capacity.value)


def _not_down(
    signals: Signals, count: int, settings: Settings, history: Sequence[Step], now: float
) -> tuple[str, str] | None:
    """Why no step down is taken now, as cause and reason."""
    cooldown = settings.contract.cooldown
    last = max((step.at for step in history if step.after != step.before), default=-math.inf)
    if now - last < cooldown:
        return "Cooldown", f"the last step was less than {_span(cooldown)} ago"
    if _starting(signals, count, settings, history, now):
        return "Starting", "not all instances take requests"
    return None


def _enough(load: float, use: float) -> int:
    """The fewest instances that carry the load (in instances' worth) at no more than ``use``."""
    # A load that is a whole multiple must not be rounded up for its last digit, and one divided by
    # next to no capacity may be infinite.
    return math.ceil(min(load / use, _BEYOND_ALL) - 1e-9)


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _span(seconds: float) -> str:
    return f"{seconds / 60:g} min" if seconds >= 60 and seconds % 30 == 0 else f"{seconds:g} s"


def _list(unknown: Sequence[str]) -> str:
    return "; ".join(unknown)
