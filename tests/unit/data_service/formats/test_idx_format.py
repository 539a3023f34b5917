from __future__ import annotations

import io
import struct
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy

from data_service.formats.idx import MAX_ROW_BYTES, read_header, read_rows, rows_per_chunk
from data_service.formats.interface import IdxError
from tests.support.idx import idx_bytes


def read_all(data: bytes, rows: int = 3) -> np.ndarray[Any, Any]:
    stream = io.BytesIO(data)
    header = read_header(stream)
    chunks = list(read_rows(stream, header, rows))
    return np.concatenate(chunks) if chunks else np.empty((0, *header.row_shape), header.value_type)


arrays = st_numpy.arrays(
    dtype=st.sampled_from([np.dtype(code) for code in ("u1", "i1", "i2", "i4", "f4", "f8")]),
    shape=st_numpy.array_shapes(min_dims=1, max_dims=4, max_side=6),
)


@given(values=arrays, rows=st.integers(1, 10))
def test_written_arrays_are_read_whatever_the_chunks(values: np.ndarray[Any, Any], rows: int) -> None:
    read = read_all(idx_bytes(values), rows)
    assert read.shape == values.shape
    np.testing.assert_array_equal(read, values)


@given(values=arrays, cut=st.data())
def test_every_shorter_file_is_refused(values: np.ndarray[Any, Any], cut: st.DataObject) -> None:
    data = idx_bytes(values)
    with pytest.raises(IdxError):
        read_all(data[: cut.draw(st.integers(0, len(data) - 1))])


@given(values=arrays, more=st.binary(min_size=1, max_size=20))
def test_every_longer_file_is_refused(values: np.ndarray[Any, Any], more: bytes) -> None:
    with pytest.raises(IdxError, match="goes on after"):
        read_all(idx_bytes(values) + more)


@given(data=st.binary(max_size=64))
def test_no_bytes_crash_the_reader(data: bytes) -> None:
    with suppress(IdxError):
        read_all(data)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "within its magic number"),
        (b"\0\0\x08", "within its magic number"),
        (b"PAR1PAR1", "no IDX file has"),
        (b"\0\0\x07\x01\0\0\0\0", "no IDX file has"),
        (b"\0\0\x08\x00", "0 dimensions"),
        (b"\0\0\x08\x06" + b"\0" * 24, "6 dimensions"),
        (b"\0\0\x08\x03\0\0\0\1\0\0", "within its header"),
        (b"\0\0\x08\x03" + struct.pack(">3I", 5, 0, 28), "which holds nothing"),
        (b"\0\0\x08\x03" + struct.pack(">3I", 5, 65536, 65536), "a row takes"),
        (b"\0\0\x08\x03" + struct.pack(">3I", 5, 2, 2) + b"\0" * 19, "claims 5 rows, but it ends after 4"),
    ],
)
def test_each_corruption_is_refused_by_name(data: bytes, said: str) -> None:
    with pytest.raises(IdxError, match=said):
        read_all(data)


def test_memory_is_taken_for_bytes_that_are_there_not_for_those_claimed() -> None:
    header = b"\0\0\x08\x03" + struct.pack(">3I", 2**32 - 1, 4096, 4096)
    stream = io.BytesIO(header + b"\0" * 100)
    claimed = read_header(stream)
    assert claimed.row_bytes == MAX_ROW_BYTES
    with pytest.raises(IdxError, match="ends after 0"):
        list(read_rows(stream, claimed, rows_per_chunk(claimed, 1)))


def test_a_stream_that_gives_a_little_at_a_time_is_read_whole() -> None:
    class Trickle(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            return super().read(min(size or 0, 3))

    values = np.arange(60, dtype=np.uint8).reshape(5, 3, 4)
    stream = Trickle(idx_bytes(values))
    np.testing.assert_array_equal(np.concatenate(list(read_rows(stream, read_header(stream), 2))), values)
