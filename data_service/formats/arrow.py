"""Arrow IPC, as a stream or as a file.

Each message is checked before Arrow's reader allocates memory for its claims.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from copy import copy
from dataclasses import dataclass
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
# Arrow IPC, as a stream or as a file: both are read from front to back, so an upload is read while it grows. The footer
# of a large file divides it into parts.


class ArrowRows:
    """The rows of one stream or file.

    Columns keep their types if a version supports them (`logical_field`); others get that of `types`. Record
    batches may have any size up to `MAX_BODY_BYTES`; one is in memory at a time.
    """

    class_names: list[str] | None = None

    def __init__(self, file: SourceFile, types: Mapping[str, pa.DataType] = MappingProxyType({})) -> None:
        self._file = file
        self._types = types
        self._part: _Part | None = None
        with self._reader() as (reader, _):
            self.schema = logical_schema_of(file, reader.schema, types)
            has_bytes = any(_take_bytes(field.type) for field in reader.schema)
        if not has_bytes and not file.is_upload:
            self._divided()  # a few bytes may claim any number of rows; of an upload the footer may not be there yet
        self.row_count: int | None = None
        self.size_bytes = file.size_bytes or 0
        width = row_bytes(self.schema)
        self._chunk_rows = interface.MAX_CHUNK_ROWS if width is None else max(interface.CHUNK_BYTES // max(width, 1), 1)

    def parts(self) -> Sequence[RowSource]:
        """Divides a large file into runs of record batches; a stream has no footer that names them.

        An upload is verified first, as a whole. Raises `InvalidArgument` if the footer names more rows than are read.
        """
        if self._part is not None or self.size_bytes <= interface.PART_BYTES:
            return [self]
        self._file.wait_until_whole()
        parts = self._divided()
        return [self._only(part) for part in parts] if len(parts) > 1 else [self]

    def _divided(self) -> list[_Part]:
        with closing(self._file.open()) as opened, blaming(self._file, "Arrow"):
            try:
                return _parts(opened, self._file.on_read)
            except RowClaimError as error:
                raise self._file.corrupt(str(error)) from None
            except ArrowMessageError:
                return []  # reading it finds the error

    def _only(self, part: _Part) -> ArrowRows:
        rows = copy(self)
        rows._part, rows.row_count, rows.size_bytes = part, part.row_count, part.size_bytes
        return rows

    def tables(self, bad: BadRowSink) -> Iterator[pa.Table]:
        columns = TypedColumns(self._file, self.schema, self._part.first_row if self._part else 0)
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
                pieces = checked_messages(opened) if self._part is None else _messages_of(opened, self._part)
                yield pa.ipc.open_stream(pa.PythonFile(PieceReader(pieces), mode="r")), pieces
            except ArrowMessageError as error:
                raise self._file.corrupt(str(error)) from None


@dataclass(frozen=True)
class _Part:
    """A run of record batches: `batch_count` messages from the file's byte `begin` on, without dictionaries."""

    begin: int
    batch_count: int
    first_row: int
    row_count: int
    size_bytes: int


def _parts(opened: BinaryIO, on_read: Callable[[], None]) -> list[_Part]:
    """Divides a file by its footer; nothing if that is no complete list of its messages, or names dictionaries.

    Raises `ArrowMessageError` for a damaged file.
    """
    blocks, messages_end = _blocks_of(opened)
    begin, size_bytes, batch_count, first_row, row_count, rows_of_file = 0, 0, 0, 0, 0, 0
    parts: list[_Part] = []
    for position, metadata_bytes, body_bytes in blocks:
        on_read()
        if begin and position != begin + size_bytes:
            return []
        rows = _row_count_of(opened, position, metadata_bytes, body_bytes)
        rows_of_file = _sum_of_rows(rows_of_file, rows)
        if batch_count and size_bytes + metadata_bytes + body_bytes > interface.PART_BYTES:
            parts.append(_Part(begin, batch_count, first_row, row_count, size_bytes))
            size_bytes, batch_count, first_row, row_count = 0, 0, first_row + row_count, 0
        if not batch_count:
            begin = position
        size_bytes += metadata_bytes + body_bytes
        batch_count, row_count = batch_count + 1, row_count + rows
    if not blocks or blocks[0][0] != _position_after_schema(opened) or begin + size_bytes != messages_end:
        return []
    return [*parts, _Part(begin, batch_count, first_row, row_count, size_bytes)]


