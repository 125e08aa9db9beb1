"""Where Envoy connects to: the workers, as the scheduler names them, and the scheduler."""

from __future__ import annotations

from typing import Any

from ecoserve import headers
from ecoserve.gateway import relay
from ecoserve.gateway.config import GatewayConfig
from ecoserve.gateway.parts import Config, address, seconds, typed
from ecoserve.gateway.tls import to_scheduler, to_workers

# Envoy's own limits are 1,024 (3 for retries); what bounds the load is the scheduler's queue.
_UNLIMITED = 1_000_000
# Below the five seconds after which the workers' HTTP server closes an idle connection, so that a
# call is not sent into one that is just being closed. It does not touch connections in use.
_WORKER_KEEP_ALIVE_S = 4.0
# Notices a machine that went away without a word in half a minute.
_TCP_KEEPALIVE = {
    "tcp_keepalive": {"keepalive_probes": 3, "keepalive_time": 15, "keepalive_interval": 5}
}


def workers(config: GatewayConfig) -> Config:
    return {
        **to_workers(config),
        "name": "workers",
        "type": "EDS",
        "connect_timeout": seconds(config.connect_timeout_s),
        "eds_cluster_config": {
            "service_name": config.cluster,
            "eds_config": {
                "resource_api_version": "V3",
                # How long the listener stays shut at the start for a scheduler that does not
                # answer. What was learnt once stays when the scheduler goes away.
                "initial_fetch_timeout": "2s",
                "api_config_source": {
                    "api_type": "GRPC",
                    "transport_api_version": "V3",
                    "grpc_services": [
                        {
                            "envoy_grpc": {
                                "cluster_name": "scheduler",
                                # The default backs off to half a minute.
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
        "load_balancing_policy": {"policies": [_override_host()]},
        # With few healthy workers Envoy would otherwise send to the unhealthy ones too.
        "common_lb_config": {
            "healthy_panic_threshold": {"value": 0},
            # By default changes of health are gathered for a second before they count.
            "update_merge_window": "0s",
        },
        # A worker that the scheduler takes off the list is off, even while its health route is
        # well. Its running answers end in peace.
        "ignore_health_on_host_removal": True,
        "health_checks": [
            {
                "timeout": "2s",
                "interval": seconds(config.health_interval_s),
                # Until the first request the default is once a minute.
                "no_traffic_interval": seconds(config.health_interval_s),
                # For timeouts and refused connections; a 503 counts at once.
                "unhealthy_threshold": 2,
                "healthy_threshold": 1,
                "http_health_check": {"path": config.health_path},
            }
        ],
        **_to_http_server(),
        "upstream_connection_options": _TCP_KEEPALIVE,
    }


def relays(config: GatewayConfig) -> list[Config]:
    """The stream relay's cluster, if there is one."""
    return [] if config.relay is None else [relay.cluster(config, _to_http_server())]


def _to_http_server() -> Config:
    """How to talk to workers, and to the relay, whose HTTP server is the same."""
    return {
        "circuit_breakers": _unlimited(),
        "typed_extension_protocol_options": _protocol(
            explicit_http_config={"http_protocol_options": {}},
            common_http_protocol_options={"idle_timeout": seconds(_WORKER_KEEP_ALIVE_S)},
        ),
    }


def _override_host() -> Config:
    """The picker's choice: first host first, the next on each retry, then least-request.

    The header alone is read, not the metadata beside it: Envoy would join both lists, and come
    round to a host that had already failed.
    """
    least_request = {
        "typed_extension_config": {
            "name": "envoy.load_balancing_policies.least_request",
            "typed_config": typed(
                "extensions.load_balancing_policies.least_request.v3.LeastRequest"
            ),
        }
    }
    return {
        "typed_extension_config": {
            "name": "envoy.load_balancing_policies.override_host",
            "typed_config": typed(
                "extensions.load_balancing_policies.override_host.v3.OverrideHost",
                override_host_sources=[{"header": headers.DESTINATION}],
                fallback_policy={"policies": [least_request]},
            ),
        }
    }


def scheduler(config: GatewayConfig) -> Config:
    return {
        **to_scheduler(config),
        "name": "scheduler",
        "type": "STRICT_DNS",
        "connect_timeout": seconds(min(config.picker_timeout_s, config.connect_timeout_s)),
        "load_assignment": {
            "cluster_name": "scheduler",
            "endpoints": [
                {
                    "lb_endpoints": [
                        {"endpoint": {"address": address("scheduler", config.scheduler)}}
                    ]
                }
            ],
        },
        # Each waiting call holds a stream.
        "circuit_breakers": _unlimited(),
        "typed_extension_protocol_options": _protocol(
            # A connection that leads to somebody else, because the address has changed hands, may
            # be well and of no use. Calls that wait on it are not cut.
            common_http_protocol_options={"max_connection_duration": "60s"},
            explicit_http_config={
                "http2_protocol_options": {
                    "max_concurrent_streams": 100_000,
                    # Calls that wait at a scheduler that hangs go on without it once the
                    # connection is given up, rather than at the end of the time it asked for.
                    # The scheduler must allow a ping every two seconds.
                    "connection_keepalive": {"interval": "2s", "timeout": "5s"},
                }
            },
        ),
        "upstream_connection_options": _TCP_KEEPALIVE,
    }


def _protocol(**fields: Any) -> Config:
    name = "extensions.upstreams.http.v3.HttpProtocolOptions"
    return {f"envoy.{name}": typed(name, **fields)}


def _unlimited() -> Config:
    limits = ("max_connections", "max_pending_requests", "max_requests", "max_retries")
    return {"thresholds": [dict.fromkeys(limits, _UNLIMITED)]}
