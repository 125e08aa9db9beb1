"""API keys as Envoy's filter takes them, fixed or from a file that may change while it runs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable

from ecoserve import headers
from ecoserve.gateway.config import GatewayConfig, check_keys
from ecoserve.gateway.parts import Config, http_filter, typed

_NAME = "envoy.filters.http.api_key_auth"
_KIND = "extensions.filters.http.api_key_auth.v3.ApiKeyAuth"


def key_filter(config: GatewayConfig) -> Config | None:
    """The filter that asks for a key; None if none is asked for."""
    if config.api_keys:
        return http_filter("api_key_auth", _KIND, **_settings(config.api_keys))
    if config.api_keys_file is None:
        return None
    return {
        "name": _NAME,
        "config_discovery": {
            "config_source": {
                "resource_api_version": "V3",
                "path_config_source": {"path": config.api_keys_file},
            },
            "type_urls": [f"type.googleapis.com/envoy.{_KIND}"],
        },
    }


def keys_file_text(keys: Iterable[str]) -> str:
    """What ``GatewayConfig.api_keys_file`` holds. Write it beside and move it there: Envoy watches
    for the move, and takes over the new keys within a second or so.

    Raises ``ValueError`` for no keys at all, or a bad one.
    """
    given = tuple(keys)
    if not given:
        raise ValueError("api_keys must not be empty: nobody would be let in")
    check_keys(given)
    resource = {
        "@type": "type.googleapis.com/envoy.config.core.v3.TypedExtensionConfig",
        "name": _NAME,
        "typed_config": typed(_KIND, **_settings(given)),
    }
    return json.dumps({"resources": [resource]}, indent=1) + "\n"


def tenant(key: str) -> str:
    """What the scheduler is told of who calls: it does not tell the key, and stays the same when
    other keys come and go."""
    return hashlib.blake2b(key.encode(), digest_size=8, person=b"ecoserve").hexdigest()


def _settings(keys: tuple[str, ...]) -> Config:
    return {
        "credentials": [{"key": key, "client": tenant(key)} for key in keys],
        # The filter itself takes off a "Bearer " before the key.
        "key_sources": [{"header": "Authorization"}],
        # Workers have no business with the key.
        "forwarding": {"header": headers.TENANT, "hide_credentials": True},
    }
