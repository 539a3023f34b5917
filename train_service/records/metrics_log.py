"""The metrics of steps, as Parquet in the store.

    {job}/metrics/a{attempt:05d}-f{first_step:08d}-{from:08d}-{to:08d}.parquet

holds points of the steps `from` to `to`, by an attempt that began at `first_step`. An attempt writes its newest part
again, under a longer name, until it is full: so there are few objects however often it is flushed. A reader takes the
longest part of each beginning. Of every attempt only the points up to where a later one began count: what came behind
was lost with it.

Of a run each step is read once, by the attempt whose work is in the weights.
"""

from __future__ import annotations

import io
import logging
import re
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import pyarrow as pa
import pyarrow.parquet as pq

from shared import paging
from shared.errors import STORE_OUTAGES, Unavailable, invalid_field
from shared.storage import ObjectMissing, ObjectStore
from train_service.store_retry import store_call

# --- Metrics log ---

logger = logging.getLogger(__name__)

FLUSH_EVERY_S = 5.0
# After an outage, and at the end so often until it is written.
RETRY_S = 1.0
# How long the end of a run waits for a store that does not answer.
END_TIMEOUT_S = 300.0
# Points of a part that is not written again. To encode so many takes some milliseconds, which each checkpoint adds.
PART_POINTS = 1024
# The columns of values have this before their metric's name, for a metric may be named as it likes.
VALUE = "values."


@dataclass(frozen=True)
class MetricPoint:
    """`step` counts the steps done; `time` is in seconds since the epoch."""

    step: int
    epoch: int
    attempt: int
    time: float
    values: dict[str, float]


class MetricsLog:
    """Points of one attempt, written by a thread every few seconds. Use as a context: leaving it writes what is left.

    Neither an outage of the store nor a full one fails the run: the points wait in memory. An end during an outage of
    more than `END_TIMEOUT_S` loses some, a process that is killed those that were not written: so who commits a
    checkpoint writes before what is in it.
    """

    def __init__(self, store: ObjectStore, job: str, attempt: int, first_step: int) -> None:
        """`first_step` is the position that the attempt starts from."""
        self._store = store
        self._attempt = attempt
        self._prefix = f"{job}/metrics/a{attempt:05d}-f{first_step:08d}"
        self._lock = threading.Lock()
        # Held while a part is written: by our thread, or by one that wants the points durable.
        self._writing = threading.Lock()
        self._points: list[MetricPoint] = []
        self._from = first_step
        # What the part at work is in the store: its key and number of points.
        self._written = ("", -1)
        # Set before anything happened: where this attempt begins is known as soon as the store answers.
        self._wanted = threading.Event()
        self._wanted.set()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)

    def __enter__(self) -> MetricsLog:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._wanted.set()
        with store_call():
            self._thread.join()

    def add(self, step: int, epoch: int, values: Mapping[str, float]) -> None:
        """Notes the values after `step` steps; again for the same step, they are put together. It never waits."""
        point = MetricPoint(step, epoch, self._attempt, time.time(), {name: float(one) for name, one in values.items()})
        with self._lock:
            self._points.append(point)

    def flush(self) -> None:
        """Asks the thread to write now what there is. It does not wait for it."""
        self._wanted.set()

    def write(self) -> None:
        """Returns once all that was added before is in the store. Raises what the store does; may be repeated."""
        with self._writing:
            self._write()

    def _run(self) -> None:
        give_up_at = 0.0
        while True:
            self._wanted.wait(FLUSH_EVERY_S)
            # Read before the points: what was added before the end is among them.
            ended = self._ended.is_set()
            self._wanted.clear()
            try:
                self.write()
            except STORE_OUTAGES as error:
                give_up_at = give_up_at or time.monotonic() + END_TIMEOUT_S
                if ended and time.monotonic() > give_up_at:
                    logger.error("%s; %d points of metrics are lost", error.message, len(self._points))
                    return
                logger.warning("%s; %d points of metrics wait to be written", error.message, len(self._points))
                self._wanted.set()
                if ended:
                    time.sleep(RETRY_S)
                else:
                    self._ended.wait(RETRY_S)
                continue
            except Exception:
                logger.exception("metrics cannot be written")
                return
            give_up_at = 0.0
            if ended:
                return

    def _write(self) -> None:
        """Writes the part at work, and the next ones as long as there are points for them."""
        while True:
            with self._lock:
                points, more = self._points[:PART_POINTS], len(self._points) > PART_POINTS
            last = max((point.step for point in points), default=self._from)
            key, before = f"{self._prefix}-{self._from:08d}-{last:08d}.parquet", self._written
            if (key, len(points)) != before:
                self._store.put(key, encode(points))
                self._written = (key, len(points))
                if before[0] not in ("", key):
                    self._store.delete(before[0])
            if len(points) < PART_POINTS:
                return
            # Full: the next part begins with the next point.
            with self._lock:
                del self._points[:PART_POINTS]
            self._from, self._written = last + 1, ("", -1)
            if not more:
                return


