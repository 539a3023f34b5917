"""Comma-separated values (RFC 4180): records with their line numbers, and rows with inferred types."""

from __future__ import annotations

import csv
import io
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.csv
from numpy.typing import NDArray

from data_service.domain.import_spec import CsvOptions
from data_service.formats import interface
from data_service.formats.casts import Cast, CastRefused, Fits, InferredType, cast_between, cast_rows
from data_service.formats.interface import (
    BadRowSink,
    LineBlock,
    PartCutter,
    RowSource,
    TextError,
    TextPart,
    TextPlace,
    UnitRunner,
    blaming,
    excerpt_of,
    opened_text,
    scan_files,
    split_lines,
)
from data_service.formats.typed_columns import Overrides, check_names
from data_service.storage.source_files import SourceFile
from shared.dataset_version.manifest import MAX_COLUMNS
from shared.errors import invalid_field
from shared.value_texts import zone_hint

# --- CSV rows ---
# Comma-separated values: types are inferred from all rows of all files of the source, unless they are given.

NULL_VALUES = ("NA", "N/A", "null", "NULL", "NaN", "nan")


def open_csv(
    files: Sequence[SourceFile],
    options: CsvOptions | None,
    overrides: Overrides,
    run_units: UnitRunner | None = None,
) -> list[RowSource]:
    """Open one source for each file.

    Reads all files once to infer types, unless every column's type is given; large ones by `run_units`. Raises
    `InvalidArgument` if a file has no usable column names, or others than the first file.
    """
    dialect = _Dialect(options or CsvOptions())
    names = dialect.names_of(files[0])
    for file in files[1:]:
        if (others := dialect.names_of(file)) != names:
            raise file.corrupt(f"its columns are {_shown(others)}, but those of {files[0].uri} are {_shown(names)}")
    given = overrides.types_among(names)
    casts = {name: _cast(overrides, name, wanted) for name, wanted in given.items()}
    scanner = _CsvScanner(dialect, names, [name for name in names if name not in given])
    inferred, parts = scan_files(files, scanner, run_units)
    types = {name: given.get(name) or inferred[name].type for name in names}
    schema = pa.schema([pa.field(name, arrow_type) for name, arrow_type in types.items()])
    casts |= {name: cast_between(pa.string(), one.type) for name, one in inferred.items()}
    shared = MappingProxyType(casts)
    return [_CsvRows(file, dialect, schema, shared, found) for file, found in zip(files, parts, strict=True)]


class _Dialect:
    """How the files of one source are parsed."""

    def __init__(self, options: CsvOptions) -> None:
        self._delimiter = options.delimiter or ","
        self._null_values = options.null_values or NULL_VALUES
        self._encoding = options.encoding or "utf-8"
        self._names = options.column_names

    def names_of(self, file: SourceFile) -> list[str]:
        if self._names:
            names = list(self._names)
        else:
            with self._opened(file) as reader:
                found = reader.header()
            if found is None:
                raise file.corrupt("it is empty: it has not even a line of names")
            names = found
        if len(names) > MAX_COLUMNS:
            raise file.corrupt(f"it has {len(names)} columns; at most {MAX_COLUMNS} are read")
        if any("\ud800" <= character <= "\udfff" for name in names for character in name):
            raise file.corrupt(f"its names of columns are not {self._encoding}")
        check_names(file, names)
        return names

    @contextmanager
    def reader(self, file: SourceFile, part: TextPart | None = None) -> Iterator[CsvReader]:
        """Open the records after the names; of a part its own."""
        with self._opened(file, part) as reader:
            if not self._names and (part is None or part.is_first):
                reader.header()
            yield reader

    @contextmanager
    def _opened(self, file: SourceFile, part: TextPart | None = None) -> Iterator[CsvReader]:
        with blaming(file, "CSV"), opened_text(file, self._encoding, part) as text:
            try:
                yield CsvReader(
                    text.blocks, self._delimiter, self._null_values, part, can_be_divided=text.can_be_divided
                )
            except (CsvHeaderError, TextError) as error:
                raise file.corrupt(str(error)) from None


