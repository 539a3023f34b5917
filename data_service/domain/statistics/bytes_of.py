"""The bytes of each value of an Arrow array, without a copy."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pyarrow.types as kinds


def byte_slices(array: pa.Array) -> Iterator[memoryview]:
    """Of strings, bytes, and fixed-size bytes, without nulls."""
    if not len(array):
        return
    if kinds.is_fixed_size_binary(array.type):
        width = array.type.byte_width
        data = memoryview(array.buffers()[1])
        for start in range(array.offset * width, (array.offset + len(array)) * width, width):
            yield data[start : start + width]
        return
    is_large = kinds.is_large_string(array.type) or kinds.is_large_binary(array.type)
    _, offsets, values = array.buffers()
    places = np.frombuffer(offsets, np.int64 if is_large else np.int32)
    ends = places[array.offset : array.offset + len(array) + 1].tolist()
    data = memoryview(values if values is not None else b"")
    for start, end in pairwise(ends):
        yield data[start:end]
