"""How long steps take: a model of seven figures, fitted from measured steps.

prefill(n | context c)  = a + b n + k n (c + n/2)       one prompt chunk of n tokens after c others
decode(B, total ctx C)  = d + e B + f C                 one token for each of B sequences
mixed                   = (1 + p) (decode + prefill - a)

b is linear layers, k attention pairs, d weights and launch overhead, e and f the batch's share and
KV reading. A mixed step pays the fixed cost once; p, the mixed-batch penalty, is what mixing costs
beyond that ideal on the engine at hand.
The form follows DistServe's estimator (a quadratic in prompt length; batch and context for decode);
a straight line in n misses by a quarter on CPUs.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class LatencyModel:
    """Seconds per step. ``error`` is the relative error (one sigma) seen of its own predictions."""

    prefill_fixed: float
    prefill_token: float
    prefill_pair: float
    decode_fixed: float
    decode_sequence: float
    decode_context: float
    mixing: float = 0.0
    error: float = 0.05

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if not math.isfinite(value) or (value < 0 and name != "mixing"):
                raise ValueError(f"latency.{name} must be finite and not negative, not {value!r}")
        if self.mixing <= -1:
            raise ValueError(f"latency.mixing must be above -1, not {self.mixing!r}")
        if self.prefill_token <= 0 or self.decode_fixed + self.decode_sequence <= 0:
            raise ValueError("latency: a prompt token and a decode step must take time")

    def prefill_work(self, tokens: int, context: int = 0) -> float:
        """Seconds of a prompt chunk's own work, without the step's fixed cost."""
        return self.prefill_token * tokens + self.prefill_pair * tokens * (context + tokens / 2)

    def prefill(self, tokens: int, context: int = 0) -> float:
        """Seconds of a step that computes ``tokens`` of one prompt after ``context`` others."""
        return self.prefill_fixed + self.prefill_work(tokens, context) if tokens else 0.0

    def decode(self, batch: int, context: int) -> float:
        """Seconds of a decode step of ``batch`` sequences with ``context`` tokens in all."""
        if not batch:
            return 0.0
        return self.decode_fixed + self.decode_sequence * batch + self.decode_context * context

    def prefill_tokens_within(self, seconds: float, context: int = 0) -> int:
        """The longest chunk after ``context`` whose prefill step keeps within ``seconds``."""
        return self.tokens_for_work(seconds - self.prefill_fixed, context)

    def tokens_for_work(self, work: float, context: int = 0) -> int:
        """The longest chunk after ``context`` whose own work is at most ``work`` seconds."""
        # Solves b n + k n (c + n/2) <= work for n.
        if work <= 0:
            return 0
        linear = self.prefill_token + self.prefill_pair * context
        if self.prefill_pair == 0:
            return int(work / linear)
        # The form 2w / (l + sqrt(l^2 + 2kw)) loses no digits when the quadratic part is small.
        return int(2 * work / (linear + math.sqrt(linear**2 + 2 * self.prefill_pair * work)))


@dataclass(frozen=True, slots=True)
class StepSample:
    """One measured step: ``tokens`` prompt tokens with ``pairs`` = sum of n (c + n/2) over its
    chunks, beside ``batch`` decodes with ``context`` tokens in all."""

    tokens: int
    pairs: float
    batch: int
    context: int
    seconds: float

    @property
    def kind(self) -> Literal["prefill", "decode", "mixed"]:
        if not self.tokens:
            return "decode"
        return "mixed" if self.batch else "prefill"


# See ``LatencyFit``.
_RUN = 4
# The part of a normal distribution that is below one sigma above its mean.
_SIGMA = 0.841


class LatencyFit:
    """Keeps a ``LatencyModel`` true to the steps that are measured.

    The latest ``window`` samples of each kind are kept and fitted anew after every ``every``
    samples: least squares on the *relative* error, coefficients not negative, with the first model
    (the calibration, which exercised every term on purpose) as a prior of weight ``prior``. The
    prior holds proportions, not speed: it is first scaled to the samples as a whole. So what was
    not exercised lately (one prompt length only, batches of one to three) keeps its proportion
    however long that lasts, while terms that the samples do tell apart follow them.

    A sample that is off by more than ``outlier`` times is a hiccup (a page fault, a compile) and is
    left out, unless it is one of a run: ``_RUN`` samples of its kind, one after the other, that all
    are off so far to the same side. Then it is the model that is wrong, and it is fitted at once
    and after each ``_RUN`` more: an instance that starts on a machine busier than at its
    calibration would be given far too much meanwhile.
    """

    def __init__(
        self,
        model: LatencyModel,
        *,
        window: int = 256,
        every: int = 32,
        prior: float = 1.0,
        outlier: float = 4.0,
    ) -> None:
        self.model = model
        self._first = model
        self._every = every
        self._prior = prior
        self._outlier = outlier
        self._samples: dict[str, deque[StepSample]] = {
            kind: deque(maxlen=window) for kind in ("prefill", "decode", "mixed")
        }
        # How long the run of each kind is; negative while less is taken than predicted.
        self._runs = dict.fromkeys(self._samples, 0)
        self._since_fit = 0

    def predict(self, sample: StepSample) -> float:
        """What the model says that the step takes, seconds."""
        model = self.model
        prompt = model.prefill_token * sample.tokens + model.prefill_pair * sample.pairs
        if sample.kind == "prefill":
            return model.prefill_fixed + prompt
        decode = model.decode(sample.batch, sample.context)
        return decode if sample.kind == "decode" else (1 + model.mixing) * (decode + prompt)

    def observe(self, sample: StepSample) -> bool:
        """Takes a measured step; True if the model was fitted anew."""
        if sample.seconds <= 0:
            return False
        ratio = sample.seconds / max(self.predict(sample), 1e-9)
        run = self._run(sample.kind, ratio)
        if 0 < run < _RUN:
            return False
        self._samples[sample.kind].append(sample)
        self._since_fit += 1
        if self._since_fit >= self._every:
            self._since_fit = 0
        elif run == 0 or run % _RUN:
            return False
        self.model = self._fit()
        return True

    def _run(self, kind: str, ratio: float) -> int:
        """Takes note of a sample that took ``ratio`` of what was predicted; how long its run is."""
        run = self._runs[kind]
        if ratio >= self._outlier:
            run = max(run, 0) + 1
        elif ratio * self._outlier <= 1:
            run = min(run, 0) - 1
        else:
            run = 0
        self._runs[kind] = run
        return abs(run)

    def _fit(self) -> LatencyModel:
        first = self._first
        prefill = _nonnegative(
            [(1.0, s.tokens, s.pairs) for s in self._samples["prefill"]],
            [s.seconds for s in self._samples["prefill"]],
            (first.prefill_fixed, first.prefill_token, first.prefill_pair),
            self._prior,
        )
        decode = _nonnegative(
            [(1.0, s.batch, s.context) for s in self._samples["decode"]],
            [s.seconds for s in self._samples["decode"]],
            (first.decode_fixed, first.decode_sequence, first.decode_context),
            self._prior,
        )
        fitted = replace(
            self.model,
            prefill_fixed=prefill[0],
            prefill_token=max(prefill[1], 1e-9),
            prefill_pair=prefill[2],
            decode_fixed=max(decode[0], 1e-9),
            decode_sequence=decode[1],
            decode_context=decode[2],
        )
        self.model = replace(fitted, mixing=0.0)
        mixed = self._samples["mixed"]
        ratios = [s.seconds / self.predict(s) for s in mixed]
        mixing = float(np.median(ratios)) - 1 if ratios else self.model.mixing
        self.model = replace(fitted, mixing=min(max(mixing, -0.9), 9.0))
        return replace(self.model, error=min(self._error(), 1.0))

    def _error(self) -> float:
        """By how much more than predicted, as a share, one step in six takes at least (a normal
        distribution's sigma), of the kind of step that is predicted worst: pooled, the many decode
        steps would hide what the few mixed ones miss by.

        A quantile, as misses need not be chance: a step of a tile more than another takes longer
        each time, and would be made again and again. What hiccups in fewer steps does not move it.
        """
        worst = 0.0
        for samples in self._samples.values():
            if samples:
                over = [s.seconds / max(self.predict(s), 1e-9) - 1 for s in samples]
                worst = max(worst, float(np.quantile(over, _SIGMA)))
        return worst


def _nonnegative(
    rows: list[tuple[float, float, float]],
    seconds: list[float],
    prior: tuple[float, float, float],
    prior_weight: float,
) -> tuple[float, float, float]:
    """Least squares on relative error with coefficients >= 0, drawn weakly towards ``prior``."""
    if not rows:
        return prior
    y: NDArray[np.float64] = np.asarray(seconds, dtype=np.float64)
    # A row divided by its time has the target 1, so each sample weighs by its relative error.
    x: NDArray[np.float64] = np.asarray(rows, dtype=np.float64) / y[:, None]
    old = np.asarray(prior, dtype=np.float64)
    # What the samples do not tell apart moves together: the prior is first scaled as a whole.
    predicted = x @ old
    if (predicted > 0).all():
        old = old / np.median(predicted)
    # One more row a coefficient, on its relative change; on its contribution where it was zero.
    unit = np.where(old > 0, old, 1 / np.maximum(x.mean(axis=0), 1e-12))
    a = np.vstack([x, np.diag(prior_weight / unit)])
    b = np.concatenate([np.ones(len(y)), prior_weight * old / unit])
    active = [0, 1, 2]
    solution = np.zeros(3)
    while active:
        found, *_ = np.linalg.lstsq(a[:, active], b, rcond=None)
        negative = [i for i, value in zip(active, found, strict=True) if value < 0]
        if not negative:
            solution[active] = found
            break
        active = [i for i in active if i not in negative]
    return float(solution[0]), float(solution[1]), float(solution[2])