class _InferredTypes(dict[str, InferredType]):
    """The types of the columns that have no given one; a `Found`."""

    def merge(self, file: SourceFile, later: _InferredTypes) -> None:  # noqa: ARG002 - types never refuse a file
        for name, one in later.items():
            self[name].merge(one)


@dataclass(frozen=True)
class _CsvScanner:
    """Scans the rows of a source with the columns `names`, and infers the types of those in `inferred`."""

    dialect: _Dialect
    names: Sequence[str]
    inferred: Sequence[str]

    @property
    def reads_rows(self) -> bool:
        return bool(self.inferred)

    def nothing(self) -> _InferredTypes:
        return _InferredTypes({name: InferredType() for name in self.inferred})

    def scan(self, file: SourceFile, found: _InferredTypes, part: TextPart | None = None) -> list[TextPart]:
        """Without columns to infer, a file that is not worth another pass has no parts."""
        if not self.inferred:
            return self.cut(file) if (file.size_bytes or 0) > interface.PART_BYTES else []
        cutter = PartCutter()
        with self.dialect.reader(file, part) as reader:
            for records in reader.records(len(self.names)):
                # A row with undecodable bytes does not influence the types.
                texts, all_fit = _texts(records.columns)
                cutter.add(len(records.lines) if all_fit is None else int(all_fit.sum()))
                for name, column in zip(self.names, texts, strict=True):
                    if name in found:
                        found[name].update(column if all_fit is None else column.filter(pa.array(all_fit)))
                if part is None:
                    reader.pass_place(cutter)
        return cutter.parts(file) if part is None else [replace(part, row_count=cutter.row_count)]

    def cut(self, file: SourceFile) -> list[TextPart]:
        cutter = PartCutter()
        with self.dialect.reader(file) as reader:
            if self.inferred and not reader.can_be_divided:
                return []
            for row_count in reader.skip_blocks() if self.inferred else reader.row_counts(len(self.names)):
                cutter.add(row_count)
                reader.pass_place(cutter)
        return cutter.parts(file)


class _CsvRows:
    class_names: list[str] | None = None

    def __init__(
        self,
        file: SourceFile,
        dialect: _Dialect,
        schema: pa.Schema,
        casts: MappingProxyType[str, Cast | None],
        parts: Sequence[TextPart],
    ) -> None:
        self._file, self._dialect, self._casts = file, dialect, casts
        self._part: TextPart | None = None
        self.schema = schema
        self._set_parts(parts)

    def _set_parts(self, parts: Sequence[TextPart]) -> None:
        self._parts = parts
        self.row_count = sum(part.row_count for part in parts) if parts else None
        self.size_bytes = sum(part.size_bytes for part in parts) if parts else self._file.size_bytes or 0

    def parts(self) -> Sequence[RowSource]:
        return [self._only(part) for part in self._parts] if len(self._parts) > 1 else [self]

    def _only(self, part: TextPart) -> _CsvRows:
        rows = copy(self)  # shares the columns and their casts with the other parts
        rows._part = part
        rows._set_parts([part])
        return rows

    def tables(self, bad: BadRowSink) -> Iterator[pa.Table]:
        with self._dialect.reader(self._file, self._part) as reader:
            for records in reader.records(len(self.schema)):
                table, misfits = self._converted(records)
                for one in sorted([*records.bad, *misfits], key=lambda one: one.line):
                    bad.add(self._file.uri, one.place, one.reason, excerpt_of(one.excerpt), one.line_count)
                if table.num_rows:
                    yield table

    def _converted(self, records: Records) -> tuple[pa.Table, list[BadRecord]]:
        good = np.ones(len(records.lines), np.bool_)
        columns, reasons = [], {}
        for field, column in zip(self.schema, records.columns, strict=True):
            texts, fits = cast_rows(column, lambda values: values.cast(pa.string()))
            reason = f"column {field.name!r} has bytes that are no text in its encoding"
            cast = self._casts[field.name]
            if cast is not None:
                texts, cast_fits = cast_rows(texts, cast)
                if cast_fits is not None:
                    for row in np.flatnonzero(good & ~cast_fits & (True if fits is None else fits)).tolist():
                        reasons[row] = f"column {field.name!r} is no {field.type}{zone_hint(field.type)}"
            if fits is not None:
                for row in np.flatnonzero(good & ~fits).tolist():
                    reasons[row] = reason
            for row in reasons:
                good[row] = False
            columns.append(texts)
        table = pa.Table.from_arrays(columns, schema=self.schema)
        misfits = [
            BadRecord(int(records.lines[row]), reason, records.excerpt(row), int(records.line_counts[row]))
            for row, reason in reasons.items()
        ]
        return (table.filter(pa.array(good)) if reasons else table), misfits


