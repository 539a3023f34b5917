"""Reads rows of a committed version as Arrow IPC, a few row groups in memory at a time."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import pyarrow as pa

from shared.dataset_version import RowGroup, VersionReader
from shared.dataset_version.manifest import Split
from shared.dataset_version.reader import GroupSizes, ReadBytes
from shared.errors import invalid_field
from shared.streaming import framed

# Below the 4 MiB limit of most clients.
MESSAGE_BYTES = 3 * 1024 * 1024 + 512 * 1024
BATCH_BYTES = MESSAGE_BYTES - 64 * 1024
# The number of the field `arrow_ipc` in a ReadVersionResponse.
ARROW_IPC = 1
# The bytes that are read and decoded at a time, in READ_AHEAD threads.
CHUNK_BYTES = 3 * 1024 * 1024
# The limit for several groups together, even if their dictionary encoding hides the most.
MAX_CHUNK_BYTES = 12 * 1024 * 1024
READ_AHEAD = 2
# Arrow's end of a stream: a continuation marker, and a message of length 0.
END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"


@dataclass(frozen=True, kw_only=True)
class Selection:
    """The selected rows and columns.

    An empty split means all splits, no columns all but `_row_id`, a limit of 0 no limit.
    """

    split: str
    columns: Sequence[str]
    offset: int
    limit: int


def read_stream(reader: VersionReader, selection: Selection) -> Generator[bytes, None, None]:
    """Yields one Arrow IPC stream, in the order of row ids.

    The pieces are serialized `ReadVersionResponse`s of about `MESSAGE_BYTES`. A piece has whole Arrow messages, so that
    a reader need not concatenate them, unless a row is larger. While a piece is sent, up to `READ_AHEAD` chunks are
    read. Raises `InvalidArgument` for an unknown split or column or a negative range, and `DataLoss`.
    """
    for field, value in (("offset", selection.offset), ("limit", selection.limit)):
        if value < 0:
            raise invalid_field(field, value, "use 0 or more")
    schema = reader.select(selection.columns or None)
    chunks = _chunks(reader, selection, schema.names)
    yield framed(ARROW_IPC, [schema.serialize().to_pybytes()])
    with ThreadPoolExecutor(READ_AHEAD, thread_name_prefix="read-ahead") as pool:
        ahead: deque[Future[list[bytes]]] = deque()
        try:
            for chunk in chunks:
                ahead.append(pool.submit(_encoded, reader, chunk, schema))
                if len(ahead) > READ_AHEAD:
                    yield from ahead.popleft().result()
            while ahead:
                yield from ahead.popleft().result()
        finally:
            for pending in ahead:
                pending.cancel()
    yield framed(ARROW_IPC, [END_OF_STREAM])


@dataclass(frozen=True)
class _Chunk:
    """Row groups that are read together, and the selected rows in them."""

    groups: list[RowGroup]
    skip: int
    row_count: int


def _chunks(reader: VersionReader, selection: Selection, columns: Sequence[str]) -> Iterator[_Chunk]:
    """Yields the selected rows in chunks of about a message.

    Groups before the offset or after the limit are not read.
    """
    manifest = reader.version.manifest
    splits = [reader.version.split(selection.split)] if selection.split else manifest.splits
    left = selection.limit or sum(split.row_count for split in splits)
    groups, skip = _groups_of(reader, splits, selection.offset)
    sizes = GroupSizes(reader, columns)
    chunk: list[RowGroup] = []
    size, rows, first_skip = ReadBytes(), 0, 0
    for group in groups:
        if left <= 0:
            break
        with_group = size + sizes.bytes_of(group)
        if chunk and (with_group.expected > CHUNK_BYTES or with_group.most > MAX_CHUNK_BYTES):
            yield _Chunk(chunk, first_skip, rows)
            chunk, rows, with_group = [], 0, sizes.bytes_of(group)
        if not chunk:
            first_skip = skip
        chunk.append(group)
        taken = min(group.row_count - skip, left)
        skip = 0
        left -= taken
        rows += taken
        size = with_group
    if chunk:
        yield _Chunk(chunk, first_skip, rows)


def _groups_of(reader: VersionReader, splits: Sequence[Split], offset: int) -> tuple[Iterator[RowGroup], int]:
    """Returns the row groups from row `offset` of these splits on, and the rows of the first group to skip."""
    left = list(splits)
    while left and offset >= left[0].row_count:
        offset -= left.pop(0).row_count
    if not left:
        return iter(()), 0
    first_row_id = left[0].first_row_id + offset
    groups = itertools.chain(
        reader.row_groups_from(left[0].name, offset), *(reader.row_groups_from(split.name, 0) for split in left[1:])
    )
    first = next(groups, None)
    return (itertools.chain([first], groups), first_row_id - first.first_row_id) if first else (iter(()), 0)


def _encoded(reader: VersionReader, chunk: _Chunk, schema: pa.Schema) -> list[bytes]:
    """Returns the chunk's rows as Arrow messages, split into response messages."""
    table = reader.read_many(chunk.groups, schema.names).slice(chunk.skip, chunk.row_count)
    return [
        framed(ARROW_IPC, parts) for batch in _batches(table) for parts in _cut(_arrow_message(batch), MESSAGE_BYTES)
    ]


def _arrow_message(batch: pa.RecordBatch) -> list[memoryview]:
    """Returns the batch in Arrow's stream format, in parts that share the batch's memory."""
    sink = _Parts()
    with pa.ipc.new_stream(sink, batch.schema) as stream:
        stream.write_batch(batch)
        # The schema precedes the first batch of a stream, and was sent before.
        schema_bytes = batch.schema.serialize().size
        while schema_bytes > 0:
            schema_bytes -= len(sink.parts.pop(0))
        return list(sink.parts)


def _cut(parts: list[memoryview], max_bytes: int) -> Iterator[list[memoryview]]:
    """Yields the same bytes in lists of at most `max_bytes` each."""
    taken: list[memoryview] = []
    capacity = max_bytes
    for part in parts:
        left = part
        while len(left) > capacity:
            yield [*taken, left[:capacity]]
            taken, left, capacity = [], left[capacity:], max_bytes
        taken.append(left)
        capacity -= len(left)
    yield taken


class _Parts:
    """A sink for Arrow that keeps the written parts without copying them."""

    closed = False

    def __init__(self) -> None:
        self.parts: list[memoryview] = []

    def write(self, data: bytes | pa.Buffer) -> int:
        self.parts.append(memoryview(data))
        return len(data)

    def flush(self) -> None:
        """Does nothing: no data is buffered."""

    def close(self) -> None:
        """Does nothing: the parts stay."""


def _batches(table: pa.Table) -> Iterator[pa.RecordBatch]:
    """Yields batches whose messages are smaller than `MESSAGE_BYTES`, unless a row is larger."""
    rows = max(1, table.num_rows * BATCH_BYTES // max(table.nbytes, 1))
    for batch in table.to_batches(max_chunksize=rows):
        yield from _halved(batch)


def _halved(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Halves the batch until each part fits, because row sizes differ."""
    if batch.nbytes <= BATCH_BYTES or batch.num_rows == 1:
        yield batch
        return
    middle = batch.num_rows // 2
    yield from _halved(batch.slice(0, middle))
    yield from _halved(batch.slice(middle))