def _messages_of(opened: BinaryIO, part: _Part) -> Iterator[bytes]:
    """Yields a stream of the schema and the part's record batches, checked as `checked_messages` does."""
    opened.seek(len(FILE_MAGIC) + 2)
    for position, messages in ((None, 1), (part.begin, part.batch_count)):
        if position is not None:
            opened.seek(position)
        for _ in range(messages):
            message = _checked_message(opened, _exactly(opened, 8, "its next message"))
            if message is None:
                raise ArrowMessageError("it ends before the record batches that its footer names")
            yield from message.pieces
    yield from (END_MARKER[:4], END_MARKER[4:])


def _take_bytes(arrow_type: pa.DataType) -> bool:
    """Returns whether values take bytes: all do, except nulls of no other type."""
    if isinstance(arrow_type, pa.BaseExtensionType):
        return _take_bytes(arrow_type.storage_type)
    if kinds.is_fixed_size_list(arrow_type):
        return bool(arrow_type.list_size > 0) and _take_bytes(arrow_type.value_type)
    return not kinds.is_null(arrow_type)


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
END_MARKER = CONTINUATION + bytes(4)
MAX_METADATA_BYTES = 16 * 1024 * 1024
# The limit of one message, which has a whole record batch.
MAX_BODY_BYTES = 1024 * 1024 * 1024
# The limit of rows of one record batch: that many bits are a body of the most bytes. Only columns of nulls take less.
MAX_BATCH_ROWS = 8 * MAX_BODY_BYTES
PIECE_BYTES = 16 * 1024 * 1024

_DICTIONARY_BATCH, _RECORD_BATCH = 2, 3


class ArrowMessageError(ValueError):
    """The bytes are no readable Arrow stream; the text says why."""


class RowClaimError(ArrowMessageError):
    """Record batches claim to have more rows than are read."""


def checked_messages(stream: BinaryIO) -> Iterator[bytes]:
    """Yields an Arrow stream's bytes in the pieces that Arrow's stream reader requests.

    The pieces are prefix, length, metadata and body of each message, then the end marker. Reads up to the very end of
    the stream. Raises `ArrowMessageError`.
    """
    start = _exactly(stream, 8, "its beginning")
    in_file = start[:6] == FILE_MAGIC
    if in_file:
        start = _exactly(stream, 8, "its first message")
    batches = row_count = 0
    while (message := _checked_message(stream, start)) is not None:
        batches += message.kind == _RECORD_BATCH
        row_count = _sum_of_rows(row_count, message.row_count)
        yield from message.pieces
        start = _exactly(stream, 8, "its next message or its end marker; close its writer")
    yield start[:4]
    yield start[4:]
    if in_file:
        _check_footer(stream, batches)
    elif _some(stream, 1):
        raise ArrowMessageError("it goes on after its end marker")


@dataclass(frozen=True)
class _CheckedMessage:
    """A message's type, its bytes (prefix, length, metadata and body), and the rows of a record batch."""

    kind: int
    pieces: list[bytes]
    row_count: int


def _checked_message(stream: BinaryIO, start: bytes) -> _CheckedMessage | None:
    """Reads the message that begins with the 8 bytes `start`; None for the end marker."""
    if start[:4] != CONTINUATION:
        raise ArrowMessageError(
            "it has no Arrow message where one must begin: it is no Arrow stream or file, or damaged"
        )
    (metadata_bytes,) = struct.unpack("<i", start[4:])
    if metadata_bytes == 0:
        return None
    if not 8 <= metadata_bytes <= MAX_METADATA_BYTES:
        raise ArrowMessageError(f"a message has {metadata_bytes} bytes of metadata; {MAX_METADATA_BYTES} are read")
    metadata = _exactly(stream, metadata_bytes, "a message's metadata")
    kind, body_bytes, record_batch = _message(metadata)
    if not 0 <= body_bytes <= MAX_BODY_BYTES:
        raise ArrowMessageError(
            f"a message has {body_bytes} bytes; write record batches of at most {MAX_BODY_BYTES} bytes"
        )
    row_count = 0 if record_batch is None else _checked_row_count(record_batch)
    body = _exactly(stream, body_bytes, "a message's body")
    if record_batch is not None:
        _check_decompressed(record_batch, body)
    pieces = [start[:4], start[4:], metadata, *([body] if body_bytes else [])]
    return _CheckedMessage(kind, pieces, row_count if kind == _RECORD_BATCH else 0)


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


