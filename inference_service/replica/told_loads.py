"""What the fronts have told a replica that they have for its model to do, for Ray Serve's controller."""

from __future__ import annotations

import time
from collections.abc import Callable

from inference_service.domain.load import Load
from inference_service.replica.autoscaling import REFUSED, ROWS

# A front that has told nothing for so long has gone, or has nothing to do with this model any more.
FORGOTTEN_AFTER_S = 15.0


class ToldLoads:
    """`clock` gives seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._loads: dict[str, tuple[Load, float]] = {}  # by front

    def tell(self, front: str, load: Load) -> None:
        self._loads = {**self._present(), front: (load, self._clock())}

    def in_all(self) -> dict[str, float]:
        """Of all fronts together; empty before the first has told anything."""
        if not self._loads:
            return {}
        present = [load for load, _ in self._present().values()]
        return {ROWS: sum(load.rows for load in present), REFUSED: float(sum(load.refused for load in present))}

    def _present(self) -> dict[str, tuple[Load, float]]:
        since_s = self._clock() - FORGOTTEN_AFTER_S
        return {front: (load, at_s) for front, (load, at_s) in self._loads.items() if at_s >= since_s}
