"""What the gateway is told about each kind of call."""

from __future__ import annotations

import asyncio
import json
import re

import grpc
import pytest
from envoy.service.ext_proc.v3 import external_processor_pb2 as ext_proc

from ecoserve import headers
from ecoserve.proto.v1 import admin_pb2, session_pb2
from ecoserve.scheduler.extproc import CHUNK_BYTES
from tests.scheduler.fakes import (
    BUFFERED,
    FULL_DUPLEX,
    Reply,
    _body,
    chat,
    cluster,
    head,
    until,
)


@pytest.mark.parametrize("mode", [BUFFERED, FULL_DUPLEX])
async def test_a_call_is_routed_with_ordered_fallbacks(rig, mode) -> None:
    workers = await rig.ready("a", "b", "c", "d")
    reply = await rig.gateway.call(chat(), mode=mode)
    places = reply.destinations
    assert len(places) == 3
    assert len(set(places)) == 3
    assert set(places) <= {w.address for w in workers}
    assert reply.metadata_destination == ",".join(places)
    assert reply.id.startswith("eco-")
    assert len(reply.id) == 20
    assert float(reply.set_headers[headers.WAITED]) < 1
    assert float(reply.set_headers[headers.TTFT_SLO]) == 5.0
    assert float(reply.set_headers[headers.TPOT_SLO]) == 0.5
    assert reply.extensions == 0
    routed = [r for r in reply.responses if r.HasField("dynamic_metadata")]
    assert len(routed) == 1
    kind = routed[0].WhichOneof("response")
    assert kind == ("request_body" if mode == BUFFERED else "request_headers")
    assert getattr(routed[0], kind).response.clear_route_cache


async def test_buffered_bodies_are_left_alone(rig) -> None:
    await rig.ready("a")
    reply = await rig.gateway.call(chat())
    assert not any(r.request_body.response.HasField("body_mutation") for r in reply.responses)
    assert "content-length" not in reply.set_headers


@pytest.mark.parametrize("trailers", [False, True])
@pytest.mark.parametrize("size", [0, 10, CHUNK_BYTES, CHUNK_BYTES + 1, 300_000])
async def test_streamed_bodies_come_back_whole_in_small_chunks(rig, size, trailers) -> None:
    await rig.ready("a")
    body = json.dumps(chat("x" * size)).encode()
    reply = await rig.gateway.call(body, mode=FULL_DUPLEX, chunk=50_000, trailers=trailers)
    assert reply.body == body
    assert reply.responses[0].HasField("request_headers")
    chunks = [
        r.request_body.response.body_mutation.streamed_response
        for r in reply.responses
        if r.HasField("request_body")
    ]
    assert all(len(chunk.body) <= CHUNK_BYTES for chunk in chunks)
    ends = [chunk.end_of_stream for chunk in chunks]
    assert ends == [False] * (len(ends) - 1) + [not trailers]
    assert reply.responses[-1].HasField("request_trailers") == trailers


async def test_a_call_without_a_body_goes_to_any_worker_and_reserves_nothing(rig) -> None:
    [worker] = await rig.ready("a")
    for mode in (BUFFERED, FULL_DUPLEX):
        reply = await rig.gateway.call(None, path="/v1/models", method="GET", mode=mode)
        assert reply.destinations == [worker.address]
    assert not rig.reservations()


async def test_unknown_model_is_not_found_in_the_shape_of_openai(rig) -> None:
    await rig.ready("a")
    reply = await rig.gateway.call(chat(model="gpt-9"))
    assert reply.status == 404
    assert reply.error["code"] == "model_not_found"
    assert reply.error["param"] == "model"
    assert "gpt-9" in reply.error["message"]
    assert reply.set_headers["content-type"] == "application/json"


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"\xff\xfe", b'{"model": 3}', b'{"messages": "x"}', b'"' + b"[" * 9999],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/embeddings"])
async def test_bad_bodies_are_for_a_worker_to_answer(rig, body, path) -> None:
    [worker] = await rig.ready("a")
    reply = await rig.gateway.call(body, path=path)
    assert reply.destinations == [worker.address]
    [reservation] = rig.server.store.clusters["c"].instances["a"].reservations.values()
    assert reservation.kv < 4000


