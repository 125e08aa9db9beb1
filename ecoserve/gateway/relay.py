"""The way of a call through the stream relay.

A call that asks for it goes from the listener for clients to the relay, over a Unix socket, and
from there to a listener of its own, on another, which is the normal way without keys and TLS: by
then a client has shown its key. With the relay away calls go to that listener directly.
"""

from __future__ import annotations

from dataclasses import replace

from ecoserve.gateway.config import GatewayConfig
from ecoserve.gateway.parts import Config, seconds, typed

# In the folder ``GatewayConfig.relay``: what the relay listens on, and what it sends to.
RELAY_SOCKET = "relay.sock"
GATEWAY_SOCKET = "gateway.sock"
HEALTH_PATH = "/healthz"

# Who may connect is a matter of the folder.
_MODE = 0o666
# A token's id as JSON takes up to so many times the bytes of its text.
_GROWTH = 8
_MOST_BODY = 2**31


def inner(config: GatewayConfig) -> GatewayConfig:
    """The settings of the listener behind the relay."""
    return replace(
        config,
        # A call that is continued holds token ids where the client's held text.
        body_limit=min(_GROWTH * config.body_limit, _MOST_BODY),
        api_keys=(),
        api_keys_file=None,
        tls_file=None,
        relay=None,
    )


def address(config: GatewayConfig, socket: str) -> Config:
    return {"pipe": {"path": f"{config.relay}/{socket}", "mode": _MODE}}


def cluster(config: GatewayConfig, common: Config) -> Config:
    """The relay and, for when it is not well, the listener behind it. ``common`` is what this
    shares with the clusters of workers."""
    instead = {
        "address": address(config, GATEWAY_SOCKET),
        "health_check_config": {"disable_active_health_check": True},
    }
    return {
        **common,
        "name": "relay",
        "type": "STATIC",
        "connect_timeout": seconds(config.connect_timeout_s),
        "load_assignment": {
            "cluster_name": "relay",
            "endpoints": [
                {"priority": priority, "lb_endpoints": [{"endpoint": endpoint}]}
                for priority, endpoint in enumerate(
                    ({"address": address(config, RELAY_SOCKET)}, instead)
                )
            ],
        },
        "common_lb_config": {"healthy_panic_threshold": {"value": 0}},
        "health_checks": [
            {
                "timeout": "2s",
                "interval": seconds(config.health_interval_s),
                "no_traffic_interval": seconds(config.health_interval_s),
                "unhealthy_threshold": 2,
                "healthy_threshold": 1,
                "http_health_check": {"path": HEALTH_PATH},
            }
        ],
    }


def route(config: GatewayConfig) -> Config:
    """What a route through the relay does."""
    return {
        "cluster": "relay",
        "timeout": "0s",
        "idle_timeout": seconds(config.idle_timeout_s),
        # Once, and then past the relay. It sends nothing back before it has an answer's beginning.
        "retry_policy": {
            "retry_on": "connect-failure,refused-stream,reset",
            "num_retries": 1,
            "retry_priority": {
                "name": "envoy.retry_priorities.previous_priorities",
                "typed_config": typed(
                    "extensions.retry.priority.previous_priorities.v3.PreviousPrioritiesConfig",
                    update_frequency=1,
                ),
            },
        },
    }
