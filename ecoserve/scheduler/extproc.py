"""Messages of Envoy's external processing protocol, as the endpoint-picker protocol uses them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any, Literal

import msgspec
from envoy.config.core.v3 import base_pb2
from envoy.service.ext_proc.v3 import external_processor_pb2 as ext_proc
from envoy.type.v3 import http_status_pb2
from google.protobuf import duration_pb2, struct_pb2

from ecoserve import headers
from ecoserve.scheduler.requests import Turned

# Below the 64 KB that some gateways allow in a chunk, with room for its framing.
CHUNK_BYTES = 62 * 1024

_FILTER = "envoy.filters.http.ext_proc"
_OVERWRITE = base_pb2.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD
_EMPTY_HEADERS = ext_proc.ProcessingResponse(
    request_headers=ext_proc.HeadersResponse()
).SerializeToString()
# As long as an id and a usual wait are, of characters that neither nor an address holds.
_SOME_ID = b"\x01" * 20
_SOME_WAIT = b"\x02" * 8
_SOME = b"\x03"
# Lengths up to here are serialised without the byte that stands for a destination.
_MOST_DESTINATION = 383

Kind = Literal["request_headers", "request_body", "metadata"]


def go_on() -> Any:
    """To request headers: nothing to change yet."""
    return _EMPTY_HEADERS


def serialised(message: Any) -> bytes:
    """What goes over the wire: a message, or one that is serialised already."""
    if isinstance(message, bytes):
        return message
    data: bytes = message.SerializeToString()
    return data


def _mutation(values: Mapping[str, str]) -> Any:
    return ext_proc.HeaderMutation(
        set_headers=[
            base_pb2.HeaderValueOption(
                header=base_pb2.HeaderValue(key=key, raw_value=value.encode()),
                append_action=_OVERWRITE,
            )
            for key, value in values.items()
        ]
    )


def _routed(kind: Kind, values: Mapping[str, str]) -> Any:
    common = ext_proc.CommonResponse(header_mutation=_mutation(values), clear_route_cache=True)
    told = values if kind == "metadata" else {headers.DESTINATION: values[headers.DESTINATION]}
    inner = struct_pb2.Struct(
        fields={key: struct_pb2.Value(string_value=value) for key, value in told.items()}
    )
    metadata = struct_pb2.Struct(
        fields={headers.METADATA_NAMESPACE: struct_pb2.Value(struct_value=inner)}
    )
    answer = ext_proc.ProcessingResponse(dynamic_metadata=metadata)
    if kind == "request_headers":
        answer.request_headers.response.CopyFrom(common)
    elif kind == "request_body":
        answer.request_body.response.CopyFrom(common)
    else:
        answer.request_body.SetInParent()
    return answer


@lru_cache(maxsize=4096)
def _template(kind: Kind, size: int, rest: tuple[tuple[str, str], ...]) -> bytes:
    """A decision as serialised, with ``_SOME_ID``, ``_SOME_WAIT`` and ``size`` times ``_SOME`` for
    id, wait and destination."""
    values = {
        headers.REQUEST_ID: _SOME_ID.decode(),
        headers.WAITED: _SOME_WAIT.decode(),
        headers.DESTINATION: _SOME.decode() * size,
        **dict(rest),
    }
    return serialised(_routed(kind, values))


def routed(
    kind: Kind, request_id: str, waited: str, destination: str, rest: Mapping[str, str]
) -> bytes:
    """The decision, serialised, as the answer to the request's headers or to a buffered body, which
    stays as it is; as ``metadata`` to a body whose headers were not sent. ``rest`` are headers to
    set besides the id, the wait and the destination.

    What is around these differs little from call to call, so it is kept: to build and to serialise
    the whole takes as long as to decide.
    """
    size = len(destination)
    usual = len(request_id) == len(_SOME_ID) and len(waited) == len(_SOME_WAIT)
    if not usual or size > _MOST_DESTINATION:
        values = {
            headers.REQUEST_ID: request_id,
            headers.WAITED: waited,
            headers.DESTINATION: destination,
            **rest,
        }
        return serialised(_routed(kind, values))
    return (
        _template(kind, size, tuple(rest.items()))
        .replace(_SOME_ID, request_id.encode())
        .replace(_SOME_WAIT, waited.encode())
        .replace(_SOME * size, destination.encode())
    )


def _chunk(body: bytes, end: bool) -> Any:
    streamed = ext_proc.StreamedBodyResponse(body=body, end_of_stream=end)
    mutation = ext_proc.BodyMutation(streamed_response=streamed)
    return ext_proc.BodyResponse(response=ext_proc.CommonResponse(body_mutation=mutation))


def request_chunks(body: bytes, end: bool) -> Iterator[Any]:
    """The request's body back to a gateway that streams it; ``end`` if no trailers follow."""
    for start in range(0, max(len(body), 1), CHUNK_BYTES):
        piece = body[start : start + CHUNK_BYTES]
        last = end and start + CHUNK_BYTES >= len(body)
        yield ext_proc.ProcessingResponse(request_body=_chunk(piece, last))


