"""Arrow tables into a version: sent as one LZ4 Arrow stream, and imported while it arrives."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from google.protobuf import empty_pb2

from millrace.data.v1 import data_service_pb2 as pb
from millrace.data.v1 import resources_pb2
from millrace_client.calls import Caller, new_request_id
from millrace_client.errors import MillraceError
from millrace_client.operations import Operation
from millrace_client.uploads import resume_upload

if TYPE_CHECKING:
    import pyarrow as pa

# A batch is encoded, sent and decoded as a whole.
BATCH_BYTES = 4 * 1024 * 1024


def import_while_sent(
    caller: Caller,
    stub: Any,
    dataset: str,
    rows: pa.Table | pa.RecordBatchReader | Iterable[pa.RecordBatch],
    import_upload: Callable[[str], Operation[resources_pb2.DatasetVersion]],
) -> Operation[resources_pb2.DatasetVersion]:
    """Sends the rows into a new upload of `datasets/{d}`, and has `import_upload` start importing it before they are.

    Where sending fails the import is cancelled and nothing is left.
    """
    request = pb.StartUploadRequest(parent=dataset, request_id=new_request_id())
    upload = caller.unary(stub.StartUpload, request, resources_pb2.Upload).name
    operation = None
    try:
        operation = import_upload(upload)
        resume_upload(caller, stub, upload, stream_of(rows))
    except BaseException:
        with suppress(MillraceError):  # what is left then is swept by the server in its time
            if operation is not None:
                operation.cancel()
                operation.wait()
        with suppress(MillraceError):
            caller.unary(stub.AbortUpload, pb.AbortUploadRequest(name=upload), empty_pb2.Empty)
        raise
    return operation


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
