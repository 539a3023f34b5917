"""Which applications have lost all their replicas: requests would wait for them nobody knows how long.

Not those of which one is started again within seconds, nor those whose replicas Serve's controller does not know of for
a moment, after it was started again itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

# From the first of the readings that saw none to the last of them: what nobody has read says nothing.
LOST_AFTER_S = 3.0


class Absences:
    """`lost` is as of the last reading. Times are seconds on one clock."""

    def __init__(self, lost_after_s: float = LOST_AFTER_S) -> None:
        self._lost_after_s = lost_after_s
        self._since_s: dict[str, float] = {}
        self.lost: frozenset[str] = frozenset()

    def read(self, applications: Iterable[str], replicas: Mapping[str, int], now_s: float) -> None:
        """So many replicas of each run now; of one that is not named, none."""
        self._since_s = {name: self._since_s.get(name, now_s) for name in applications if not replicas.get(name, 0)}
        self.lost = frozenset(name for name, since_s in self._since_s.items() if now_s - since_s >= self._lost_after_s)
