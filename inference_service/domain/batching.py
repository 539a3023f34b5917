"""When to send which waiting rows to the model, and what to refuse at once.

All times are seconds on one monotonic clock; `batch_s` is how long a full batch takes from here and back, 0 while
nobody knows. The rules, in order of weight: never run what comes too late, never exceed the model's share of batches in
flight, never let the model idle while rows wait, fill batches otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from shared.errors import DeadlineExceeded, ResourceExhausted, Unavailable

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
    """Rows that stay together in one batch, at most `max_rows`; only rows of one `form` share a batch."""

    rows: int
    form: str
    arrived_s: float
    deadline_s: float
    size_bytes: int = 0


@dataclass(frozen=True)
class Decision:
    """Positions in the queue: `late` is to be refused, `batch` to be sent now. `wake_s`: decide again then, if nothing
    happens before."""

    late: tuple[int, ...] = ()
    batch: tuple[int, ...] = ()
    wake_s: float | None = None


def pieces(rows: int, max_rows: int) -> list[tuple[int, int]]:
    """A request's rows as [start, stop) pieces that each fit a batch."""
    return [(start, min(start + max_rows, rows)) for start in range(0, rows, max_rows)]


def admit(
    rows: int,
    deadline_s: float,
    *,
    queued_rows: int,
    rows_ahead: int,
    in_flight: int,
    now_s: float,
    batch_s: float,
    bound_s: float,
    limits: Limits,
) -> None:
    """Raises `DeadlineExceeded` or `ResourceExhausted` if rows that come now cannot be served.

    `rows_ahead` are those of the rows in the queue that are as urgent, or more; hardly any batch takes longer than
    `bound_s`. Rows of several batches are answered after the last of these, so the others are ahead of it. What is
    refused here is refused at once, and what is let in should be answered: so this is the stricter of the two looks at
    a deadline.
    """
    per_batch_s = batch_s / limits.max_in_flight
    if queued_rows + rows > limits.max_queued_rows:
        full_batches = math.ceil(queued_rows / limits.max_rows)
        raise ResourceExhausted(
            f"{queued_rows} rows wait already and at most {limits.max_queued_rows} may",
            reason="QUEUE_FULL",
            metadata={"queued_rows": str(queued_rows), "max_queued_rows": str(limits.max_queued_rows)},
            retry_after_s=max(MIN_RETRY_AFTER_S, full_batches * per_batch_s / 2),
        )
    own_ahead = (rows - 1) // limits.max_rows * limits.max_rows
    wait_s = (rows_ahead + own_ahead) / limits.max_rows * per_batch_s
    if _hopeless(deadline_s, now_s + wait_s, in_flight, bound_s):
        raise too_late(deadline_s - now_s)


def decide(
    queue: Iterable[Waiting],
    *,
    in_flight: int,
    now_s: float,
    batch_s: float,
    limits: Limits,
    free_s: float = 0.0,
    company: int = 0,
    bound_s: float = 0.0,
) -> Decision:
    """What to do with the queue, the most urgent first and the older of two that are as urgent, now.

    `free_s` is when a batch should be on its way, so that it arrives as a replica becomes free; it gathers until then,
    however long its rows have waited. `company` are the rows that an idle replica's batch waits for, `max_delay_s` at
    most, and no longer than leaves `bound_s` to each of its rows. It looks no further than one batch, so its cost does
    not grow with the queue.
    """
    if in_flight >= limits.max_in_flight:
        return Decision()
    late: list[int] = []
    batch: list[int] = []
    rows, size_bytes, form, oldest_s, earliest_s, full = 0, 0, "", math.inf, math.inf, False
    for position, waiting in enumerate(queue):
        if _hopeless(waiting.deadline_s, now_s, in_flight, batch_s):
            late.append(position)
            continue
        if batch and (
            waiting.form != form
            or rows + waiting.rows > limits.max_rows
            or size_bytes + waiting.size_bytes > limits.max_bytes
        ):
            full = True
            break
        batch.append(position)
        rows, size_bytes, form = rows + waiting.rows, size_bytes + waiting.size_bytes, waiting.form
        oldest_s = min(oldest_s, waiting.arrived_s)
        earliest_s = min(earliest_s, waiting.deadline_s)
        full = rows >= limits.max_rows
        if full:
            break
    # An idle replica takes what there is, where no company is expected: waiting would only add to the latency. A busy
    # one would not take it any earlier.
    idle = in_flight < limits.at_work
    delayed_s = oldest_s + limits.max_delay_s
    due_s = min(delayed_s, earliest_s - bound_s) if idle else max(delayed_s, free_s)
    if batch and not full and not (idle and rows >= company) and due_s > now_s:
        return Decision(tuple(late), (), due_s)
    return Decision(tuple(late), tuple(batch), None)


def too_late(remaining_s: float, *, begun: bool = False) -> DeadlineExceeded:
    """`begun`: the model has seen some of the request's rows, which took several batches."""
    seen = "it saw a part of the request's rows; send fewer in one request" if begun else "it never saw the request"
    return DeadlineExceeded(
        f"the model cannot answer in the {max(remaining_s, 0) * 1000:.0f} ms that are left; {seen}",
        reason="DEADLINE_CANNOT_BE_MET",
    )


def draining(why: str) -> Unavailable:
    return Unavailable(why, reason="MODEL_DRAINING", retry_after_s=1.0)


def _hopeless(deadline_s: float, start_s: float, in_flight: int, batch_s: float) -> bool:
    # An idle model always tries: an estimate that is too high could otherwise never be put right.
    return start_s + (batch_s if in_flight else 0.0) >= deadline_s
