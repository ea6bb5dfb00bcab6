"""Free ports of loopback, for servers that tests start."""

from __future__ import annotations

import socket

HOST = "127.0.0.1"


def free_ports(count: int) -> list[int]:
    """Return different ports on which no server listens."""
    sockets = [socket.create_server((HOST, 0)) for _ in range(count)]
    ports = [int(one.getsockname()[1]) for one in sockets]
    for one in sockets:
        one.close()
    return ports


def free_port() -> int:
    """Return a port on which no server listens."""
    [port] = free_ports(1)
    return port
