"""Ends an interrupted benchmark cleanly."""

from __future__ import annotations

import signal
import sys


def exit_on_signals() -> None:
    """Make SIGTERM and SIGHUP end this process by an exception, like Ctrl-C.

    Each `with` then ends what it started, including the Ray heads and the services.
    """
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda received, _: sys.exit(128 + received))
