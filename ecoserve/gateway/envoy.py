"""Envoy's bootstrap configuration, from a handful of settings. Pure: no files, no network.

Envoy is the data path. For each call it asks the scheduler (``ext_proc``) where it goes, and goes
there (``override_host``); with the scheduler dead or hung it serves by least-request over the
workers that pass their health check. Until an answer has begun, a call that fails is tried again
elsewhere.
"""

from __future__ import annotations

import json

from ecoserve import headers
from ecoserve.gateway import clusters, relay, status
from ecoserve.gateway.config import GatewayConfig
from ecoserve.gateway.keys import key_filter
from ecoserve.gateway.parts import Config, address, http_filter, seconds, typed
from ecoserve.gateway.replies import local_replies
from ecoserve.gateway.routes import routes
from ecoserve.gateway.tls import transport_socket

# Below what an operator would set as the limit of open files.
_MOST_CONNECTIONS = 50_000
# SO_KEEPALIVE, and Linux's TCP_KEEPIDLE, TCP_KEEPINTVL and TCP_KEEPCNT: a client that went away
# without a word is noticed, and a silent answer is not cut by a NAT between.
_KEEPALIVE_OPTIONS = ((1, 9, 1), (6, 4, 30), (6, 5, 10), (6, 6, 6))


def build(config: GatewayConfig) -> Config:
    """The bootstrap, as plain data for a JSON or YAML file."""
    return {
        "node": {"id": f"gateway-{config.cluster}", "cluster": config.cluster},
        "admin": {"address": address("admin", config.admin)},
        "static_resources": {
            "listeners": [_listener(config), *_relay_listeners(config), *status.listeners(config)],
            "clusters": [
                clusters.workers(config),
                clusters.scheduler(config),
                *clusters.relays(config),
                *status.clusters(config),
            ],
        },
        "overload_manager": {
            "resource_monitors": [
                {
                    "name": "envoy.resource_monitors.global_downstream_max_connections",
                    "typed_config": typed(
                        "extensions.resource_monitors.downstream_connections.v3"
                        ".DownstreamConnectionsConfig",
                        max_active_downstream_connections=_MOST_CONNECTIONS,
                    ),
                }
            ]
        },
    }


def dump(config: GatewayConfig) -> str:
    """The bootstrap as the text of a ``.json`` or ``.yaml`` file. Fixed API keys are in it, so the
    file has to be private."""
    return json.dumps(build(config), indent=1) + "\n"


def _listener(config: GatewayConfig) -> Config:
    return {
        "name": "openai",
        "address": address("listen", config.listen),
        "socket_options": [
            {"level": level, "name": name, "int_value": value, "state": "STATE_LISTENING"}
            for level, name, value in _KEEPALIVE_OPTIONS
        ],
        "filter_chains": [
            {
                **transport_socket(config),
                "filters": [
                    {
                        "name": "envoy.filters.network.http_connection_manager",
                        "typed_config": _connection_manager(config, "gateway"),
                    }
                ],
            }
        ],
    }


def _relay_listeners(config: GatewayConfig) -> list[Config]:
    """The listener behind the relay, if there is one."""
    if config.relay is None:
        return []
    manager = _connection_manager(relay.inner(config), "relay", behind_relay=True)
    name = "envoy.filters.network.http_connection_manager"
    return [
        {
            "name": "relay",
            "address": relay.address(config, relay.GATEWAY_SOCKET),
            # Streams that the relay has are continued while this drains.
            "drain_type": "MODIFY_ONLY",
            # They have been counted where they came in.
            "ignore_global_conn_limit": True,
            "filter_chains": [{"filters": [{"name": name, "typed_config": manager}]}],
        }
    ]


def _connection_manager(config: GatewayConfig, name: str, *, behind_relay: bool = False) -> Config:
    asks_key = key_filter(config)
    manager = typed(
        "extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
        stat_prefix=name,
        use_remote_address=True,
        # The worker makes the id that the engine sees.
        generate_request_id=False,
        stream_idle_timeout=seconds(config.idle_timeout_s),
        request_headers_timeout="30s",
        common_http_protocol_options={"idle_timeout": seconds(config.idle_timeout_s)},
        normalize_path=True,
        merge_slashes=True,
        path_with_escaped_slashes_action="REJECT_REQUEST",
        early_header_mutation_extensions=[_strip_headers(behind_relay)],
        http_filters=[
            status.health_filter(),
            *([asks_key] if asks_key is not None else []),
            # Holds the body until it is whole, and answers 413 to one over the limit.
            _buffer(config),
            _picker(config),
            *([] if config.body_mode == "full_duplex" else _after_picker(config)),
            http_filter("router", "extensions.filters.http.router.v3.Router"),
        ],
        route_config=routes(config, behind_relay=behind_relay),
        local_reply_config=local_replies(config),
    )
    if config.access_log is not None:
        manager["access_log"] = [_access_log(config.access_log)]
    return manager


