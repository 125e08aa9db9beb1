"""`ecoserve bench` against a server of known delays."""

from __future__ import annotations

import asyncio
import csv
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ecoserve.bench import report
from ecoserve.bench.endpoint import EndpointError, Promise, discover
from ecoserve.bench.load import Client, Outcome
from ecoserve.bench.plan import Kind, Plan
from ecoserve.bench.runner import Bench, Found, Step
from ecoserve.cli import app
from tests.bench.fake_endpoint import FakeEndpoint

LOOSE = {"ttft": Promise(30.0, multiple=False), "tpot": Promise(30.0, multiple=False)}


class Quiet:
    """Watches a bench; ``on_ended`` is called with each call that ended."""

    def __init__(self, on_ended: Callable[[Outcome], None] | None = None) -> None:
        self._on_ended = on_ended

    def known(self, found: Found) -> None: ...

    def began(self, kind: Kind, load: float, calls: int | None, seconds: float) -> None: ...

    def ended(self, outcome: Outcome) -> None:
        if self._on_ended is not None:
            self._on_ended(outcome)

    def stepped(self, step: Step) -> None: ...


def plan(endpoint: FakeEndpoint, **more: Any) -> Plan:
    few = {"seconds": 0.6, "warmup": 0.1, "repeats": 1, "unloaded_calls": 2, "output": "5"}
    return Plan(**({"url": endpoint.url, "search": False} | LOOSE | few | more))


async def found(endpoint: FakeEndpoint, **more: Any) -> Found:
    bench = Bench(plan(endpoint, **more), Quiet())
    await bench.play()
    return bench.found


@pytest.mark.parametrize("api", ["chat", "completions"])
async def test_rate_steps(api: str) -> None:
    async with FakeEndpoint(ttft=0.03, tpot=0.004, per_word=1.5, overhead=30).serve() as endpoint:
        result = await found(endpoint, rates=(20.0, 40.0), prompt="120", api=api)
    assert result.alone is not None
    assert result.alone.ttft >= 0.03
    assert result.alone.tpot >= 0.004
    assert [(s.kind, s.load) for s in result.steps] == [("rate", 20.0), ("rate", 40.0)]
    for step in result.steps:
        assert (step.summary.failed, step.summary.attained) == (0, 1.0)
        assert step.summary.ttft.p50 >= 0.03
        assert step.summary.output_tokens == 5
        # Words were counted, so that prompts have the tokens that were asked.
        assert step.summary.prompt_tokens == pytest.approx(120, abs=2)
    assert result.steps[1].summary.calls > result.steps[0].summary.calls


async def test_ttft_is_at_the_first_text_and_not_at_the_role() -> None:
    async with FakeEndpoint(ttft=0.2, tpot=0.0).serve() as endpoint:
        result = await found(endpoint, concurrency=(1,))
    (step,) = result.steps
    assert step.summary.ttft.p50 >= 0.2


async def test_concurrency_is_kept() -> None:
    async with FakeEndpoint(slots=2).serve() as endpoint:
        result = await found(endpoint, concurrency=(1, 6))
        most = [0, 0]
    for number, step in enumerate(result.steps):
        spans = [(o.sent, o.end) for o in step.runs[0].outcomes]
        most[number] = max(sum(a <= sent < b for a, b in spans) for sent, _ in spans)
    assert most == [1, 6]


async def test_prompts_of_different_runs_differ() -> None:
    async with FakeEndpoint().serve() as endpoint:
        await found(endpoint, rates=(20.0, 20.0), repeats=2)
        texts = [b["messages"][0]["content"][:60] for b in endpoint.bodies]
    assert len(set(texts)) == len(texts)


async def test_a_run_can_be_had_again_exactly() -> None:
    async with FakeEndpoint().serve() as one, FakeEndpoint().serve() as other:
        for endpoint in (one, other):
            await found(endpoint, rates=(20.0,), salt=5)
        # The first two find out how the endpoint counts.
        texts = [[b["messages"] for b in e.bodies[2:]] for e in (one, other)]
    assert texts[0] == texts[1]


async def test_conversations_carry_what_was_said() -> None:
    async with FakeEndpoint().serve() as endpoint:
        result = await found(endpoint, rates=(15.0,), turns=3, think=0.01)
        last = max(endpoint.bodies, key=lambda body: len(body["messages"]))["messages"]
    assert [m["role"] for m in last] == ["user", "assistant", "user", "assistant", "user"]
    assert last[1]["content"] == "w0 w1 w2 w3 w4 "
    (step,) = result.steps
    assert len(step.runs[0].outcomes) == 9
    assert step.summary.failed == 0


