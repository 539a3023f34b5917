"""When to send which waiting rows to the model, and what to refuse at once: by how long batches take, and by the
load.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from shared.errors import DeadlineExceeded, ResourceExhausted, Unavailable

# --- Load ---
# What a model has to do: how many rows wait or are at work, and how many it had to refuse.


@dataclass(frozen=True)
class Load:
    """Over some seconds: the mean of the rows that waited or were at work, and those refused for want of capacity."""

    rows: float
    refused: int


class LoadMeter:
    """Exact means over the time between two readings, however short the peaks. Times are seconds on one clock."""

    def __init__(self, now_s: float) -> None:
        self._rows = self._refused = 0
        self._row_seconds = 0.0
        self._since_s = self._read_s = now_s

    def add(self, rows: int, now_s: float) -> None:
        """So many more; fewer, where it is negative."""
        self._row_seconds += self._rows * (now_s - self._since_s)
        self._since_s = now_s
        self._rows += rows

    def refuse(self, rows: int) -> None:
        self._refused += rows

    def read(self, now_s: float) -> Load:
        """Since the last reading; what is now, where no time has passed."""
        self.add(0, now_s)
        passed_s = now_s - self._read_s
        load = Load(self._row_seconds / passed_s if passed_s > 0 else float(self._rows), self._refused)
        self._row_seconds, self._refused, self._read_s = 0.0, 0, now_s
        return load


# --- Batch times ---
# How long a batch takes, learned from those that came back.

# Of the newest batch in the moving averages: of the way, and of the deviation; of what computing takes, by how much all
# sizes are slower than they were, and by how much this size is.
WEIGHT = 0.2
# The deviation falls more slowly than it rises, so that a spell in which all take the same is not trusted too soon; and
# what it is at first, before anybody knows.
CALMING_WEIGHT, FIRST_DEVIATION = 0.05, 0.25
PACE_WEIGHT, SHAPE_WEIGHT = 0.15, 0.05
# Of the newest pace in the usual one, which passing spells are to change little.
USUAL_WEIGHT = 0.02
# Of the mean deviation, as in TCP's estimate of a round trip (Jacobson, 1988), which takes 4.
DEVIATIONS = 3.0
# A batch that took many times as long as expected tells of a hiccup, not of what batches take.
MAX_DEVIATION = 1.0


class BatchTimes:
    """A batch takes its way to the model and back, with any wait there for the one before it, which is thought to be
    the same for all sizes; and what the model computes, by size in buckets of powers of two.

    What makes one size slower, such as a busy machine, makes most others so. Hence sizes share a pace beside what each
    is seen to take, and the deviation; and none is thought to take longer than a larger one. What is refused because of
    an estimate never runs, so it could not put that estimate right by itself: others do.
    """

    def __init__(self, measured_s: Mapping[int, float] | None = None) -> None:
        """`measured_s`: rows → seconds of computing, from the replica's warm-up."""
        self._shape_s = {bucket(rows): seconds for rows, seconds in (measured_s or {}).items()}
        self._pace = self._usual_pace = 1.0
        self._way_s: float | None = None
        self._deviation = FIRST_DEVIATION  # relative to what was expected

    def observe(self, rows: int, seconds: float, computed_s: float | None = None) -> None:
        """Of a batch that was back after `seconds`, of which the model computed for `computed_s`: by default all."""
        key = bucket(rows)
        computed_s = seconds if computed_s is None else min(computed_s, seconds)
        way_s = seconds - computed_s
        if self._way_s is None:
            self._way_s = way_s
        if key not in self._shape_s:
            self._shape_s[key] = computed_s / self._pace
        before_s = self._way_s + self._shape_s[key] * self._pace
        deviation = min(abs(seconds - before_s) / before_s, MAX_DEVIATION) if before_s else 0.0
        weight = WEIGHT if deviation > self._deviation else CALMING_WEIGHT
        self._deviation += weight * (deviation - self._deviation)
        # The largest size has no larger one to put it right: one hiccup must not make it look too slow to be tried.
        max_s = before_s * (1 + MAX_DEVIATION)
        self._way_s += WEIGHT * (min(way_s, max_s) - self._way_s)
        expected_s = self._shape_s[key] * self._pace
        if expected_s:
            change = min(computed_s / expected_s - 1, MAX_DEVIATION)
            # Both in one ratio, whatever the changes are: of two averages that follow a product each by itself, one
            # would rise for ever and the other fall.
            self._pace *= math.exp(PACE_WEIGHT * change)
            self._usual_pace += USUAL_WEIGHT * (self._pace - self._usual_pace)
            self._shape_s[key] *= math.exp(SHAPE_WEIGHT * change)

    def expected_s(self, rows: int) -> float:
        """What a batch of so many rows takes from here and back. 0 while nothing is known."""
        return self.computing_s(rows) + (self._way_s or 0.0)

    def computing_s(self, rows: int) -> float:
        """What the model computes for; where that size was never seen, what the next smaller one known takes, so that
        the estimate is rather too low."""
        wanted = bucket(rows)
        if wanted not in self._shape_s:
            wanted = max((size for size in self._shape_s if size < wanted), default=0)
        shape_s = min((seconds for size, seconds in self._shape_s.items() if size >= wanted > 0), default=0.0)
        return shape_s * self._pace

    def usually_s(self, rows: int) -> float:
        """What the model computes for apart from spells in which all batches are faster or slower."""
        return self.computing_s(rows) / self._pace * self._usual_pace

    def at_most_s(self, seconds: float, deviations: float = DEVIATIONS) -> float:
        """What is expected to take so long, with so many mean deviations more."""
        return seconds * (1 + deviations * self._deviation)

    def bound_s(self, rows: int) -> float:
        """What hardly any batch of so many rows takes longer than, from here and back."""
        return self.at_most_s(self.expected_s(rows))


