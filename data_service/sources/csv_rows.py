"""Comma-separated values: types are inferred from all rows of all files of the source, unless they are given."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import pyarrow as pa

from data_service.domain import line_blocks
from data_service.domain.csv_records import BadRecord, CsvHeaderError, CsvReader, Records
from data_service.domain.import_spec import CsvOptions
from data_service.domain.line_blocks import TextError
from data_service.domain.row_casts import Cast, CastRefused, Fits, cast_between, cast_rows
from data_service.domain.text_values import InferredType
from data_service.sources.content import blaming, content
from data_service.sources.interface import BadRowSink, RowSource, excerpt_of
from data_service.sources.overrides import Overrides
from data_service.sources.source_files import SourceFile
from data_service.sources.typed_columns import check_names
from shared.dataset_version.column_names import MAX_COLUMNS
from shared.errors import invalid_field
from shared.temporal_texts import zone_hint

NULL_VALUES = ("NA", "N/A", "null", "NULL", "NaN", "nan")


def open_csv(files: Sequence[SourceFile], options: CsvOptions | None, overrides: Overrides) -> list[RowSource]:
    """One source for each file. Reads all files once, unless every column's type is given.

    Raises `InvalidArgument` where a file has no usable names, or others than the first.
    """
    dialect = _Dialect(options or CsvOptions())
    names = dialect.names_of(files[0])
    for file in files[1:]:
        if (others := dialect.names_of(file)) != names:
            raise file.corrupt(f"its columns are {_shown(others)}, but those of {files[0].uri} are {_shown(names)}")
    given = overrides.types_among(names)
    casts = {name: _cast(overrides, name, wanted) for name, wanted in given.items()}
    inferred = {name: InferredType() for name in names if name not in given}
    if inferred:
        for file in files:
            _infer(file, dialect, names, inferred)
    types = {name: given.get(name) or inferred[name].type for name in names}
    schema = pa.schema([pa.field(name, arrow_type) for name, arrow_type in types.items()])
    casts |= {name: cast_between(pa.string(), one.type) for name, one in inferred.items()}
    return [_CsvRows(file, dialect, schema, casts) for file in files]


class _Dialect:
    """How the files of one source are to be read."""

    def __init__(self, options: CsvOptions) -> None:
        self._delimiter = options.delimiter or ","
        self._null_values = options.null_values or NULL_VALUES
        self._encoding = options.encoding or "utf-8"
        self._names = options.column_names

    def names_of(self, file: SourceFile) -> list[str]:
        if self._names:
            names = list(self._names)
        else:
            with self.reader(file) as reader:
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
    def records(self, file: SourceFile, names: Sequence[str]) -> Iterator[Iterator[Records]]:
        with self.reader(file) as reader:
            if not self._names:
                reader.header()
            yield reader.records(len(names))

    @contextmanager
    def reader(self, file: SourceFile) -> Iterator[CsvReader]:
        with content(file) as stream, blaming(file, "CSV"):
            try:
                yield CsvReader(line_blocks.line_blocks(stream, self._encoding), self._delimiter, self._null_values)
            except (CsvHeaderError, TextError) as error:
                raise file.corrupt(str(error)) from None


def _infer(file: SourceFile, dialect: _Dialect, names: Sequence[str], inferred: Mapping[str, InferredType]) -> None:
    with dialect.records(file, names) as blocks:
        for records in blocks:
            # A row that is bad for its bytes has no say in the types.
            texts, all_fit = _texts(records.columns)
            for name, column in zip(names, texts, strict=True):
                if name in inferred:
                    inferred[name].update(column if all_fit is None else column.filter(pa.array(all_fit)))


class _CsvRows:
    class_names: list[str] | None = None

    def __init__(
        self, file: SourceFile, dialect: _Dialect, schema: pa.Schema, casts: Mapping[str, Cast | None]
    ) -> None:
        self._file, self._dialect, self._casts = file, dialect, dict(casts)
        self.schema = schema

    def tables(self, bad: BadRowSink) -> Iterator[pa.Table]:
        with self._dialect.records(self._file, self.schema.names) as blocks:
            for records in blocks:
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
    """Binary columns as strings, and which rows are UTF-8 in all of them."""
    cast = [cast_rows(column, lambda values: values.cast(pa.string())) for column in columns]
    misfits = [fits for _, fits in cast if fits is not None]
    return [texts for texts, _ in cast], (np.logical_and.reduce(misfits) if misfits else None)


def _cast(overrides: Overrides, name: str, wanted: pa.DataType) -> Cast | None:
    try:
        return cast_between(pa.string(), wanted)
    except CastRefused as refused:
        raise invalid_field(f"{overrides.field(name)}.arrow_type", str(wanted), f"{refused}; use another") from None


def _shown(names: Sequence[str]) -> str:
    return ", ".join(names[:20]) + (", …" if len(names) > 20 else "")
