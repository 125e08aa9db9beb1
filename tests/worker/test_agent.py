"""The agent against a small scheduler of the test's own, over real gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest
from ecoserve_worker import agent as agent_module
from ecoserve_worker.agent import Agent
from ecoserve_worker.ledger import Ledger
from ecoserve_worker.messages import FromEngine, PhaseSwitch, PromptState, State
from network import Network

from ecoserve.policy.state import SLO
from ecoserve.proto.v1 import session_pb2 as pb
from ecoserve.proto.v1 import session_pb2_grpc as pb_grpc

LATENCY = (0.01, 2e-4, 2e-8, 0.015, 4e-4, 1.5e-6, 0.1, 0.05)


class Scheduler(pb_grpc.SessionServicer):
    """Remembers what it is sent; sends what the test puts into ``outgoing``."""

    def __init__(self) -> None:
        self.hellos: list[pb.Hello] = []
        self.reports: list[pb.Report] = []
        self.done: list[pb.CommandDone] = []
        self.outgoing: asyncio.Queue[pb.SchedulerMessage | None] = asyncio.Queue()

    async def Connect(self, incoming: Any, context: Any) -> AsyncIterator[pb.SchedulerMessage]:
        reader = asyncio.create_task(self._read(incoming))
        try:
            while (message := await self.outgoing.get()) is not None:
                yield message
        finally:
            reader.cancel()

    async def _read(self, incoming: Any) -> None:
        async for message in incoming:
            kind = message.WhichOneof("message")
            if kind == "hello":
                self.hellos.append(message.hello)
            elif kind == "report":
                self.reports.append(message.report)
            else:
                self.done.append(message.done)

    def say(self, **message: Any) -> None:
        self.outgoing.put_nowait(pb.SchedulerMessage(**message))


class Rig:
    def __init__(self) -> None:
        self.scheduler = Scheduler()
        self.ledger = Ledger(SLO(1.0, 0.1))
        self.ledger.latency = LATENCY
        self.executed: list[pb.Command] = []
        self.error: Exception | None = None
        self.go_on = asyncio.Event()
        self.go_on.set()
        self.port = 0
        self._server: grpc.aio.Server | None = None

    async def execute(self, command: pb.Command) -> None:
        self.executed.append(command)
        await self.go_on.wait()
        if self.error is not None:
            raise self.error

    async def start_server(self) -> None:
        self._server = grpc.aio.server()
        pb_grpc.add_SessionServicer_to_server(self.scheduler, self._server)
        self.port = self._server.add_insecure_port(f"127.0.0.1:{self.port}")
        await self._server.start()

    async def stop_server(self) -> None:
        assert self._server is not None
        await self._server.stop(None)

    def agent(self) -> Agent:
        hello = pb.Hello(cluster="c", instance="i", incarnation="x", address="127.0.0.1:1")
        hello.limits.kv_tokens, hello.limits.max_num_seqs = 46_592, 64
        return Agent(f"127.0.0.1:{self.port}", hello, self.ledger, self.execute)


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    rig = Rig()
    await rig.start_server()
    running = asyncio.create_task(rig.agent().run())
    yield rig
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await rig.stop_server()


async def _until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


def _ends(ledger: Ledger, count: int) -> None:
    for number in range(count):
        ledger.end(ledger.begin(f"eco-{number:016x}", 0, None, None), 400, broken=False)


async def test_hello_comes_first_with_the_latency_model(rig: Rig) -> None:
    await _until(lambda: rig.scheduler.reports)
    (hello,) = rig.scheduler.hellos
    assert (hello.cluster, hello.incarnation) == ("c", "x")
    assert hello.latency.decode_fixed == LATENCY[3]
    assert hello.latency.error == LATENCY[7]


async def test_an_engine_that_never_ran_is_reported_as_free(rig: Rig) -> None:
    await _until(lambda: rig.scheduler.reports)
    report = rig.scheduler.reports[0]
    assert (report.phase, report.kv_free_tokens, report.batch_limit) == ("decode", 46_592, 64)


async def test_acceptance_latches(rig: Rig) -> None:
    rig.scheduler.say(refused=pb.Refused(reason="no such cluster yet"))
    await _until(lambda: rig.ledger.starting == "no such cluster yet")
    assert not rig.ledger.accepted
    rig.scheduler.say(accepted=pb.Accepted(configure=pb.Configure(policy="paper")))
    await _until(lambda: rig.ledger.accepted)
    assert rig.executed[0].configure.policy == "paper"
    rig.scheduler.say(refused=pb.Refused(reason="replaced"))
    rig.scheduler.outgoing.put_nowait(None)
    await _until(lambda: len(rig.scheduler.hellos) == 2)
    assert rig.ledger.accepted


async def test_commands_are_answered_with_what_went_wrong(rig: Rig) -> None:
    rig.scheduler.say(command=pb.Command(number=1, drain=pb.Drain(timeout_s=3)))
    await _until(lambda: rig.scheduler.done)
    assert (rig.scheduler.done[0].number, rig.scheduler.done[0].error) == (1, "")
    rig.error = ValueError("policy must be one of these")
    rig.scheduler.say(command=pb.Command(number=2, configure=pb.Configure(policy="x")))
    await _until(lambda: len(rig.scheduler.done) == 2)
    assert rig.scheduler.done[1].error == "policy must be one of these"


async def test_a_command_of_a_session_that_is_over_is_not_answered(rig: Rig) -> None:
    """The next session's commands have the same numbers."""
    rig.go_on.clear()
    rig.scheduler.say(command=pb.Command(number=1, drain=pb.Drain(timeout_s=3)))
    await _until(lambda: rig.executed)
    rig.scheduler.outgoing.put_nowait(None)
    await _until(lambda: len(rig.scheduler.hellos) == 2)
    rig.scheduler.say(command=pb.Command(number=2, resume=pb.Resume()))
    await _until(lambda: len(rig.executed) == 2)
    rig.go_on.set()
    await _until(lambda: rig.scheduler.done)
    seen = len(rig.scheduler.reports)
    await _until(lambda: len(rig.scheduler.reports) > seen)
    assert [done.number for done in rig.scheduler.done] == [2]


