"""The worker's listening socket, and the error of a start that cannot be."""

from __future__ import annotations

import errno
import socket


class StartError(Exception):
    """The worker cannot start; the text is one line for a person."""


def bind(host: str, port: int) -> socket.socket:
    """A TCP socket to listen on; raises ``StartError`` if there can be none.

    It does not listen yet: until the worker serves, connections are refused instead of hanging.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            raise StartError(f"port {port} of {host} is in use") from error
        raise StartError(f"cannot listen on {host}:{port}: {error.strerror or error}") from error
    return sock
