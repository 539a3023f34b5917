"""How many rows go in one request, so that a server takes it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from millrace_client.calls import MAX_MESSAGE_BYTES
from millrace_client.rows.asking import Request
from millrace_client.rows.typed import Array, BadInput, Tensor, dtype_of

REQUEST_BYTES = 8 * 1024 * 1024
# Of a message, for all but its rows: the model's name, and names and shapes of inputs.
BESIDE_ROWS_BYTES = 64 * 1024
# Before each text or string of bytes.
LENGTH_BYTES = 4
MEBIBYTE = 1024 * 1024


def most_rows(inputs: Sequence[Tensor], wanted: int) -> int:
    """At most `wanted`, of whose numbers one request does not grow too large."""
    if any(size < 0 for tensor in inputs for size in tensor.shape[1:]):
        return 1
    numbers = [tensor for tensor in inputs if tensor.datatype != "BYTES"]
    row_bytes = sum(math.prod(tensor.shape[1:]) * dtype_of(tensor).itemsize for tensor in numbers)
    return max(1, min(wanted, REQUEST_BYTES // max(row_bytes, 1)))


def cut_by_bytes(requests: Iterable[Request]) -> Iterator[Request]:
    """The same rows, in requests of at most `REQUEST_BYTES`, or of one row: nobody knows before how long texts are.

    Raises `BadInput` for a row that no request has room for.
    """
    for one in requests:
        begin, taken = 0, 0
        for row, size in enumerate(_row_bytes(one)):
            if size > MAX_MESSAGE_BYTES - BESIDE_ROWS_BYTES:
                limit = f"a server takes {MAX_MESSAGE_BYTES // MEBIBYTE} MiB in one request, names and shapes too"
                raise BadInput(f"{one.rows[row]} takes {size // MEBIBYTE} MiB, and {limit}", remedy="make it smaller")
            if row > begin and taken + size > REQUEST_BYTES:
                yield one.part(begin, row)
                begin, taken = row, 0
            taken += size
        yield one.part(begin, len(one.rows))


def _row_bytes(request: Request) -> list[int]:
    """What each row takes in the message."""
    sizes: npt.NDArray[np.int64] = np.zeros(len(request.rows), np.int64)
    for values in request.inputs.values():
        sizes += _lengths(values) if values.dtype == object else values.nbytes // max(len(values), 1)
    found: list[int] = sizes.tolist()
    return found


def _lengths(values: Array) -> npt.NDArray[np.int64]:
    """Of each row's texts and bytes, on the wire."""
    flat = [LENGTH_BYTES + len(one.encode() if isinstance(one, str) else one) for one in values.reshape(-1)]
    lengths: npt.NDArray[np.int64] = np.array(flat, np.int64).reshape(len(values), -1).sum(axis=1)
    return lengths
