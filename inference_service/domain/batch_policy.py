"""The batching policy: when to send which waiting rows to the model, and what to refuse at once.

It decides by the time that batches take, and by the load.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from shared.errors import DeadlineExceeded, ResourceExhausted, Unavailable

# --- Load ---
# The load of a model: the rows that wait or are being computed, and the rows that were refused.


@dataclass(frozen=True)
class Load:
    """The load over some seconds.

    `rows` is the mean number of rows that waited or were being computed, `refused` the number of rows that were refused
    for lack of capacity.
    """

    rows: float
    refused: int


class LoadMeter:
    """Measures exact means between two readings, however short the peaks.

    Times are seconds on one clock.
    """

    def __init__(self, now_s: float) -> None:
        self._rows = self._refused = 0
        self._row_seconds = 0.0
        self._since_s = self._read_s = now_s

    def add(self, rows: int, now_s: float) -> None:
        """Add `rows`; a negative number removes rows."""
        self._row_seconds += self._rows * (now_s - self._since_s)
        self._since_s = now_s
        self._rows += rows

    def refuse(self, rows: int) -> None:
        self._refused += rows

    def read(self, now_s: float) -> Load:
        """Return the load since the last reading.

        If no time has passed, returns the present number of rows.
        """
        self.add(0, now_s)
        passed_s = now_s - self._read_s
        load = Load(self._row_seconds / passed_s if passed_s > 0 else float(self._rows), self._refused)
        self._row_seconds, self._refused, self._read_s = 0.0, 0, now_s
        return load


# --- Batch times ---
# Estimates how long a batch takes, from the batches that came back.

# The weights of the newest batch in the moving averages. WEIGHT: the transfer time and a rising deviation. PACE_WEIGHT:
# the pace that all sizes share. SHAPE_WEIGHT: the compute time of one size.
WEIGHT = 0.2
# CALMING_WEIGHT: the deviation falls more slowly than it rises, so that a quiet spell is not trusted too soon.
# FIRST_DEVIATION: its initial value.
CALMING_WEIGHT, FIRST_DEVIATION = 0.05, 0.25
PACE_WEIGHT, SHAPE_WEIGHT = 0.15, 0.05
# The weight of the newest pace in the usual pace, which short spells should hardly change.
USUAL_WEIGHT = 0.02
# The mean deviations in an upper bound. TCP's estimate of a round trip (Jacobson, 1988) takes 4.
DEVIATIONS = 3.0
# The largest relative deviation that is learned: a batch that took many times as long as expected was a hiccup.
MAX_DEVIATION = 1.0


class BatchTimes:
    """Estimates the time of a batch: transfer time plus compute time.

    The transfer, there and back, includes the wait for the batch before and is assumed to be the same for all sizes.
    The compute time is kept by size, in buckets of powers of two.

    A cause that slows one size, such as a busy machine, slows most others. So all sizes share a pace and a deviation,
    and no size is assumed to take longer than a larger one. A refused batch never runs, so it cannot correct its own
    estimate: other sizes do.
    """

    def __init__(self, measured_s: Mapping[int, float] | None = None) -> None:
        """`measured_s` maps rows → seconds of compute time, from the replica's warm-up."""
        self._shape_s = {bucket(rows): seconds for rows, seconds in (measured_s or {}).items()}
        # What `_shape_of` returned since the last batch. Each admission asks several times.
        self._shape_of_s: dict[int, float] = {}
        self._pace = self._usual_pace = 1.0
        self._transfer_s: float | None = None
        self._deviation = FIRST_DEVIATION  # relative to the expected time

    def observe(self, rows: int, seconds: float, computed_s: float | None = None) -> None:
        """Learn from a batch that returned after `seconds`.

        `computed_s` is its compute time, by default all of it.
        """
        key = bucket(rows)
        self._shape_of_s.clear()
        computed_s = seconds if computed_s is None else min(computed_s, seconds)
        transfer_s = seconds - computed_s
        if self._transfer_s is None:
            self._transfer_s = transfer_s
        if key not in self._shape_s:
            self._shape_s[key] = computed_s / self._pace
        before_s = self._transfer_s + self._shape_s[key] * self._pace
        deviation = min(abs(seconds - before_s) / before_s, MAX_DEVIATION) if before_s else 0.0
        weight = WEIGHT if deviation > self._deviation else CALMING_WEIGHT
        self._deviation += weight * (deviation - self._deviation)
        # No larger size can correct the largest one, so a single hiccup must not make it look too slow to try.
        max_s = before_s * (1 + MAX_DEVIATION)
        self._transfer_s += WEIGHT * (min(transfer_s, max_s) - self._transfer_s)
        expected_s = self._shape_s[key] * self._pace
        if expected_s:
            change = min(computed_s / expected_s - 1, MAX_DEVIATION)
            # Both factors change by one ratio. If each followed the product by itself, one could rise for ever while
            # the other falls.
            self._pace *= math.exp(PACE_WEIGHT * change)
            self._usual_pace += USUAL_WEIGHT * (self._pace - self._usual_pace)
            self._shape_s[key] *= math.exp(SHAPE_WEIGHT * change)

    def expected_s(self, rows: int) -> float:
        """Return the expected round trip of a batch, in seconds; 0 without measurements."""
        return self.computing_s(rows) + (self._transfer_s or 0.0)

    def computing_s(self, rows: int) -> float:
        """Return the expected compute time in seconds.

        A size without measurements gets the time of the next smaller one, so the estimate is rather too low.
        """
        wanted = bucket(rows)
        shape_s = self._shape_of_s.get(wanted)
        if shape_s is None:
            shape_s = self._shape_of_s[wanted] = self._shape_of(wanted)
        return shape_s * self._pace

    def _shape_of(self, wanted: int) -> float:
        if wanted not in self._shape_s:
            wanted = max((size for size in self._shape_s if size < wanted), default=0)
        return min((seconds for size, seconds in self._shape_s.items() if size >= wanted > 0), default=0.0)

    def typical_compute_s(self, rows: int) -> float:
        """Return the compute time at the usual pace, which ignores short spells."""
        return self.computing_s(rows) / self._pace * self._usual_pace

    def at_most_s(self, seconds: float, deviations: float = DEVIATIONS) -> float:
        """Return `seconds` plus `deviations` mean deviations."""
        return seconds * (1 + deviations * self._deviation)

    def bound_s(self, rows: int) -> float:
        """Return an upper bound of the round trip, which hardly any batch exceeds."""
        return self.at_most_s(self.expected_s(rows))


