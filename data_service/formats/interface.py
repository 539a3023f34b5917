"""The interface between formats and the import job, and the code that formats share.

The shared code opens and decompresses files, names the file in errors, and computes the size of decoded rows. It cuts
text, from any supported encoding, into UTF-8 blocks of whole lines, with a limit on a line's memory.

A text file can be divided into parts of whole lines, or of whole records, that are read one by one.

Only UTF-8 that is not compressed can be divided: any other text can be decoded from its first byte on alone. The places
of the cuts are found while the whole file is read for another purpose, such as type inference.

A scan of all rows of a source's text files infers the types of their columns, and finds where they can be divided.

One process scans the files of a small source, one after the other. Tasks scan several files of a large source,
and at several parts of a large file, at the same time. A first pass finds the cuts of large files: it parses no values.
That of an upload runs in the attempt's own process, and verifies its bytes.
What the tasks find is merged in the order of the rows, and is then what one process would find.
"""

from __future__ import annotations

import codecs
import gzip
import io
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any, BinaryIO, Generic, Protocol, TypeVar, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as kinds

from data_service.storage.source_files import SourceFile
from shared.errors import Unavailable, first_line

# --- Decompression ---
# Gzip, recognised by its first bytes rather than by a file's name, with a limit on the decompressed size.

GZIP_MAGIC = b"\x1f\x8b"
# Up to FREE_BYTES decoded bytes are always accepted. Beyond that, more than MAX_RATIO times the bytes read counts as a
# decompression bomb. MNIST grows fivefold; deflate cannot grow more than 1,032-fold.
FREE_BYTES = 256 * 1024 * 1024
MAX_RATIO = 200
BUFFER_BYTES = 1024 * 1024


class DecompressionError(ValueError):
    """The bytes are no complete gzip file, or decompress beyond the limit; the text says which."""


class IdxError(ValueError):
    """The bytes are no complete IDX file; the text says why."""


def decompressed(stream: BinaryIO) -> BinaryIO:
    """Return `stream`, or its decompressed content if it is gzip.

    Use only `read(size)` of the result; it may return fewer bytes, and none only at the end.
    """
    raw = _Raw(stream)
    buffered = io.BufferedReader(raw, BUFFER_BYTES)
    if buffered.peek(2)[:2] != GZIP_MAGIC:
        return cast(BinaryIO, buffered)
    return cast(BinaryIO, _Gunzip(buffered, raw))


class _Raw(io.RawIOBase):
    """A raw stream over any object with `read`, which counts the bytes."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self.bytes_read = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        data = self._stream.read(len(buffer))
        buffer[: len(data)] = data
        self.bytes_read += len(data)
        return len(data)


class _Gunzip:
    """Decompresses gzip, with a limit relative to the bytes read so far.

    The size of the whole file may not be known yet.
    """

    def __init__(self, compressed: io.BufferedReader[_Raw], raw: _Raw) -> None:
        self._file = gzip.GzipFile(fileobj=compressed, mode="rb")
        self._raw = raw
        self._returned_bytes = 0

    def read(self, size: int) -> bytes:
        try:
            data = self._file.read(size)
        except EOFError:
            raise DecompressionError("it is gzip, and ends before its end marker") from None
        except (gzip.BadGzipFile, zlib.error) as error:
            raise DecompressionError(f"it is damaged gzip: {error}") from None
        self._returned_bytes += len(data)
        most = max(FREE_BYTES, MAX_RATIO * self._raw.bytes_read)
        if self._returned_bytes > most:
            raise DecompressionError(f"it decompresses to more than {most} bytes, {MAX_RATIO} times its size")
        return data


# --- Content ---
# A source file's bytes, and errors that name the file.


@contextmanager
def content(file: SourceFile, begin: int = 0) -> Iterator[BinaryIO]:
    """Open the file's bytes, decompressed if they are gzip; with `begin`, the stored bytes from that one on.

    Use only `read(size)` of the result.
    """
    with closing(file.open()) as opened:
        if begin:
            opened.seek(begin)
        # Of an object each read is a request, and readers of tars read a block at a time.
        stream = cast(BinaryIO, io.BufferedReader(_Raw(opened), BUFFER_BYTES)) if begin else decompressed(opened)
        yield cast(BinaryIO, _Watched(stream, file.on_read))


def is_compressed(stream: BinaryIO) -> bool:
    """Return whether the bytes of `content` are decompressed ones."""
    return isinstance(cast(_Watched, stream).stream, _Gunzip)


class _Watched:
    """A stream that calls `on_read` before each read.

    Type inference reads whole files, and must stop when the job is stopped.
    """

    def __init__(self, stream: BinaryIO, on_read: Callable[[], None]) -> None:
        self.stream = stream
        self._on_read = on_read

    def read(self, size: int) -> bytes:
        self._on_read()
        return self.stream.read(size)


@contextmanager
def blaming(file: SourceFile, kind: str) -> Iterator[None]:
    """Turn a reader's errors about the bytes into errors that name the source; `kind` is the format."""
    try:
        yield
    except (IdxError, DecompressionError) as error:
        raise file.corrupt(str(error)) from None
    except MemoryError:
        raise  # Arrow's, too: the limit of the process says more than that the file is damaged
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        if (isinstance(error, OSError) and error.errno) or "AWS Error" in str(error):
            raise Unavailable(f"{file.field}: {file.uri} cannot be read at present", retry_after_s=1.0) from error
        raise file.corrupt(f"it is not a whole {kind} file: {first_line(error)}") from None