def _strip_headers(behind_relay: bool) -> Config:
    """What picker and workers tell each other is not for clients to say; nor are Envoy's own
    headers, by which a client that Envoy takes for internal would set timeouts and retries. The
    relay's calls bring the tenant that the listener for clients has found."""
    keep = {headers.TENANT} if behind_relay else set()
    return {
        "name": "envoy.http.early_header_mutation.header_mutation",
        "typed_config": typed(
            "extensions.http.early_header_mutation.header_mutation.v3.HeaderMutation",
            mutations=[
                *({"remove": name} for name in headers.INTERNAL if name not in keep),
                {"remove_on_match": {"key_matcher": {"prefix": "x-envoy-", "ignore_case": True}}},
            ],
        ),
    }


def _buffer(config: GatewayConfig) -> Config:
    return http_filter(
        "buffer",
        "extensions.filters.http.buffer.v3.Buffer",
        max_request_bytes=config.body_limit,
    )


def _after_picker(config: GatewayConfig) -> list[Config]:
    """Has the call wait for the picker's decision, and makes it into headers.

    The picker is sent a call's body and no message for its headers, which saves each call a round
    trip. It can then not set headers, and Envoy would not hold them back for it; so the headers
    wait for the body here, which waits at the picker, and are set from the metadata of its answer.
    Without an answer there is no metadata and nothing is set.
    """
    return [
        _buffer(config),
        http_filter(
            "header_mutation",
            "extensions.filters.http.header_mutation.v3.HeaderMutation",
            mutations={
                "request_mutations": [
                    {
                        "append": {
                            "header": {
                                "key": name,
                                "value": f"%DYNAMIC_METADATA({headers.METADATA_NAMESPACE}:{name})%",
                            },
                            "append_action": "OVERWRITE_IF_EXISTS_OR_ADD",
                        }
                    }
                    for name in headers.PICKED
                ]
            },
        ),
    ]


def _picker(config: GatewayConfig) -> Config:
    """One message with the whole body each way; in the endpoint-picker protocol's streamed mode
    headers and pieces of the body."""
    duplex = config.body_mode == "full_duplex"
    return http_filter(
        "ext_proc",
        "extensions.filters.http.ext_proc.v3.ExternalProcessor",
        grpc_service={
            "envoy_grpc": {"cluster_name": "scheduler"},
            "initial_metadata": [
                {"key": "x-ecoserve-cluster", "value": config.cluster},
                {"key": "x-ecoserve-max-wait", "value": f"{config.picker_max_wait_s:g}"},
            ],
        },
        processing_mode={
            "request_header_mode": "SEND" if duplex else "SKIP",
            "request_body_mode": "FULL_DUPLEX_STREAMED" if duplex else "BUFFERED",
            # A streamed body may end with trailers, so Envoy asks for them in that mode.
            "request_trailer_mode": "SEND" if duplex else "SKIP",
            # Answers never pass the picker.
            "response_header_mode": "SKIP",
            "response_body_mode": "NONE",
            "response_trailer_mode": "SKIP",
        },
        # What is to be known of the headers comes with the body.
        request_attributes=[] if duplex else [*headers.ATTRIBUTES],
        # Buffered, the whole body is still here, and the call can go on without the picker. Once
        # chunks of it were streamed away it cannot, so that mode fails with a clear error.
        failure_mode_allow=not duplex,
        status_on_error={"code": "ServiceUnavailable"},
        # Short, so that a hung scheduler costs no more than a dead one. One that lets a call wait
        # asks for more, once, up to the maximum.
        message_timeout=seconds(config.picker_timeout_s),
        max_message_timeout=seconds(config.picker_max_wait_s),
        # No route depends on what the picker sets.
        route_cache_action="RETAIN",
        metadata_options={
            "forwarding_namespaces": {"untyped": [headers.SUBSET_NAMESPACE]},
            "receiving_namespaces": {"untyped": [headers.METADATA_NAMESPACE]},
        },
    )


def _access_log(path: str) -> Config:
    fields = {
        "time": "%START_TIME%",
        "method": "%REQ(:METHOD)%",
        "path": "%REQ(:PATH)%",
        "status": "%RESPONSE_CODE%",
        "flags": "%RESPONSE_FLAGS%",
        "details": "%RESPONSE_CODE_DETAILS%",
        "bytes_in": "%BYTES_RECEIVED%",
        "bytes_out": "%BYTES_SENT%",
        "ms": "%DURATION%",
        "ms_to_first_byte": "%RESPONSE_DURATION%",
        "picked": f"%REQ({headers.DESTINATION})%",
        "worker": "%UPSTREAM_HOST%",
        "attempts": "%UPSTREAM_REQUEST_ATTEMPT_COUNT%",
        "id": f"%REQ({headers.REQUEST_ID})%",
    }
    return {
        "name": "envoy.access_loggers.file",
        "typed_config": typed(
            "extensions.access_loggers.file.v3.FileAccessLog",
            path=path,
            log_format={"json_format": fields},
        ),
    }