async def test_the_goodput_is_between_what_passes_and_what_fails() -> None:
    # Four slots of 0.05 s and more: at most 80 a second.
    async with FakeEndpoint(ttft=0.05, tpot=0.0, slots=4).serve() as endpoint:
        result = await found(
            endpoint,
            search=True,
            output="1",
            ttft=Promise(0.3, multiple=False),
            rates=(10.0,),
            seconds=2.0,
            precision=0.5,
        )
    assert result.search is not None
    assert result.search.bracketed
    assert result.search.low <= 80
    failed = [s for s in result.steps if not s.attained(0.9)]
    assert failed
    for step in failed:
        assert step.load >= result.search.high
        assert step.decided_early or (step.summary.attained or 0) < 0.9


async def test_concurrency_rises_until_it_fails() -> None:
    async with FakeEndpoint(ttft=0.05, tpot=0.0, slots=2).serve() as endpoint:
        # Alone 0.05 s; eight wait for each other.
        result = await found(endpoint, ttft=Promise(0.15, multiple=False), output="1")
    met = [s.attained(0.9) for s in result.steps]
    assert [s.load for s in result.steps] == [float(2**i) for i in range(len(met))]
    assert met[0]
    assert not met[-1]
    assert all(met[:-1])


async def test_slos_are_multiples_of_the_unloaded_figures() -> None:
    async with FakeEndpoint().serve() as endpoint:
        three, two = Promise(3, multiple=True), Promise(2, multiple=True)
        result = await found(endpoint, concurrency=(1,), ttft=three, tpot=two)
    assert result.slo is not None
    assert result.alone is not None
    assert result.slo.ttft == pytest.approx(3 * result.alone.ttft)
    assert result.slo.tpot == pytest.approx(2 * result.alone.tpot)


@pytest.mark.parametrize(
    ("kind", "words"),
    [("500", "HTTP 500 oops"), ("broken", "without [DONE]"), ("error", "engine_dead")],
)
async def test_failures_are_counted_by_error(kind: str, words: str) -> None:
    async with FakeEndpoint(failure=kind, every=5).serve() as endpoint:
        endpoint.every = 0
        work = Bench(plan(endpoint, rates=(40.0,)), Quiet())

        def fail(found: Found) -> None:
            endpoint.every = 5

        work._watcher.known = fail  # type: ignore[method-assign]
        await work.play()
    (step,) = work.found.steps
    calls = step.runs[0].outcomes
    assert sum(not o.ok for o in calls) == pytest.approx(len(calls) / 5, abs=1)
    (error,) = step.summary.errors
    assert words in error
    assert step.summary.attained == pytest.approx(1 - step.summary.failed / step.summary.calls)


async def test_an_endpoint_without_usage_has_its_events_counted() -> None:
    async with FakeEndpoint(usage=False).serve() as endpoint:
        result = await found(endpoint, concurrency=(1,))
    assert result.steps[0].summary.output_tokens == 5


@pytest.mark.parametrize(
    "refused", [("ignore_eos",), ("ignore_eos", "max_tokens"), ("max_tokens",)]
)
async def test_endpoints_that_refuse_fields(refused: tuple[str, ...]) -> None:
    async with FakeEndpoint(refused_fields=refused).serve() as endpoint:
        result = await found(endpoint, concurrency=(1,))
    assert result.steps[0].summary.failed == 0
    assert result.steps[0].summary.calls > 0


async def test_what_the_model_cannot_hold_is_not_asked() -> None:
    async with FakeEndpoint(longest=300).serve() as endpoint:
        await found(endpoint, concurrency=(4,), prompt="100:250")
        lengths = [len(b["messages"][0]["content"].split()) for b in endpoint.bodies]
    assert max(lengths) <= 300


async def test_which_model() -> None:
    fake = FakeEndpoint(models=("a", "b"))
    async with fake.serve() as endpoint, Client(endpoint.url) as client:
        assert (await discover(client, "b")).name == "b"
        with pytest.raises(EndpointError, match="pass --model, one of: a, b"):
            await discover(client, None)
        with pytest.raises(EndpointError, match="--model c is not served; there are: a, b"):
            await discover(client, "c")
    async with FakeEndpoint(models=()).serve() as endpoint, Client(endpoint.url) as client:
        with pytest.raises(EndpointError, match="/v1/models lists no models"):
            await discover(client, None)


async def test_keys() -> None:
    async with FakeEndpoint(key="k").serve() as endpoint:
        assert (await found(endpoint, concurrency=(1,), api_key="k")).steps
        with pytest.raises(EndpointError, match="401: pass --api-key"):
            await found(endpoint, concurrency=(1,))


