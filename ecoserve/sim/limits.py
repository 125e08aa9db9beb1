"""What numbers options and experiment files of the simulator take."""

from __future__ import annotations

from ecoserve.numbers import Allowed

RATE = Allowed(0, 100_000, above=True)  # requests a second
GPUS = Allowed(1, 65_536, whole=True)
PARALLEL = Allowed(1, 64, whole=True)
INSTANCES = Allowed(1, 1024, whole=True)  # as the operator
REQUESTS = Allowed(1, 10_000_000, whole=True)
SEEDS = Allowed(1, 1000, whole=True)
PERCENTILE = Allowed(0, 100, above=True)
MINUTES = Allowed(0, 1440, above=True)
"""Length of a step."""
MIXING = Allowed(0, 100)
ERROR = Allowed(0, 100)
"""Of noise and of guesses, relative."""
PRICE = Allowed(0, 1_000_000, above=True)
BUS = Allowed(0, 1_000_000, above=True)  # GB/s
BUDGET = Allowed(0, 1_000_000)
"""Minutes after which no cell begins."""
JOBS = Allowed(1, 1024, whole=True)
"""Processes."""
