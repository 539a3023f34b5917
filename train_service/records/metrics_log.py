"""The metrics of steps, as Parquet in the store.

    {job}/metrics/a{attempt:05d}-f{first_step:08d}-{from:08d}-{to:08d}.parquet

holds points of the steps `from` to `to`, by an attempt that began at `first_step`. An attempt writes its newest part
again, under a longer name, until it is full: so there are few objects however often it is flushed. A reader takes the
longest part of each beginning. Of every attempt only the points up to where a later one began count: what came behind
was lost with it.
"""

from __future__ import annotations

import io
import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.parquet as pq

from shared.errors import STORE_OUTAGES
from shared.storage import ObjectStore
from train_service.patience import store_call

logger = logging.getLogger(__name__)

FLUSH_EVERY_S = 5.0
# After an outage, and at the end so often until it is written.
RETRY_S = 1.0
# How long the end of a run waits for a store that does not answer.
END_PATIENCE_S = 300.0
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
    more than `END_PATIENCE_S` loses some, a process that is killed those that were not written: so who commits a
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
                give_up_at = give_up_at or time.monotonic() + END_PATIENCE_S
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
