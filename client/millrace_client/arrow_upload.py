"""Arrow tables into a version: sent as one LZ4 Arrow stream, and imported while it arrives."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa

# A batch is encoded, sent and decoded as a whole.
BATCH_BYTES = 4 * 1024 * 1024


def stream_of(
    rows: pa.Table | pa.RecordBatchReader | Iterable[pa.RecordBatch], compression: str | None = "lz4"
) -> Iterator[bytes]:
    """The rows as an Arrow IPC stream, its bodies compressed, piece by piece: a batch in memory at a time.

    Raises `ValueError` where `rows` are batches and there is none, for then nobody knows their columns.
    """
    import pyarrow as pa

    schema, batches = _batches(rows)
    sink = _Pieces()
    with pa.ipc.new_stream(sink, schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as stream:
        for batch in batches:
            stream.write_batch(batch)
            yield from sink.taken()
    yield from sink.taken()


def _batches(rows: Any) -> tuple[Any, Iterator[Any]]:
    import pyarrow as pa

    if isinstance(rows, pa.Table):
        most = max(1, rows.num_rows * BATCH_BYTES // max(rows.nbytes, 1))
        return rows.schema, iter(rows.to_batches(max_chunksize=most))
    if isinstance(rows, pa.RecordBatchReader):
        return rows.schema, iter(rows)
    batches = iter(rows)
    first = next(batches, None)
    if first is None:
        raise ValueError("there is no batch, so nobody knows the columns; give a table or a RecordBatchReader")
    return first.schema, _chained(first, batches)


def _chained(first: Any, others: Iterator[Any]) -> Iterator[Any]:
    yield first
    yield from others


class _Pieces:
    """A sink for Arrow that hands out what was written."""

    closed = False

    def __init__(self) -> None:
        self._pieces: list[bytes] = []

    def write(self, data: bytes) -> int:
        self._pieces.append(data)
        return len(data)

    def taken(self) -> list[bytes]:
        taken, self._pieces = self._pieces, []
        return taken

    def flush(self) -> None:
        """Nothing is held back."""

    def close(self) -> None:
        """The pieces stay."""
