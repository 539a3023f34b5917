"""Arrow IPC, as a stream or as a file, read by Arrow.

A reading process bounds what a file's claims may cost. The code here divides a file, and checks what Arrow does not.
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
from shared.errors import first_line

# --- Arrow IPC ---
# A file is a stream between a magic and a footer. Both are read from front to back, so an upload is read while it
# grows. Of a large file the messages are listed, which divides it into parts.

FILE_MAGIC = b"ARROW1"
# The limit of rows of one record batch: a bit for each is a gibibyte. Columns of nulls alone have no bytes.
MAX_BATCH_ROWS = 2**33


class ArrowRows:
    """The rows of one stream or file.

    Columns keep their types if a version supports them (`logical_field`); others get that of `types`. Record batches
    may have any size that the limit of the reading process allows; one is in memory at a time.
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
            self._divided()  # a few bytes may claim any number of rows; an upload may not be there yet
        self.row_count: int | None = None
        self.size_bytes = file.size_bytes or 0
        width = row_bytes(self.schema)
        self._chunk_rows = interface.MAX_CHUNK_ROWS if width is None else max(interface.CHUNK_BYTES // max(width, 1), 1)

    def parts(self) -> Sequence[RowSource]:
        """Divide a large file into runs of record batches; a stream is one part.

        An upload is verified first, as a whole. Raises `InvalidArgument` if the file claims more rows than are read.
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
            except ArrowDamage:
                return []  # reading it finds the error

    def _only(self, part: _Part) -> ArrowRows:
        rows = copy(self)
        rows._part, rows.row_count, rows.size_bytes = part, part.row_count, part.size_bytes
        return rows

    def tables(self, bad: BadRowSink) -> Iterator[pa.Table]:
        columns = TypedColumns(self._file, self.schema, self._part.first_row if self._part else 0)
        with self._reader() as (reader, stream):
            if logical_schema_of(self._file, reader.schema, self._types) != self.schema:
                raise self._file.corrupt("it changed while it was read")
            for batch in self._batches(reader, stream):
                batch.validate(full=any(_needs_a_look(field.type) for field in batch.schema))
                for piece in self._pieces(batch):
                    yield columns.table(piece, bad)

    def _batches(self, reader: pa.RecordBatchReader, stream: ArrowStream) -> Iterator[pa.RecordBatch]:
        """Yield the record batches, with checks of what they claim, and then check how the file ends."""
        if self._part is not None:
            stream.seek(self._part.begin)
        batch_count = row_count = 0
        while self._part is None or batch_count < self._part.batch_count:
            try:
                batch = reader.read_next_batch()
            except StopIteration:
                break
            batch_count += 1
            row_count = _sum_of_rows(row_count, batch.num_rows)
            yield batch
        if self._part is None:
            stream.check_end(batch_count)
        elif (batch_count, row_count) != (self._part.batch_count, self._part.row_count):
            raise self._file.corrupt("it changed while it was read")

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
    def _reader(self) -> Iterator[tuple[pa.RecordBatchReader, ArrowStream]]:
        with closing(self._file.open()) as opened, blaming(self._file, "Arrow"):
            try:
                stream = ArrowStream(opened)
                yield pa.ipc.open_stream(pa.PythonFile(stream, mode="r")), stream
            except (RowClaimError, ArrowDamage) as error:
                raise self._file.corrupt(str(error)) from None


class RowClaimError(ValueError):
    """Record batches claim to have more rows than are read."""


def _sum_of_rows(row_count: int, of_batch: int) -> int:
    """Add the rows of the next record batch. The rows of all files are added in 64 bits before they are read."""
    if not 0 <= of_batch <= MAX_BATCH_ROWS:
        raise RowClaimError(
            f"a record batch claims to have {of_batch} rows; write record batches of at most {MAX_BATCH_ROWS} rows"
        )
    row_count += of_batch
    if row_count > interface.MAX_ROWS:
        raise RowClaimError(
            f"its record batches claim to have more than {interface.MAX_ROWS} rows; import it as several files"
        )
    return row_count


def _take_bytes(arrow_type: pa.DataType) -> bool:
    """Return whether values take bytes: all do, except nulls of no other type."""
    if isinstance(arrow_type, pa.BaseExtensionType):
        return _take_bytes(arrow_type.storage_type)
    if kinds.is_fixed_size_list(arrow_type):
        return bool(arrow_type.list_size > 0) and _take_bytes(arrow_type.value_type)
    return not kinds.is_null(arrow_type)


def _needs_a_look(arrow_type: pa.DataType) -> bool:
    """Return whether values can be malformed: offsets, indices, UTF-8, decimals, times of day."""
    if isinstance(arrow_type, pa.BaseExtensionType):
        return _needs_a_look(arrow_type.storage_type)
    if kinds.is_fixed_size_list(arrow_type):
        return _needs_a_look(arrow_type.value_type)
    if kinds.is_dictionary(arrow_type) or kinds.is_nested(arrow_type) or is_text(arrow_type):
        return True
    return bool(kinds.is_decimal(arrow_type) or kinds.is_time(arrow_type) or kinds.is_date64(arrow_type))


# --- Bytes ---

PIECE_BYTES = 16 * 1024 * 1024
# A footer has 24 bytes for each record batch.
MAX_END_BYTES = 64 * 1024 * 1024


class ArrowDamage(ValueError):
    """The bytes are no whole stream or file; the text says why."""


class ArrowStream:
    """The messages of a stream or file, as a file that Arrow's reader of streams reads.

    It never reads beyond a message, for whose end an upload may have to be awaited.
    """

    closed = False

    def __init__(self, opened: BinaryIO) -> None:
        self._opened = opened
        start = _read_pieces(opened, 8)
        self._in_file = start.startswith(FILE_MAGIC)
        self._rest = b"" if self._in_file else start
        self._has_ended = False

    def read(self, size: int = -1) -> bytes:
        """Return `size` bytes, fewer at the end."""
        data = self._rest
        if len(data) < size:
            # Arrow reads the prefix and the length of a message one after the other, and each read may be a request.
            data += _read_pieces(self._opened, max(size, 8) - len(data))
            self._has_ended = len(data) < size
        self._rest = data[size:]
        return data[:size] if self._rest else data

    def seek(self, position: int) -> None:
        """Go on at this byte of the file."""
        self._opened.seek(position)
        self._rest = b""

    def check_end(self, batch_count: int) -> None:
        """Check the end marker, and what follows it. Reads up to the very end. Raises `ArrowDamage`.

        Arrow's reader takes a stream without its end marker for a whole one, though it was cut off behind a message.
        """
        if self._has_ended:
            raise ArrowDamage("it ends without its end marker; close its writer")
        if self._in_file:
            check_footer(self._rest + _read_end(self._opened), batch_count)
        elif self._rest or self._opened.read(1):
            raise ArrowDamage("it goes on after its end marker")

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return False

    def close(self) -> None:
        self.closed = True


def check_footer(rest: bytes, batch_count: int) -> None:
    """Check the rest of a file, which is behind its end marker. Raises `ArrowDamage`."""
    try:
        # Arrow finds a footer from the end on.
        claimed = pa.ipc.open_file(FILE_MAGIC + bytes(2) + rest).num_record_batches
    except (pa.ArrowInvalid, OSError) as error:  # no error of a disk: the bytes are in memory
        raise ArrowDamage(f"its footer is damaged: {first_line(error)}") from None
    if claimed != batch_count:
        raise ArrowDamage(f"its footer names {claimed} record batches, but it has {batch_count}")


def _read_end(opened: BinaryIO) -> bytes:
    """Read what follows a file's end marker. Raises `ArrowDamage` if that is too much for a footer."""
    end = _read_pieces(opened, MAX_END_BYTES + 1)
    if len(end) > MAX_END_BYTES:
        raise ArrowDamage(f"more than {MAX_END_BYTES} bytes follow its end marker")
    return end


def _read_pieces(opened: BinaryIO, size: int) -> bytes:
    """Read `size` bytes, or fewer at the end. Memory grows with the bytes read, not with a message's claim."""
    first = opened.read(min(size, PIECE_BYTES))
    if len(first) == size or not first:
        return first
    pieces = [first]
    missing = size - len(first)
    while missing > 0 and (piece := opened.read(min(missing, PIECE_BYTES))):
        pieces.append(piece)
        missing -= len(piece)
    return b"".join(pieces)


# --- Parts ---
# Lists the messages of a file, without their bodies. Arrow reads no message's rows without its body, and a part must
# know the number of rows before it.
#
# Sources: https://arrow.apache.org/docs/format/Columnar.html (encapsulated message format), Message.fbs, and
# https://flatbuffers.dev/internals.

CONTINUATION = b"\xff\xff\xff\xff"
MESSAGE_BYTES = 4096
_SCHEMA, _RECORD_BATCH = 1, 3


@dataclass(frozen=True)
class _Part:
    """A run of record batches: `batch_count` messages from the file's byte `begin` on, without dictionaries."""

    begin: int
    batch_count: int
    first_row: int
    row_count: int
    size_bytes: int


@dataclass(frozen=True)
class _Message:
    """A message: `size_bytes` with those of its body, and the rows that a record batch claims to have."""

    begin: int
    kind: int
    size_bytes: int
    row_count: int


def _parts(opened: BinaryIO, on_read: Callable[[], None]) -> list[_Part]:
    """Divide a file by its messages. Return nothing for a stream, and for a file that has dictionaries.

    Record batches may need a dictionary that is far away. Raises `ArrowDamage` and `RowClaimError`.
    """
    if opened.read(len(FILE_MAGIC)) != FILE_MAGIC:
        return []
    parts: list[_Part] = []
    waiting: list[_Message] = []
    first_row = row_count = size_bytes = batch_count = 0
    for place, message in enumerate(_messages(opened)):
        on_read()
        if place == 0 and message.kind == _SCHEMA:
            continue
        if message.kind != _RECORD_BATCH:
            return []
        row_count = _sum_of_rows(row_count, message.row_count)
        batch_count += 1
        if waiting and size_bytes + message.size_bytes > interface.PART_BYTES:
            parts.append(_part_of(waiting, first_row))
            first_row += parts[-1].row_count
            waiting, size_bytes = [], 0
        waiting.append(message)
        size_bytes += message.size_bytes
    check_footer(_read_end(opened), batch_count)
    return [*parts, _part_of(waiting, first_row)] if waiting else []


def _part_of(messages: Sequence[_Message], first_row: int) -> _Part:
    row_count = sum(message.row_count for message in messages)
    return _Part(messages[0].begin, len(messages), first_row, row_count, sum(one.size_bytes for one in messages))


def _messages(opened: BinaryIO) -> Iterator[_Message]:
    """Yield the messages of a file up to its end marker, and leave it there. Raises `ArrowDamage`."""
    position, metadata_bytes = len(FILE_MAGIC) + 2, MESSAGE_BYTES
    opened.seek(0, 2)
    file_bytes = opened.tell()
    while True:
        if position > file_bytes:
            raise ArrowDamage("a message's body goes on after its end")
        # One read for most messages: their metadata are as large as those of the message before.
        opened.seek(position)
        data = _read_pieces(opened, 8 + metadata_bytes)
        if data[:4] != CONTINUATION or len(data) < 8:
            raise ArrowDamage("it has no message where one must begin")
        (metadata_bytes,) = struct.unpack_from("<i", data, 4)
        if metadata_bytes == 0:
            opened.seek(position + 8)
            return
        if metadata_bytes < 8:
            raise ArrowDamage("a message's metadata is damaged")
        if len(data) < 8 + metadata_bytes:
            data += _read_pieces(opened, 8 + metadata_bytes - len(data))
        try:
            message = _message(data[8 : 8 + metadata_bytes], position)
        except struct.error:
            raise ArrowDamage("a message's metadata is damaged") from None
        yield message
        position += message.size_bytes


def _message(metadata: bytes, begin: int) -> _Message:
    """Read a `Message`, of whose fields the type of the header, the header and the size of the body are needed."""
    table = _number("<I", metadata, 0)
    kind, header, body_bytes = (_field(metadata, table, field) for field in (1, 2, 3))
    size_bytes = 0 if body_bytes is None else _number("<q", metadata, body_bytes)
    # With bodies of fewer than 0 bytes messages would overlap, and listing them would take the square of their number.
    if kind is None or header is None or size_bytes < 0:
        raise ArrowDamage("a message's metadata is damaged")
    rows = _field(metadata, header + _number("<I", metadata, header), 0) if metadata[kind] == _RECORD_BATCH else None
    return _Message(
        begin, metadata[kind], 8 + len(metadata) + size_bytes, 0 if rows is None else _number("<q", metadata, rows)
    )


def _field(data: bytes, table: int, field: int) -> int | None:
    """Return where a field of a flatbuffers table is; None if the table lacks it."""
    fields = table - _number("<i", data, table)
    slot = 4 + 2 * field
    offset = _number("<H", data, fields + slot) if slot + 2 <= _number("<H", data, fields) else 0
    return table + offset if 0 < offset < len(data) - table else None


def _number(layout: str, data: bytes, position: int) -> int:
    return int(struct.unpack_from(layout, data, position)[0])
