"""How Envoy is, for balancers, Kubernetes and Prometheus."""

from __future__ import annotations

from ecoserve.gateway.config import GatewayConfig
from ecoserve.gateway.parts import Config, address, http_filter, typed

HEALTH_PATH = "/healthz"
LIVE_PATH = "/live"
METRICS_PATH = "/metrics"


def health_filter() -> Config:
    """Envoy's own health, 503 while it drains. No key is asked for it."""
    return http_filter(
        "health_check",
        "extensions.filters.http.health_check.v3.HealthCheck",
        pass_through_mode=False,
        headers=[{"name": ":path", "string_match": {"exact": HEALTH_PATH}}],
    )


def listeners(config: GatewayConfig) -> list[Config]:
    """The listener at ``GatewayConfig.status``, if there is one. Of the admin port, which could do
    everything, it shows the metrics alone."""
    if config.status is None:
        return []
    routes = [
        {"match": {"path": LIVE_PATH}, "direct_response": {"status": 200}},
        {
            "match": {"path": METRICS_PATH},
            "route": {"cluster": "admin", "prefix_rewrite": "/stats/prometheus"},
        },
    ]
    manager = typed(
        "extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
        stat_prefix="status",
        http_filters=[
            health_filter(),
            http_filter("router", "extensions.filters.http.router.v3.Router"),
        ],
        route_config={"virtual_hosts": [{"name": "status", "domains": ["*"], "routes": routes}]},
    )
    return [
        {
            "name": "status",
            "address": address("status", config.status),
            # Draining is what it has to tell of, so it stays.
            "drain_type": "MODIFY_ONLY",
            # Its calls are not what load and overload are about.
            "ignore_global_conn_limit": True,
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
    ]


def clusters(config: GatewayConfig) -> list[Config]:
    """Envoy's own admin port, where the metrics come from."""
    if config.status is None:
        return []
    endpoint = {"endpoint": {"address": address("admin", config.admin)}}
    return [
        {
            "name": "admin",
            "type": "STATIC",
            "connect_timeout": "1s",
            "load_assignment": {
                "cluster_name": "admin",
                "endpoints": [{"lb_endpoints": [endpoint]}],
            },
        }
    ]
