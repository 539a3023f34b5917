"""JSON Lines: one object a line; any row's key is a column, null in rows without it."""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.types as kinds

from data_service.formats.casts import EXACT_IN_DOUBLE, Cast, CastRefused, cast_between, cast_rows
from data_service.formats.interface import (
    BadRowSink,
    LineBlock,
    NotMergeable,
    OpenText,
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
from shared.dataset_version.manifest import MAX_COLUMNS, is_tensor
from shared.errors import invalid_field
from shared.value_texts import zone_hint

# --- JSON rows ---
# Whole numbers are never rounded: a column is inferred as strings if one number exceeds int64, or if it has doubles and
# a number that a double would change. If `column_types` gives a type that cannot hold such a number, or if it is in a
# list, its row is a bad one.

# The limit of one line. An empty list or object takes two or three bytes of it, and thirty times as much once it is
# parsed.
MAX_CONTAINERS = 250_000
# Digits that may be a whole number beyond 64 bits, which orjson would turn into a double.
_BEYOND = re.compile(rb"(?<![0-9.])[1-9][0-9]{18,}(?![0-9.eE])")
_DIGITS = b"0" * 19
_DIGITS_ALIKE = bytes(ord("0") if code in b"0123456789" else 0 for code in range(256))
# Builds a column's array, with null for values that do not fit, and the mask of those that fit (None: all).
Build = Callable[[Sequence[Any]], tuple[pa.Array, "np.ndarray[Any, Any] | None"]]


@dataclass(frozen=True)
class _Line:
    number: int
    data: bytes
    row: dict[str, Any]


@dataclass(frozen=True)
class _BadLine:
    number: int
    data: bytes
    reason: str


def open_json_lines(
    files: Sequence[SourceFile], overrides: Overrides, run_units: UnitRunner | None = None
) -> list[RowSource]:
    """Open one source for each file, all with the columns of all files.

    Columns are in the order of their first occurrence. Reads all files once, large ones by `run_units`. Raises
    `InvalidArgument` if they have no column, or too many.
    """
    found, parts = scan_files(files, _JsonScanner(), run_units)
    inferred = found.columns
    if found.first_bad and not inferred:
        file, number, reason = found.first_bad
        raise file.corrupt(f"no line of it is a row; of line {number}, {reason}")
    check_names(files[0], list(inferred))
    given = overrides.types_among(list(inferred))
    types = {name: given.get(name) or one.type for name, one in inferred.items()}
    schema = pa.schema([pa.field(name, one, nullable=not is_tensor(one)) for name, one in types.items()])
    builds = MappingProxyType({name: _build(overrides, name, inferred[name].type, types[name]) for name in types})
    return [_JsonRows(file, schema, builds, found) for file, found in zip(files, parts, strict=True)]


class _JsonFound:
    """The columns of some rows, in the order of their first occurrence, and the first bad line; a `Found`.

    `first_bad` is (file, line number, reason).
    """

    def __init__(self) -> None:
        self.columns: dict[str, InferredColumn] = {}
        self.first_bad: tuple[SourceFile, int, str] | None = None

    def add(self, file: SourceFile, lines: Sequence[_Line | _BadLine]) -> int:
        """Add the next lines, and return how many of them are rows."""
        rows = [line.row for line in lines if isinstance(line, _Line)]
        for name in dict.fromkeys(itertools.chain.from_iterable(rows)):
            self._column(file, name).update([row[name] for row in rows if name in row])
        if self.first_bad is None:
            self.first_bad = next(
                ((file, line.number, line.reason) for line in lines if isinstance(line, _BadLine)), None
            )
        return len(rows)

    def merge(self, file: SourceFile, later: _JsonFound) -> None:
        for name, column in later.columns.items():
            self._column(file, name).merge(column)
        self.first_bad = self.first_bad or later.first_bad

    def _column(self, file: SourceFile, name: str) -> InferredColumn:
        if name not in self.columns:
            if len(self.columns) == MAX_COLUMNS:
                raise file.corrupt(f"its rows have more than {MAX_COLUMNS} different keys")
            self.columns[name] = InferredColumn()
        return self.columns[name]


@dataclass(frozen=True)
class _JsonScanner:
    reads_rows: bool = True

    def nothing(self) -> _JsonFound:
        return _JsonFound()

    def scan(self, file: SourceFile, found: _JsonFound, part: TextPart | None = None) -> list[TextPart]:
        cutter = PartCutter()
        with _opened(file, part) as text:
            for block in text.blocks:
                if part is not None and part.end is not None and block.file_byte >= part.end:
                    break
                if part is None:
                    _pass_place(text, block, cutter)
                cutter.add(found.add(file, list(_parsed(block))))
        return cutter.parts(file) if part is None else [replace(part, row_count=cutter.row_count)]

    def cut(self, file: SourceFile) -> list[TextPart]:
        cutter = PartCutter()
        with _opened(file) as text:
            if not text.can_be_divided:
                return []
            for block in text.blocks:
                _pass_place(text, block, cutter)
        return cutter.parts(file)


def _pass_place(text: OpenText, block: LineBlock, cutter: PartCutter) -> None:
    if text.can_be_divided:
        cutter.pass_place(TextPlace(block.file_byte, block.first_line, block.first_byte))


class _JsonRows:
    class_names: list[str] | None = None

    def __init__(
        self, file: SourceFile, schema: pa.Schema, builds: MappingProxyType[str, Build], parts: Sequence[TextPart]
    ) -> None:
        self._file, self._builds = file, builds
        self._part: TextPart | None = None
        self.schema = schema
        self._set_parts(parts)

    def _set_parts(self, parts: Sequence[TextPart]) -> None:
        self._parts = parts
        self.row_count: int | None = sum(part.row_count for part in parts)
        self.size_bytes = sum(part.size_bytes for part in parts)

    def parts(self) -> Sequence[RowSource]:
        return [self._only(part) for part in self._parts] if len(self._parts) > 1 else [self]

    def _only(self, part: TextPart) -> _JsonRows:
        rows = copy(self)  # shares the columns and how they are built with the other parts
        rows._part = part
        rows._set_parts([part])
        return rows

    def tables(self, bad: BadRowSink) -> Iterator[pa.Table]:
        end = None if self._part is None else self._part.end
        with _opened(self._file, self._part) as text:
            for block in text.blocks:
                if end is not None and block.file_byte >= end:
                    break
                lines = list(_parsed(block))
                table, misfits = self._converted([line for line in lines if isinstance(line, _Line)])
                unread = [line for line in lines if isinstance(line, _BadLine)]
                for one in sorted([*unread, *misfits], key=lambda one: one.number):
                    bad.add(self._file.uri, f"line {one.number}", one.reason, excerpt_of(one.data))
                if table.num_rows:
                    yield table

    def _converted(self, lines: Sequence[_Line]) -> tuple[pa.Table, list[_BadLine]]:
        good = np.ones(len(lines), np.bool_)
        columns, misfits = [], []
        for field in self.schema:
            column, fits = self._builds[field.name]([line.row.get(field.name) for line in lines])
            columns.append(column)
            if fits is None:
                continue
            for index in np.flatnonzero(good & ~fits).tolist():
                wanted = f"list of {field.type.shape[0]} numbers" if is_tensor(field.type) else str(field.type)
                wanted += zone_hint(field.type)
                misfits.append(_BadLine(lines[index].number, lines[index].data, f"key {field.name!r} is no {wanted}"))
            good &= fits
        table = pa.Table.from_arrays(columns, schema=self.schema)
        return (table.filter(pa.array(good)) if misfits else table), misfits


@contextmanager
def _opened(file: SourceFile, part: TextPart | None = None) -> Iterator[OpenText]:
    with blaming(file, "JSON Lines"), opened_text(file, "utf-8", part) as text:
        try:
            yield text
        except TextError as error:
            raise file.corrupt(str(error)) from None


def _parsed(block: LineBlock) -> Iterator[_Line | _BadLine]:
    if block.too_long:
        yield _BadLine(block.first_line, block.data, "the line is too long")
        return
    beyond = _DIGITS in block.data.translate(_DIGITS_ALIKE)  # ten times as fast as the regular expression
    for number, data in enumerate(split_lines(block.data), block.first_line):
        if not data.strip():
            continue
        if data.count(b"{") + data.count(b"[") > MAX_CONTAINERS:
            yield _BadLine(number, data[:1024], f"it has more than {MAX_CONTAINERS} lists and objects")
            continue
        try:
            row = orjson.loads(data)
        except orjson.JSONDecodeError as error:
            yield _BadLine(number, data[:1024], f"it is no JSON: {error.msg} at character {error.colno}")
            continue
        if beyond and _BEYOND.search(data):
            try:
                row = json.loads(data)
            except RecursionError:
                yield _BadLine(number, data[:1024], "it is nested too deep")
                continue
        if not isinstance(row, dict):
            yield _BadLine(number, data[:1024], "it is no JSON object")
        elif "" in row:
            yield _BadLine(number, data[:1024], "it has an empty key")
        else:
            yield _Line(number, data[:1024], row)


def _build(overrides: Overrides, name: str, found: pa.DataType, data_type: pa.DataType) -> Build:
    """Return the function that builds a column of type `data_type`."""
    try:
        if is_tensor(data_type):
            length = int(np.prod(data_type.shape))
            middle = found if is_tensor(found) else pa.fixed_shape_tensor(pa.float64(), [length])
            return _tensors(middle, cast_between(middle, data_type))
        if is_tensor(found):
            raise CastRefused(f"a column of lists cannot be cast to {data_type}")
        return _scalars(data_type, cast_between(pa.string(), data_type))
    except CastRefused as refused:
        raise invalid_field(f"{overrides.field(name)}.arrow_type", str(data_type), f"{refused}; use another") from None


def _scalars(data_type: pa.DataType, cast: Cast | None) -> Build:
    direct = {pa.bool_(): (bool,), pa.int64(): (int,), pa.float64(): (int, float), pa.string(): (str,)}.get(data_type)

    def build(values: Sequence[Any]) -> tuple[pa.Array, np.ndarray[Any, Any] | None]:
        if direct is not None and set(map(type, values)) <= {*direct, type(None)}:
            try:
                return pa.array(values, data_type), None
            except (pa.ArrowInvalid, OverflowError):
                pass  # an integer beyond the type: the cast below finds its row
        texts = [_text(value, data_type) for value in values]
        column, fits = cast_rows(pa.array(texts, pa.string()), cast or (lambda given: given))
        # Objects and lists are no text, and are null in `texts`.
        are_scalars = [value is None or text is not None for value, text in zip(values, texts, strict=True)]
        whole = np.array(are_scalars, np.bool_)
        return column, whole if fits is None else fits & whole

    return build


def _text(value: Any, data_type: pa.DataType) -> str | None:
    if isinstance(value, (list, dict)):
        return None
    if isinstance(value, float) and kinds.is_integer(data_type) and value.is_integer():
        return str(int(value))
    return as_text(value)


def _tensors(found: pa.FixedShapeTensorType, cast: Cast | None) -> Build:
    length = found.shape[0]

    def fitting(numbers: list[Any]) -> bool:
        kind = numbers_kind(numbers)
        if kinds.is_integer(found.value_type):
            return kind is int
        return kind is float or (kind is int and all_in_double(numbers))

    def build(values: Sequence[Any]) -> tuple[pa.Array, np.ndarray[Any, Any] | None]:
        fits = np.array(
            [isinstance(value, list) and len(value) == length and fitting(value) for value in values], np.bool_
        )
        nothing = [0] * length
        flat = itertools.chain.from_iterable(one if fit else nothing for one, fit in zip(values, fits, strict=True))
        array = np.fromiter(flat, found.value_type.to_pandas_dtype(), count=len(values) * length)
        tensors = pa.ExtensionArray.from_storage(found, pa.FixedSizeListArray.from_arrays(pa.array(array), length))
        if cast is None:
            return tensors, None if fits.all() else fits
        tensors, cast_fits = cast_rows(tensors, cast)
        return tensors, fits if cast_fits is None else fits & cast_fits

    return build


# --- JSON columns ---
# Infers column types from JSON objects, and converts values to them.
#
# A column of scalars has the type that holds all of them: bool, int64, double, string; null fits each. If scalars are
# of incompatible kinds, such as a number and a text, the column is of strings, and other values are kept as their JSON.
# A column with more lists than scalars is one of tensors, of the length that most lists have (of equally frequent ones,
# the shortest). No whole number is rounded: a number beyond int64, or one that a double would change in a column of
# doubles, makes its column one of strings, which keep its digits; a list with such a number fits no column.

MAX_LENGTHS = 10_000
MAX_LIST = 4 * 1024 * 1024
_INT64 = range(-(2**63), 2**63)


class InferredColumn:
    """Collects the kinds of values of one column."""

    def __init__(self) -> None:
        self._scalars: Counter[type] = Counter()
        # Whether any whole number exceeds int64, and whether a double would change any.
        self._beyond_int64 = self._beyond_double = False
        self._lengths: Counter[int] = Counter()
        self._doubles_in_lists: set[int] = set()

    def update(self, values: Sequence[Any]) -> None:
        """Add parsed JSON values.

        Values that fit no column, such as objects, are ignored.
        """
        kinds = Counter(map(type, values))
        if kinds[int]:
            wholes = [value for value in values if type(value) is int]
            self._beyond_int64 |= min(wholes) not in _INT64 or max(wholes) not in _INT64
            self._beyond_double |= not all_in_double(wholes)
        self._scalars += Counter({kind: kinds[kind] for kind in (bool, int, float, str)})
        if kinds[list]:
            self._update_lists([value for value in values if type(value) is list])

    def _update_lists(self, lists: Sequence[list[Any]]) -> None:
        for values in lists:
            kind = numbers_kind(values)
            if kind is not None and len(self._lengths) < MAX_LENGTHS:
                self._lengths[len(values)] += 1
                if kind is float:
                    self._doubles_in_lists.add(len(values))

    def merge(self, other: InferredColumn) -> None:
        """Add the values of other rows.

        Raises `NotMergeable` for lists of too many lengths, of which only the first ones count.
        """
        if len(self._lengths.keys() | other._lengths.keys()) >= MAX_LENGTHS:
            raise NotMergeable
        self._scalars += other._scalars
        self._beyond_int64 |= other._beyond_int64
        self._beyond_double |= other._beyond_double
        self._lengths += other._lengths
        self._doubles_in_lists |= other._doubles_in_lists

    @property
    def type(self) -> pa.DataType:
        """The inferred type; string if all values were null."""
        if self._lengths.total() > self._scalars.total():
            length = min(self._lengths, key=lambda one: (-self._lengths[one], one))
            value_type = pa.float64() if length in self._doubles_in_lists else pa.int64()
            return pa.fixed_shape_tensor(value_type, [length])
        kinds = set(self._scalars)
        if kinds == {bool}:
            return pa.bool_()
        if self._beyond_int64 or not kinds or not kinds <= {int, float}:
            return pa.string()
        if kinds == {int}:
            return pa.int64()
        return pa.string() if self._beyond_double else pa.float64()


def all_in_double(numbers: Sequence[int | float]) -> bool:
    """Return whether a double represents each of the numbers exactly.

    There must be at least one, and none beyond the range of doubles.
    """
    if min(numbers) >= -EXACT_IN_DOUBLE and max(numbers) <= EXACT_IN_DOUBLE:
        return True
    return all(float(number) == number for number in numbers)  # Python compares a whole number with a float exactly


def numbers_kind(values: list[Any]) -> type | None:
    """Return int or float for a list of numbers, whichever represents all of them exactly.

    Return None for other lists, and for an empty one.
    """
    kinds = set(map(type, values))
    if not kinds or not kinds <= {int, float} or len(values) > MAX_LIST:
        return None
    if kinds == {float}:
        return float
    wholes = values if kinds == {int} else [value for value in values if type(value) is int]
    if min(wholes) not in _INT64 or max(wholes) not in _INT64:
        return None
    if kinds == {int}:
        return int
    return float if all_in_double(wholes) else None


def as_text(value: Any) -> str | None:
    """Return a scalar as text: null stays null, other values than text become JSON."""
    if value is None or isinstance(value, str):
        return value
    # orjson does not write whole numbers of more than 64 bits.
    return str(value) if type(value) is int else orjson.dumps(value).decode()
