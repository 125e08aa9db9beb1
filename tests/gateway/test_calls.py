"""Where calls go, what is tried again, and what clients are told: one Envoy for all."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from ecoserve import headers
from tests.gateway.workers import Worker
from tests.gateway.world import CHAT, MESSAGE, World, until

pytestmark = [pytest.mark.envoy, pytest.mark.asyncio(loop_scope="module")]

FIVE_MB = b"x" * (5 * 2**20)


def is_openai_error(answer: httpx.Response, status: int, code: str) -> str:
    """The message of an error that has OpenAI's shape."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    error = answer.json()["error"]
    assert error["code"] == code
    assert error["param"] is None
    assert error["type"] in ("invalid_request_error", "server_error")
    return str(error["message"])


def served(worker: Worker) -> int:
    return len(worker.calls)


# --- the picker's choice


async def test_the_pick_is_obeyed(three: World) -> None:
    for worker in (*three.workers, *reversed(three.workers)):
        answer = await three.ask(pick=worker.address)
        assert answer.json()["worker"] == worker.address
    assert {e["metadata"]["x-ecoserve-cluster"] for e in three.picked()} == {"test"}
    assert {e["metadata"]["x-ecoserve-max-wait"] for e in three.picked()} == {"60"}


async def test_without_a_pick_any_worker_serves(three: World) -> None:
    assert (await three.ask()).status_code == 200


async def test_the_next_named_host_when_the_first_is_dead(three: World) -> None:
    first, second, _ = three.workers
    await first.kill()
    answer = await three.ask(pick=f"{first.address},{second.address}")
    assert answer.json()["worker"] == second.address


async def test_a_host_that_envoy_does_not_know_is_passed_over(three: World) -> None:
    worker = three.workers[1]
    answer = await three.ask(pick=f"127.0.0.1:1,{worker.address}")
    assert answer.json()["worker"] == worker.address
    assert (await three.ask(pick="127.0.0.1:1")).status_code == 200


async def test_headers_that_are_not_for_clients_to_set(three: World) -> None:
    false = dict.fromkeys(headers.INTERNAL, "127.0.0.1:1")
    worker = three.workers[0]
    given = {"x-envoy-upstream-rq-timeout-ms": "1", "X-Envoy-Max-Retries": "0"}
    answer = await three.ask(pick=worker.address, headers={**false, **given})
    assert answer.json()["worker"] == worker.address
    (asked,) = three.picked()
    assert not set(asked["headers"]) & {*headers.INTERNAL, *(n.lower() for n in given)}
    (call,) = worker.calls
    assert call.headers[headers.REQUEST_ID] == "eco-0123456789abcdef"
    assert call.headers[headers.DESTINATION] == worker.address
    assert headers.WAITED not in call.headers


async def test_the_slo_is_for_clients_to_set(three: World) -> None:
    await three.ask(headers={headers.TTFT_SLO: "0.5"})
    assert three.picked()[0]["headers"][headers.TTFT_SLO] == "0.5"


async def test_models_are_not_for_the_picker(three: World) -> None:
    answer = await three.client.get("/v1/models?x=1", headers={headers.DESTINATION: "127.0.0.1:1"})
    assert answer.status_code == 200
    assert not three.picked()


# --- waiting


async def test_a_call_that_waits_is_served_when_the_picker_answers(three: World) -> None:
    worker = three.workers[2]
    for _ in range(2):
        answer = await three.ask(pick=worker.address, mode="late:0.8:10")
        assert answer.json()["worker"] == worker.address
    assert await three.stat("override_message_timeout_received") >= 2


async def test_an_extension_over_the_maximum_is_not_given(three: World) -> None:
    before = await three.stat("ext_proc.message_timeouts")
    assert (await three.ask(mode="late:5:61")).status_code == 200
    assert await three.stat("ext_proc.message_timeouts") == before + 1


async def test_the_call_goes_on_at_the_end_of_its_extension(three: World) -> None:
    before = await three.stat("ext_proc.message_timeouts")
    assert (await three.ask(mode="never:0.6")).status_code == 200
    assert await three.stat("ext_proc.message_timeouts") == before + 1


@pytest.mark.parametrize("status", [429, 503, 404, 400])
async def test_the_pickers_own_answers_pass_as_they_are(three: World, status: int) -> None:
    answer = await three.ask(mode=f"deny:{status}")
    assert answer.status_code == status
    assert answer.headers["retry-after"] == "7"
    assert answer.headers["content-type"] == "application/json"
    assert answer.json() == {"error": {"message": "the picker's own"}}


