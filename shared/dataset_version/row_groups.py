"""Where row groups end: a function of the rows alone, however they arrive.

A row group is the unit of reading, checking, caching and transforming, so that its bytes bound the memory of all of
these: small enough that even a small version divides over many lanes, large enough that a request per group is worth
its round trip.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from shared.dataset_version.columns import row_bytes

TARGET_GROUP_BYTES = 256 * 1024
MAX_GROUP_BYTES = 32 * 1024 * 1024
MIN_GROUP_ROWS, MAX_GROUP_ROWS = 256, 4096
# Of rows without a fixed width: at most so many, of at most so many bytes unless one row alone has more.
DEFAULT_GROUP_ROWS = 256
MAX_UNEQUAL_GROUP_BYTES = 4 * 1024 * 1024


def group_rows(schema: pa.Schema) -> int:
    """How many rows of these columns make a row group, at most: a power of two, and a function of the types alone."""
    width = row_bytes(schema)
    if width is None:
        return DEFAULT_GROUP_ROWS
    target = TARGET_GROUP_BYTES // max(width, 1)
    rows = min(max(target, MIN_GROUP_ROWS), MAX_GROUP_ROWS, max(MAX_GROUP_BYTES // max(width, 1), 1))
    return 1 << (rows.bit_length() - 1)


def cut_groups(stored: pa.Table, *, to_end: bool) -> list[int]:
    """The row counts of the groups that these rows of stored types begin with.

    Rows of a fixed width make groups of `group_rows`. Of others a group ends before the row by which its values would
    grow beyond `MAX_UNEQUAL_GROUP_BYTES`. What rows still to come could join is left over, unless it is `to_end`.
    """
    most = group_rows(stored.schema)
    if row_bytes(stored.schema) is None:
        return _unequal(_row_sizes(stored), most, to_end=to_end)
    whole, left = divmod(stored.num_rows, most)
    return [most] * whole + [left] * bool(left and to_end)


def raw_bytes(stored: pa.Table) -> int:
    """Of the values, as the rows alone determine it: how they were cut into buffers has no say in it."""
    total = 0
    for column in stored.columns:
        try:
            total += column.type.bit_width * len(column) // 8
        except ValueError:  # of no fixed width
            total += 4 * len(column) + (pc.sum(pc.binary_length(column)).as_py() or 0)
    return total


def _unequal(sizes: NDArray[np.int64], most_rows: int, *, to_end: bool) -> list[int]:
    ends = np.cumsum(sizes)
    groups: list[int] = []
    begin, before = 0, 0
    while begin < len(sizes):
        fitting = int(np.searchsorted(ends, before + MAX_UNEQUAL_GROUP_BYTES, side="right"))
        end = max(begin + 1, min(fitting, begin + most_rows))
        full = end - begin == most_rows or ends[end - 1] - before >= MAX_UNEQUAL_GROUP_BYTES
        if end == len(sizes) and not (full or to_end):
            break
        groups.append(end - begin)
        begin, before = end, int(ends[end - 1])
    return groups


def _row_sizes(stored: pa.Table) -> NDArray[np.int64]:
    """Of each row's values, in bytes: (N,). Every row has some, be it empty or null."""
    sizes = np.zeros(stored.num_rows, np.int64)
    bits = 0
    for column in stored.columns:
        try:
            bits += column.type.bit_width
        except ValueError:  # of no fixed width
            sizes += 4 + pc.binary_length(column).fill_null(0).to_numpy().astype(np.int64)
    sizes += -(-bits // 8)
    return sizes