def bucket(rows: int) -> int:
    """Return the power of two at or above `rows`."""
    return 1 << (rows - 1).bit_length()


def buckets(max_rows: int) -> list[int]:
    """Return the batch sizes to warm up: powers of two below `max_rows`, and `max_rows`."""
    return [*(1 << power for power in range((max_rows - 1).bit_length())), max_rows]


# --- Policy ---
# All times are seconds on one monotonic clock. The rules, by priority: never run rows that would be late, never exceed
# the limit of batches in flight, never let the model idle while rows wait, and otherwise fill batches.

MIN_RETRY_AFTER_S = 0.01
# The limit of a batch that several requests share: two more copies of it exist on its way to a replica.
MAX_BATCH_BYTES = 256 * 1024 * 1024


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The limits of a batcher.

    `max_in_flight` counts batches: one computing in each replica and one in transit to it. `max_bytes` limits what is
    added to a batch, not its first rows.
    """

    max_rows: int
    max_delay_s: float
    max_queued_rows: int
    max_in_flight: int
    max_bytes: int = MAX_BATCH_BYTES

    @property
    def replicas(self) -> int:
        """The number of replicas. As many batches in flight keep each of them busy."""
        return (self.max_in_flight + 1) // 2


@dataclass(frozen=True)
class Waiting:
    """The waiting rows of one request.

    They stay together in one batch, unless they are `divisible`: then some may be sent while the others wait. Only rows
    of one `form` share a batch.
    """

    rows: int
    form: str
    arrived_s: float
    deadline_s: float
    size_bytes: int = 0
    divisible: bool = False


@dataclass(frozen=True)
class Decision:
    """A decision about the queue; positions are indices in the queue.

    The rows at `late` are refused. `batch` is sent now, with the given number of rows from each position. At `wake_s`
    the policy must decide again, if nothing happens before.
    """

    late: tuple[int, ...] = ()
    batch: Mapping[int, int] = field(default_factory=dict)
    wake_s: float | None = None


def pieces(rows: int, max_rows: int) -> list[tuple[int, int]]:
    """Split a request's rows into [start, stop) pieces that each fit a batch."""
    return [(start, min(start + max_rows, rows)) for start in range(0, rows, max_rows)]


