"""What the ranks tell each other of a step, in the one sum over ranks that each step has anyway."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from train_service.learning.ranks import PendingSum, Ranks


@dataclass(frozen=True)
class StepReport:
    """The same on every rank, so all of them do the same upon it."""

    # As `Learner.step` gives them, of all ranks together.
    sums: list[float]
    # What rank 0 asked for: see `CheckpointClock.ask`, and `Reporter.stop_reason`.
    checkpoint_requested: float
    stop_reason: int
    # Seconds; of the rank that waited the longest for its rows, and so of all, for they wait for it in their sums.
    data_wait_s: float


class PendingReport:
    """A step's report that is under way."""

    def __init__(
        self,
        ranks: Ranks,
        sums: Sequence[float],
        data_wait_s: float,
        *,
        checkpoint_requested: float = 0.0,
        stop_reason: int = 0,
    ) -> None:
        """Starts adding it up; all ranks do so after the same step. The wishes are rank 0's."""
        self._world_size = ranks.world_size
        # A place for each rank's wait, so that the sum has them all.
        waits = [0.0] * ranks.world_size
        waits[ranks.rank] = data_wait_s
        self._pending: PendingSum = ranks.add([checkpoint_requested, float(stop_reason), *waits, *sums])

    def result(self) -> StepReport:
        """Waits for it; asked again, it is the same."""
        request, stop, *rest = self._pending.result()
        waits, sums = rest[: self._world_size], rest[self._world_size :]
        return StepReport(sums, request, int(stop), max(waits))
