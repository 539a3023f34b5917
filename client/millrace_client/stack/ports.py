"""Free ports on loopback."""

from __future__ import annotations

import socket
from contextlib import ExitStack

HOST = "127.0.0.1"


def is_free(port: int) -> bool:
    with socket.socket() as one:
        # As servers do: a port whose last connections linger in TIME_WAIT is free.
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            one.bind((HOST, port))
        except OSError:
            return False
        return True


def free_ports(count: int) -> list[int]:
    """Different ports that nobody listens on now; who binds one soon will most likely get it."""
    with ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind((HOST, 0))
        return [int(one.getsockname()[1]) for one in sockets]


def answers(address: str, *, timeout_s: float = 0.5) -> bool:
    """Whether somebody accepts a connection at host:port."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=timeout_s):
            return True
    except OSError:
        return False
