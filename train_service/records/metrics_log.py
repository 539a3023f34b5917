"""The metrics of steps, as Parquet in the store.

    {job}/metrics/a{attempt:05d}-f{first_step:08d}-{from:08d}-{to:08d}.parquet

holds points of the steps `from` to `to`, by an attempt that began at `first_step`. An attempt rewrites its newest part
under a longer name until it is full, so that there are few objects however often it is flushed. A reader takes the
longest part for each `from`. Of every attempt only the points up to the start of a later one count, because the work
after that was lost with the attempt.

Each step of a run is thus read once, from the attempt whose work is in the weights.
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

from shared import names
from shared.errors import STORE_OUTAGES, Unavailable, invalid_field
from shared.storage import ObjectMissing, ObjectStore
from train_service.store_retry import store_call

# --- Metrics log ---

logger = logging.getLogger(__name__)

FLUSH_EVERY_S = 5.0
# Interval of retries after an outage, and at the end until everything is written.
RETRY_S = 1.0
# How long the end of a run waits for a store that does not answer.
END_TIMEOUT_S = 300.0
# Points of a part that is not written again. Encoding this many takes some milliseconds, which each checkpoint adds.
PART_POINTS = 1024
# Prefix of the value columns, because a metric may have any name.
VALUE = "values."


@dataclass(frozen=True)
class MetricPoint:
    """Values after `step` completed steps. `time` is in seconds since the epoch."""

    step: int
    epoch: int
    attempt: int
    time: float
    values: dict[str, float]


class MetricsLog:
    """Metrics of one attempt, which a thread writes every few seconds.

    Use it as a context: leaving it writes the remaining points. Neither an outage of the store nor a full store fails
    the run: the points wait in memory. If the run ends during an outage of more than `END_TIMEOUT_S`, some points are
    lost. A killed process loses its unwritten points, so the points of a checkpoint must be written before the
    checkpoint is committed.
    """

    def __init__(self, store: ObjectStore, job: str, attempt: int, first_step: int) -> None:
        """Prepare the log. `first_step` is the position that the attempt starts from."""
        self._store = store
        self._attempt = attempt
        self._prefix = f"{job}/metrics/a{attempt:05d}-f{first_step:08d}"
        self._lock = threading.Lock()
        # Held while a part is written, by our thread or by one that needs the points durable.
        self._writing = threading.Lock()
        self._points: list[MetricPoint] = []
        self._from = first_step
        # Key and number of points of the current part in the store.
        self._written = ("", -1)
        # Set initially, so that the start of this attempt is recorded as soon as the store answers.
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
        """Record the values after `step` steps. It never waits.

        Values for the same step are merged.
        """
        point = MetricPoint(
            step, epoch, self._attempt, time.time(), {name: float(value) for name, value in values.items()}
        )
        with self._lock:
            self._points.append(point)

    def flush(self) -> None:
        """Ask the thread to write all points now. It does not wait for that."""
        self._wanted.set()

    def write(self) -> None:
        """Write all points and return once they are in the store. Raises the store's errors; may be repeated."""
        with self._writing:
            self._write()

    def _run(self) -> None:
        give_up_at = 0.0
        while True:
            self._wanted.wait(FLUSH_EVERY_S)
            # Read before the points, so that all points from before the end are included.
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
        """Write the current part, and the next ones as long as there are points for them."""
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
            # The part is full: the next one begins with the next point.
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
# Retries if a part vanishes between listing and reading, because a longer one has replaced it.
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


# Digits of a step in a token, at most those of an int64.
MAX_DIGITS = 19


def metrics_page(
    store: ObjectStore, job: str, after_step: int, page_size: int, page_token: str
) -> tuple[list[MetricPoint], str]:
    """Return the points after `after_step` in the order of steps, and the token of the next page."""
    if after_step < 0:
        raise invalid_field("after_step", after_step, "use 0 or more")
    size = names.checked_size(page_size, DEFAULT_POINTS, MAX_POINTS)
    last_sent = names.key_of(page_token)
    if last_sent and not (last_sent.isdecimal() and len(last_sent) <= MAX_DIGITS):
        raise invalid_field("page_token", page_token, "send a next_page_token as it came, or none")
    points = _points(store, job, max(after_step, int(last_sent or 0)), size + 1)
    taken = points[:size]
    return taken, names.token_of(str(taken[-1].step)) if len(points) > size else ""


def _points(store: ObjectStore, job: str, after_step: int, wanted: int) -> list[MetricPoint]:
    for _ in range(TRIES):
        found: dict[int, MetricPoint] = {}
        try:
            for point in _counting(store, list_parts(store, job), after_step):
                before = found.get(point.step)
                if before is None and len(found) == wanted:
                    break
                # Training and validation both report the same step.
                found[point.step] = replace(point, values={**before.values, **point.values}) if before else point
        except ObjectMissing:
            continue
        return [found[step] for step in sorted(found)]
    raise Unavailable(f"the metrics of {job} are being written again and again; try again", retry_after_s=1.0)


def list_parts(store: ObjectStore, job: str) -> list[Part]:
    """Return the parts in the order of their points. For each beginning the longest."""
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


def _ends(parts: list[Part]) -> dict[int, int | None]:
    """Return the step up to which the points of each attempt count: the first start of a later one, if there is one."""
    first_steps: dict[int, int] = {}
    for part in parts:
        first_steps[part.attempt] = min(part.first_step, first_steps.get(part.attempt, part.first_step))
    ends: dict[int, int | None] = {}
    end: int | None = None
    for attempt in sorted(first_steps, reverse=True):
        ends[attempt] = end
        end = first_steps[attempt] if end is None else min(end, first_steps[attempt])
    return ends


def _counting(store: ObjectStore, parts: list[Part], after_step: int) -> Iterator[MetricPoint]:
    """Yield the points that count: those of each attempt up to the start of a later one."""
    ends = _ends(parts)
    for part in parts:
        end = ends[part.attempt]
        if part.last <= after_step or (end is not None and part.begin > end + 1):
            continue
        for point in decode(store.get(part.key), part.attempt):
            if point.step > after_step and (end is None or point.step <= end):
                yield point
