"""Envoy's own errors in the shape of OpenAI's API. What the picker answers passes as it is."""

from __future__ import annotations

import json

from ecoserve.gateway.config import MIB, GatewayConfig
from ecoserve.gateway.parts import Config, typed


def error(kind: str, code: str, message: str) -> str:
    """An error body as OpenAI's API words it."""
    body = {"error": {"message": message, "type": kind, "param": None, "code": code}}
    return json.dumps(body) + "\n"


def local_replies(config: GatewayConfig) -> Config:
    """The first that fits is taken; an answer that none fits keeps its body."""
    limit = f"{config.body_limit} bytes ({config.body_limit / MIB:.4g} MiB)"
    idle = f"{config.idle_timeout_s:g} s"
    return {
        "mappers": [
            _mapper(
                _when("response.code == 401"),
                error("invalid_request_error", "invalid_api_key", "Missing or wrong API key."),
            ),
            _mapper(
                _when("response.code == 413"),
                error(
                    "invalid_request_error",
                    "request_too_large",
                    f"The request's body is larger than the limit of {limit}.",
                ),
            ),
            # The picker is only waited for in vain where its failure cannot be passed over. Envoy
            # says 504 for a hung one and 503 for a dead one; to the client it is the same.
            _mapper(
                _when("response.code_details.startsWith('ext_proc_error')"),
                error(
                    "server_error",
                    "scheduler_unavailable",
                    "The scheduler went away while it had the request. Try again.",
                ),
                status=503,
                retry_after=1,
            ),
            _mapper(
                {"and_filter": {"filters": [_flags("SI"), _when("response.code == 408")]}},
                error(
                    "invalid_request_error",
                    "timeout",
                    f"The request was silent for {idle}, the idle timeout.",
                ),
            ),
            _mapper(
                _flags("SI"),
                error(
                    "server_error",
                    "timeout",
                    f"No answer came for {idle}, the idle timeout.",
                ),
            ),
            _mapper(
                _flags("UH", "NC"),
                error(
                    "server_error",
                    "no_worker",
                    "No worker is ready to take the request. Try again.",
                ),
                retry_after=2,
            ),
            _mapper(
                _flags("UF", "UC", "UR", "UO", "LR", "URX"),
                error(
                    "server_error",
                    "worker_failed",
                    "The workers that were tried failed before they answered. Try again.",
                ),
                retry_after=1,
            ),
            _mapper(
                _flags("DPE"),
                error("invalid_request_error", "bad_request", "This is no valid HTTP request."),
            ),
        ]
    }


def _mapper(
    condition: Config, body: str, *, status: int | None = None, retry_after: int | None = None
) -> Config:
    mapper: Config = {
        "filter": condition,
        "body_format_override": {
            # A percent sign would begin a command of Envoy's format; none is meant here.
            "text_format_source": {"inline_string": body.replace("%", "%%")},
            "content_type": "application/json",
        },
    }
    if status is not None:
        mapper["status_code"] = status
    if retry_after is not None:
        mapper["headers_to_add"] = [
            {
                "header": {"key": "retry-after", "value": str(retry_after)},
                "append_action": "ADD_IF_ABSENT",
            }
        ]
    return mapper


def _when(expression: str) -> Config:
    return {
        "extension_filter": {
            "name": "envoy.access_loggers.extension_filters.cel",
            "typed_config": typed(
                "extensions.access_loggers.filters.cel.v3.ExpressionFilter", expression=expression
            ),
        }
    }


def _flags(*flags: str) -> Config:
    return {"response_flag_filter": {"flags": list(flags)}}
