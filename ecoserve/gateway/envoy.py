"""Envoy's bootstrap configuration, from a handful of settings. Pure: no files, no network.

Envoy is the data path. For each call it asks the scheduler (``ext_proc``) where it goes, and goes
there (``override_host``); with the scheduler dead or hung it serves by least-request over the
workers that pass their health check. Until an answer has begun, a call that fails is tried again
elsewhere.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal

from ecoserve import headers

Config = dict[str, Any]

# Calls that the picker decides, and reads that any worker answers.
PICKED_PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings")
PLAIN_PATHS = ("/v1/models",)

# Envoy's own limits are 1,024; what bounds the load here is the scheduler's queue.
_UNLIMITED = 1_000_000
# Below the five seconds after which the workers' HTTP server closes an idle connection, so that a
# call is not sent into one that is just being closed.
_WORKER_KEEP_ALIVE_S = 4.0


@dataclass(frozen=True, slots=True)
class GatewayConfig:
    """Settings of one gateway; times in seconds, sizes in bytes, addresses "host:port".

    ``idle_timeout_s`` is the one knob of patience: how long a request or answer may be silent.
    There is no total timeout. ``picker_timeout_s`` is how long a scheduler may take to react before
    the call goes on without it (at most a second), ``picker_max_wait_s`` how long a call may wait
    there once the scheduler has said that it waits. Raises ``ValueError`` that names the field.
    """

    listen: str
    admin: str
    scheduler: str
    cluster: str
    body_limit: int = 16 * 1024 * 1024
    idle_timeout_s: float = 3600.0
    api_keys: tuple[str, ...] = ()
    body_mode: Literal["buffered", "full_duplex"] = "buffered"
    picker_timeout_s: float = 0.5
    picker_max_wait_s: float = 60.0
    connect_timeout_s: float = 2.0
    drain_s: float = 600.0
    health_interval_s: float = 1.0
    access_log: str | None = None

    def __post_init__(self) -> None:
        for name in ("listen", "admin", "scheduler"):
            _split(name, getattr(self, name))
        if not self.cluster:
            raise ValueError("cluster must not be empty")
        if not 1024 <= self.body_limit <= 2**31:
            raise ValueError(f"body_limit must be 1 KiB to 2 GiB, not {self.body_limit} bytes")
        if self.body_mode not in ("buffered", "full_duplex"):
            raise ValueError(f"body_mode must be buffered or full_duplex, not {self.body_mode!r}")
        if not 0 < self.picker_timeout_s <= 1:
            raise ValueError(
                f"picker_timeout_s must be within 0 to 1 s, not {self.picker_timeout_s}"
            )
        positive = ("idle_timeout_s", "picker_max_wait_s", "connect_timeout_s", "drain_s")
        for name in (*positive, "health_interval_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be more than 0 s, not {getattr(self, name)}")
        if any(not key or key != key.strip() for key in self.api_keys):
            raise ValueError("api_keys must not be empty or begin or end with a space")
        if len(set(self.api_keys)) != len(self.api_keys):
            raise ValueError("api_keys must be different from each other")


def build(config: GatewayConfig) -> Config:
    """The bootstrap, as plain data for a JSON or YAML file."""
    return {
        "node": {"id": f"gateway-{config.cluster}", "cluster": config.cluster},
        "admin": {"address": _address("admin", config.admin)},
        "static_resources": {
            "listeners": [_listener(config)],
            "clusters": [_workers(config), _scheduler(config)],
        },
        # Without it each listener's buffers grow until the kernel ends the process.
        "overload_manager": {
            "resource_monitors": [
                {
                    "name": "envoy.resource_monitors.global_downstream_max_connections",
                    "typed_config": _typed(
                        "extensions.resource_monitors.downstream_connections.v3"
                        ".DownstreamConnectionsConfig",
                        max_active_downstream_connections=50_000,
                    ),
                }
            ]
        },
    }


def _listener(config: GatewayConfig) -> Config:
    filters = [_strip_internal_headers()]
    if config.api_keys:
        filters.append(_api_keys(config))
    filters += [
        _filter(
            "buffer",
            "extensions.filters.http.buffer.v3.Buffer",
            max_request_bytes=config.body_limit,
        ),
        _picker(config),
        _filter("router", "extensions.filters.http.router.v3.Router"),
    ]
    manager = _typed(
        "extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
        stat_prefix="gateway",
        use_remote_address=True,
        generate_request_id=True,
        stream_idle_timeout=_seconds(config.idle_timeout_s),
        # A body that trickles in is bounded by the idle time alone.
        request_timeout="0s",
        common_http_protocol_options={"idle_timeout": _seconds(config.idle_timeout_s)},
        drain_timeout=_seconds(config.drain_s),
        normalize_path=True,
        merge_slashes=True,
        path_with_escaped_slashes_action="REJECT_REQUEST",
        http_filters=filters,
        route_config=_routes(config),
        local_reply_config=_local_replies(config),
    )
    if config.access_log is not None:
        manager["access_log"] = [_access_log(config.access_log)]
    return {
        "name": "openai",
        "address": _address("listen", config.listen),
        # Bodies are held whole, for the picker and for a retry.
        "per_connection_buffer_limit_bytes": config.body_limit,
        "filter_chains": [
            {
                "filters": [
                    {
                        "name": "envoy.filters.network.http_connection_manager",
                        "typed_config": manager,
                    }
                ]
            }
        ],
    }


def _strip_internal_headers() -> Config:
    """What picker and workers tell each other is not for clients to say."""
    return _filter(
        "header_mutation",
        "extensions.filters.http.header_mutation.v3.HeaderMutation",
        mutations={"request_mutations": [{"remove": name} for name in headers.INTERNAL]},
    )


def _api_keys(config: GatewayConfig) -> Config:
    return _filter(
        "api_key_auth",
        "extensions.filters.http.api_key_auth.v3.ApiKeyAuth",
        credentials=[
            {"key": key, "client": f"key-{number}"} for number, key in enumerate(config.api_keys)
        ],
        # A "Bearer " before the key is taken off by the filter itself.
        key_sources=[{"header": "Authorization"}],
        forwarding={"hide_credentials": True},
    )


def _picker(config: GatewayConfig) -> Config:
    duplex = config.body_mode == "full_duplex"
    return _filter(
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
            "request_header_mode": "SEND",
            "request_body_mode": "FULL_DUPLEX_STREAMED" if duplex else "BUFFERED",
            "request_trailer_mode": "SEND" if duplex else "SKIP",
            # Answers never pass the picker.
            "response_header_mode": "SKIP",
            "response_body_mode": "NONE",
            "response_trailer_mode": "SKIP",
        },
        # Buffered, the whole body is still here, and the call can go on without the picker. Once
        # chunks of it were streamed away it cannot, so that mode fails with a clear error.
        failure_mode_allow=not duplex,
        status_on_error={"code": "BadGateway"},
        message_timeout=_seconds(config.picker_timeout_s),
        max_message_timeout=_seconds(config.picker_max_wait_s),
        mutation_rules={"allow_all_routing": False, "allow_envoy": False},
        metadata_options={
            "forwarding_namespaces": {"untyped": [headers.SUBSET_NAMESPACE]},
            "receiving_namespaces": {"untyped": [headers.METADATA_NAMESPACE]},
        },
    )


def _routes(config: GatewayConfig) -> Config:
    plain = [{"path": path} for path in PLAIN_PATHS] + [{"prefix": f"{p}/"} for p in PLAIN_PATHS]
    no_picker = {
        "envoy.filters.http.ext_proc": _typed(
            "extensions.filters.http.ext_proc.v3.ExtProcPerRoute", disabled=True
        )
    }
    no_key = {
        "envoy.filters.http.api_key_auth": _typed("config.route.v3.FilterConfig", disabled=True)
    }
    routes: list[Config] = [
        {"match": {"path": path}, "route": _route(config)} for path in PICKED_PATHS
    ]
    routes += [
        {"match": match, "route": _route(config), "typed_per_filter_config": no_picker}
        for match in plain
    ]
    routes.append(
        {
            "match": {"path": "/healthz"},
            "direct_response": {"status": 200, "body": {"inline_string": "ok\n"}},
            "typed_per_filter_config": no_picker | (no_key if config.api_keys else {}),
        }
    )
    routes.append(
        {
            "match": {"prefix": "/"},
            "direct_response": {"status": 404},
            "typed_per_filter_config": no_picker,
        }
    )
    return {
        "virtual_hosts": [
            {
                "name": "openai",
                "domains": ["*"],
                "routes": routes,
                "request_body_buffer_limit": config.body_limit,
                "include_request_attempt_count": True,
            }
        ]
    }


def _route(config: GatewayConfig) -> Config:
    return {
        "cluster": "workers",
        "timeout": "0s",
        "idle_timeout": _seconds(config.idle_timeout_s),
        "retry_policy": {
            # "reset" is a worker that goes away before its answer begins. Of the answers only
            # those are tried again that say that nothing was begun; any other error is the answer.
            "retry_on": "connect-failure,refused-stream,reset,retriable-headers",
            "retriable_headers": [{"name": headers.RETRYABLE, "present_match": True}],
            "num_retries": 4,
            "retry_back_off": {"base_interval": "0.025s", "max_interval": "0.5s"},
            # The picker's ordered fallbacks come first; past them this keeps off what was tried.
            "retry_host_predicate": [
                {
                    "name": "envoy.retry_host_predicates.previous_hosts",
                    "typed_config": _typed(
                        "extensions.retry.host.previous_hosts.v3.PreviousHostsPredicate"
                    ),
                }
            ],
            "host_selection_retry_max_attempts": 5,
        },
    }


def _workers(config: GatewayConfig) -> Config:
    return {
        "name": "workers",
        "type": "EDS",
        "connect_timeout": _seconds(config.connect_timeout_s),
        "per_connection_buffer_limit_bytes": config.body_limit,
        "eds_cluster_config": {
            "service_name": config.cluster,
            "eds_config": {
                "resource_api_version": "V3",
                # The scheduler answers when it knows its workers; the listener opens before.
                "initial_fetch_timeout": "0.5s",
                "api_config_source": {
                    "api_type": "GRPC",
                    "transport_api_version": "V3",
                    "grpc_services": [
                        {
                            "envoy_grpc": {
                                "cluster_name": "scheduler",
                                "retry_policy": {
                                    "retry_back_off": {
                                        "base_interval": "0.2s",
                                        "max_interval": "1s",
                                    }
                                },
                            }
                        }
                    ],
                },
            },
        },
        "load_balancing_policy": {
            "policies": [
                {
                    "typed_extension_config": {
                        "name": "envoy.load_balancing_policies.override_host",
                        "typed_config": _typed(
                            "extensions.load_balancing_policies.override_host.v3.OverrideHost",
                            override_host_sources=[
                                {"header": headers.DESTINATION},
                                {
                                    "metadata": {
                                        "key": headers.METADATA_NAMESPACE,
                                        "path": [{"key": headers.DESTINATION}],
                                    }
                                },
                            ],
                            fallback_policy={"policies": [_least_request()]},
                        ),
                    }
                }
            ]
        },
        # With too few healthy workers Envoy would otherwise send to the unhealthy ones too.
        "common_lb_config": {"healthy_panic_threshold": {"value": 0}},
        "health_checks": [
            {
                "timeout": "1s",
                "interval": _seconds(config.health_interval_s),
                "no_traffic_interval": _seconds(config.health_interval_s),
                "no_traffic_healthy_interval": _seconds(config.health_interval_s),
                "unhealthy_threshold": 2,
                "healthy_threshold": 1,
                "http_health_check": {"path": "/ecoserve/health"},
            }
        ],
        "circuit_breakers": _unlimited(),
        "typed_extension_protocol_options": _protocol(
            explicit_http_config={"http_protocol_options": {}},
            common_http_protocol_options={"idle_timeout": _seconds(_WORKER_KEEP_ALIVE_S)},
        ),
        "upstream_connection_options": {
            "tcp_keepalive": {
                "keepalive_probes": 3,
                "keepalive_time": 15,
                "keepalive_interval": 5,
            }
        },
    }


def _least_request() -> Config:
    return {
        "typed_extension_config": {
            "name": "envoy.load_balancing_policies.least_request",
            "typed_config": _typed(
                "extensions.load_balancing_policies.least_request.v3.LeastRequest"
            ),
        }
    }


def _scheduler(config: GatewayConfig) -> Config:
    return {
        "name": "scheduler",
        "type": "STRICT_DNS",
        "connect_timeout": _seconds(min(config.picker_timeout_s, config.connect_timeout_s)),
        "load_assignment": {
            "cluster_name": "scheduler",
            "endpoints": [
                {
                    "lb_endpoints": [
                        {"endpoint": {"address": _address("scheduler", config.scheduler)}}
                    ]
                }
            ],
        },
        # Each waiting call holds a stream.
        "circuit_breakers": _unlimited(),
        "typed_extension_protocol_options": _protocol(
            explicit_http_config={
                "http2_protocol_options": {
                    "connection_keepalive": {"interval": "10s", "timeout": "5s"}
                }
            }
        ),
    }


def _local_replies(config: GatewayConfig) -> Config:
    """Envoy's own errors in OpenAI's shape. What the picker answers is passed on as it is."""
    limit = config.body_limit
    by_status = [
        (401, "invalid_request_error", "invalid_api_key", "Missing or wrong API key."),
        (
            404,
            "invalid_request_error",
            "not_found",
            "No such route here. The OpenAI API is under /v1: "
            + ", ".join((*PICKED_PATHS, *PLAIN_PATHS))
            + ".",
        ),
        (
            408,
            "invalid_request_error",
            "timeout",
            f"The request was silent for {config.idle_timeout_s:g} s.",
        ),
        (
            413,
            "invalid_request_error",
            "request_too_large",
            f"The request body is larger than the limit of {limit} bytes"
            f" ({limit / 2**20:.4g} MiB).",
        ),
        (
            502,
            "server_error",
            "scheduler_unavailable",
            "The scheduler went away while it had the request. Try again.",
        ),
        (
            504,
            "server_error",
            "timeout",
            f"The answer was silent for {config.idle_timeout_s:g} s.",
        ),
    ]
    mappers: list[Config] = [
        {
            "filter": {
                "status_code_filter": {
                    "comparison": {
                        "op": "EQ",
                        "value": {"default_value": status, "runtime_key": f"ecoserve.{status}"},
                    }
                }
            },
            "body_format_override": _openai_error(kind, code, message),
        }
        for status, kind, code, message in by_status
        if status != 404
    ]
    # The picker's 404 is about a model; this one is about the path.
    mappers.append(
        {
            "filter": {
                "and_filter": {
                    "filters": [
                        {
                            "status_code_filter": {
                                "comparison": {
                                    "op": "EQ",
                                    "value": {"default_value": 404, "runtime_key": "ecoserve.404"},
                                }
                            }
                        },
                        {
                            "extension_filter": {
                                "name": "envoy.access_loggers.extension_filters.cel",
                                "typed_config": _typed(
                                    "extensions.access_loggers.filters.cel.v3.ExpressionFilter",
                                    expression="response.code_details == 'direct_response'",
                                ),
                            }
                        },
                    ]
                }
            },
            "body_format_override": _openai_error(*by_status[1][1:]),
        }
    )
    # Upstream failures carry a response flag; the picker's own 503 carries none.
    mappers.append(
        {
            "filter": {
                "response_flag_filter": {
                    "flags": ["UH", "UF", "UC", "UO", "NC", "URX", "UR", "LR", "NR"]
                }
            },
            "body_format_override": _openai_error(
                "server_error", "no_worker", "No worker could take the request. Try again."
            ),
            "headers_to_add": [{"header": {"key": "retry-after", "value": "2"}}],
        }
    )
    return {"mappers": mappers}


def _openai_error(kind: str, code: str, message: str) -> Config:
    body = {"error": {"message": message, "type": kind, "param": None, "code": code}}
    return {
        # A percent sign begins a command of Envoy's format; none of ours is meant as one.
        "text_format_source": {"inline_string": json.dumps(body).replace("%", "%%") + "\n"},
        "content_type": "application/json",
    }


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
        "worker": "%UPSTREAM_HOST%",
        "attempts": "%UPSTREAM_REQUEST_ATTEMPT_COUNT%",
        "id": f"%REQ({headers.REQUEST_ID.upper()})%",
    }
    return {
        "name": "envoy.access_loggers.file",
        "typed_config": _typed(
            "extensions.access_loggers.file.v3.FileAccessLog",
            path=path,
            log_format={"json_format": fields},
        ),
    }


def _filter(name: str, kind: str, **fields: Any) -> Config:
    return {"name": f"envoy.filters.http.{name}", "typed_config": _typed(kind, **fields)}


def _typed(kind: str, **fields: Any) -> Config:
    return {"@type": f"type.googleapis.com/envoy.{kind}", **fields}


def _protocol(**fields: Any) -> Config:
    name = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"
    return {name: _typed("extensions.upstreams.http.v3.HttpProtocolOptions", **fields)}


def _unlimited() -> Config:
    limits = ("max_connections", "max_pending_requests", "max_requests", "max_retries")
    return {"thresholds": [dict.fromkeys(limits, _UNLIMITED)]}


def _seconds(value: float) -> str:
    return f"{value:.9f}".rstrip("0").rstrip(".") + "s"


def _split(field: str, address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(f"{field} must be host:port with a port from 1 to 65535, not {address!r}")
    return host.strip("[]"), int(port)


def _address(field: str, address: str) -> Config:
    host, port = _split(field, address)
    return {"socket_address": {"address": host, "port_value": port}}
