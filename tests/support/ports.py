"""Free loopback ports."""

from __future__ import annotations

import fcntl
import os
import socket
import tempfile
from contextlib import suppress
from pathlib import Path

# The system gives these ports to no connection and to no process that binds port 0, so a port that was found free stays
# free until its server binds it, however long the server takes to start. Ray gives lower ports to its workers, and a
# stack of `millrace up` takes higher ones.
FIRST, LAST = 20_000, 26_000
EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_ports(count: int) -> list[int]:
    """Free ports, each another: none that any process of this user's tests was given lately."""
    ports: list[int] = []
    with (Path(tempfile.gettempdir()) / f"millrace-test-ports-{os.getuid()}").open("a+") as counter:
        fcntl.flock(counter, fcntl.LOCK_EX)
        counter.seek(0)
        last = int(counter.read() or FIRST)
        end = _end()
        for _ in range(FIRST, end):
            if len(ports) == count:
                break
            last = last + 1 if FIRST <= last < end - 1 else FIRST
            if _is_free(last):
                ports.append(last)
        counter.truncate(0)
        counter.write(str(last))
    if len(ports) < count:
        raise RuntimeError(f"of the ports {FIRST} to {end} only {len(ports)} are free, and {count} are wanted")
    return ports


def _end() -> int:
    with suppress(OSError, ValueError):
        first_ephemeral = int(EPHEMERAL.read_text().split()[0])
        if first_ephemeral > FIRST:
            return min(LAST, first_ephemeral)
    return LAST


def _is_free(port: int) -> bool:
    with socket.socket() as one:
        try:
            one.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True
