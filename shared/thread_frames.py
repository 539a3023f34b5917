"""The current frames of all threads, without the deadlock of Python 3.11."""

from __future__ import annotations

import gc
import sys
from types import FrameType


def current_frames() -> dict[int, FrameType]:
    """Return the current frame of each thread, by its id.

    Python 3.11 holds its lock of all threads meanwhile and creates objects. A garbage collection that this triggers
    waits forever for that lock (python/cpython#106883), so the collector is disabled.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        return sys._current_frames()
    finally:
        if collects:
            gc.enable()
