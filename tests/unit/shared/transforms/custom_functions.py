"""Functions of an operator's own, as `custom` calls them."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc


def doubled(rows: pa.RecordBatch) -> pa.RecordBatch:
    """Every column twice as large; tensors too."""
    columns = []
    for column in rows.columns:
        if isinstance(column, pa.ExtensionArray):
            lists = pa.FixedSizeListArray.from_arrays(
                pc.multiply(column.storage.flatten(), 2), type=column.type.storage_type
            )
            columns.append(pa.ExtensionArray.from_storage(column.type, lists))
        else:
            columns.append(pc.multiply(column, 2))
    return pa.RecordBatch.from_arrays(columns, rows.schema.names)


def halves_as_lists(rows: pa.RecordBatch) -> pa.RecordBatch:
    """One new column, of fixed-size lists."""
    halves = pc.divide(pc.cast(rows.column(0), pa.float64()), 2)
    return pa.RecordBatch.from_arrays([pa.FixedSizeListArray.from_arrays(halves, 1)], ["half"])


def named_age(rows: pa.RecordBatch) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([rows.column(0)], ["age"])


def named_with_zero(rows: pa.RecordBatch) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([rows.column(0)], ["x\0y"])


def named_at_length(rows: pa.RecordBatch) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([rows.column(0)], ["x" * 100_000])


def very_many(rows: pa.RecordBatch) -> pa.RecordBatch:
    names = [f"x{number}" for number in range(10_001)]
    return pa.RecordBatch.from_arrays([rows.column(0)] * len(names), names)


def one_row_less(rows: pa.RecordBatch) -> pa.RecordBatch:
    return rows.slice(1) if len(rows) else rows


def another_type(rows: pa.RecordBatch) -> pa.RecordBatch:
    kind = pa.int32() if len(rows) else pa.int64()
    return pa.RecordBatch.from_arrays([pc.cast(rows.column(0), kind)], rows.schema.names)


def no_batch(rows: pa.RecordBatch) -> Any:
    return rows.to_pydict()


def no_column(rows: pa.RecordBatch) -> pa.RecordBatch:
    return rows.select([])


def nested(rows: pa.RecordBatch) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.array([[1]] * len(rows), pa.list_(pa.int64()))], rows.schema.names)


def raising(rows: pa.RecordBatch) -> pa.RecordBatch:
    if len(rows):
        raise KeyError("no such thing")
    return rows


def stuck(rows: pa.RecordBatch) -> pa.RecordBatch:
    """Never ends, and swallows whatever it can."""
    while len(rows):
        try:
            threading.Event().wait(0.01)
        except Exception:
            continue
    return rows


def never_null(rows: pa.RecordBatch) -> pa.RecordBatch:
    """Say so of its column, whatever is in it."""
    return pa.RecordBatch.from_arrays(rows.columns, schema=pa.schema([rows.schema.field(0).with_nullable(False)]))


def slow(rows: pa.RecordBatch) -> pa.RecordBatch:
    if len(rows):
        deadline = time.monotonic() + 0.05
        while time.monotonic() < deadline:
            pass
    return rows


NOT_A_FUNCTION = 3


# Functions that no rows are enough to set off.


def chatty(rows: pa.RecordBatch) -> pa.RecordBatch:
    """Print, by whatever way, and leave a process behind that keeps its standard output."""
    print("S is no answer", flush=True)
    os.write(1, b"nor is this")
    subprocess.Popen(["sleep", "90"])
    return rows


def pid_as_name(rows: pa.RecordBatch) -> pa.RecordBatch:
    """Tell in which process it ran."""
    return pa.RecordBatch.from_arrays([rows.column(0)], [f"pid_{os.getpid()}"])


def always_raising(rows: pa.RecordBatch) -> pa.RecordBatch:  # noqa: ARG001
    raise KeyError("nothing at all")


def always_hanging(rows: pa.RecordBatch) -> pa.RecordBatch:  # noqa: ARG001
    while True:
        time.sleep(0.1)


def deaf(rows: pa.RecordBatch) -> pa.RecordBatch:
    """Hang as native code does, which no signal handler of Python's interrupts."""
    signal.signal(signal.SIGALRM, signal.SIG_IGN)
    return always_hanging(rows)


def always_crashing(rows: pa.RecordBatch) -> pa.RecordBatch:
    os.kill(os.getpid(), signal.SIGSEGV)
    return always_hanging(rows)


def leaving(rows: pa.RecordBatch) -> pa.RecordBatch:  # noqa: ARG001
    os._exit(3)
