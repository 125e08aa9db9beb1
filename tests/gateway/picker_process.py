"""A picker and an endpoint discovery to be killed, stopped and told what to do.

``python picker_process.py PORT ENDPOINTS LOG``. What to do with a request is in its own headers:
``x-test-pick`` names the hosts, ``x-test-mode`` is one of

    pick            (default) answers at once
    late:WAIT:MORE  asks for MORE seconds (0: does not ask), and answers after WAIT
    never:MORE      asks for MORE seconds and never answers
    deny:STATUS     answers the client itself
    die             ends the process when the body comes
    die-early       ends the process when the headers come

ENDPOINTS is a file with a JSON list of host:port, read again and again. Each request is a line of
JSON in LOG.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import grpc
from envoy.config.core.v3 import address_pb2, base_pb2
from envoy.config.endpoint.v3 import endpoint_components_pb2, endpoint_pb2
from envoy.extensions.filters.http.ext_proc.v3 import processing_mode_pb2
from envoy.service.discovery.v3 import discovery_pb2
from envoy.service.endpoint.v3 import eds_pb2_grpc
from envoy.service.ext_proc.v3 import external_processor_pb2 as ext_proc
from envoy.service.ext_proc.v3 import external_processor_pb2_grpc
from envoy.type.v3 import http_status_pb2
from google.protobuf import any_pb2, duration_pb2, struct_pb2

from ecoserve import headers

CHUNK = 60_000
_DUPLEX = processing_mode_pb2.ProcessingMode.FULL_DUPLEX_STREAMED
TYPE_URL = "type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment"


def set_headers(values: dict[str, str]) -> Any:
    return ext_proc.HeaderMutation(
        set_headers=[
            base_pb2.HeaderValueOption(
                header=base_pb2.HeaderValue(key=key, raw_value=value.encode()),
                append_action=base_pb2.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD,
            )
            for key, value in values.items()
        ]
    )


class Picker(external_processor_pb2_grpc.ExternalProcessorServicer):
    def __init__(self, log: Path) -> None:
        self._log = log

    async def Process(self, requests: Any, context: Any) -> Any:
        seen: dict[str, str] = {}
        mode = "pick"
        streamed = False
        pieces: list[bytes] = []
        async for request in requests:
            kind = request.WhichOneof("request")
            if kind == "request_headers":
                seen = {
                    h.key: h.raw_value.decode() for h in request.request_headers.headers.headers
                }
                streamed = request.protocol_config.request_body_mode == _DUPLEX
                mode = seen.get("x-test-mode", "pick")
                if mode == "die-early":
                    os._exit(1)
                if not streamed:
                    yield ext_proc.ProcessingResponse(request_headers=ext_proc.HeadersResponse())
            elif kind == "request_body":
                told = request.attributes["envoy.filters.http.ext_proc"].fields
                for name, value in told.items():
                    if name.startswith("request.headers['"):
                        seen[name.split("'")[1]] = value.string_value
                if not streamed:
                    mode = seen.get("x-test-mode", "pick")
                if mode in ("die", "die-early"):
                    os._exit(1)
                pieces.append(request.request_body.body)
                if streamed and not request.request_body.end_of_stream:
                    continue
                body = b"".join(pieces)
                self._note(seen, len(body), context)
                what, *numbers = mode.split(":")
                if what == "deny":
                    yield self._denied(int(numbers[0]))
                    return
                more = float(numbers[-1]) if what in ("late", "never") else 0.0
                if more:
                    wait = duration_pb2.Duration()
                    wait.FromMilliseconds(int(more * 1000))
                    yield ext_proc.ProcessingResponse(override_message_timeout=wait)
                if what == "never":
                    await asyncio.sleep(3600)
                if what == "late":
                    await asyncio.sleep(float(numbers[0]))
                for answer in self._picked(seen, body, streamed):
                    yield answer

    def _note(self, seen: dict[str, str], size: int, context: Any) -> None:
        entry = {
            "headers": seen,
            "size": size,
            "metadata": {k: str(v) for k, v in context.invocation_metadata()},
        }
        with self._log.open("a") as file:
            file.write(json.dumps(entry) + "\n")

    def _denied(self, status: int) -> Any:
        return ext_proc.ProcessingResponse(
            immediate_response=ext_proc.ImmediateResponse(
                status=http_status_pb2.HttpStatus(code=status),
                headers=set_headers({"retry-after": "7", "content-type": "application/json"}),
                body=json.dumps({"error": {"message": "the picker's own"}}).encode(),
                details="picker_denied",
            )
        )

    def _picked(self, seen: dict[str, str], body: bytes, streamed: bool) -> list[Any]:
        hosts = seen.get("x-test-pick", "")
        if hosts:
            values = {headers.DESTINATION: hosts, headers.REQUEST_ID: "eco-0123456789abcdef"}
            common = ext_proc.CommonResponse(
                header_mutation=set_headers(values), clear_route_cache=True
            )
            inner = struct_pb2.Struct(
                fields={key: struct_pb2.Value(string_value=text) for key, text in values.items()}
            )
            metadata = struct_pb2.Struct(
                fields={headers.METADATA_NAMESPACE: struct_pb2.Value(struct_value=inner)}
            )
        else:
            common, metadata = ext_proc.CommonResponse(), struct_pb2.Struct()
        if not streamed:
            # Its headers were not sent, so it could set none.
            answer = ext_proc.BodyResponse()
            return [ext_proc.ProcessingResponse(request_body=answer, dynamic_metadata=metadata)]
        answers = [
            ext_proc.ProcessingResponse(
                request_headers=ext_proc.HeadersResponse(response=common),
                dynamic_metadata=metadata,
            )
        ]
        for start in range(0, max(len(body), 1), CHUNK):
            piece = ext_proc.StreamedBodyResponse(
                body=body[start : start + CHUNK], end_of_stream=start + CHUNK >= len(body)
            )
            mutation = ext_proc.BodyMutation(streamed_response=piece)
            chunk = ext_proc.BodyResponse(response=ext_proc.CommonResponse(body_mutation=mutation))
            answers.append(ext_proc.ProcessingResponse(request_body=chunk))
        return answers


class Endpoints(eds_pb2_grpc.EndpointDiscoveryServiceServicer):
    def __init__(self, file: Path) -> None:
        self._file = file

    async def StreamEndpoints(self, requests: Any, context: Any) -> Any:
        first = await requests.__anext__()
        (name,) = first.resource_names
        sent = None
        while True:
            text = self._file.read_text()
            if text and text != sent:
                sent = text
                yield discovery_pb2.DiscoveryResponse(
                    version_info=str(hash(text)),
                    type_url=TYPE_URL,
                    nonce=str(hash(text)),
                    resources=[
                        any_pb2.Any(
                            type_url=TYPE_URL,
                            value=assignment(name, json.loads(text)).SerializeToString(),
                        )
                    ],
                )
            await asyncio.sleep(0.03)


def assignment(name: str, addresses: list[str]) -> Any:
    endpoints = []
    for text in addresses:
        host, _, port = text.rpartition(":")
        socket = address_pb2.SocketAddress(address=host, port_value=int(port))
        endpoint = endpoint_components_pb2.Endpoint(
            address=address_pb2.Address(socket_address=socket)
        )
        endpoints.append(endpoint_components_pb2.LbEndpoint(endpoint=endpoint))
    return endpoint_pb2.ClusterLoadAssignment(
        cluster_name=name,
        endpoints=[endpoint_components_pb2.LocalityLbEndpoints(lb_endpoints=endpoints)],
    )


async def main(port: str, endpoints: str, log: str) -> None:
    server = grpc.aio.server(options=[("grpc.max_receive_message_length", 64 * 2**20)])
    external_processor_pb2_grpc.add_ExternalProcessorServicer_to_server(Picker(Path(log)), server)
    eds_pb2_grpc.add_EndpointDiscoveryServiceServicer_to_server(Endpoints(Path(endpoints)), server)
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
