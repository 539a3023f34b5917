"""Whether a replica's model thread still moves. Nobody can interrupt what runs in it; who asks can have it replaced."""

from __future__ import annotations

import gc
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class HangWatch:
    """Told by the one thread that works, asked by any other."""

    def __init__(self) -> None:
        # Since when it has been at the same piece of work; None while it has none.
        self._since_s: float | None = None
        self._thread: int | None = None

    @contextmanager
    def working(self) -> Iterator[None]:
        self._thread = threading.get_ident()
        self.moved()
        try:
            yield
        finally:
            self._since_s = None

    def moved(self) -> None:
        """It goes on to its next piece."""
        self._since_s = time.monotonic()

    def lasts_s(self) -> float:
        """How long it has been at the present piece of work; 0 while it has none."""
        since_s = self._since_s
        return time.monotonic() - since_s if since_s is not None else 0.0

    def stack(self) -> str:
        """Where it is in the code, as a traceback shows it."""
        frame = _frames().get(self._thread or 0)
        return "".join(traceback.format_stack(frame)) if frame is not None else ""


def _frames() -> dict[int, FrameType]:
    """Where every thread is. Python 3.11 holds its lock of all threads meanwhile and makes objects, and a garbage
    collection that this sets off waits for that lock for ever (python/cpython#106883): so none may begin."""
    collects = gc.isenabled()
    gc.disable()
    try:
        return sys._current_frames()
    finally:
        if collects:
            gc.enable()