def passed_on(message: Any, *, streamed: bool) -> Any | None:
    """The answer that leaves ``message`` as it is; None if it asks for none."""
    kind = message.WhichOneof("request")
    if kind == "response_headers":
        return ext_proc.ProcessingResponse(response_headers=ext_proc.HeadersResponse())
    if kind in ("request_trailers", "response_trailers"):
        return ext_proc.ProcessingResponse(**{kind: ext_proc.TrailersResponse()})
    if kind in ("request_body", "response_body"):
        part = getattr(message, kind)
        body = _chunk(part.body, part.end_of_stream) if streamed else ext_proc.BodyResponse()
        return ext_proc.ProcessingResponse(**{kind: body})
    return None


def more_time(seconds: float) -> Any:
    """Asks for so much time for the message under way. Envoy takes this once a message, and only
    within the filter's ``max_message_timeout``; it ignores all else in the same answer."""
    duration = duration_pb2.Duration()
    duration.FromMilliseconds(max(int(seconds * 1000), 1))
    return ext_proc.ProcessingResponse(override_message_timeout=duration)


def error_body(turned: Turned) -> bytes:
    """An error as OpenAI's API words it."""
    kind = {429: "rate_limit_error", 503: "server_error"}.get(
        turned.status, "invalid_request_error"
    )
    return msgspec.json.encode(
        {
            "error": {
                "message": turned.message,
                "type": kind,
                "param": turned.param,
                "code": turned.kind,
            }
        }
    )


def turned_away(turned: Turned) -> Any:
    """An answer to the client in the worker's stead."""
    values = {"content-type": "application/json"}
    if turned.retry_after is not None:
        values["retry-after"] = str(max(round(turned.retry_after), 1))
    return ext_proc.ProcessingResponse(
        immediate_response=ext_proc.ImmediateResponse(
            status=http_status_pb2.HttpStatus(code=turned.status),
            headers=_mutation(values),
            body=error_body(turned),
            details=f"ecoserve_{turned.kind}",
        )
    )


def request_headers(message: Any) -> dict[str, str]:
    """The request's headers; of a repeated one the last. Of a message that holds none, those that
    its attributes tell."""
    if not message.HasField("request_headers"):
        fields = message.attributes[_FILTER].fields
        return {
            header: fields[name].string_value
            for name, header in headers.ATTRIBUTES.items()
            if name in fields
        }
    return {
        header.key: header.raw_value.decode("latin-1") if header.raw_value else header.value
        for header in message.request_headers.headers.headers
    }


def subset(message: Any) -> frozenset[str] | None:
    """The endpoints to which the gateway limits the call; None: any."""
    hints = message.metadata_context.filter_metadata
    if headers.SUBSET_NAMESPACE not in hints:
        return None
    fields = hints[headers.SUBSET_NAMESPACE].fields
    if headers.DESTINATION_SUBSET not in fields:
        return None
    value = fields[headers.DESTINATION_SUBSET]
    if value.HasField("list_value"):
        texts = [item.string_value for item in value.list_value.values]
    else:
        texts = value.string_value.split(",")
    return frozenset(text.strip() for text in texts if text.strip())
