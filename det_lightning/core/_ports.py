"""Ports of this machine."""

from __future__ import annotations

import socket


def free_port(host: str = "") -> int:
    """Return a TCP port that nothing listens on, on one interface or by default on all."""
    with socket.socket() as found:
        found.bind((host, 0))
        port: int = found.getsockname()[1]
    return port
