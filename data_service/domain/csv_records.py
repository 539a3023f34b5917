"""Comma-separated values, RFC 4180, as columns of bytes; each record knows its first line.

Blocks without a quote are cut by Arrow, others by Python's csv module: in the former every line is a record.
"""

from __future__ import annotations

import csv
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
from numpy.typing import NDArray

from data_service.domain import line_blocks
from data_service.domain.line_blocks import LineBlock, count_lines, split_lines


@dataclass(frozen=True)
class BadRecord:
    line: int
    reason: str
    excerpt: bytes


@dataclass(frozen=True)
class Records:
    """`columns` are binary arrays of equal length, nulls where a field is a null value; `lines` has each record's first
    line; `excerpt` gives a record's beginning. `bad` are those that have other numbers of fields, or no end."""

    columns: list[pa.Array]
    lines: NDArray[np.int64]
    excerpt: Callable[[int], bytes]
    bad: list[BadRecord]


class _TooLong(Exception):
    """A record goes on for longer than one may."""


class CsvReader:
    """Reads one file's blocks once. Empty lines are skipped; null values count in quotes, too."""

    def __init__(self, blocks: Iterator[LineBlock], delimiter: str, null_values: Sequence[str]) -> None:
        self._blocks = blocks
        self._pushed_back: LineBlock | None = None
        self._delimiter = delimiter
        self._null_values = ["", *null_values]
        self._nulls = frozenset(value.encode() for value in self._null_values)

    def header(self) -> list[str] | None:
        """The fields of the first record; None where the file has none. Undecodable bytes become lone surrogates."""
        while (block := self._take()) is not None:
            if block.too_long:
                return [""]
            for found in list(self._rows(block, most=1)):
                if isinstance(found, BadRecord):
                    return [""]
                return found[1]
        return None

    def records(self, width: int) -> Iterator[Records]:
        """All that follow, of `width` fields each."""
        while (block := self._take()) is not None:
            if block.too_long:
                reason = f"a line has more than {line_blocks.MAX_LINE_BYTES} bytes"
                yield _nothing_but(BadRecord(block.first_line, reason, block.data), width)
            elif b'"' in block.data or block.data.count(b"\r") != block.data.count(b"\r\n"):
                yield self._quoted(block, width)
            else:
                yield self._plain(block, width)

    def _take(self) -> LineBlock | None:
        block, self._pushed_back = self._pushed_back, None
        return block or next(self._blocks, None)

    def _plain(self, block: LineBlock, width: int) -> Records:
        """A record a line: lines are told apart by counting delimiters, before anything is cut."""
        data = block.data if block.data.endswith(b"\n") else block.data + b"\n"
        codes = np.frombuffer(data, np.uint8)
        ends = np.flatnonzero(codes == 10) + 1
        starts = np.concatenate([[0], ends[:-1]])
        delimiters = np.searchsorted(ends, np.flatnonzero(codes == ord(self._delimiter)), side="right")
        fields = np.bincount(delimiters, minlength=len(ends)) + 1
        content = ends - starts - 1
        carriage = (content > 0) & (codes[np.maximum(ends - 2, 0)] == 13)
        empty = content - carriage == 0
        good = ~empty & (fields == width)
        bad = [
            _ragged(block.first_line + index, int(fields[index]), width, data[starts[index] : ends[index] - 1])
            for index in np.flatnonzero(~empty & ~good).tolist()
        ]
        kept = np.flatnonzero(good)
        if len(kept) < len(ends):
            data = b"".join(data[starts[index] : ends[index]] for index in kept.tolist())
        whole, first = block.data, starts[kept]
        return Records(
            _cut(data, self._delimiter, width, self._null_values),
            (block.first_line + kept).astype(np.int64),
            lambda row: whole[first[row] : first[row] + 1024].split(b"\n")[0],
            bad,
        )

    def _quoted(self, block: LineBlock, width: int) -> Records:
        lines, rows, bad = [], [], []
        for found in self._rows(block):
            if isinstance(found, BadRecord):
                bad.append(found)
            elif len(found[1]) != width:
                bad.append(_ragged(found[0], len(found[1]), width, found[2]))
            else:
                lines.append(found[0])
                rows.append([field.encode("utf-8", "surrogateescape") for field in found[1]])
        columns = [
            pa.array([None if field in self._nulls else field for field in column], pa.binary())
            for column in (zip(*rows, strict=True) if rows else [()] * width)
        ]
        return Records(columns, np.array(lines, np.int64), lambda row: self._joined(rows[row]), bad)

    def _joined(self, row: Sequence[bytes]) -> bytes:
        return self._delimiter.encode().join(row)

    def _rows(self, block: LineBlock, most: int | None = None) -> Iterator[tuple[int, list[str], bytes] | BadRecord]:
        """(first line, fields, beginning) of the records that begin in `block`, or of `most` of them; a last one may go
        on in the blocks that follow. What is left is pushed back."""
        lines = _Lines(block, self._take)
        reader = lines.reader(self._delimiter)
        own = count_lines(block.data)
        found = 0
        while lines.taken < own and (most is None or found < most):
            start = block.first_line + lines.taken
            lines.record_bytes, lines.beginning = 0, b""
            try:
                row = next(reader, None)
            except csv.Error as error:
                found += 1
                yield BadRecord(start, f"its quotes are malformed: {error}", lines.beginning)
                continue
            except _TooLong:
                reader = lines.reader(self._delimiter)
                last = block.first_line + lines.taken - 1
                reason = f"lines {start} to {last} are one record that does not end; is a quote not closed?"
                found += 1
                yield BadRecord(start, reason, lines.beginning)
                continue
            if row:
                found += 1
                yield start, row, lines.beginning.rstrip(b"\r\n")
        self._pushed_back = lines.left()