@pytest.mark.parametrize("name", [headers.TTFT_SLO, headers.TPOT_SLO])
@pytest.mark.parametrize("value", ["fast", "0", "-1", "inf", "nan", ""])
async def test_malformed_slo_headers_are_named(rig, name, value) -> None:
    await rig.ready("a")
    reply = await rig.gateway.call(chat(), values={name: value})
    assert reply.status == 400
    assert name in reply.error["message"]


async def test_a_call_may_bring_its_own_slo(rig) -> None:
    await rig.ready("a")
    reply = await rig.gateway.call(chat(), values={headers.TTFT_SLO: "0.25"})
    assert float(reply.set_headers[headers.TTFT_SLO]) == 0.25
    assert float(reply.set_headers[headers.TPOT_SLO]) == 0.5


@pytest.mark.parametrize("as_list", [True, False])
async def test_subset_hints_are_kept_to(rig, as_list) -> None:
    a, b, c = await rig.ready("a", "b", "c")
    allowed = [b.address, c.address]
    hint = allowed if as_list else ", ".join(allowed)
    for _ in range(4):
        reply = await rig.gateway.call(chat(), subset=hint)
        assert set(reply.destinations) == set(allowed)
    reply = await rig.gateway.call(None, path="/v1/models", method="GET", subset=hint)
    assert a.address not in reply.destinations
    nobody = await rig.gateway.call(chat(), subset="10.0.0.1:1")
    assert nobody.status == 503
    assert int(nobody.set_headers["retry-after"]) >= 1


async def test_nobody_to_serve_is_unavailable(rig) -> None:
    await rig.apply(cluster("a"))
    store = rig.server.store
    # Within this time of a declaration its workers may yet come.
    store.clusters["c"].applied_at -= 100
    reply = await rig.gateway.call(chat())
    assert reply.status == 503
    assert reply.error["code"] == "service_unavailable"
    assert "retry-after" in reply.set_headers


async def test_calls_wait_for_workers_after_a_start(rig) -> None:
    reply = Reply()
    call = asyncio.create_task(rig.gateway.call(chat(), reply=reply))
    await until(lambda: reply.extensions)
    [worker] = await rig.ready("a")
    await call
    assert reply.destinations == [worker.address]
    assert reply.extensions == 1


async def test_cluster_by_metadata(rig) -> None:
    [a] = await rig.ready("a")
    await rig.apply(cluster("b", name="other"))
    b = await rig.worker("b", cluster="other").ready()
    for name, worker in (("c", a), ("other", b)):
        metadata = (("x-ecoserve-cluster", name),)
        assert (await rig.gateway.call(chat(), metadata=metadata)).destinations == [worker.address]
    rig.server.store.started_at -= 100
    unknown = await rig.gateway.call(chat(), metadata=(("x-ecoserve-cluster", "nix"),))
    assert unknown.status == 503
    assert "nix" in unknown.error["message"]


async def test_a_cluster_declared_late_after_a_start_is_waited_for(rig) -> None:
    rig.server.store.started_at -= 20
    reply = Reply()
    named = (("x-ecoserve-cluster", "late"),)
    call = asyncio.create_task(rig.gateway.call(chat(), metadata=named, reply=reply))
    await until(lambda: reply.extensions)
    await rig.apply(cluster("b", name="late"))
    worker = await rig.worker("b", cluster="late").ready()
    await call
    assert reply.destinations == [worker.address]


