"""For how long this process itself has watched a roll-out in one situation: what nobody watched says nothing."""

from __future__ import annotations

import time

# What a roll-out waits for before any traffic moves, and when its version has lost its replicas; otherwise its step.
PREPARING = "PREPARING"
SILENT = "SILENT"


class Watching:
    """Begins anew with each process, and each time that the situation is another than at the last look."""

    def __init__(self) -> None:
        self._since_s: dict[str, tuple[str | int, float]] = {}  # by uid

    def lasts_s(self, uid: str, situation: str | int) -> float:
        """Seconds since it was first seen in this situation; 0 at the first look."""
        now_s = time.monotonic()
        before = self._since_s.get(uid)
        if before is None or before[0] != situation:
            before = self._since_s[uid] = (situation, now_s)
        return now_s - before[1]

    def forget(self, uid: str) -> None:
        """After it has ended."""
        self._since_s.pop(uid, None)
