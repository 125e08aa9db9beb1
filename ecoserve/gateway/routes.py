"""Which calls reach a worker, and how often they are tried."""

from __future__ import annotations

from ecoserve import headers
from ecoserve.gateway import relay
from ecoserve.gateway.config import GatewayConfig
from ecoserve.gateway.parts import Config, seconds, typed
from ecoserve.gateway.replies import error
from ecoserve.relay.messages import TEXT_PATH

# Generation, which the picker places, and reads, which any worker answers. Nothing else that a
# worker serves is let through.
PICKED_PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings")
PLAIN_PATHS = ("/v1/models",)

_NOT_PICKED: Config = {
    "typed_per_filter_config": {
        "envoy.filters.http.ext_proc": typed(
            "extensions.filters.http.ext_proc.v3.ExtProcPerRoute", disabled=True
        )
    }
}


# Meant for the gateway, or for the relay, and not for clients.
_NOT_FOR_CLIENTS = (headers.RETRYABLE, headers.LIMITS)


def routes(config: GatewayConfig, *, behind_relay: bool = False) -> Config:
    """The routes. Only exact paths match, with any query string."""
    through_relay = PICKED_PATHS if config.relay is not None else ()
    for_relay = (TEXT_PATH,) if behind_relay else ()
    return {
        "virtual_hosts": [
            {
                "name": "openai",
                "domains": ["*"],
                "routes": [
                    *(_relayed(config, path) for path in through_relay),
                    *(_plain(config, path, "POST") for path in for_relay),
                    *(_picked(config, path) for path in PICKED_PATHS),
                    *(_plain(config, path, "GET") for path in PLAIN_PATHS),
                    *(_wrong_method(path, "POST") for path in PICKED_PATHS),
                    *(_wrong_method(path, "GET") for path in PLAIN_PATHS),
                    _unknown(),
                ],
                # Without it a body over Envoy's default of a megabyte could not be sent again.
                "request_body_buffer_limit": config.body_limit,
                "response_headers_to_remove": [
                    *(_NOT_FOR_CLIENTS if not behind_relay else (headers.RETRYABLE,))
                ],
            }
        ]
    }


def _picked(config: GatewayConfig, path: str) -> Config:
    return {"match": _match(path, "POST"), "route": _route(config)}


def _plain(config: GatewayConfig, path: str, method: str) -> Config:
    return {"match": _match(path, method), "route": _route(config), **_NOT_PICKED}


def _relayed(config: GatewayConfig, path: str) -> Config:
    match = _match(path, "POST")
    match["headers"].append({"name": headers.RELAY, "present_match": True})
    # The relay's own calls are picked.
    return {"match": match, "route": relay.route(config), **_NOT_PICKED}


def _match(path: str, method: str) -> Config:
    return {
        "path": path,
        "headers": [{"name": ":method", "string_match": {"exact": method}}],
    }


def _wrong_method(path: str, method: str) -> Config:
    message = f"{path} takes {method} only."
    return _refusal({"path": path}, 405, "method_not_allowed", message, {"allow": method})


def _unknown() -> Config:
    known = ", ".join((*PICKED_PATHS, *PLAIN_PATHS))
    message = f"There is no such route here. The routes are {known}."
    return _refusal({"prefix": "/"}, 404, "not_found", message, {})


def _refusal(
    match: Config, status: int, code: str, message: str, more_headers: dict[str, str]
) -> Config:
    values = {"content-type": "application/json", **more_headers}
    return {
        "match": match,
        "direct_response": {
            "status": status,
            "body": {"inline_string": error("invalid_request_error", code, message)},
        },
        "response_headers_to_add": [
            {
                "header": {"key": key, "value": value},
                "append_action": "OVERWRITE_IF_EXISTS_OR_ADD",
            }
            for key, value in values.items()
        ],
        # The picker has no say in what goes to no worker.
        **_NOT_PICKED,
    }


def _route(config: GatewayConfig) -> Config:
    return {
        "cluster": "workers",
        # No total timeout: an answer may take as long as it is not silent.
        "timeout": "0s",
        "idle_timeout": seconds(config.idle_timeout_s),
        "retry_policy": {
            # "reset" is a worker that goes away before its answer begins; once it has begun Envoy
            # retries nothing. Of the answers only those are tried again that say that nothing was
            # begun: any other error is the answer.
            "retry_on": "connect-failure,refused-stream,reset,retriable-headers",
            "retriable_headers": [{"name": headers.RETRYABLE, "present_match": True}],
            "num_retries": 4,
            "retry_back_off": {"base_interval": "0.025s", "max_interval": "0.5s"},
            # The picker's ordered fallbacks come first; past them this keeps off what was tried.
            "retry_host_predicate": [
                {
                    "name": "envoy.retry_host_predicates.previous_hosts",
                    "typed_config": typed(
                        "extensions.retry.host.previous_hosts.v3.PreviousHostsPredicate"
                    ),
                }
            ],
            # Hosts are drawn at random, and a dead one has the fewest requests: draw often enough.
            "host_selection_retry_max_attempts": 32,
        },
    }
