"""The instance scheduler's own state, without vLLM."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from ecoserve_worker.channel import EngineEnd
from ecoserve_worker.messages import Calibrate, Forget, Meta, SequenceDone, Settings
from ecoserve_worker.vllm_plugin.instance import Instance

from ecoserve.policy.latency import StepSample
from ecoserve.policy.state import StepPlan

ID = "eco-0123456789abcdef"
DECODE = StepSample(0, 0.0, 2, 100, 0.0)
PREFILL = StepSample(100, 5000.0, 0, 0, 0.0)


class Channel(EngineEnd):
    """A channel whose two directions are lists."""

    def __init__(self) -> None:
        super().__init__(None)
        self.incoming: list[Any] = []
        self.events: list[Any] = []

    def commands(self) -> list[Any]:
        commands, self.incoming = self.incoming, []
        return commands

    def first_token(self, id: str) -> None:
        self.events.append(id)

    def done(self, done: SequenceDone) -> None:
        self.events.append(done)

    def switch(self, switch: Any) -> None:
        self.events.append(switch)

    def sample(self, sample: Any) -> None:
        self.events.append(sample)


@pytest.fixture
def channel() -> Channel:
    return Channel()


@pytest.fixture
def instance(channel: Channel) -> Instance:
    settings = Settings("paper", {}, 1.0, 0.1, debug=False)
    return Instance(settings, channel, max_batch=8, kv_tokens=1000, step_budget=512, now=0.0)


def _seconds(instance: Instance) -> list[float]:
    samples = [s for kind in instance.fit._samples.values() for s in kind]
    return [sample.seconds for sample in samples]


def test_a_step_takes_from_its_start_to_its_end(instance: Instance) -> None:
    instance.begin(DECODE, None, 10.0)
    instance.end(10.02)
    assert _seconds(instance) == [pytest.approx(0.02)]


def test_a_step_scheduled_ahead_begins_when_the_one_before_it_ends(instance: Instance) -> None:
    instance.begin(DECODE, None, 10.00)
    instance.begin(DECODE, None, 10.01)
    instance.end(10.02)
    instance.begin(DECODE, None, 10.03)
    instance.end(10.05)
    instance.end(10.06)
    assert _seconds(instance) == pytest.approx([0.02, 0.03, 0.01])


def test_steps_are_counted_by_what_they_hold(instance: Instance) -> None:
    for sample in (PREFILL, DECODE, DECODE, StepSample(9, 40.0, 2, 9, 0.0)):
        instance.begin(sample, None, 1.0)
        instance.end(1.1)
    instance.begin(StepSample(0, 0.0, 0, 0, 0.0), None, 2.0)
    instance.end(2.1)
    assert instance._steps == {"prefill": 1, "decode": 2, "mixed": 1}


def test_saved_tpot(instance: Instance) -> None:
    sequence = instance.sequence("cmpl-1", 5, arrived=9.0, now=10.0)
    assert sequence.deadline == 10.0
    instance.tokens(sequence, 1, 10.5)
    assert sequence.slack(10.5) == pytest.approx(0.1)
    instance.tokens(sequence, 3, 10.6)
    assert sequence.slack(10.6) == pytest.approx(0.3)
    assert sequence.deadline == pytest.approx(10.9)


def test_the_account_of_a_sequence(instance: Instance, channel: Channel) -> None:
    channel.incoming = [Meta(ID, 8.0, 3.0, 0.2)]
    instance.take_commands()
    sequence = instance.sequence(f"cmpl-{ID}-0-77", 5, arrived=9.0, now=9.5)
    sequence.cached = 4
    instance.tokens(sequence, 1, 10.0)
    instance.tokens(sequence, 4, 10.4)
    instance.finish(f"cmpl-{ID}-0-77", False, 10.4)
    first, done = channel.events
    assert first == ID
    assert (done.id, done.prompt_tokens, done.cached_tokens, done.generated) == (ID, 5, 4, 5)
    assert (done.ttft, done.tpot) == (pytest.approx(2.0), pytest.approx(0.1))
    assert (done.ttft_slo, done.tpot_slo) == (3.0, 0.2)
    assert not instance.sequences


def test_metadata_that_comes_late_still_counts(instance: Instance, channel: Channel) -> None:
    sequence = instance.sequence(f"cmpl-{ID}", 5, arrived=9.0, now=9.5)
    assert (sequence.ttft, sequence.tpot) == (1.0, 0.1)
    channel.incoming = [Meta(ID, 8.0, 3.0, None)]
    instance.take_commands()
    assert (sequence.arrived, sequence.ttft, sequence.tpot) == (8.0, 3.0, 0.1)
    channel.incoming = [Forget(ID)]
    instance.take_commands()
    assert instance.sequence(f"cmpl-{ID}-2", 5, 9.0, 9.5).ttft == 1.0


def test_settings_change_policy_and_default_slo(instance: Instance, channel: Channel) -> None:
    channel.incoming = [Settings("window", {}, 2.0, 0.3, False, latency=(1.0,) * 6 + (0.1, 0.2))]
    instance.take_commands()
    assert instance.policy.name == "window"
    assert instance.fit.model.mixing == 0.1
    assert instance.sequence("x", 1, 0.0, 0.0).tpot == 0.3
    channel.incoming = [Settings("nonsense", {}, 2.0, 0.3, False)]
    instance.take_commands()
    assert instance.policy.name == "window"


def test_what_is_calibrated_is_not_counted(instance: Instance, channel: Channel) -> None:
    channel.incoming = [Calibrate(True)]
    instance.take_commands()
    sequence = instance.sequence("calibrate-1", 5, 0.0, 0.0)
    instance.begin(PREFILL, None, 1.0)
    instance.tokens(sequence, 1, 1.1)
    instance.finish("calibrate-1", False, 1.1)
    instance.end(1.1)
    (sample,) = channel.events
    assert (sample.tokens, sample.seconds) == (100, pytest.approx(0.1))
    assert instance._steps["prefill"] == 0


def test_phase_switches_are_told_with_their_reason(instance: Instance, channel: Channel) -> None:
    instance.decide(StepPlan("prefill", 512, "nothing decodes"), 1.0)
    instance.decide(StepPlan("prefill", 512, "more"), 2.0)
    instance.decide(StepPlan("decode", 0, "backlog is small"), 3.0)
    told = [(switch.phase, switch.at, switch.reason) for switch in channel.events]
    assert told == [("prefill", 1.0, "nothing decodes"), ("decode", 3.0, "backlog is small")]


def test_the_batch_limit_shrinks_within_bounds_and_once_a_second(instance: Instance) -> None:
    limits = []
    for step in range(1, 200):
        instance.measure(step * 0.05, running=0)
        limits.append(instance.batch_limit)
    assert limits[18:20] == [8, 7]
    assert limits[-1] == 2  # a quarter of the engine's own
    changes = sum(one != other for one, other in pairwise(limits))
    assert changes <= 10


def test_a_batch_limit_that_is_reached_grows_with_every_step(instance: Instance) -> None:
    for step in range(1, 200):
        instance.measure(step * 0.05, running=0)
    grown = []
    for step in range(6):
        instance.measure(10 + step * 0.05, running=instance.batch_limit)
        grown.append(instance.batch_limit)
    assert grown == [3, 4, 5, 6, 8, 8]