def admit(
    rows: int,
    deadline_s: float,
    *,
    queued_rows: int,
    now_s: float,
    ends_s: float,
    drained_s: float,
    limits: Limits,
) -> None:
    """Raise `DeadlineExceeded` or `ResourceExhausted` if new rows cannot be served.

    `ends_s` is when their answers should arrive, `drained_s` the time that the queue takes. Admission is stricter than
    `decide`: a refusal here comes at once, and admitted rows should be answered.
    """
    if queued_rows + rows > limits.max_queued_rows:
        raise ResourceExhausted(
            f"{queued_rows} rows wait already and at most {limits.max_queued_rows} may",
            reason="QUEUE_FULL",
            metadata={"queued_rows": str(queued_rows), "max_queued_rows": str(limits.max_queued_rows)},
            retry_after_s=max(MIN_RETRY_AFTER_S, drained_s / 2),
        )
    if ends_s >= deadline_s:
        raise too_late(deadline_s - now_s)


def starts_s(frees_s: Sequence[float], batches_ahead: int, full_batch_s: float) -> float:
    """Return when a replica is expected to begin the batch behind `batches_ahead` others.

    Each of these takes `full_batch_s`. `frees_s` is when each replica is expected to be free, the earliest first.
    """
    rounds, place = divmod(batches_ahead, len(frees_s))
    return frees_s[place] + rounds * full_batch_s


def decide(
    queue: Iterable[Waiting],
    *,
    in_flight: int,
    now_s: float,
    ends_s: float,
    limits: Limits,
    due_s: float = 0.0,
    full_due_s: float = 0.0,
    min_rows_to_send: int = 0,
    bound_s: float = 0.0,
) -> Decision:
    """Decide what to do now with the queue.

    The queue has rows of one form, by priority, then by arrival.

    A batch that is sent now is expected to be answered at `ends_s`. `due_s` is when a batch should be sent so that it
    arrives as a replica becomes free; `full_due_s` is the same for a full batch. A batch gathers rows until then,
    however long they have waited: once it is sent, its deadlines are not checked again, and more urgent rows cannot
    overtake it.

    An idle replica's batch waits for `min_rows_to_send` rows, but at most `max_delay_s`, and no longer than leaves
    `bound_s` to each of its rows. The decision reads at most one batch, so its cost does not grow with the queue.
    """
    if in_flight >= limits.max_in_flight:
        return Decision()
    late: list[int] = []
    batch: dict[int, int] = {}
    rows, size_bytes, oldest_s, earliest_s, full = 0, 0.0, math.inf, math.inf, False
    # An idle model always tries. Otherwise an estimate that is too high could never be corrected.
    soonest_s = ends_s if in_flight else now_s
    for position, waiting in enumerate(queue):
        if soonest_s >= waiting.deadline_s:
            late.append(position)
            continue
        taken = _that_fit(waiting, limits.max_rows - rows, limits.max_bytes - size_bytes if batch else math.inf)
        if not taken:
            full = True
            break
        batch[position] = taken
        rows, size_bytes = rows + taken, size_bytes + waiting.size_bytes * taken / waiting.rows
        oldest_s = min(oldest_s, waiting.arrived_s)
        earliest_s = min(earliest_s, waiting.deadline_s)
        full = rows >= limits.max_rows or taken < waiting.rows
        if full:
            break
    # An idle replica takes the waiting rows at once if no more are expected: waiting would only add latency. A busy one
    # could not take them any earlier.
    delayed_s = oldest_s + limits.max_delay_s
    if in_flight >= limits.replicas:
        at_s = full_due_s if full else max(delayed_s, due_s)
    else:
        at_s = now_s if full or rows >= min_rows_to_send else min(delayed_s, earliest_s - bound_s)
    if batch and at_s > now_s:
        return Decision(tuple(late), {}, at_s)
    return Decision(tuple(late), batch, None)


def too_late(remaining_s: float, *, begun: bool = False) -> DeadlineExceeded:
    """Return the error for rows that would be answered too late.

    `begun`: the model has seen some of the request's rows, which took several batches.
    """
    seen = "it saw a part of the request's rows; send fewer in one request" if begun else "it never saw the request"
    return DeadlineExceeded(
        f"the model cannot answer in the {max(remaining_s, 0) * 1000:.0f} ms that are left; {seen}",
        reason="DEADLINE_CANNOT_BE_MET",
    )


def draining(why: str) -> Unavailable:
    return Unavailable(why, reason="MODEL_DRAINING", retry_after_s=1.0)


def _that_fit(waiting: Waiting, rows: int, size_bytes: float) -> int:
    """Return how many of these rows fit a batch with this capacity left."""
    if not waiting.divisible:
        return waiting.rows if waiting.rows <= rows and waiting.size_bytes <= size_bytes else 0
    if size_bytes < waiting.size_bytes:
        rows = min(rows, math.floor(max(size_bytes, 0.0) * waiting.rows / waiting.size_bytes))
    return min(rows, waiting.rows)
