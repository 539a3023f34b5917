"""Arrow IPC, as a stream or as a file.

Each message is checked before Arrow's reader allocates memory for its claims.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from types import MappingProxyType
from typing import BinaryIO

import pyarrow as pa
import pyarrow.types as kinds

from data_service.formats import interface
from data_service.formats.interface import BadRowSink, RowSource, blaming, decoded_bytes, is_text
from data_service.formats.typed_columns import TypedColumns, logical_schema_of
from data_service.storage.source_files import SourceFile
from shared.dataset_version.manifest import row_bytes

# --- Arrow IPC ---
# Arrow IPC, as a stream or as a file: both are read from front to back, so an upload is read while it grows.


class ArrowRows:
    """The rows of one stream or file.

    Columns keep their types if a version supports them (`logical_field`); others get that of `types`. Record
    batches may have any size up to `MAX_BODY_BYTES`; one is in memory at a time.
    """

    class_names: list[str] | None = None

    def __init__(self, file: SourceFile, types: Mapping[str, pa.DataType] = MappingProxyType({})) -> None:
        self._file = file
        self._types = types
        with self._reader() as (reader, _):
            self.schema = logical_schema_of(file, reader.schema, types)
        self.row_count: int | None = None
        self.size_bytes = file.size_bytes or 0
        width = row_bytes(self.schema)
        self._chunk_rows = interface.MAX_CHUNK_ROWS if width is None else max(interface.CHUNK_BYTES // max(width, 1), 1)

    def parts(self) -> Sequence[RowSource]:
        return [self]

    def tables(self, bad: BadRowSink) -> Iterator[pa.Table]:
        columns = TypedColumns(self._file, self.schema)
        with self._reader() as (reader, rest):
            if logical_schema_of(self._file, reader.schema, self._types) != self.schema:
                raise self._file.corrupt("it changed while it was read")
            for batch in reader:
                batch.validate(full=any(_needs_a_look(field.type) for field in batch.schema))
                for piece in self._pieces(batch):
                    yield columns.table(piece, bad)
            # Arrow stops at the end marker; the remaining bytes are checked, too.
            for _ in rest:
                pass

    def _pieces(self, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        rows = self._chunk_rows
        if row_bytes(self.schema) is None:
            rows = max(1, min(rows, batch.num_rows * interface.CHUNK_BYTES // max(decoded_bytes(batch), 1)))
        for begin in range(0, batch.num_rows, rows):
            piece = batch.slice(begin, rows)
            size_bytes = decoded_bytes(piece)
            if size_bytes > interface.MAX_DECODED_BYTES:
                raise self._file.corrupt(f"{piece.num_rows} of its rows decode to {size_bytes} bytes")
            yield piece

    @contextmanager
    def _reader(self) -> Iterator[tuple[pa.RecordBatchReader, Iterator[bytes]]]:
        with closing(self._file.open()) as opened, blaming(self._file, "Arrow"):
            try:
                pieces = checked_messages(opened)
                yield pa.ipc.open_stream(pa.PythonFile(PieceReader(pieces), mode="r")), pieces
            except ArrowMessageError as error:
                raise self._file.corrupt(str(error)) from None


def _needs_a_look(arrow_type: pa.DataType) -> bool:
    """Returns whether values can be malformed: offsets, indices, UTF-8, decimals, times of day."""
    if isinstance(arrow_type, pa.BaseExtensionType):
        return _needs_a_look(arrow_type.storage_type)
    if kinds.is_fixed_size_list(arrow_type):
        return _needs_a_look(arrow_type.value_type)
    if kinds.is_dictionary(arrow_type) or kinds.is_nested(arrow_type) or is_text(arrow_type):
        return True
    return bool(kinds.is_decimal(arrow_type) or kinds.is_time(arrow_type) or kinds.is_date64(arrow_type))


# --- Arrow messages ---
# Checks Arrow IPC messages before Arrow's reader allocates memory for their claims.
#
# Source: https://arrow.apache.org/docs/format/Columnar.html (encapsulated message format, IPC file format) and
# Message.fbs. A file is a stream between a magic and a footer, so both are read from front to back.

FILE_MAGIC = b"ARROW1"
CONTINUATION = b"\xff\xff\xff\xff"
MAX_METADATA_BYTES = 16 * 1024 * 1024
# The limit of one message, which has a whole record batch.
MAX_BODY_BYTES = 1024 * 1024 * 1024
PIECE_BYTES = 16 * 1024 * 1024

_DICTIONARY_BATCH, _RECORD_BATCH = 2, 3


class ArrowMessageError(ValueError):
    """The bytes are no readable Arrow stream; the text says why."""


def checked_messages(stream: BinaryIO) -> Iterator[bytes]:
    """Yields an Arrow stream's bytes in the pieces that Arrow's stream reader requests.

    The pieces are prefix, length, metadata and body of each message, then the end marker. Reads up to the very end of
    the stream. Raises `ArrowMessageError`.
    """
    start = _exactly(stream, 8, "its beginning")
    in_file = start[:6] == FILE_MAGIC
    if in_file:
        start = _exactly(stream, 8, "its first message")
    batches = 0
    while True:
        if start[:4] != CONTINUATION:
            raise ArrowMessageError(
                "it has no Arrow message where one must begin: it is no Arrow stream or file, or damaged"
            )
        (metadata_bytes,) = struct.unpack("<i", start[4:])
        yield start[:4]
        yield start[4:]
        if metadata_bytes == 0:
            break
        if not 8 <= metadata_bytes <= MAX_METADATA_BYTES:
            raise ArrowMessageError(f"a message has {metadata_bytes} bytes of metadata; {MAX_METADATA_BYTES} are read")
        metadata = _exactly(stream, metadata_bytes, "a message's metadata")
        kind, body_bytes, record_batch = _message(metadata)
        if not 0 <= body_bytes <= MAX_BODY_BYTES:
            raise ArrowMessageError(
                f"a message has {body_bytes} bytes; write record batches of at most {MAX_BODY_BYTES} bytes"
            )
        body = _exactly(stream, body_bytes, "a message's body")
        if record_batch is not None:
            _check_decompressed(record_batch, body)
        batches += kind == _RECORD_BATCH
        yield metadata
        if body_bytes:
            yield body
        start = _exactly(stream, 8, "its next message or its end marker; close its writer")
    if in_file:
        _check_footer(stream, batches)
    elif _some(stream, 1):
        raise ArrowMessageError("it goes on after its end marker")


class PieceReader:
    """Presents pieces as a file to Arrow's reader; pieces that are requested whole are not copied."""

    closed = False

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = pieces
        self._rest = memoryview(b"")

    def read(self, size: int = -1) -> bytes | memoryview:
        memoryviews: list[memoryview] = []
        wanted = size
        while wanted > 0:
            if not self._rest:
                piece = next(self._pieces, None)
                if piece is None:
                    break
                if not memoryviews and len(piece) == size:
                    return piece
                self._rest = memoryview(piece)
            memoryviews.append(self._rest[:wanted])
            self._rest = self._rest[wanted:]
            wanted -= len(memoryviews[-1])
        return memoryviews[0] if len(memoryviews) == 1 else b"".join(memoryviews)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return False

    def close(self) -> None:
        self.closed = True