def _texts(columns: Sequence[pa.Array]) -> tuple[list[pa.Array], Fits]:
    """Return binary columns as strings, and which rows are UTF-8 in all of them."""
    cast = [cast_rows(column, lambda values: values.cast(pa.string())) for column in columns]
    misfits = [fits for _, fits in cast if fits is not None]
    return [texts for texts, _ in cast], (np.logical_and.reduce(misfits) if misfits else None)


def _cast(overrides: Overrides, name: str, data_type: pa.DataType) -> Cast | None:
    try:
        return cast_between(pa.string(), data_type)
    except CastRefused as refused:
        raise invalid_field(f"{overrides.field(name)}.arrow_type", str(data_type), f"{refused}; use another") from None


def _shown(names: Sequence[str]) -> str:
    return ", ".join(names[:20]) + (", …" if len(names) > 20 else "")


# --- CSV records ---
# Comma-separated values, RFC 4180, as columns of bytes; each record knows its lines.
#
# Arrow splits blocks in which every quote stands where it should; Python's csv module splits the others.
#
# An unclosed quote spoils only the line in which it opens: that line is bad, and the next record begins with the line
# after it. Reading stays linear in the file's size, however many such quotes it has: if a quote failed, every line
# within its reach is known to fail likewise when a quote is open at its beginning (`_OpenQuote`).

NEVER_CLOSED = "a quoted field begins in it, and no quote closes it"
CLOSED_WITHIN_TEXT = "a quoted field begins in it, and the quote that closes it stands before further text"


class CsvHeaderError(ValueError):
    """The line of names cannot be read; the text says why."""


@dataclass(frozen=True)
class BadRecord:
    """A malformed record.

    `line` is its first line; `excerpt` is the beginning of that line.
    """

    line: int
    reason: str
    excerpt: bytes
    line_count: int = 1

    @property
    def place(self) -> str:
        last = self.line + self.line_count - 1
        return f"line {self.line}" if self.line_count == 1 else f"lines {self.line} to {last}"


@dataclass(frozen=True)
class Records:
    """Parsed records of one block.

    `columns` are binary arrays of equal length, with nulls for null values. `lines` has each record's first line and
    `line_counts` the number of its lines; `excerpt` returns a record's beginning. `bad` are records with another number
    of fields, and lines with malformed quotes.
    """

    columns: list[pa.Array]
    lines: NDArray[np.int64]
    line_counts: NDArray[np.int64]
    excerpt: Callable[[int], bytes]
    bad: list[BadRecord]


class _Record(NamedTuple):
    line: int
    line_count: int
    fields: list[str]
    first_line: bytes


@dataclass(frozen=True)
class _CsvPlace(TextPlace):
    """A place between two records, and what is known there of a quote that is open on later lines."""

    open_quote: _OpenQuote | None = None


@dataclass(frozen=True)
class _OpenQuote:
    """The fate of a quoted field that is open at the beginning of a line, up to `last_line`.

    The field is not closed, for `reason`. With `end` it is closed, but the record ends at byte `end` of the text, too
    far away for most lines.
    """

    last_line: float
    reason: str
    end: int | None = None


class _NotClosed(Exception):
    """A quoted field is not closed; the text says why."""


class _TooLong(Exception):
    """A record exceeds the maximum length."""


