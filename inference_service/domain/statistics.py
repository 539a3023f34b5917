"""What one model version has answered and how long each part took: the numbers of ModelStatistics and of the metrics.

All durations are seconds.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from inference_service.domain.recent import LATE, Recent

OK = "OK"
DURATION_BOUNDS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
ROW_BOUNDS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0)


class Histogram:
    """`counts[i]` are the values at most `bounds[i]` and above the bound before; the last one, all the others."""

    def __init__(self, bounds: Sequence[float] = DURATION_BOUNDS_S) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    @property
    def count(self) -> int:
        return sum(self.counts)


class Computing:
    """Batches, or requests, by what the model did with them."""

    def __init__(self) -> None:
        self.input = Histogram()
        self.infer = Histogram()
        self.output = Histogram()


class Statistics:
    """Lives on one event loop; other threads may read it."""

    def __init__(self) -> None:
        self.requests: dict[str, Histogram] = {}  # by status, from the message to the answer
        self.queue = Histogram()
        self.computing = Computing()
        self.rows = 0
        self.non_finite_rows = 0  # answered with a NaN or an infinity
        self.last_inference_s = 0.0  # since the epoch
        self.batch_rows = Histogram(ROW_BOUNDS)
        self.batch_round_trip = Histogram()
        self.batches: dict[int, Computing] = {}  # by rows
        self.recent = Recent()
        self.shadowed: dict[str, int] = {}  # copies for a shadow, by status; SHED: left out

    def answered(
        self,
        *,
        rows: int,
        now_s: float,
        total_s: float,
        model_s: float,
        input_s: float,
        infer_s: float,
        output_s: float,
    ) -> None:
        """A request, `total_s` after its message came. The batcher had it for `model_s`; `input_s` and `infer_s` of it
        the model computed, what else passed there was waiting, and the way to the model and back."""
        self._ended(OK, total_s)
        self.recent.answered(now_s, total_s)
        self.rows += rows
        self.last_inference_s = now_s
        # Pieces of one request may be computed side by side.
        self.queue.observe(max(model_s - input_s - infer_s, 0.0))
        self.computing.input.observe(input_s)
        self.computing.infer.observe(infer_s)
        self.computing.output.observe(output_s)

    def failed(
        self,
        *,
        status: str,
        now_s: float,
        total_s: float,
        limit_s: float | None = None,
        least_s: float = 0.0,
        had_part: bool = True,
    ) -> None:
        """A request that ended with another status, by its name. `limit_s` is the time that it had, `least_s` what any
        version needs: one that had less is late by its own fault. Where the version `had_part` not, having no replicas
        yet, or this process no memory, that says nothing about how it answers."""
        self._ended(status, total_s)
        in_vain = status == LATE and limit_s is not None and limit_s < least_s
        if had_part and not in_vain:
            self.recent.failed(now_s, status, max(total_s, limit_s or 0.0))

    def shadow_ended(self, status: str) -> None:
        """A copy of a request, which counts nowhere else."""
        self.shadowed[status] = self.shadowed.get(status, 0) + 1

    def batch_ran(self, *, rows: int, round_trip_s: float, input_s: float, infer_s: float, output_s: float) -> None:
        self.batch_rows.observe(rows)
        self.batch_round_trip.observe(round_trip_s)
        batch = self.batches.get(rows)
        if batch is None:
            batch = self.batches[rows] = Computing()
        batch.input.observe(input_s)
        batch.infer.observe(infer_s)
        batch.output.observe(output_s)

    def _ended(self, status: str, total_s: float) -> None:
        histogram = self.requests.get(status)
        if histogram is None:
            histogram = self.requests[status] = Histogram()
        histogram.observe(total_s)
