"""The serving port by mutual TLS: nobody but the cluster's gateways gets in."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import uvicorn

from ecoserve import tls

logger = logging.getLogger(__name__)


def secure(config: uvicorn.Config, files: tls.Files, gateway: str) -> None:
    """Has a server whose ``config`` is loaded take connections by TLS, of clients with a
    certificate of the DNS name ``gateway`` only."""
    config.ssl = tls.LiveContext(files)
    config.http_protocol_class = _only_from(gateway, config.http_protocol_class)


def _only_from(gateway: str, base: type[asyncio.Protocol]) -> type[asyncio.Protocol]:
    class Checked(base):  # type: ignore[misc, valid-type]
        """Ends connections of anyone else before a byte of theirs is read: that an authority has
        signed a certificate, which TLS has checked, does not say whose it is."""

        _refused = False

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            names = tls.dns_names(transport.get_extra_info("peercert"))
            if gateway not in names:
                self._refused = True
                told = ", ".join(sorted(names)) or "nobody"
                logger.warning("a connection of %s, not of %s, is refused", told, gateway)
                transport.abort()

        def data_received(self, data: bytes) -> None:
            if not self._refused:
                super().data_received(data)

    return Checked