async def test_reports_the_engines_state(rig: Rig) -> None:
    waiting = [PromptState("eco-1", 100, 28, 0.5, True)]
    state = State(0, "prefill", 2.0, waiting, [], 77, 0.4, 0.9, "prefill", 0.3, 8, 5, 6, 7)
    rig.ledger.received(FromEngine(state=state, switches=[PhaseSwitch("prefill", 0, "backlog")]))
    await _until(lambda: rig.scheduler.reports and rig.scheduler.reports[-1].waiting)
    report = rig.scheduler.reports[-1]
    assert (report.phase, report.kv_free_tokens, report.use) == ("prefill", 77, 0.4)
    assert (report.waiting[0].id, report.waiting[0].tokens) == ("eco-1", 100)
    assert (report.step.kind, report.step.estimated_s) == ("prefill", 0.3)
    switches = [switch for report in rig.scheduler.reports for switch in report.switches]
    assert [switch.reason for switch in switches] == ["backlog"]


async def test_finished_records_survive_a_lost_session(rig: Rig) -> None:
    _ends(rig.ledger, 3)
    await _until(lambda: sum(len(r.finished) for r in rig.scheduler.reports) >= 3)
    rig.scheduler.say(ack=pb.Ack(report=1, finished=1))
    await _until(lambda: len(rig.ledger.finished) == 2)
    await rig.stop_server()
    rig.scheduler.reports.clear()
    rig.scheduler.outgoing = asyncio.Queue()
    await rig.start_server()
    await _until(lambda: any(r.finished for r in rig.scheduler.reports))
    again = [f.number for report in rig.scheduler.reports for f in report.finished]
    assert again[:2] == [2, 3]
    assert {hello.incarnation for hello in rig.scheduler.hellos} == {"x"}


async def test_reports_are_coalesced(rig: Rig) -> None:
    await _until(lambda: rig.scheduler.reports)
    before = len(rig.scheduler.reports)
    loop = asyncio.get_running_loop()
    began = loop.time()
    for _ in range(100):
        rig.ledger.changed.set()
        await asyncio.sleep(0.005)
    elapsed = loop.time() - began
    assert len(rig.scheduler.reports) - before <= 20 * elapsed + 2


async def test_reports_come_when_nothing_changes(rig: Rig) -> None:
    await _until(lambda: len(rig.scheduler.reports) >= 3)
    assert [report.number for report in rig.scheduler.reports] == sorted(
        report.number for report in rig.scheduler.reports
    )


class _Ended:
    """A stream whose end is found by a write, before any read tells of it."""

    def __init__(self) -> None:
        self.written = 0

    async def write(self, message: pb.WorkerMessage) -> None:
        self.written += 1
        if message.HasField("report"):
            raise asyncio.InvalidStateError("RPC already finished.")

    async def read(self) -> Any:
        await asyncio.Event().wait()

    def cancel(self) -> None:
        pass


async def test_a_write_into_an_ended_stream_only_ends_the_session(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = _Ended()

    class Stub(pb_grpc.SessionStub):
        def __init__(self, channel: grpc.aio.Channel) -> None:
            super().__init__(channel)
            if not ended.written:
                self.Connect = lambda: ended

    monkeypatch.setattr(agent_module, "SessionStub", Stub)
    running = asyncio.create_task(rig.agent().run())
    await _until(lambda: ended.written == 2)
    await _until(lambda: len(rig.scheduler.hellos) == 2)  # the rig's own is the other
    assert not running.done()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_a_fault_in_a_report_ends_the_session_and_not_the_worker(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    await _until(lambda: rig.scheduler.reports)
    faults = iter([ZeroDivisionError("a fault of ours")])
    whole = Agent._report

    def report(agent: Agent) -> pb.Report:
        if (fault := next(faults, None)) is not None:
            raise fault
        return whole(agent)

    monkeypatch.setattr(Agent, "_report", report)
    await _until(lambda: len(rig.scheduler.hellos) == 2)
    seen = len(rig.scheduler.reports)
    await _until(lambda: len(rig.scheduler.reports) > seen)


async def test_a_proxy_of_the_environment_is_not_asked(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "https_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "no_grpc_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    running = asyncio.create_task(rig.agent().run())
    await _until(lambda: len(rig.scheduler.hellos) == 2)  # the rig's own is the other
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_a_scheduler_that_falls_silent_is_left(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = (("keepalive_time", 200), ("http2.ping_timeout", 300))
    monkeypatch.setattr(agent_module, "_KEEPALIVE", times)
    network = Network(rig.port)
    await network.start()
    rig.port = network.port
    running = asyncio.create_task(rig.agent().run())
    await _until(lambda: len(rig.scheduler.hellos) == 2)  # the rig's own is the other
    network.silence()
    await _until(lambda: len(rig.scheduler.hellos) == 3)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await network.stop()


async def test_reports_as_seldom_as_it_is_told(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    sleep = asyncio.sleep

    async def noted(seconds: float) -> None:
        slept.append(seconds)
        await sleep(min(seconds, 0.01))

    await _until(lambda: rig.scheduler.reports)
    monkeypatch.setattr(agent_module.asyncio, "sleep", noted)
    rig.scheduler.say(ack=pb.Ack(report=1, interval_s=0.7))

    def told() -> bool:
        rig.ledger.changed.set()
        return 0.7 in slept

    await _until(told)