def bucket(rows: int) -> int:
    """The power of two at or above `rows`."""
    return 1 << (rows - 1).bit_length()


def buckets(max_rows: int) -> list[int]:
    """Batch sizes to warm: the powers of two below `max_rows`, and `max_rows` itself."""
    return [*(1 << power for power in range((max_rows - 1).bit_length())), max_rows]


# --- Policy ---
# When to send which waiting rows to the model, and what to refuse at once.
#
# All times are seconds on one monotonic clock; `batch_s` is how long a full batch takes from here and back, 0 while
# nobody knows. The rules, in order of weight: never run what comes too late, never exceed the model's share of batches
# in flight, never let the model idle while rows wait, fill batches otherwise.

MIN_RETRY_AFTER_S = 0.01
# Of a batch that several requests share: on its way to a replica there are two more copies of it.
MAX_BATCH_BYTES = 256 * 1024 * 1024


@dataclass(frozen=True, kw_only=True)
class Limits:
    """`max_in_flight` counts batches: one at work in each replica and one on its way there. `max_bytes`
    bounds what is added to a batch, not its first rows."""

    max_rows: int
    max_delay_s: float
    max_queued_rows: int
    max_in_flight: int
    max_bytes: int = MAX_BATCH_BYTES

    @property
    def at_work(self) -> int:
        """So many batches in flight leave no replica idle."""
        return (self.max_in_flight + 1) // 2


@dataclass(frozen=True)
class Waiting:
    """Rows of one request. They stay together in one batch, unless they are `divisible`: then some may go, and the
    others wait on. Only rows of one `form` share a batch."""

    rows: int
    form: str
    arrived_s: float
    deadline_s: float
    size_bytes: int = 0
    divisible: bool = False


@dataclass(frozen=True)
class Decision:
    """Positions in the queue: `late` is to be refused, `batch` to be sent now, with so many rows of each. `wake_s`:
    decide again then, if nothing happens before."""

    late: tuple[int, ...] = ()
    batch: Mapping[int, int] = field(default_factory=dict)
    wake_s: float | None = None


def pieces(rows: int, max_rows: int) -> list[tuple[int, int]]:
    """A request's rows as [start, stop) pieces that each fit a batch."""
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
    """Raises `DeadlineExceeded` or `ResourceExhausted` if rows that come now cannot be served.

    `ends_s` is when their answers should have arrived, `drained_s` how long the queue takes. What is refused here is
    refused at once, and what is let in should be answered: so this is the stricter of the two looks at a deadline.
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
    """When a replica is expected to begin the batch that has so many others ahead of it in the queue, each of which
    takes so long; `frees_s` is when each replica is expected to be free, the soonest first."""
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
    """What to do now with the queue: rows of one form, the most urgent first and the older of two that are as urgent.

    A batch that is sent now is expected to be answered at `ends_s`. `due_s` is when one should be on its way, so that
    it arrives as a replica becomes free, and `full_due_s` the same of a full one. It gathers until then, however long
    its rows have waited: in front of a busy replica nobody looks at deadlines again, nor would more urgent rows pass
    it. `min_rows_to_send` are the rows that an idle replica's batch waits for, `max_delay_s` at most, and no longer
    than leaves `bound_s` to each of its rows. It looks no further than one batch, so its cost does not grow with the
    queue.
    """
    if in_flight >= limits.max_in_flight:
        return Decision()
    late: list[int] = []
    batch: dict[int, int] = {}
    rows, size_bytes, oldest_s, earliest_s, full = 0, 0.0, math.inf, math.inf, False
    # An idle model always tries: an estimate that is too high could otherwise never be put right.
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
    # An idle replica takes what there is, where no company is expected: waiting would only add to the latency. A busy
    # one would not take it any earlier.
    delayed_s = oldest_s + limits.max_delay_s
    if in_flight >= limits.at_work:
        at_s = full_due_s if full else max(delayed_s, due_s)
    else:
        at_s = now_s if full or rows >= min_rows_to_send else min(delayed_s, earliest_s - bound_s)
    if batch and at_s > now_s:
        return Decision(tuple(late), {}, at_s)
    return Decision(tuple(late), batch, None)


def too_late(remaining_s: float, *, begun: bool = False) -> DeadlineExceeded:
    """`begun`: the model has seen some of the request's rows, which took several batches."""
    seen = "it saw a part of the request's rows; send fewer in one request" if begun else "it never saw the request"
    return DeadlineExceeded(
        f"the model cannot answer in the {max(remaining_s, 0) * 1000:.0f} ms that are left; {seen}",
        reason="DEADLINE_CANNOT_BE_MET",
    )


def draining(why: str) -> Unavailable:
    return Unavailable(why, reason="MODEL_DRAINING", retry_after_s=1.0)


def _that_fit(waiting: Waiting, rows: int, size_bytes: float) -> int:
    """How many of these rows go into a batch that has room for so many more."""
    if not waiting.divisible:
        return waiting.rows if waiting.rows <= rows and waiting.size_bytes <= size_bytes else 0
    if size_bytes < waiting.size_bytes:
        rows = min(rows, math.floor(max(size_bytes, 0.0) * waiting.rows / waiting.size_bytes))
    return min(rows, waiting.rows)