async def test_stopped_it_keeps_what_it_has() -> None:
    async with FakeEndpoint(ttft=0.01).serve() as endpoint:
        seen: list[Outcome] = []

        def stop(outcome: Outcome) -> None:
            seen.append(outcome)
            if len(seen) == 5:
                bench.stop()

        bench = Bench(plan(endpoint, rates=(50.0, 60.0), warmup=0.0), Quiet(stop))
        await asyncio.wait_for(bench.play(), 20)
    (step,) = bench.found.steps
    assert step.interrupted
    assert len(step.runs[0].outcomes) == 5
    assert report.document(bench.found)["interrupted"] is True


async def test_files(tmp_path: Path) -> None:
    async with FakeEndpoint().serve() as endpoint:
        result = await found(
            endpoint, concurrency=(1, 2), rates=(20.0,), api_key="secret", out=tmp_path
        )
    report.write(result, tmp_path)
    told = json.loads((tmp_path / "bench.json").read_text())
    assert [s["load"] for s in told["steps"]] == [1.0, 2.0, 20.0]
    assert told["steps"][0]["ttft"]["p50"] > 0
    assert "secret" not in (tmp_path / "bench.json").read_text()
    steps = list(csv.DictReader((tmp_path / "steps.csv").open()))
    assert [float(s["load"]) for s in steps] == [1.0, 2.0, 20.0]
    requests = list(csv.DictReader((tmp_path / "requests.csv").open()))
    assert len(requests) == sum(len(r.outcomes) for s in result.steps for r in s.runs)
    for name in ("rate.png", "concurrency.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


async def command(*arguments: str, until: bytes = b"") -> tuple[int, str, str]:
    """Runs the command; after ``until`` on standard error it gets a SIGINT."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "ecoserve", "bench", *arguments,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=os.environ | {"COLUMNS": "200"},
    )  # fmt: skip
    assert process.stderr is not None
    before = b""
    if until:
        before = await asyncio.wait_for(process.stderr.readuntil(until), 60)
        process.send_signal(signal.SIGINT)
    out, err = await asyncio.wait_for(process.communicate(), 60)
    return process.returncode or 0, out.decode(), (before + err).decode()


async def test_the_command() -> None:
    async with FakeEndpoint().serve() as endpoint:
        code, out, err = await command(
            "--url", f"{endpoint.url}/v1", "--rate", "20", "--seconds", "0.5", "--warmup", "0.1",
            "--output-tokens", "3", "--unloaded-calls", "1", "--repeats", "1", "--json",
        )  # fmt: skip
    assert code == 0, err
    assert json.loads(out)["steps"][0]["load"] == 20
    assert "20 requests/s" in err


async def test_ctrl_c_keeps_what_was_measured(tmp_path: Path) -> None:
    async with FakeEndpoint(ttft=0.001, tpot=0.0).serve() as endpoint:
        code, _, err = await command(
            "--url", endpoint.url, "--rate", "20,5", "--seconds", "1000", "--warmup", "0",
            "--output-tokens", "1", "--unloaded-calls", "1", "--repeats", "1", "--json",
            "--out", str(tmp_path), until=b"in time",
        )  # fmt: skip
    assert code == 130, err
    told = json.loads((tmp_path / "bench.json").read_text())
    assert told["interrupted"] is True
    assert [s["interrupted"] for s in told["steps"]] == [True]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--url", "localhost:8000"], "--url must begin with http"),
        (["--rate", "1,x"], "--rate must be numbers"),
        (
            ["--rate", "0"],
            "--rate must be a positive number of requests a second, 100000 at most, not 0",
        ),
        (["--concurrency", "1.5"], "--concurrency must be whole numbers"),
        (["--attainment", "1.5"], "--attainment must be within 0 and 1"),
        (["--seconds", "5", "--warmup", "5"], "--warmup must be"),
        (["--ttft-slo", "soon"], "--ttft-slo must be seconds"),
        (["--tpot-slo", "-1x"], "--tpot-slo must be seconds"),
        (["--prompt-tokens", "many"], "--prompt-tokens must be tokens"),
        (["--data", "nothing.csv"], "--data must be one of"),
        (["--turns", "0"], "--turns must be a whole number from 1 to 1000, not 0"),
        (["--cv", "0"], "--cv must be a positive number, 100 at most, not 0"),
        (["--url", "http://127.0.0.1:9"], "cannot be reached"),
        (["--out", "/dev/null/x"], "--out: [Errno 20] Not a directory: '/dev/null/x'"),
    ],
)
def test_wrong_arguments_are_named(arguments: list[str], words: str) -> None:
    result = CliRunner().invoke(app, ["bench", *arguments], env={"COLUMNS": "200"})
    assert result.exit_code == 1
    assert words in result.output
    assert len(result.output.splitlines()) == 1
