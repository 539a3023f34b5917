"""How a bench ends when it is interrupted."""

from __future__ import annotations

import signal
import sys


def exit_on_signals() -> None:
    """Makes SIGTERM and SIGHUP end this process as Ctrl-C does, by an exception: each `with` then ends what it started,
    the Ray heads and the services among it."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda received, _: sys.exit(128 + received))