# --- tried again, before the first byte


@pytest.mark.parametrize("body", [b"{}", FIVE_MB], ids=["small", "5 MB"])
@pytest.mark.parametrize("streaming", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("failure", ["retryable", "close", "dead"])
async def test_another_worker_is_tried(
    three: World, failure: str, streaming: bool, body: bytes
) -> None:
    failing, good, other = three.workers
    if failure == "dead":
        await failing.kill()
    else:
        failing.behaviour = failure
    for worker in (good, other):
        worker.behaviour = "stream" if streaming else "answer"
        worker.gate.set()
    # With no second host named, the fallback keeps off the one that was tried.
    for pick in (f"{failing.address},{good.address}", failing.address):
        answer = await three.ask(pick=pick, content=body)
        assert answer.status_code == 200, answer.text
        assert headers.RETRYABLE not in answer.headers
        if streaming:
            assert answer.text.endswith("data: [DONE]\n\n")
        elif pick != failing.address:
            assert answer.json()["worker"] == good.address
    if failure != "dead":
        assert served(failing) == 2
        assert {call.body for call in failing.calls} == {body}
    assert {call.body for call in (*good.calls, *other.calls)} == {body}
    assert served(good) + served(other) == 2


async def test_no_failed_host_is_tried_twice_while_another_is_left(three: World) -> None:
    one, two, three_ = three.workers
    one.behaviour = two.behaviour = "retryable"
    answer = await three.ask(pick=f"{one.address},{two.address}")
    assert answer.json()["worker"] == three_.address
    assert (served(one), served(two), served(three_)) == (1, 1, 1)


async def test_when_all_fail_it_is_said(three: World) -> None:
    for worker in three.workers:
        worker.behaviour = "close"
    answer = await three.ask()
    message = is_openai_error(answer, 503, "worker_failed")
    assert "Try again" in message
    assert answer.headers["retry-after"] == "1"
    assert sum(map(served, three.workers)) == 5


async def test_the_last_retryable_answer_is_the_answer(three: World) -> None:
    for worker in three.workers:
        worker.behaviour = "retryable"
    answer = await three.ask()
    assert (answer.status_code, answer.json()) == (503, {"served": "no"})
    assert headers.RETRYABLE not in answer.headers


@pytest.mark.parametrize(
    ("behaviour", "status", "body"),
    [("refuse", 503, {"own": "busy"}), ("error", 500, {"own": "broken"})],
)
async def test_other_errors_are_the_answer(
    three: World, behaviour: str, status: int, body: dict[str, str]
) -> None:
    worker = three.workers[0]
    worker.behaviour = behaviour
    answer = await three.ask(pick=worker.address)
    assert (answer.status_code, answer.json()) == (status, body)
    assert sum(map(served, three.workers)) == 1


# --- streams


async def test_a_stream_arrives_as_it_is_made(three: World) -> None:
    worker = three.workers[0]
    worker.behaviour = "stream"
    answer = await three.stream(pick=worker.address)
    lines = answer.aiter_lines()
    assert await anext(lines) == f"data: {worker.address}"
    worker.gate.set()
    assert [line async for line in lines if line] == ["data: more", "data: [DONE]"]


async def test_a_broken_stream_is_seen_as_broken(three: World) -> None:
    worker = three.workers[0]
    worker.behaviour = "break"
    answer = await three.stream(pick=worker.address)
    text = answer.aiter_text()
    assert await anext(text) == f"data: {worker.address}\n\n"
    worker.gate.set()
    with pytest.raises(httpx.RemoteProtocolError, match="incomplete chunked"):
        async for _ in text:
            pass
    assert sum(map(served, three.workers)) == 1


# --- what may come in


async def test_five_megabytes_pass(three: World) -> None:
    worker = three.workers[1]
    answer = await three.ask(pick=worker.address, content=FIVE_MB)
    assert answer.json() == {"worker": worker.address, "size": len(FIVE_MB)}
    assert three.picked()[0]["size"] == len(FIVE_MB)


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_body_over_the_limit(three: World, chunked: bool) -> None:
    body = b"x" * (16 * 2**20 + 1)

    async def pieces() -> Any:
        for start in range(0, len(body), 2**20):
            yield body[start : start + 2**20]

    answer = await three.ask(content=pieces() if chunked else body)
    message = is_openai_error(answer, 413, "request_too_large")
    assert "16777216 bytes (16 MiB)" in message
    assert not three.picked()


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/metrics",
        "/health",
        "/pause",
        "/ecoserve/health",
        "/tokenize",
        "/v1",
        "/v1/models/../../metrics",
        "/v1/chat/completions/render",
        "/v1/load_lora_adapter",
        "//metrics",
        "/v1/models;/../../metrics",
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_nothing_else_of_a_worker_is_reached(three: World, path: str, method: str) -> None:
    url = httpx.URL(f"http://{three.config.listen}").copy_with(raw_path=path.encode())
    answer = await three.client.request(method, url)
    message = is_openai_error(answer, 404, "not_found")
    assert CHAT in message
    assert sum(map(served, three.workers)) == 0
    assert not three.picked()


async def test_escaped_slashes_reach_nothing(three: World) -> None:
    answer = await three.client.get("/v1/models/..%2f..%2fmetrics")
    assert answer.status_code == 400
    assert sum(map(served, three.workers)) == 0


async def test_the_wrong_method(three: World) -> None:
    answer = await three.client.get(CHAT)
    assert "POST" in is_openai_error(answer, 405, "method_not_allowed")
    assert answer.headers["allow"] == "POST"
    answer = await three.client.post("/v1/models", json={})
    is_openai_error(answer, 405, "method_not_allowed")
    assert sum(map(served, three.workers)) == 0


@pytest.mark.parametrize(
    "path", ["/v1/completions", "/v1/responses", "/v1/embeddings", "/v1//chat/completions"]
)
async def test_openai_routes_are_picked(three: World, path: str) -> None:
    worker = three.workers[0]
    url = httpx.URL(f"http://{three.config.listen}").copy_with(raw_path=path.encode())
    answer = await three.client.post(url, json=MESSAGE, headers={"x-test-pick": worker.address})
    assert answer.json()["worker"] == worker.address


async def test_envoys_own_health(three: World) -> None:
    assert (await three.client.get("/healthz")).status_code == 200
    assert sum(map(served, three.workers)) == 0


# --- which workers there are


async def test_workers_come_and_go_without_a_restart(three: World) -> None:
    one, two, three_ = three.workers
    two.behaviour = "stream"
    running = await three.stream(pick=two.address)
    lines = running.aiter_lines()
    await anext(lines)
    three.tell_endpoints([one])
    await three.until_hosts([one])
    # Off the list is off, healthy and picked as it may be.
    for worker in (two, three_):
        answer = await three.ask(pick=worker.address)
        assert answer.json()["worker"] == one.address
    two.gate.set()
    assert [line async for line in lines if line][-1] == "data: [DONE]"
    two.behaviour = "answer"
    three.tell_endpoints([one, two])
    await three.until_hosts([one, two])
    assert (await three.ask(pick=two.address)).json()["worker"] == two.address


async def test_an_unhealthy_worker_is_left_out(three: World) -> None:
    one, two, three_ = three.workers
    two.behaviour = "stream"
    running = await three.stream(pick=two.address)
    lines = running.aiter_lines()
    await anext(lines)
    two.healthy = False
    await three.until_hosts([one, three_])
    answers = await asyncio.gather(*(three.ask() for _ in range(20)))
    assert two.address not in {a.json()["worker"] for a in answers}
    two.gate.set()
    assert [line async for line in lines if line][-1] == "data: [DONE]"
    two.healthy = True
    await three.until_hosts(three.workers)


async def test_a_pick_is_obeyed_whatever_the_probe_says(three: World) -> None:
    """Envoy asks for health only where nobody has picked; a picked worker refuses by itself."""
    one, two, three_ = three.workers
    two.healthy = False
    await three.until_hosts([one, three_])
    assert (await three.ask(pick=two.address)).json()["worker"] == two.address
    two.behaviour = "retryable"
    picks = f"{two.address},{three_.address}"
    assert (await three.ask(pick=picks)).json()["worker"] == three_.address


async def test_with_no_healthy_worker_it_is_said(three: World) -> None:
    for worker in three.workers:
        worker.healthy = False
    await three.until_hosts([])
    answer = await three.ask()
    assert "No worker is ready" in is_openai_error(answer, 503, "no_worker")
    assert answer.headers["retry-after"] == "2"
    assert (await three.client.get("/healthz")).status_code == 200


async def test_the_access_log_tells_of_a_call(three: World) -> None:
    worker = three.workers[0]
    await three.ask(pick=worker.address)
    assert three.config.access_log is not None

    def told() -> bool:
        with open(str(three.config.access_log), encoding="utf-8") as file:
            return f'"picked":"{worker.address}"' in file.read()

    await until("the access log tells of it", told)
