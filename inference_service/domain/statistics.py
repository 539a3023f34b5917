"""The request statistics of one model version.

Totals since the start, for ModelStatistics and the metrics, and recent counts, for the limits of rollouts.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from inference_service.domain.rollout import MAX_WINDOW_S, RolloutLimits

# --- The last minutes ---
# The recent requests of one model version: their number, their failures and their latencies.

# 5 % apart, from 0.1 ms to an hour. A percentile is reported as the bound below it, which it certainly exceeds.
BOUNDS_S = [0.0001 * 1.05**power for power in range(357)]
# The statuses that count as the version's faults; a client's errors and cancellations do not. A replica that was
# restarted and cannot load its checkpoint answers FAILED_PRECONDITION.
FAULTS = frozenset(
    {"DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED", "UNAVAILABLE", "INTERNAL", "DATA_LOSS", "FAILED_PRECONDITION"}
)
LATE = "DEADLINE_EXCEEDED"


@dataclass(frozen=True)
class Seen:
    """A summary of recent requests.

    `p99_s` covers answered requests and those that ran out of time; 0 if there are none.
    """

    requests: int
    faults: int
    p99_s: float


@dataclass(frozen=True)
class Counts:
    """Recent counts that can be summed over processes; `took` counts by index in `BOUNDS_S`."""

    answered: int = 0
    faults: int = 0
    took: Mapping[int, int] = field(default_factory=dict)

    def __add__(self, other: Counts) -> Counts:
        took = dict(self.took)
        for place, count in other.took.items():
            took[place] = took.get(place, 0) + count
        return Counts(self.answered + other.answered, self.faults + other.faults, took)

    def seen(self) -> Seen:
        return Seen(self.answered + self.faults, self.faults, _p99_s(self.took))


class _Second:
    def __init__(self, second: int) -> None:
        self.second = second
        self.answered = 0
        self.faults = 0
        self.took: dict[int, int] = {}  # by index in BOUNDS_S

    def took_s(self, total_s: float) -> None:
        place = bisect_left(BOUNDS_S, total_s)
        self.took[place] = self.took.get(place, 0) + 1


class Recent:
    """Counts requests by second, so that its size does not depend on the load."""

    def __init__(self) -> None:
        self._seconds: deque[_Second] = deque()

    def answered(self, now_s: float, total_s: float) -> None:
        second = self._second(now_s)
        second.answered += 1
        second.took_s(total_s)

    def failed(self, now_s: float, status: str, total_s: float) -> None:
        """Count a failed request.

        `status` is the name of its status. `total_s` is its duration or, if it was refused because its time was too
        short, the time that it had.
        """
        if status not in FAULTS:
            return
        second = self._second(now_s)
        second.faults += 1
        if status == LATE:  # otherwise a hung version would show only the latencies of the requests that it answers
            second.took_s(total_s)

    def counts(self, now_s: float, window_s: float) -> Counts:
        """Return the counts of the last `window_s`, to a second."""
        took: dict[int, int] = {}
        answered = faults = 0
        for one in self._seconds:
            if now_s - window_s <= one.second <= now_s:
                answered += one.answered
                faults += one.faults
                for place, count in one.took.items():
                    took[place] = took.get(place, 0) + count
        return Counts(answered, faults, took)

    def seen(self, now_s: float, window_s: float) -> Seen:
        return self.counts(now_s, window_s).seen()

    def _second(self, now_s: float) -> _Second:
        second = int(now_s)
        if not self._seconds or self._seconds[-1].second != second:
            self._seconds.append(_Second(second))
            while self._seconds[0].second < second - MAX_WINDOW_S:
                self._seconds.popleft()
        return self._seconds[-1]


def _p99_s(took: Mapping[int, int]) -> float:
    left = -(-99 * sum(took.values()) // 100)  # in integers, since 0.99 * 100 is more than 99 in floats
    for place in sorted(took):
        left -= took[place]
        if left <= 0:
            return BOUNDS_S[place - 1] if place else 0.0
    return 0.0


def passed_limit(limits: RolloutLimits, new: Seen, old: Seen) -> str:
    """Return which limit the new version has exceeded; empty if none."""
    if new.requests < limits.min_requests:
        return ""
    share = new.faults / new.requests
    if limits.max_error_share is not None and share > limits.max_error_share:
        return f"{share:.1%} of its last {new.requests} requests failed, at most {limits.max_error_share:.1%} may"
    if limits.max_p99_s is not None and new.p99_s > limits.max_p99_s:
        took_ms, max_ms = new.p99_s * 1000, limits.max_p99_s * 1000
        return f"1 % of its requests took {took_ms:.4g} ms or longer, at most {max_ms:.4g} ms may"
    if limits.max_p99_ratio and old.requests >= limits.min_requests and old.p99_s:
        ratio = new.p99_s / old.p99_s
        if ratio > limits.max_p99_ratio:
            return (
                f"1 % of its requests took {new.p99_s * 1000:.4g} ms or longer, {ratio:.3g} times as long as the old "
                f"version's; at most {limits.max_p99_ratio:g} times is allowed"
            )
    return ""


# --- Statistics ---
# The statistics of one model version: the numbers of ModelStatistics and of the metrics.
#
# All durations are seconds.

OK = "OK"
DURATION_BOUNDS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
ROW_BOUNDS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0)


class Histogram:
    """A histogram.

    `counts[i]` counts the values at most `bounds[i]` and above the bound before; the last entry counts all greater
    values.
    """

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
    """The durations of the stages of batches or requests."""

    def __init__(self) -> None:
        self.input = Histogram()
        self.infer = Histogram()
        self.output = Histogram()


class Statistics:
    """Collects the statistics of a version.

    Lives on one event loop; other threads may read it.
    """

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
        self.shadowed: dict[str, int] = {}  # copies for a shadow, by status; SHED: not sent

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
        """Count an answered request, `total_s` after its message arrived.

        `model_s` is its time in the batcher, of which `input_s` and `infer_s` were preprocessing and compute; the rest
        was waiting and transfer.
        """
        self._ended(OK, total_s)
        self.recent.answered(now_s, total_s)
        self.rows += rows
        self.last_inference_s = now_s
        # Pieces of one request may be computed in parallel.
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
        min_s: float = 0.0,
        counts_against_version: bool = True,
    ) -> None:
        """Count a request that ended with another status, by name.

        `limit_s` is the time that it had, `min_s` the time that any version needs: a request with less is late by its
        own fault. `counts_against_version` is False if the version was not involved, because it had no replicas yet or
        this process had no memory.
        """
        self._ended(status, total_s)
        in_vain = status == LATE and limit_s is not None and limit_s < min_s
        if counts_against_version and not in_vain:
            self.recent.failed(now_s, status, max(total_s, limit_s or 0.0))

    def shadow_ended(self, status: str) -> None:
        """Count a copy of a request, which counts nowhere else."""
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
