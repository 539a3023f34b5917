"""Has the memory of large buffers go back to the system when they are freed."""

from __future__ import annotations

import ctypes

_M_MMAP_THRESHOLD = -3  # of malloc.h
LARGE_BYTES = 64 * 1024


def give_back_large_buffers() -> None:
    """From now on each has pages of its own, which end with it.

    gRPC takes in a message that is over the limit before it refuses it, in buffers that many threads allocate and free;
    glibc keeps such memory, and a server that was sent 65 MiB now and then held 300 MiB more after minutes. Elsewhere
    than with glibc this does nothing.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, LARGE_BYTES)