class CsvReader:
    """Reads one file's blocks once.

    Empty lines are skipped. Null values count within quotes, too.
    """

    def __init__(
        self,
        blocks: Iterator[LineBlock],
        delimiter: str,
        null_values: Sequence[str],
        part: TextPart | None = None,
        *,
        can_be_divided: bool = False,
    ) -> None:
        """With a `part`, reads the records that begin in it; `blocks` begin with it."""
        self._blocks = blocks
        self.can_be_divided = can_be_divided
        self._end = None if part is None else part.end
        self._pushed_back: deque[LineBlock] = deque()
        self._open_quote: _OpenQuote | None = None
        if part is not None and isinstance(part.begin, _CsvPlace):
            self._open_quote = part.begin.open_quote
        self._delimiter = delimiter
        self._null_values = ["", *null_values]
        self._nulls = frozenset(value.encode() for value in self._null_values)

    def header(self) -> list[str] | None:
        """Return the fields of the first record; None if the file has none.

        Undecodable bytes become lone surrogates. Raises `CsvHeaderError`.
        """
        while (block := self._take()) is not None:
            if block.too_long:
                raise CsvHeaderError(f"line {block.first_line}, which should name its columns, is too long")
            for found in list(self._rows(block, most=1)):
                if isinstance(found, BadRecord):
                    raise CsvHeaderError(f"{found.place}, which should name its columns, is malformed: {found.reason}")
                return found.fields
        return None

    def records(self, width: int) -> Iterator[Records]:
        """Yield all following records, which must have `width` fields each."""
        while (block := self._next_own()) is not None:
            if block.too_long:
                reason = f"a line has more than {interface.MAX_LINE_BYTES} bytes"
                yield _nothing_but(BadRecord(block.first_line, reason, block.data), width)
            elif (ends := _record_ends(block.data, self._delimiter)) is not None:
                yield self._regular(block, ends, width)
            else:
                yield self._irregular(block, width)

    def row_counts(self, width: int) -> Iterator[int]:
        """Yield how many records each block has, as `records` does, but without their values.

        Where all quotes stand as they should, the records are found by the parity of the quotes before a line's end.
        """
        while (block := self._next_own()) is not None:
            if block.too_long:
                yield 0
            elif (ends := _record_ends(block.data, self._delimiter)) is not None:
                yield int(_are_filled(block.data, ends).sum())
            else:
                found = list(self._rows(block))
                yield sum(isinstance(one, _Record) and len(one.fields) == width for one in found)

    def skip_blocks(self) -> Iterator[int]:
        """Go past the records of each block, as `records` does; yield 0 for each block, since it counts no rows."""
        while (block := self._next_own()) is not None:
            # Without a quote each line is a record, so all records end with the block.
            if not block.too_long and b'"' in block.data and not _is_regular(block.data, self._delimiter):
                for _ in self._rows(block):
                    pass
            yield 0

    def pass_place(self, cutter: PartCutter) -> None:
        """Offer the place before the next record for a cut; call it only between two blocks of records."""
        if self.can_be_divided and (block := self._take()) is not None:
            self._pushed_back.appendleft(block)
            cutter.pass_place(_CsvPlace(block.file_byte, block.first_line, block.first_byte, self._open_quote))

    def _take(self) -> LineBlock | None:
        return self._pushed_back.popleft() if self._pushed_back else next(self._blocks, None)

    def _next_own(self) -> LineBlock | None:
        """Take the next block, unless it lies behind the part."""
        block = self._take()
        if block is not None and self._end is not None and block.file_byte >= self._end:
            return None
        return block

    def _regular(self, block: LineBlock, ends: NDArray[np.int64], width: int) -> Records:
        """Parse a block whose records end before the positions `ends`.

        Records are checked by counting delimiters before they are split.
        """
        data, first_line = block.data, block.first_line
        codes = np.frombuffer(data, np.uint8)
        starts = np.concatenate([[0], ends[:-1]])
        delimiters = np.flatnonzero(codes == ord(self._delimiter))
        if b'"' in data:
            delimiters = delimiters[_are_outside(codes, delimiters)]
            lines = np.flatnonzero(codes == 10) + 1
            first_lines = np.searchsorted(lines, starts, side="right")
            line_counts = np.searchsorted(lines, ends - 1, side="right") - first_lines + 1
        else:
            first_lines, line_counts = np.arange(len(ends)), np.ones(len(ends), np.int64)
        fields = np.bincount(np.searchsorted(ends, delimiters, side="right"), minlength=len(ends)) + 1
        filled = _are_filled(data, ends)
        good = filled & (fields == width)
        bad = [
            _ragged(
                first_line + int(first_lines[index]),
                int(fields[index]),
                width,
                data[starts[index] : ends[index]].split(b"\n")[0],
                int(line_counts[index]),
            )
            for index in np.flatnonzero(filled & ~good).tolist()
        ]
        kept = np.flatnonzero(good)
        chosen = data
        if len(kept) < len(ends):
            chosen = b"".join(data[starts[index] : ends[index]] for index in kept.tolist())
        return Records(
            _split(chosen, self._delimiter, width, self._null_values),
            (first_line + first_lines[kept]).astype(np.int64),
            line_counts[kept].astype(np.int64),
            lambda row: self._shown(data[starts[kept[row]] : ends[kept[row]]]),
            bad,
        )

    def _shown(self, record: bytes) -> bytes:
        """Return the fields of a record, without their quotes."""
        if b'"' not in record:
            return _beginning(record)
        text = io.StringIO(record.decode("utf-8", "surrogateescape"), newline="")
        fields = next(csv.reader(text, delimiter=self._delimiter))
        return self._joined([field.encode("utf-8", "surrogateescape") for field in fields])

    def _irregular(self, block: LineBlock, width: int) -> Records:
        lines, line_counts, rows, bad = [], [], [], []
        for found in self._rows(block):
            if isinstance(found, BadRecord):
                bad.append(found)
            elif len(found.fields) != width:
                bad.append(_ragged(found.line, len(found.fields), width, found.first_line, found.line_count))
            else:
                lines.append(found.line)
                line_counts.append(found.line_count)
                rows.append([field.encode("utf-8", "surrogateescape") for field in found.fields])
        columns = [
            pa.array([None if field in self._nulls else field for field in column], pa.binary())
            for column in (zip(*rows, strict=True) if rows else [()] * width)
        ]
        return Records(
            columns,
            np.array(lines, np.int64),
            np.array(line_counts, np.int64),
            lambda row: self._joined(rows[row]),
            bad,
        )

    def _joined(self, row: Sequence[bytes]) -> bytes:
        return self._delimiter.encode().join(row)

    def _rows(self, block: LineBlock, most: int | None = None) -> Iterator[_Record | BadRecord]:
        """Yield the records that begin in `block`, at most `most` of them.

        The last one may continue in the following blocks. Unread lines are pushed back.
        """
        lines = _Lines(block, self._take)
        reader = self._reader(lines)
        found = 0
        while lines.has_own and (most is None or found < most):
            lines.begin_record(self._open_quote)
            try:
                fields = next(reader)
            except (csv.Error, _NotClosed, _TooLong) as error:
                yield BadRecord(lines.record_number, self._reason(error, lines), _beginning(lines.first_line))
                found += 1
                lines.go_back_to_second_line()
                reader = self._reader(lines)
                continue
            if fields:
                yield _Record(lines.record_number, lines.line_count, fields, lines.first_line)
                found += 1
        self._pushed_back.extendleft(reversed(lines.left()))

    def _reason(self, error: Exception, lines: _Lines) -> str:
        """Return why the record that was read last is bad.

        Remembers what the failure implies for the lines after its first one.
        """
        if isinstance(error, _NotClosed):
            return str(error)
        if lines.line_count == 0:
            return f"the line has more than {interface.MAX_LINE_BYTES} bytes"
        if isinstance(error, _TooLong):
            self._open_quote = self._followed(lines)
            return _too_far()
        if lines.line_count == 1 and not lines.ended:
            return f"its quotes are malformed: {error}"
        self._open_quote = _failed(lines)
        return self._open_quote.reason

    def _followed(self, lines: _Lines) -> _OpenQuote:
        """Follow the quote that is still open where a record reached its length limit.

        Records that begin on later lines reach farther, so the quote is followed as far as any of them may reach.
        """
        last_line = lines.number
        lines.begin_bound()
        try:
            next(self._reader(lines, opened_by='"'))
        except csv.Error:
            return _failed(lines)
        except _TooLong:
            return _OpenQuote(last_line, _too_far())
        return _OpenQuote(lines.number - 1, _too_far(), end=lines.byte)

    def _reader(self, lines: _Lines, opened_by: str = "") -> Any:
        # This limit applies to the whole process and exceeds any field that gets here: `_Lines` limits records.
        csv.field_size_limit(2 * interface.MAX_LINE_BYTES)
        return csv.reader(lines.texts(opened_by), delimiter=self._delimiter, strict=True)