async def test_waits_is_extended_once_and_served_when_there_is_room(rig) -> None:
    [worker] = await rig.ready("a")
    await worker.acked(worker.busy(prefill_s=4.9))
    reply = Reply()
    call = asyncio.create_task(rig.gateway.call(chat("x" * 8000), reply=reply))
    await until(lambda: reply.extensions)
    assert (await rig.state()).waiting == 1
    [waiting] = (await rig.http.get("/state")).json()["clusters"]["c"]["waiting"]
    assert waiting["macro_instance"] == "m0"
    await worker.acked(worker.report())
    await call
    assert reply.destinations == [worker.address]
    assert reply.extensions == 1
    assert float(reply.set_headers[headers.WAITED]) > 0
    text = (await rig.http.get("/metrics")).text
    labels = '{cluster="c",instance="a",macro_instance="m0"}'
    assert f"ecoserve_queue_wait_seconds_count{labels} 1.0" in text


async def test_full_duplex_waits_without_extension(rig) -> None:
    [worker] = await rig.ready("a")
    await worker.acked(worker.busy(prefill_s=4.9))
    reply = Reply()
    call = asyncio.create_task(rig.gateway.call(chat("x" * 8000), reply=reply, mode=FULL_DUPLEX))
    await until(lambda: _waiting(rig))
    assert not reply.responses
    await worker.acked(worker.report())
    await call
    assert reply.destinations == [worker.address]
    assert reply.extensions == 0


async def _waiting(rig) -> bool:
    state = await rig.state()
    return state.waiting + state.late > 0


async def test_late_calls_are_served_in_the_end(rig) -> None:
    # TTFT cannot be met; when nothing else waits and the prefills are through, it is served.
    [worker] = await rig.ready("a", slo=session_pb2.SLO(ttft_s=0.001, tpot_s=0.5))
    await worker.acked(worker.busy())
    reply = Reply()
    call = asyncio.create_task(rig.gateway.call(chat(), reply=reply))
    await until(lambda: _late(rig))
    await worker.acked(worker.report())
    await call
    assert reply.destinations == [worker.address]
    assert "ecoserve_late_total" in (await rig.http.get("/metrics")).text


async def _late(rig) -> bool:
    return (await rig.state()).late == 1


async def test_late_wait_is_bounded(rig) -> None:
    [worker] = await rig.ready("a", slo=session_pb2.SLO(ttft_s=0.001, tpot_s=0.5), late_wait_s=0.2)
    await worker.acked(worker.busy())
    assert (await rig.gateway.call(chat())).destinations == [worker.address]


async def test_nobody_waits_longer_than_the_gateway_allows(rig) -> None:
    [worker] = await rig.ready("a", slo=session_pb2.SLO(ttft_s=500.0, tpot_s=0.5))
    await worker.acked(worker.busy())
    reply = await rig.gateway.call(chat(), metadata=(("x-ecoserve-max-wait", "0.5"),))
    assert reply.destinations == [worker.address]
    [extension] = [r for r in reply.responses if r.HasField("override_message_timeout")]
    assert extension.override_message_timeout.ToMilliseconds() == 500


async def test_a_wait_beyond_an_hour_is_refused(rig) -> None:
    stream = rig.gateway.open((("x-ecoserve-max-wait", "1e300"),))
    with pytest.raises(grpc.aio.AioRpcError, match=r"x-ecoserve-max-wait must be .* 3600 at most"):
        await stream.read()


async def test_a_call_counts_from_when_its_body_is_whole(rig) -> None:
    [worker] = await rig.ready("a")
    store = rig.server.store
    clock, ahead = store.clock, 0.0
    store.clock = lambda: clock() + ahead
    stream = rig.gateway.open()
    await stream.write(head("/v1/chat/completions", "POST", {}, BUFFERED, None, end=False))
    reply = Reply()
    reply.responses.append(await stream.read())
    ahead = 100.0
    await worker.acked(worker.report())
    await stream.write(_body(json.dumps(chat()).encode(), True))
    reply.responses.append(await stream.read())
    assert reply.destinations == [worker.address]
    store.clusters["c"].sweep(store.clock())
    assert rig.reservations() == {"a": {reply.id}}
    await stream.done_writing()


