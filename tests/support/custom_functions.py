"""Functions for custom transform steps, as operators write them: one that waits to be let on, and poisonous ones.

None does anything to no rows, with which the service asks what columns they make.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

MODULE = __name__
# The folder of the gate, for all that run below it: heads, services and their workers.
GATE_VARIABLE = "MILLRACE_TEST_GATE"
POISON = 13
# The label of a row that comes after all others.
LAST = 10


def gated(rows: pa.RecordBatch) -> pa.RecordBatch:
    """Leave its process's id in the gate's folder, and wait until the test makes the file `open` there; rows without
    the `LAST` one go on with `ajar`, too."""
    if len(rows):
        gate = Path(os.environ[GATE_VARIABLE])
        is_last = _has(rows, LAST)
        (gate / f"{'last' if is_last else 'begun'}-{os.getpid()}").touch()
        while not (gate / "open").exists() and (is_last or not (gate / "ajar").exists()):
            time.sleep(0.02)
    return rows


def slow(rows: pa.RecordBatch) -> pa.RecordBatch:
    """Take two milliseconds over each row, while the file `slow` is in the gate's folder."""
    sign = Path(os.environ[GATE_VARIABLE]) / "slow"
    until = time.monotonic() + 0.002 * len(rows)
    while time.monotonic() < until and sign.exists():
        time.sleep(0.02)
    return rows


def raising(rows: pa.RecordBatch) -> pa.RecordBatch:
    if _has(rows, POISON):
        raise ValueError("thirteen is unlucky")
    return rows


def hanging(rows: pa.RecordBatch) -> pa.RecordBatch:
    while _has(rows, POISON):
        time.sleep(0.02)
    return rows


def crashing(rows: pa.RecordBatch) -> pa.RecordBatch:
    """As a fault in native code does: without a word to Python."""
    if _has(rows, POISON):
        os.kill(os.getpid(), signal.SIGSEGV)
        time.sleep(60)
    return rows


def _has(rows: pa.RecordBatch, value: int) -> bool:
    """Some row's first column is that."""
    return bool(pc.any(pc.equal(rows.column(0), value)).as_py())
