"""Rows from memory as one Arrow stream."""

from __future__ import annotations

import pyarrow as pa
import pytest

from millrace_client.uploads import BATCH_BYTES, stream_of

ROWS = pa.table({"n": pa.array(range(100_000), pa.int64()), "s": ["a long text that is the same"] * 100_000})


def read(pieces: list[bytes]) -> pa.Table:
    return pa.ipc.open_stream(b"".join(pieces)).read_all()


def test_a_table_a_reader_and_batches_give_the_same_rows() -> None:
    reader = pa.RecordBatchReader.from_batches(ROWS.schema, ROWS.to_batches(max_chunksize=999))

    for rows in (ROWS, reader, ROWS.to_batches(max_chunksize=5000)):
        assert read(list(stream_of(rows))).equals(ROWS)


def test_the_stream_is_compressed_and_cut_into_batches_of_bounded_size() -> None:
    pieces = list(stream_of(ROWS))

    assert sum(map(len, pieces)) < ROWS.nbytes / 2
    batches = list(pa.ipc.open_stream(b"".join(pieces)))
    assert max(batch.nbytes for batch in batches) <= BATCH_BYTES * 1.1


def test_no_batch_at_all_is_refused_for_nobody_knows_its_columns() -> None:
    with pytest.raises(ValueError, match="RecordBatchReader"):
        list(stream_of([]))


def test_an_empty_table_is_a_stream_without_rows() -> None:
    assert read(list(stream_of(ROWS.slice(0, 0)))).equals(ROWS.slice(0, 0))