class _Table:
    """A flatbuffers table: fields by number, each optional.

    Source: https://flatbuffers.dev/internals.
    """

    def __init__(self, data: bytes, position: int) -> None:
        self._data, self._position = data, position
        self._fields = position - _unpack("<i", data, position)
        (self._fields_bytes,) = struct.unpack_from("<H", data, self._at(self._fields, 2))

    def number(self, field: int, layout: str, default: int = 0) -> int:
        at = self._field(field)
        return default if at is None else _unpack(layout, self._data, self._at(at, struct.calcsize(layout)))

    def table(self, field: int) -> _Table | None:
        at = self._field(field)
        return None if at is None else _Table(self._data, at + _unpack("<I", self._data, at))

    def structs(self, field: int, layout: str) -> Iterator[tuple[int, ...]]:
        at = self._field(field)
        if at is None:
            return iter(())
        begin = at + _unpack("<I", self._data, at)
        size = _unpack("<I", self._data, begin) * struct.calcsize(layout)
        self._at(begin + 4, size)
        return struct.iter_unpack(layout, self._data[begin + 4 : begin + 4 + size])

    def _field(self, field: int) -> int | None:
        slot = 4 + 2 * field
        if slot + 2 > self._fields_bytes:
            return None
        offset = _unpack("<H", self._data, self._fields + slot)
        return self._position + offset if offset else None

    def _at(self, position: int, size: int) -> int:
        if position < 0 or position + size > len(self._data):
            raise ArrowMessageError("a message's metadata is damaged")
        return position