async def test_a_full_queue_sheds_with_429(rig) -> None:
    [worker] = await rig.ready("a", queue_limit=1)
    await worker.acked(worker.busy(prefill_s=4.9))
    waiting = asyncio.create_task(rig.gateway.call(chat("x" * 8000)))
    await until(lambda: _waiting(rig))
    reply = await rig.gateway.call(chat("x" * 8000))
    assert reply.status == 429
    assert reply.error["code"] == "rate_limit_exceeded"
    assert reply.error["type"] == "rate_limit_error"
    assert 1 <= int(reply.set_headers["retry-after"]) <= 60
    await worker.acked(worker.report())
    assert (await waiting).destinations == [worker.address]
    text = (await rig.http.get("/metrics")).text
    assert 'ecoserve_sheds_total{cluster="c",macro_instance="m0"} 1.0' in text


async def test_shed_mode_sheds_what_cannot_be_on_time(rig) -> None:
    await rig.ready("a", late="shed", slo=session_pb2.SLO(ttft_s=0.001, tpot_s=0.5))
    reply = await rig.gateway.call(chat())
    assert reply.status == 429
    assert "retry-after" in reply.set_headers


async def test_waiting_calls_move_when_their_macro_instance_goes(rig) -> None:
    macros = [
        admin_pb2.MacroInstance(name="x", instances=["a"]),
        admin_pb2.MacroInstance(name="y", instances=["b"]),
    ]
    a, b = await rig.ready("a", "b", macro_instances=macros)
    for worker in (a, b):
        await worker.acked(worker.busy(prefill_s=4.9))
    call = asyncio.create_task(rig.gateway.call(chat("x" * 8000)))
    [waiting] = await until(lambda: list(rig.server.store.clusters["c"].tickets.values()))
    kept = {"x": "y", "y": "x"}[waiting.macro]
    rest = [macro for macro in macros if macro.name == kept]
    await rig.apply(cluster("a", "b", macro_instances=rest))
    assert waiting.macro == kept
    survivor = b if kept == "y" else a
    await survivor.acked(survivor.report())
    assert (await call).destinations == [survivor.address]


async def test_conversations_keep_to_a_macro_instance(rig) -> None:
    macros = [admin_pb2.MacroInstance(name=f"m{i}", instances=[f"w{i}"]) for i in range(3)]
    await rig.ready("w0", "w1", "w2", macro_instances=macros)
    seen = {}
    for turn in range(3):
        for key in "abcdef":
            reply = await rig.gateway.call(chat(f"turn {turn}"), values={headers.CONVERSATION: key})
            await _cover(rig, reply)
            seen.setdefault(key, set()).add(reply.destinations[0])
    assert all(len(places) == 1 for places in seen.values())
    assert len(set.union(*seen.values())) > 1


async def _cover(rig, reply) -> None:
    worker = next(w for w in rig.workers if w.address == reply.destinations[0])
    number = sum(a.finished > 0 for a in worker.acks) + 1
    done = session_pb2.Finished(number=number, id=reply.id, status=200)
    await worker.acked(worker.report(finished=[done]))


async def test_a_conversation_returns_to_the_instance_that_holds_it(rig) -> None:
    await rig.ready("a", "b", "c")
    talks = {
        name: [{"role": "user", "content": f"{name} " * 600}] for name in ("one", "two", "six")
    }
    homes = {}
    for turn in range(4):
        for name, messages in talks.items():
            reply = await rig.gateway.call({"model": "m", "messages": messages})
            homes.setdefault(name, set()).add(reply.destinations[0])
            await _cover(rig, reply)
            messages += [
                {"role": "assistant", "content": f"answer {turn}"},
                {"role": "user", "content": f"question {turn}"},
            ]
    assert all(len(places) == 1 for places in homes.values()), homes
    text = (await rig.http.get("/metrics")).text
    assert "ecoserve_prefix_expected_tokens_total" in text