def encode(points: list[MetricPoint]) -> bytes:
    names = sorted({name for point in points for name in point.values})
    columns = {
        "step": pa.array([point.step for point in points], pa.int64()),
        "epoch": pa.array([point.epoch for point in points], pa.int32()),
        "time": pa.array([point.time for point in points], pa.float64()),
        **{VALUE + name: pa.array([one.values.get(name) for one in points], pa.float64()) for name in names},
    }
    sink = io.BytesIO()
    pq.write_table(pa.table(columns), sink, compression="zstd")
    return sink.getvalue()


def decode(data: bytes, attempt: int) -> list[MetricPoint]:
    table = pq.read_table(pa.BufferReader(data))
    columns = {
        name.removeprefix(VALUE): table.column(name).to_pylist()
        for name in table.column_names
        if name.startswith(VALUE)
    }
    steps, epochs, times = (table.column(name).to_pylist() for name in ("step", "epoch", "time"))
    return [
        MetricPoint(
            step,
            epochs[row],
            attempt,
            times[row],
            {name: values[row] for name, values in columns.items() if values[row] is not None},
        )
        for row, step in enumerate(steps)
    ]


# --- Reading metrics ---

DEFAULT_POINTS, MAX_POINTS = 1000, 10_000
# How often a part may vanish between listing and reading, because a longer one has taken its place.
TRIES = 5

_NAME = re.compile(r"a(\d+)-f(\d+)-(\d+)-(\d+)\.parquet")


@dataclass(frozen=True)
class Part:
    """An object with points of the steps up to `last`, by an attempt that began at `first_step`."""

    key: str
    attempt: int
    first_step: int
    begin: int
    last: int


# Of a step, in a token: as many as an int64 has at most.
MAX_DIGITS = 19


def metrics_page(
    store: ObjectStore, job: str, after_step: int, page_size: int, page_token: str
) -> tuple[list[MetricPoint], str]:
    """The points behind `after_step` in the order of steps, and the token of the next page."""
    if after_step < 0:
        raise invalid_field("after_step", after_step, "use 0 or more")
    size = paging.checked_size(page_size, DEFAULT_POINTS, MAX_POINTS)
    last_sent = paging.key_of(page_token)
    if last_sent and not (last_sent.isdecimal() and len(last_sent) <= MAX_DIGITS):
        raise invalid_field("page_token", page_token, "send a next_page_token as it came, or none")
    points = _points(store, job, max(after_step, int(last_sent or 0)), size + 1)
    taken = points[:size]
    return taken, paging.token_of(str(taken[-1].step)) if len(points) > size else ""


def _points(store: ObjectStore, job: str, after_step: int, wanted: int) -> list[MetricPoint]:
    for _ in range(TRIES):
        found: dict[int, MetricPoint] = {}
        try:
            for point in _counting(store, list_parts(store, job), after_step):
                before = found.get(point.step)
                if before is None and len(found) == wanted:
                    break
                # Training and validation tell of the same step.
                found[point.step] = replace(point, values={**before.values, **point.values}) if before else point
        except ObjectMissing:
            continue
        return [found[step] for step in sorted(found)]
    raise Unavailable(f"the metrics of {job} are being written again and again; try again", retry_after_s=1.0)


def list_parts(store: ObjectStore, job: str) -> list[Part]:
    """In the order of their points; of each beginning the longest."""
    longest: dict[tuple[int, int], Part] = {}
    for info in store.list(f"{job}/metrics"):
        matched = _NAME.fullmatch(info.key.rpartition("/")[2])
        if matched is None:
            continue
        attempt, first_step, begin, last = map(int, matched.groups())
        part = Part(info.key, attempt, first_step, begin, last)
        there = longest.get((attempt, begin))
        if there is None or part.last > there.last:
            longest[attempt, begin] = part
    return [longest[place] for place in sorted(longest)]


def _counting(store: ObjectStore, parts: list[Part], after_step: int) -> Iterator[MetricPoint]:
    """Attempts count up to where a later one began, so that their points follow one another."""
    for part in parts:
        end = min((one.first_step for one in parts if one.attempt > part.attempt), default=None)
        if part.last <= after_step or (end is not None and part.begin > end + 1):
            continue
        for point in decode(store.get(part.key), part.attempt):
            if point.step > after_step and (end is None or point.step <= end):
                yield point
