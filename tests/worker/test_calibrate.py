"""Calibration without an engine: the fit, and what is kept."""

from __future__ import annotations

from pathlib import Path

import pytest
from ecoserve_worker import calibrate

from ecoserve.policy.latency import LatencyFit, LatencyModel, StepSample

TRUE = LatencyModel(0.013, 2.5e-4, 1.1e-7, 0.012, 3.8e-4, 1.4e-6, mixing=0.2, error=0.0)


def _samples() -> list[StepSample]:
    shapes = [(n, n * n / 2, 0, 0) for n in (64, 256, 768)]
    shapes += [(0, 0.0, 1, n) for n in (64, 256, 768)] + [(0, 0.0, 8, 8 * n) for n in (32, 64)]
    shapes += [(n, n * n / 2, 8, 400) for n in (64, 192, 384)]
    judge = LatencyFit(TRUE)
    samples = [StepSample(*shape, 0.0) for shape in shapes]
    return [StepSample(s.tokens, s.pairs, s.batch, s.context, judge.predict(s)) for s in samples]


def test_the_fit_of_a_few_steps_predicts_them() -> None:
    judge = LatencyFit(calibrate.fit(_samples()))
    for sample in _samples():
        assert judge.predict(sample) == pytest.approx(sample.seconds, rel=0.1)


def test_no_steps_give_the_guess() -> None:
    assert calibrate.fit([]) == calibrate.UNCALIBRATED


def test_what_is_kept_is_found_under_the_same_key_only(tmp_path: Path) -> None:
    file = calibrate.cache_file(tmp_path, {"engine": ["--model", "a"], "cpus": 2})
    assert calibrate.load(file) is None
    calibrate.save(file, TRUE)
    assert calibrate.load(file) == TRUE
    again = calibrate.cache_file(tmp_path, {"cpus": 2, "engine": ["--model", "a"]})
    assert again == file
    other = calibrate.cache_file(tmp_path, {"engine": ["--model", "b"], "cpus": 2})
    assert other != file


@pytest.mark.parametrize("text", ["", "{", "[]", '{"prefill_fixed": 1}', '{"nonsense": 1}'])
def test_a_damaged_file_is_measured_anew(tmp_path: Path, text: str) -> None:
    file = tmp_path / "latency.json"
    file.write_text(text)
    assert calibrate.load(file) is None
