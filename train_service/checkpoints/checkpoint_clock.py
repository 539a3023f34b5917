"""When to take a checkpoint: after so many steps, and after so many seconds, the same on every rank."""

from __future__ import annotations

import time
from collections.abc import Callable


class CheckpointClock:
    """One on each rank. Steps are counted alike everywhere; seconds only by rank 0, which asks through the step's sum.

    The sum of a step is known one step later, on every rank at the same place, so all take the checkpoint after the
    same step. A wish is told once: until `taken` is called it is not repeated. Where the step is saved for another
    reason, the wish that its sum brings afterwards has been fulfilled.
    """

    def __init__(self, every_steps: int, every_s: float, now: Callable[[], float] = time.monotonic) -> None:
        """0 means that there is no such rule."""
        self._every_steps = every_steps
        self._every_s = every_s
        self._now = now
        self._last = now()
        self._told = False
        self._requested = False
        # The next sum is of a step that was saved.
        self._saved = False

    def ask(self) -> float:
        """What rank 0 adds to the sum of a step: 1.0 when the time has come, else 0.0."""
        if not self._every_s or self._told or self._now() - self._last < self._every_s:
            return 0.0
        self._told = True
        return 1.0

    def heard(self, summed: float) -> None:
        """Takes what the ranks added up to, of each step once and before the next is `taken`."""
        self._requested = self._requested or (summed > 0 and not self._saved)
        self._saved = False

    def due(self, steps_done: int) -> bool:
        """Whether a checkpoint is to be taken after this step, besides those at the ends of epochs."""
        return self._requested or bool(self._every_steps and steps_done % self._every_steps == 0)

    def taken(self) -> None:
        """One was taken after the step whose sum is heard next, whatever for: the seconds count anew."""
        self._last = self._now()
        self._told = self._requested = False
        self._saved = True
