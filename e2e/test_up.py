"""`ecoserve up` for real: two engines, the scheduler, Envoy, and what a first user does with it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from e2e.harness import NAME, Running, descendants, until
from ecoserve.local import guard
from ecoserve.local.machine import port_in_use

pytestmark = [pytest.mark.engine, pytest.mark.envoy, pytest.mark.timeout(600)]

CAPITAL = {"role": "user", "content": "What is the capital of Japan?"}


@pytest.fixture
def client(up: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=up.url, api_key="none", timeout=120, max_retries=0) as client:
        yield client


def test_the_greeting_says_what_was_promised(up: Running) -> None:
    text = "\n".join(up.lines)
    assert f"  URL       {up.url}" in up.lines
    assert re.search(r"TTFT SLO  [\d.]+ s \(3 x .* the prefill of 2048 tokens", text)
    assert re.search(r"TPOT SLO  [\d.]+ ms \(2 x .* a decode step of 8 x 512 tokens", text)
    assert {i["state"] for i in up.instances().values()} == {"accepted"}
    assert "ecoserve_" in httpx.get(up.address("Metrics")).text
    assert set(httpx.get(up.address("Phases")).json()["local"]) == {"worker-0", "worker-1"}


def test_the_printed_commands_work(up: Running) -> None:
    plain, stream = up.commands

    def run(command: str) -> str:
        done = subprocess.run(
            ["bash", "-c", command], capture_output=True, text=True, check=True, timeout=120
        )
        return done.stdout

    answer = json.loads(run(plain))["choices"][0]["message"]["content"]
    assert "Tokyo" in answer
    events = [line.removeprefix("data: ") for line in run(stream).splitlines() if line]
    assert events[-1] == "[DONE]"
    deltas = [json.loads(event)["choices"][0]["delta"] for event in events[:-1]]
    assert "Tokyo" in "".join(delta.get("content") or "" for delta in deltas)


def test_the_openai_client(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [NAME]
    chat = client.chat.completions.create(model=NAME, messages=[CAPITAL], temperature=0)
    assert "Tokyo" in (chat.choices[0].message.content or "")
    assert chat.usage is not None
    assert chat.usage.completion_tokens > 0
    completion = client.completions.create(
        model=NAME, prompt="Monday, Tuesday, Wednesday,", max_tokens=8, temperature=0
    )
    assert "Thursday" in completion.choices[0].text
    chunks = list(
        client.chat.completions.create(
            model=NAME,
            messages=[CAPITAL],
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == chat.choices[0].message.content
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == chat.usage.completion_tokens


def test_tools_and_errors_of_the_openai_client(client: openai.OpenAI) -> None:
    tool: Any = {
        "type": "function",
        "function": {
            "name": "weather",
            "strict": True,
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    }
    named = client.chat.completions.create(
        model=NAME,
        messages=[{"role": "user", "content": "How is the weather in Paris?"}],
        tools=[tool],
        tool_choice={"type": "function", "function": {"name": "weather"}},
        max_tokens=64,
    )
    calls: Any = named.choices[0].message.tool_calls
    assert json.loads(calls[0].function.arguments)["city"] in {"Paris", "Rome"}
    # The model is too small to choose a tool well by itself; that it may is what counts here.
    auto = client.chat.completions.create(
        model=NAME, messages=[CAPITAL], tools=[tool], tool_choice="auto", max_tokens=32
    )
    assert auto.choices[0].message.content or auto.choices[0].message.tool_calls
    with pytest.raises(openai.NotFoundError, match="other"):
        client.chat.completions.create(model="other", messages=[CAPITAL])
    with pytest.raises(openai.BadRequestError, match="2048"):
        client.completions.create(model=NAME, prompt=[1] * 3000, max_tokens=1)


def test_debug_mode_logs_switches_with_their_reasons(up: Running, client: openai.OpenAI) -> None:
    client.chat.completions.create(model=NAME, messages=[CAPITAL], max_tokens=8)
    until(lambda: any(re.match(r"worker-\d +\| .*phase \w+: \w+", line) for line in up.lines))


def test_what_is_killed_comes_back(up: Running, client: openai.OpenAI) -> None:
    before = up.instances()
    found = descendants(up.process.pid)
    workers = {pid for pid, line in found.items() if "--instance worker-0 " in line}
    schedulers = {pid for pid, line in found.items() if "-m ecoserve.scheduler " in line}
    assert len(workers) == len(schedulers) == 1
    os.kill(*workers, signal.SIGKILL)
    until(lambda: any("! worker-0 was killed by SIGKILL" in line for line in up.lines))
    client.chat.completions.create(model=NAME, messages=[CAPITAL], max_tokens=8)

    def back() -> bool:
        now = up.instances()
        return {name: i["state"] for name, i in now.items()} == dict.fromkeys(before, "accepted")

    old = before["worker-0"]["incarnation"]
    until(lambda: up.instances().get("worker-0", {}).get("incarnation", old) != old)
    until(back)
    os.kill(*schedulers, signal.SIGKILL)
    until(lambda: any("! scheduler was killed by SIGKILL" in line for line in up.lines))
    client.chat.completions.create(model=NAME, messages=[CAPITAL], max_tokens=8)
    until(back)  # the launcher has declared the cluster again
    assert up.instances()["worker-1"]["incarnation"] == before["worker-1"]["incarnation"]
    client.chat.completions.create(model=NAME, messages=[CAPITAL], max_tokens=8)


def test_sigterm_finishes_answers_and_leaves_nothing(up: Running, client: openai.OpenAI) -> None:
    found = descendants(up.process.pid)
    assert len(found) >= 7  # guard, scheduler, Envoy, two workers with an engine each
    mark = re.search(rf"{guard.MARK}=(\w+)", "".join(_environ(pid) for pid in found))
    temporary = re.search(r"TMPDIR=([^\0]+)", "".join(_environ(pid) for pid in found))
    assert mark is not None
    assert temporary is not None
    stream = client.completions.create(
        model=NAME,
        prompt="Once upon a time",
        max_tokens=100,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    chunks = [next(iter(stream))]
    up.process.terminate()
    chunks += list(stream)
    assert chunks[-1].choices[0].finish_reason == "length"
    assert up.process.wait(120) == 0
    assert not [pid for pid in found if Path(f"/proc/{pid}").exists()]
    assert guard.members([], mark[1]) == set()
    assert not Path(temporary[1]).exists()
    assert not port_in_use("127.0.0.1", up.port)
    assert any("everything is stopped" in line for line in up.lines)


def _environ(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/environ").read_text() + "\0"
    except OSError:
        return ""