# --- Decoded size ---
# The memory that a batch of a typed file takes once it is decoded.


def is_text(arrow_type: pa.DataType) -> bool:
    """Return whether the values are strings or bytes of any length."""
    checks = (
        kinds.is_string,
        kinds.is_binary,
        kinds.is_large_string,
        kinds.is_large_binary,
        kinds.is_string_view,
        kinds.is_binary_view,
    )
    return any(check(arrow_type) for check in checks)


def decoded_bytes(batch: pa.RecordBatch) -> int:
    """Return the bytes of the batch once every row has its own values.

    A text that several rows share counts for each of them.
    """
    total = 0
    for column in (_plain(column) for column in batch.columns):
        if isinstance(column, pa.DictionaryArray):
            if is_text(column.dictionary.type):
                lengths = _text_lengths(column.dictionary)
                total += int(pc.sum(lengths.take(column.indices)).as_py() or 0)
            else:
                total += len(column) * (column.dictionary.nbytes // max(len(column.dictionary), 1) + 1)
        elif kinds.is_string_view(column.type) or kinds.is_binary_view(column.type):
            total += int(pc.sum(_text_lengths(column)).as_py() or 0)
        else:
            total += column.nbytes
    return total


def _plain(column: pa.Array) -> pa.Array:
    return _plain(column.storage) if isinstance(column, pa.ExtensionArray) else column


def _text_lengths(texts: pa.Array) -> pa.Array:
    """Return the lengths in bytes; 0 for nulls."""
    if kinds.is_string_view(texts.type) or kinds.is_binary_view(texts.type):
        # The first four bytes of each 16-byte view are its length.
        views = np.frombuffer(texts.buffers()[1], np.int32)[texts.offset * 4 : (texts.offset + len(texts)) * 4 : 4]
        return pc.if_else(texts.is_valid(), pa.array(views.astype(np.int64)), 0)
    return pc.fill_null(pc.binary_length(texts), 0).cast(pa.int64())


# --- Interface ---

# The approximate bytes of rows in one table.
CHUNK_BYTES = 4 * 1024 * 1024
# The maximum rows of a table whose rows have no fixed width.
MAX_CHUNK_ROWS = 4096
# The approximate bytes of one part of a source: decoded ones of a typed file, stored ones of others.
PART_BYTES = 64 * 1024 * 1024
# The maximum bytes that a few stored bytes may be decoded into at once.
MAX_DECODED_BYTES = 256 * 1024 * 1024
# A file that claims to have more rows is not believed. The rows of all files are added in 64 bits before they are read.
MAX_ROWS = 2**40
EXCERPT_CHARACTERS = 200


class BadRowSink(Protocol):
    """Takes rows that do not fit their columns' types."""

    def add(self, source: str, place: str, reason: str, excerpt: str, rows: int = 1) -> None:
        """Add a bad row.

        `source` is the file's URI, `place` the position in it: `line 17`, `lines 4 to 6`, `row 4`, `member
        train/ants/x.jpg`. `rows` is the number of rows there; for a text file, of lines.

        Raises `InvalidArgument` if no (more) bad rows are allowed.
        """


class RowSource(Protocol):
    """The rows of one file, or of a pair or folder of files that belong together.

    Can be sent to another process by cloudpickle, once all sources are open.
    """

    @property
    def schema(self) -> pa.Schema:
        """The logical columns, after inference and overrides."""

    @property
    def class_names(self) -> list[str] | None:
        """The names of the labels 0, 1, … for images in folders; else None."""

    @property
    def row_count(self) -> int | None:
        """The number of rows if every row is good; None if it is not known without reading them."""

    @property
    def size_bytes(self) -> int:
        """The bytes to read, an estimate; 0 for an upload that still grows."""

    def parts(self) -> Sequence[RowSource]:
        """Return consecutive sources that yield the same rows, good and bad, as this one; at least one.

        Each has the same schema, and names the places of bad rows in the whole file. The parts depend on the content
        alone. Call it only once all sources are open.
        """

    def tables(self, bad: BadRowSink) -> Iterator[pa.Table]:
        """Yield all good rows in order, a bounded number at a time.

        Bad rows go to the sink. May be called again. Raises `InvalidArgument` for a source that is damaged as a whole,
        `NotFound` and `Unavailable`.
        """


@dataclass(frozen=True)
class OpenSource:
    """An open source.

    `index` is the index of the request's source; a folder or a pattern yields one for each file, in their order.
    """

    index: int
    split: str
    rows: RowSource


def excerpt_of(value: object) -> str:
    """Return the beginning of a bad row as text; undecodable bytes are escaped."""
    if isinstance(value, (bytes, memoryview)):
        text = bytes(value[: 4 * EXCERPT_CHARACTERS]).decode("utf-8", "backslashreplace")
    else:
        text = str(value)[:EXCERPT_CHARACTERS].encode("utf-8", "backslashreplace").decode("utf-8")
    return text[:EXCERPT_CHARACTERS]


# --- Blocks of lines ---

BLOCK_BYTES = 1024 * 1024
# The limit of one line, and of one CSV record that spans several.
MAX_LINE_BYTES = 16 * 1024 * 1024
PYTHON_ENCODINGS = {"utf-8": "utf-8", "utf-16": "utf-16", "latin-1": "latin-1", "windows-1252": "cp1252"}


class TextError(ValueError):
    """The bytes are no text in their encoding at all; the text says why."""


@dataclass(frozen=True)
class TextPlace:
    """The beginning of a line.

    `file_byte` is its position in the file, from 0, `first_line` counts from 1, and `first_byte` is its position in the
    text, which has neither a byte-order mark nor lines that are skipped.
    """

    file_byte: int = 0
    first_line: int = 1
    first_byte: int = 0


@dataclass(frozen=True)
class LineBlock:
    """A block of whole lines; a file's last line may lack its end.

    `first_line` counts from 1; `first_byte` is the block's position in the text, from 0. With `too_long` it has only
    the beginning of one line that is skipped and that `first_byte` does not count. `file_byte` is the block's position
    in the file, if that is UTF-8.
    """

    data: bytes
    first_line: int
    first_byte: int
    too_long: bool = False
    file_byte: int = 0


def line_blocks(stream: BinaryIO, encoding: str, begin: TextPlace = TextPlace()) -> Iterator[LineBlock]:
    """Yield the text in blocks, from `begin` on, where the stream begins.

    Lines end with LF, CR LF or CR. A byte-order mark is removed. Undecodable characters become bytes that are no UTF-8,
    so that their rows can be reported. Raises `TextError`.
    """
    line, byte, file_byte = begin.first_line, begin.first_byte, begin.file_byte
    rest = b""
    skipping = False
    for piece in _with_end(_utf8_pieces(stream, encoding)):
        data = rest + (piece or b"")
        if encoding == "utf-8" and file_byte == 0 and data.startswith(codecs.BOM_UTF8):
            data = data.removeprefix(codecs.BOM_UTF8)
            file_byte = len(codecs.BOM_UTF8)
        cut = len(data) if piece is None else _end_of_lines(data)
        lines, rest = data[:cut], data[cut:]
        # Only the first line can be longer than what is read at once.
        if not skipping and len(lines) > MAX_LINE_BYTES and _first_line_bytes(lines) > MAX_LINE_BYTES:
            yield LineBlock(lines[:1024], line, byte, too_long=True, file_byte=file_byte)
            skipping = True
        if skipping and lines:
            end = _end_of_first_line(lines)
            lines, skipping = lines[end:], False
            line += 1
            file_byte += end
        if lines:
            yield LineBlock(lines, line, byte, file_byte=file_byte)
            line += count_lines(lines)
            byte += len(lines)
            file_byte += len(lines)
        if not skipping and len(rest) - rest.endswith(b"\r") > MAX_LINE_BYTES:
            yield LineBlock(rest[:1024], line, byte, too_long=True, file_byte=file_byte)
            skipping = True
        if skipping:
            file_byte += len(rest) - len(rest[-1:])
            rest = rest[-1:]  # a CR may be the first half of a line end


def count_lines(data: bytes) -> int:
    """Return the number of lines, including a last one without an end."""
    ends = data.count(b"\n")
    if b"\r" in data:
        ends += data.count(b"\r") - data.count(b"\r\n")
    return ends + (not data.endswith((b"\n", b"\r")))


def split_lines(data: bytes) -> list[bytes]:
    """Split the text into lines with their ends."""
    return data.splitlines(keepends=True)


def _with_end(pieces: Iterator[bytes]) -> Iterator[bytes | None]:
    yield from pieces
    yield None


def _end_of_lines(data: bytes) -> int:
    """Return the position after the last complete line.

    A final CR may be followed by its LF, so it does not count.
    """
    return max(data.rfind(b"\n"), data.rfind(b"\r", 0, len(data) - 1)) + 1


def _end_of_first_line(data: bytes) -> int:
    ends = [at for at in (data.find(b"\n"), data.find(b"\r")) if at >= 0]
    if not ends:
        return len(data)
    end = min(ends)
    return end + (2 if data[end : end + 2] == b"\r\n" else 1)


def _first_line_bytes(data: bytes) -> int:
    """Return the bytes of the first line, without its end."""
    return len(data[: _end_of_first_line(data)].rstrip(b"\r\n"))


def _utf8_pieces(stream: BinaryIO, encoding: str) -> Iterator[bytes]:
    if encoding == "utf-8":
        first = True
        while data := stream.read(BLOCK_BYTES):
            while first and len(data) < 3 and (more := stream.read(3 - len(data))):
                data += more
            yield data
            first = False
        return
    # Lone surrogates stand for undecodable bytes, and are no UTF-8.
    errors = "surrogatepass" if encoding == "utf-16" else "surrogateescape"
    data = stream.read(BLOCK_BYTES)
    while len(data) < 2 and (more := stream.read(BLOCK_BYTES)):
        data += more
    decoder = codecs.getincrementaldecoder(_codec(encoding, data))(errors)
    try:
        yield decoder.decode(data).encode("utf-8", "surrogatepass")
        while data := stream.read(BLOCK_BYTES):
            yield decoder.decode(data).encode("utf-8", "surrogatepass")
        yield decoder.decode(b"", final=True).encode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        raise TextError(f"it ends within a character, or is not {encoding}") from None


def _codec(encoding: str, beginning: bytes) -> str:
    """Return Python's name of the encoding.

    If UTF-16 lacks its byte-order mark, the zero bytes of commas and line ends show the byte order.
    """
    if encoding == "utf-16" and beginning[:2] not in (b"", codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
        upper_first, lower_first = beginning[0::2].count(0), beginning[1::2].count(0)
        if upper_first == lower_first:
            raise TextError("it has no byte-order mark, so it is not known to be utf-16; put one in front")
        return "utf-16-be" if upper_first > lower_first else "utf-16-le"
    return PYTHON_ENCODINGS[encoding]


# --- Parts of a text file ---


@dataclass(frozen=True)
class TextPart:
    """The lines from `begin` up to the file's byte `end`, which begins a line, too; None for the end of the file.

    `row_count` is the number of its well-formed rows.
    """

    begin: TextPlace
    end: int | None
    row_count: int
    size_bytes: int

    @property
    def is_first(self) -> bool:
        return self.begin.file_byte == 0


@dataclass(frozen=True)
class OpenText:
    """The blocks of a text, and whether it can be divided."""

    blocks: Iterator[LineBlock]
    can_be_divided: bool


@contextmanager
def opened_text(file: SourceFile, encoding: str, part: TextPart | None = None) -> Iterator[OpenText]:
    """Open the text; of a part from its beginning on.

    A block ends at the part's end. The blocks after it are there for records that seem to go on.
    """
    begin = TextPlace() if part is None else part.begin
    with content(file, begin=max(begin.file_byte - 1, 0)) as stream:
        if begin.file_byte and stream.read(1) not in (b"\n", b"\r"):
            raise file.corrupt("it changed while it was read")
        blocks = line_blocks(stream, encoding, begin)
        if part is not None and part.end is not None:
            blocks = _cut(blocks, part.end)
        yield OpenText(blocks, encoding == "utf-8" and not is_compressed(stream))


def _cut(blocks: Iterator[LineBlock], end: int) -> Iterator[LineBlock]:
    """Divide the block in which a line begins at the file's byte `end`."""
    for block in blocks:
        size = end - block.file_byte
        if block.too_long or not 0 < size < len(block.data):
            yield block
            continue
        first, rest = block.data[:size], block.data[size:]
        yield LineBlock(first, block.first_line, block.first_byte, file_byte=block.file_byte)
        lines = count_lines(first)
        yield LineBlock(rest, block.first_line + lines, block.first_byte + size, file_byte=end)


class PartCutter:
    """Chooses the cuts of one text while it is read from its first byte to its last."""

    def __init__(self) -> None:
        self._begin = TextPlace()
        self._parts: list[TextPart] = []
        self._row_count = 0
        self._bytes_read = 0

    @property
    def row_count(self) -> int:
        """The rows since the last cut."""
        return self._row_count

    def add(self, row_count: int) -> None:
        """Add rows that follow the last place."""
        self._row_count += row_count

    def pass_place(self, place: TextPlace) -> None:
        """Cut at this place if the part that ends here is large enough. No row is read both before and after it."""
        self._bytes_read = place.file_byte
        size_bytes = place.file_byte - self._begin.file_byte
        # Only a byte-order mark may come before line 1.
        if size_bytes >= PART_BYTES and place.first_line > 1:
            self._parts.append(TextPart(self._begin, place.file_byte, self._row_count, size_bytes))
            self._begin, self._row_count = place, 0

    def parts(self, file: SourceFile) -> list[TextPart]:
        """Return the parts of the file, which has been read to its end."""
        size_bytes = max((file.size_bytes or self._bytes_read) - self._begin.file_byte, 0)
        return [*self._parts, TextPart(self._begin, None, self._row_count, size_bytes)]


# --- Scans of text files ---

# A smaller source is read in less time than tasks need to begin.
LARGE_BYTES = 256 * 1024 * 1024


class Found(Protocol):
    """What was found in some rows. Picklable."""

    def merge(self, file: SourceFile, later: Any) -> None:
        """Add what was found in rows of `file` that follow.

        The result depends on the rows alone, never on where they were divided. Raises `InvalidArgument` for what no
        import may have, and `NotMergeable` where it depends on the rows one by one.
        """


F = TypeVar("F", bound=Found)


class NotMergeable(Exception):
    """One process has to scan all rows."""


class Scanner(Protocol[F]):
    """Scans the rows of files of one format. Picklable.

    Unless it `reads_rows`, nothing is to be found in them, and files are only cut.
    """

    @property
    def reads_rows(self) -> bool: ...

    def nothing(self) -> F:
        """Return what is found in no rows."""

    def scan(self, file: SourceFile, found: F, part: TextPart | None = None) -> list[TextPart]:
        """Add what is in the rows of the file, or of a part, to `found`.

        Return the parts of the file, with the numbers of their well-formed rows, or that part.
        """

    def cut(self, file: SourceFile) -> list[TextPart]:
        """Return the parts of a large file, as `scan` does; nothing for one that cannot be divided.

        Where rows are looked at afterwards, the parts' own numbers of rows need not be right.
        """


@dataclass(frozen=True)
class ScanUnit:
    """A file, or a part of one, that a task scans."""

    number: int
    file: SourceFile
    part: TextPart | None = None
    row_count: int = 0

    @property
    def where(self) -> str:
        lines = f", from line {self.part.begin.first_line} on" if self.part else ""
        return f"{self.file.field}: {self.file.uri}{lines}"


R = TypeVar("R")


class UnitRunner(Protocol):
    def __call__(self, work: Callable[[ScanUnit], R], units: Sequence[ScanUnit]) -> Iterator[R]:
        """Do the work on each unit in a task; yield the results in the order of the units.

        Raises the error of the first unit that fails, in that order.
        """


def scan_files(
    files: Sequence[SourceFile], scanner: Scanner[F], run_units: UnitRunner | None
) -> tuple[F, list[list[TextPart]]]:
    """Return what is found in the rows of all files, and the parts of each."""
    if run_units is not None and _are_large(files):
        try:
            return _scan_in_tasks(files, scanner, run_units)
        except NotMergeable:
            pass
    found = scanner.nothing()
    return found, [scanner.scan(file, found) for file in files]


def _are_large(files: Sequence[SourceFile]) -> bool:
    """Return whether tasks are to scan the files. The size of an upload is known once it is whole."""
    return sum(file.size_bytes or 0 for file in files) >= LARGE_BYTES


def _scan_in_tasks(
    files: Sequence[SourceFile], scanner: Scanner[F], run_units: UnitRunner
) -> tuple[F, list[list[TextPart]]]:
    large = [index for index, file in enumerate(files) if (file.size_bytes or 0) > PART_BYTES]
    to_cut = [ScanUnit(number, files[index]) for number, index in enumerate(large)]
    uploads = [file for file in files if file.is_upload]
    # An upload's bytes are verified as this process reads them. Tasks compare what they read with these bytes.
    run_cuts = _do_here if uploads else run_units
    cuts = dict(zip(large, run_cuts(_Cut(scanner), to_cut), strict=True)) if to_cut else {}
    for upload in uploads:
        upload.wait_until_whole()
    found = scanner.nothing()
    if not scanner.reads_rows:
        return found, [cuts.get(index, []) for index in range(len(files))]
    whole: list[TextPart | None] = [None]
    places = [(index, part) for index in range(len(files)) for part in (cuts.get(index) or whole)]
    units = [ScanUnit(number, files[index], part) for number, (index, part) in enumerate(places)]
    parts: list[list[TextPart]] = [[] for _ in files]
    for (index, _), scanned in zip(places, run_units(_Scan(scanner), units), strict=True):
        found.merge(files[index], scanned.found)
        parts[index] += scanned.parts
    return found, parts


def _do_here(work: Callable[[ScanUnit], R], units: Sequence[ScanUnit]) -> Iterator[R]:
    """Do the work on each unit in this process; a `UnitRunner`."""
    return map(work, units)


@dataclass(frozen=True)
class Scanned(Generic[F]):
    """What a task found in its unit, and the parts of that."""

    found: F
    parts: list[TextPart]


@dataclass(frozen=True)
class _Scan(Generic[F]):
    scanner: Scanner[F]

    def __call__(self, unit: ScanUnit) -> Scanned[F]:
        found = self.scanner.nothing()
        return Scanned(found, self.scanner.scan(unit.file, found, unit.part))


@dataclass(frozen=True)
class _Cut:
    scanner: Scanner[Any]

    def __call__(self, unit: ScanUnit) -> list[TextPart]:
        return self.scanner.cut(unit.file)