def _checked_row_count(record_batch: _Table) -> int:
    """Returns the rows that a record batch, or the batch of a dictionary, claims to have."""
    row_count = record_batch.number(0, "<q")
    if not 0 <= row_count <= MAX_BATCH_ROWS:
        raise RowClaimError(
            f"a record batch claims to have {row_count} rows; write record batches of at most {MAX_BATCH_ROWS} rows"
        )
    return row_count


def _sum_of_rows(row_count: int, of_batch: int) -> int:
    """Adds the rows of the next record batch. The rows of all files are added in 64 bits before they are read."""
    row_count += of_batch
    if row_count > interface.MAX_ROWS:
        raise RowClaimError(
            f"its record batches claim to have more than {interface.MAX_ROWS} rows; import it as several files"
        )
    return row_count


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


_BLOCK = "<qi4xq"


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
    claimed = sum(1 for _ in _Table(footer, _unpack("<I", footer, 0)).structs(3, _BLOCK))
    if claimed != batches:
        raise ArrowMessageError(f"its footer names {claimed} record batches, but it has {batches}")


def _blocks_of(opened: BinaryIO) -> tuple[list[tuple[int, ...]], int]:
    """Returns the (position, metadata bytes, body bytes) of each record batch in the footer, and where messages end.

    Nothing for a stream, and for a file with dictionaries, which batches far away may need.
    """
    if opened.read(len(FILE_MAGIC)) != FILE_MAGIC:
        return [], 0
    opened.seek(0, 2)
    end = opened.tell() - 10
    opened.seek(max(end, 0))
    ending = _exactly(opened, 10, "its footer")
    (footer_bytes,) = struct.unpack("<i", ending[:4])
    if ending[4:] != FILE_MAGIC or not 0 < footer_bytes <= min(MAX_METADATA_BYTES, end):
        raise ArrowMessageError("its footer is damaged")
    opened.seek(end - footer_bytes)
    footer = _exactly(opened, footer_bytes, "its footer")
    table = _Table(footer, _unpack("<I", footer, 0))
    messages_end = end - footer_bytes - len(END_MARKER)
    opened.seek(max(messages_end, 0))
    if _exactly(opened, len(END_MARKER), "its end marker") != END_MARKER:
        raise ArrowMessageError("its footer is damaged")
    if any(True for _ in table.structs(2, _BLOCK)):
        return [], 0
    return list(table.structs(3, _BLOCK)), messages_end


def _row_count_of(opened: BinaryIO, position: int, metadata_bytes: int, body_bytes: int) -> int:
    """Returns the rows of the record batch at this position, whose message must have these sizes."""
    if position < 8 or not 16 <= metadata_bytes <= MAX_METADATA_BYTES:
        raise ArrowMessageError("its footer is damaged")
    opened.seek(position)
    data = _exactly(opened, metadata_bytes, "a message's metadata")
    kind, actual_body_bytes, record_batch = _message(data[8:])
    if data[:4] != CONTINUATION or struct.unpack("<i", data[4:8])[0] != metadata_bytes - 8:
        raise ArrowMessageError("its footer is damaged")
    if kind != _RECORD_BATCH or record_batch is None or actual_body_bytes != body_bytes:
        raise ArrowMessageError("its footer is damaged")
    return _checked_row_count(record_batch)


def _position_after_schema(opened: BinaryIO) -> int:
    """Returns where the first record batch must begin."""
    opened.seek(len(FILE_MAGIC) + 2)
    message = _checked_message(opened, _exactly(opened, 8, "its first message"))
    if message is None:
        raise ArrowMessageError("it has no schema")
    return len(FILE_MAGIC) + 2 + sum(map(len, message.pieces))


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