def _message(metadata: bytes) -> tuple[int, int, _Table | None]:
    """Returns (the header's type, the body's size, the record batch within it)."""
    message = _Table(metadata, _unpack("<I", metadata, 0))
    kind = message.number(1, "<B")
    header = message.table(2)
    if header is None:
        raise ArrowMessageError("a message's metadata is damaged")
    record_batch = header if kind == _RECORD_BATCH else header.table(1) if kind == _DICTIONARY_BATCH else None
    return kind, message.number(3, "<q"), record_batch


def _check_decompressed(record_batch: _Table, body: bytes) -> None:
    """Checks the declared sizes of compressed buffers, since Arrow allocates memory for them."""
    if record_batch.table(3) is None:
        return
    total = 0
    for offset, size in record_batch.structs(2, "<qq"):
        if size == 0:
            continue
        if offset < 0 or size < 8 or offset + size > len(body):
            raise ArrowMessageError("a message has a buffer outside of its body")
        (decompressed,) = struct.unpack_from("<q", body, offset)
        total += size if decompressed == -1 else max(decompressed, 0)
        if decompressed < -1 or total > MAX_BODY_BYTES:
            raise ArrowMessageError(f"a record batch decompresses to more than {MAX_BODY_BYTES} bytes")


def _check_footer(stream: BinaryIO, batches: int) -> None:
    rest = _some(stream, MAX_METADATA_BYTES + 1)
    if len(rest) > MAX_METADATA_BYTES:
        raise ArrowMessageError(f"its footer has more than {MAX_METADATA_BYTES} bytes")
    if len(rest) < 10 or rest[-6:] != FILE_MAGIC:
        raise ArrowMessageError("it ends within its footer")
    (footer_bytes,) = struct.unpack("<i", rest[-10:-6])
    if not 0 < footer_bytes <= len(rest) - 10:
        raise ArrowMessageError("its footer is damaged")
    footer = rest[-10 - footer_bytes : -10]
    claimed = sum(1 for _ in _Table(footer, _unpack("<I", footer, 0)).structs(3, "<qi4xq"))
    if claimed != batches:
        raise ArrowMessageError(f"its footer names {claimed} record batches, but it has {batches}")


def _unpack(layout: str, data: bytes, position: int) -> int:
    try:
        return int(struct.unpack_from(layout, data, position)[0])
    except struct.error:
        raise ArrowMessageError("a message's metadata is damaged") from None


def _exactly(stream: BinaryIO, size: int, what: str) -> bytes:
    data = _some(stream, size)
    if len(data) < size:
        raise ArrowMessageError(f"it ends within {what}")
    return data


def _some(stream: BinaryIO, size: int) -> bytes:
    """Reads `size` bytes, or fewer at the end.

    Memory grows with the bytes read, not with the size that a message claims.
    """
    first = stream.read(min(size, PIECE_BYTES)) if size else b""
    if len(first) == size or not first:
        return first
    pieces = [first]
    missing = size - len(first)
    while missing > 0 and (piece := stream.read(min(missing, PIECE_BYTES))):
        pieces.append(piece)
        missing -= len(piece)
    return b"".join(pieces)