class _Lines:
    """Lines for Python's csv module, which asks for more as long as a record goes on."""

    def __init__(self, block: LineBlock, take: Callable[[], LineBlock | None]) -> None:
        self._waiting = deque(split_lines(block.data))
        self._first_line = block.first_line
        self._take = take
        self._left_over: LineBlock | None = None
        self.taken = 0
        self.record_bytes = 0
        self.beginning = b""

    def reader(self, delimiter: str) -> Any:
        # A bound for the whole process, above any field that gets there: `_lines` bounds records.
        csv.field_size_limit(2 * line_blocks.MAX_LINE_BYTES)
        return csv.reader(self._lines(), delimiter=delimiter, strict=True)

    def left(self) -> LineBlock | None:
        if self._waiting:
            return LineBlock(b"".join(self._waiting), self._first_line + self.taken)
        return self._left_over

    def _lines(self) -> Iterator[str]:
        while self._waiting or self._more():
            line = self._waiting.popleft()
            self.taken += 1
            self.record_bytes += len(line)
            self.beginning = self.beginning or line[:1024]
            if self.record_bytes > line_blocks.MAX_LINE_BYTES:
                raise _TooLong
            yield line.decode("utf-8", "surrogateescape")

    def _more(self) -> bool:
        block = self._take()
        if block is None:
            return False
        if block.too_long:
            self._left_over = block
            raise _TooLong
        self._waiting.extend(split_lines(block.data))
        return True


def _cut(data: bytes, delimiter: str, width: int, null_values: Sequence[str]) -> list[pa.Array]:
    names = [str(index) for index in range(width)]
    if not data:
        return [pa.array([], pa.binary())] * width
    table = pyarrow.csv.read_csv(
        pa.BufferReader(data),
        pyarrow.csv.ReadOptions(use_threads=False, column_names=names, block_size=len(data) + 1),
        pyarrow.csv.ParseOptions(delimiter=delimiter, quote_char=False),
        pyarrow.csv.ConvertOptions(
            column_types=dict.fromkeys(names, pa.binary()), null_values=null_values, strings_can_be_null=True
        ),
    )
    return [_one_chunk(column) for column in table.columns]


def _one_chunk(column: pa.ChunkedArray) -> pa.Array:
    return column.chunk(0) if column.num_chunks == 1 else pa.concat_arrays(column.chunks)


def _ragged(line: int, fields: int, width: int, excerpt: bytes) -> BadRecord:
    return BadRecord(line, f"it has {fields} fields where {width} are named", excerpt)


def _nothing_but(bad: BadRecord, width: int) -> Records:
    return Records([pa.array([], pa.binary())] * width, np.empty(0, np.int64), lambda _: b"", [bad])