def _record_ends(data: bytes, delimiter: str) -> NDArray[np.int64] | None:
    """Return the positions after the records of a block; the last one may lack its line end.

    None unless lines end with LF or CR LF, each quote begins or ends a field or is doubled within one, and no field is
    open at the end of the block.
    """
    if not _is_regular(data, delimiter):
        return None
    codes = np.frombuffer(data, np.uint8)
    ends = np.flatnonzero(codes == 10)
    if b'"' in data:
        ends = ends[_are_outside(codes, ends)]
    ends = ends + 1
    return ends if data.endswith(b"\n") else np.append(ends, len(data))


def _is_regular(data: bytes, delimiter: str) -> bool:
    """Return whether `_record_ends` finds the records of the block."""
    if data.count(b"\r") != data.count(b"\r\n"):
        return False
    if b'"' not in data:
        return True
    codes = np.frombuffer(data, np.uint8)
    return len(data) <= interface.MAX_LINE_BYTES and _are_regular(codes, np.flatnonzero(codes == 34), delimiter)


def _are_filled(data: bytes, ends: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return which of the records that end there are not just an empty line."""
    codes = np.frombuffer(data, np.uint8)
    lengths = np.diff(ends, prepend=0)
    line_ends = (codes[ends - 1] == 10).astype(np.int64)
    line_ends += (lengths > 1) & (line_ends == 1) & (codes[ends - 2] == 13)
    filled: NDArray[np.bool_] = lengths > line_ends
    return filled


def _are_outside(codes: NDArray[np.uint8], positions: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return which positions lie outside of quoted fields."""
    outside: NDArray[np.bool_] = np.searchsorted(np.flatnonzero(codes == 34), positions) % 2 == 0
    return outside


def _are_regular(codes: NDArray[np.uint8], quotes: NDArray[np.intp], delimiter: str) -> bool:
    """Return whether quotes 0, 2, … begin fields or follow a quote, and quotes 1, 3, … end fields or precede one."""
    if len(quotes) % 2:
        return False
    is_edge = np.zeros(256, np.bool_)
    is_edge[[ord(delimiter), 10, 13]] = True
    begins = (quotes == 0) | is_edge[codes[quotes - 1]]
    ends = (quotes == len(codes) - 1) | is_edge[codes[np.minimum(quotes + 1, len(codes) - 1)]]
    doubled = quotes[2::2] == quotes[1:-1:2] + 1
    begins[2::2] |= doubled
    ends[1:-1:2] |= doubled
    return bool(begins[::2].all() and ends[1::2].all())


def _failed(lines: _Lines) -> _OpenQuote:
    """Return the fate of a quote that is open before the line at which the reader failed: it fails there, too."""
    if lines.ended:
        return _OpenQuote(math.inf, NEVER_CLOSED)
    return _OpenQuote(lines.number - 1, CLOSED_WITHIN_TEXT)


def _beginning(line: bytes) -> bytes:
    return line[:1024].rstrip(b"\r\n")


def _too_far() -> str:
    return f"a quoted field begins in it that is not closed within {interface.MAX_LINE_BYTES} bytes"


class _Lines:
    """The lines of a block, and of the following blocks as far as a record continues.

    The blocks ahead are kept as text, since split lines would take many times the memory.
    """

    def __init__(self, block: LineBlock, take: Callable[[], LineBlock | None]) -> None:
        self._blocks = [block]
        self._take = take
        self._own = self._lines = split_lines(block.data)
        self._block_index = self._at = 0
        self._first_at = self._first_byte = 0
        self._open_quote: _OpenQuote | None = None
        # The byte from which a record's length is counted.
        self._bound_begin = 0
        self.line_count = 0
        # The number of the next line, and its position in the text.
        self.number, self.byte = block.first_line, block.first_byte
        # The number of the record's first line.
        self.record_number = self.number
        # Whether all lines are read.
        self.ended = False

    @property
    def has_own(self) -> bool:
        """Whether the next line belongs to the block itself."""
        return self._block_index == 0 and self._at < len(self._own)

    @property
    def first_line(self) -> bytes:
        """The first line of the record."""
        return self._own[self._first_at]

    def begin_record(self, open_quote: _OpenQuote | None) -> None:
        """Begin a record at the next line, which belongs to the block itself.

        `open_quote`: the known fate of a quote that is open on later lines.
        """
        self._first_at, self._first_byte, self.record_number = self._at, self.byte, self.number
        self._bound_begin, self.line_count, self._open_quote = self.byte, 0, open_quote

    def begin_bound(self) -> None:
        """Count a record's maximum length from here on."""
        self._bound_begin, self.line_count, self._open_quote = self.byte, 0, None

    def go_back_to_second_line(self) -> None:
        """Go back to the line after the record's first."""
        self.number, self.byte = self.record_number + 1, self._first_byte + len(self.first_line)
        self._lines, self._block_index, self._at = self._own, 0, self._first_at + 1
        self.ended = False

    def left(self) -> list[LineBlock]:
        """Return all unread lines."""
        rest = b"".join(self._lines[self._at :])
        ahead = self._blocks[self._block_index + 1 :]
        block = self._blocks[self._block_index]
        file_byte = block.file_byte + self.byte - block.first_byte
        return [LineBlock(rest, self.number, self.byte, file_byte=file_byte), *ahead] if rest else ahead

    def texts(self, opened_by: str) -> Iterator[str]:
        """Yield the lines for the csv module; `opened_by` precedes the first."""
        while self._at < len(self._lines) or self._has_next_block():
            if self.line_count:
                self._raise_if_known_to_fail()
            line = self._lines[self._at]
            if self.byte + len(line) - self._bound_begin > interface.MAX_LINE_BYTES:
                raise _TooLong
            self._at += 1
            self.number += 1
            self.byte += len(line)
            self.line_count += 1
            yield opened_by + line.decode("utf-8", "surrogateescape")
            opened_by = ""
        self.ended = True

    def _raise_if_known_to_fail(self) -> None:
        """Raise `_NotClosed` if a field that is open at the next line is known to fail."""
        known = self._open_quote
        if known is None or self.number > known.last_line:
            return
        if known.end is None or known.end - self._bound_begin > interface.MAX_LINE_BYTES:
            raise _NotClosed(known.reason)

    def _has_next_block(self) -> bool:
        if self._block_index + 1 == len(self._blocks):
            block = self._take()
            if block is None:
                return False
            self._blocks.append(block)
        block = self._blocks[self._block_index + 1]
        if block.too_long:
            raise _TooLong
        self._block_index += 1
        self._lines, self._at = split_lines(block.data), 0
        return True


def _split(data: bytes, delimiter: str, width: int, null_values: Sequence[str]) -> list[pa.Array]:
    names = [str(index) for index in range(width)]
    if not data:
        return [pa.array([], pa.binary())] * width
    table = pyarrow.csv.read_csv(
        pa.BufferReader(data),
        pyarrow.csv.ReadOptions(use_threads=False, column_names=names, block_size=len(data) + 1),
        pyarrow.csv.ParseOptions(
            delimiter=delimiter, quote_char='"' if b'"' in data else False, newlines_in_values=b'"' in data
        ),
        pyarrow.csv.ConvertOptions(
            column_types=dict.fromkeys(names, pa.binary()), null_values=null_values, strings_can_be_null=True
        ),
    )
    return [_one_chunk(column) for column in table.columns]


def _one_chunk(column: pa.ChunkedArray) -> pa.Array:
    return column.chunk(0) if column.num_chunks == 1 else pa.concat_arrays(column.chunks)


def _ragged(line: int, fields: int, width: int, first_line: bytes, line_count: int = 1) -> BadRecord:
    return BadRecord(line, f"it has {fields} fields where {width} are named", _beginning(first_line), line_count)


def _nothing_but(bad: BadRecord, width: int) -> Records:
    none = np.empty(0, np.int64)
    return Records([pa.array([], pa.binary())] * width, none, none, lambda _: b"", [bad])