async def test_trailing_messages_are_passed_on(rig) -> None:
    await rig.ready("a")
    stream = rig.gateway.open()
    body = json.dumps(chat()).encode()
    await stream.write(head("/v1/chat/completions", "POST", {}, FULL_DUPLEX, None, end=False))
    await stream.write(
        ext_proc.ProcessingRequest(request_body=ext_proc.HttpBody(body=body, end_of_stream=True))
    )
    await stream.read()
    await stream.read()
    await stream.write(ext_proc.ProcessingRequest(response_headers=ext_proc.HttpHeaders()))
    assert (await stream.read()).HasField("response_headers")
    await stream.write(
        ext_proc.ProcessingRequest(
            response_body=ext_proc.HttpBody(body=b"token", end_of_stream=True)
        )
    )
    answer = (await stream.read()).response_body.response.body_mutation.streamed_response
    assert (answer.body, answer.end_of_stream) == (b"token", True)
    await stream.done_writing()
    assert await stream.read() is grpc.aio.EOF


def whole(body: dict[str, object], **values: str) -> ext_proc.ProcessingRequest:
    """The one message of our own gateway: the body, and some headers as attributes."""
    told = {"request.url_path": "/v1/chat/completions"}
    told |= {f"request.headers['{name}']": value for name, value in values.items()}
    message = ext_proc.ProcessingRequest(
        request_body=ext_proc.HttpBody(body=json.dumps(body).encode(), end_of_stream=True)
    )
    message.attributes["envoy.filters.http.ext_proc"].update(told)
    return message


async def test_a_body_alone_is_answered_by_metadata(rig) -> None:
    workers = await rig.ready("a", "b")
    # Often enough to meet every order in which the metadata may be serialised.
    for number in range(20):
        slo = f"{number + 1}"
        stream = rig.gateway.open()
        await stream.write(whole(chat(), **{headers.TTFT_SLO: slo}))
        answer = await stream.read()
        assert answer.WhichOneof("response") == "request_body"
        assert not answer.request_body.HasField("response")
        told = answer.dynamic_metadata.fields[headers.METADATA_NAMESPACE].struct_value.fields
        values = {name: value.string_value for name, value in told.items()}
        assert set(values) == set(headers.PICKED)
        assert set(values[headers.DESTINATION].split(",")) == {w.address for w in workers}
        assert re.fullmatch(headers.REQUEST_ID_PATTERN, values[headers.REQUEST_ID])
        assert 0 <= float(values[headers.WAITED]) < 1
        assert (float(values[headers.TTFT_SLO]), float(values[headers.TPOT_SLO])) == (
            number + 1,
            0.5,
        )
        assert await stream.read() is grpc.aio.EOF
        held = {i for them in rig.reservations().values() for i in them}
        assert values[headers.REQUEST_ID] in held


async def test_a_body_alone_waits_and_may_be_turned_away(rig) -> None:
    [worker] = await rig.ready("a")
    await worker.acked(worker.busy(prefill_s=4.9))
    stream = rig.gateway.open()
    await stream.write(whole(chat("x" * 8000)))
    assert (await stream.read()).HasField("override_message_timeout")
    await worker.acked(worker.report())
    assert (await stream.read()).HasField("dynamic_metadata")
    stream = rig.gateway.open()
    await stream.write(whole(chat(), **{headers.TTFT_SLO: "never"}))
    assert (await stream.read()).immediate_response.status.code == 400


async def test_a_client_that_sent_a_body_alone_goes_away(rig) -> None:
    [worker] = await rig.ready("a")
    await worker.acked(worker.busy(prefill_s=4.9))
    stream = rig.gateway.open()
    await stream.write(whole(chat("x" * 8000)))
    assert (await stream.read()).HasField("override_message_timeout")
    await stream.done_writing()
    tickets = rig.server.store.clusters["c"].tickets
    await until(lambda: not tickets, "the call is forgotten")
    await rig.none_reserved()
