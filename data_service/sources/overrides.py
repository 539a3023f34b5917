"""`column_types`: types that columns shall have, instead of those that a source has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import pyarrow as pa

from data_service.domain.import_spec import TypeRefused, parse_type
from data_service.domain.row_casts import Cast, CastRefused, Fits, cast_between, cast_rows, misfit
from data_service.sources.interface import BadRowSink, RowSource
from data_service.sources.source_files import SourceFile
from data_service.sources.typed_columns import shown_row
from shared.dataset_version.columns import is_tensor
from shared.errors import invalid_field


class Overrides:
    """The types by column name. Remembers which columns were met, for one that no source has is a mistake."""

    def __init__(self, column_types: Mapping[str, str]) -> None:
        self._places = {name: index for index, name in enumerate(column_types)}
        self._types = {name: self._parsed(name, text) for name, text in column_types.items()}
        self._met: set[str] = set()

    @property
    def types(self) -> Mapping[str, pa.DataType]:
        return self._types

    def types_among(self, names: list[str]) -> dict[str, pa.DataType]:
        """Those of the columns `names` that have one."""
        found = {name: self._types[name] for name in names if name in self._types}
        self._met.update(found)
        return found

    def field(self, name: str) -> str:
        """The request's field that gives column `name` its type."""
        return f"column_types[{self._places[name]}]"

    def refuse_unknown(self) -> None:
        """Raises `InvalidArgument` for the first column that no source has."""
        for name in self._types:
            if name not in self._met:
                raise invalid_field(f"{self.field(name)}.column", name, "name a column that a source has")

    def applied_to(self, rows: RowSource, file: SourceFile) -> RowSource:
        """`rows` with their columns cast; values that do not fit make bad rows. Raises `InvalidArgument` naming
        `column_types[i]` where no value could fit."""
        casts = {}
        for name, wanted in self.types_among(rows.schema.names).items():
            try:
                cast = cast_between(rows.schema.field(name).type, wanted)
            except CastRefused as refused:
                remedy = f"column {name!r}: {refused}; use another"
                raise invalid_field(f"{self.field(name)}.arrow_type", str(wanted), remedy) from None
            if cast is not None:
                casts[name] = (cast, wanted)
        return _CastRows(rows, file, casts) if casts else rows

    def _parsed(self, name: str, text: str) -> pa.DataType:
        try:
            return parse_type(text)
        except TypeRefused as refused:
            raise invalid_field(f"{self.field(name)}.arrow_type", text, str(refused)) from None


class _CastRows:
    def __init__(self, rows: RowSource, file: SourceFile, casts: Mapping[str, tuple[Cast, pa.DataType]]) -> None:
        self._rows, self._file, self._casts = rows, file, dict(casts)
        self.schema = pa.schema([self._field(field) for field in rows.schema])

    @property
    def class_names(self) -> list[str] | None:
        return self._rows.class_names

    def tables(self, bad: BadRowSink) -> Iterator[pa.Table]:
        # Rows are told by their places among those that the file itself has, good or bad.
        counter = _Counter(bad)
        for table in self._rows.tables(counter):
            yield self._cast(table, counter)

    def _cast(self, table: pa.Table, counter: _Counter) -> pa.Table:
        columns, good, reasons = [], np.ones(table.num_rows, np.bool_), {}
        for field, column in zip(self.schema, table.columns, strict=True):
            if field.name in self._casts:
                column, fits = _cast_column(column, *self._casts[field.name])
                for row in np.flatnonzero(good & ~fits).tolist() if fits is not None else ():
                    reasons[row] = misfit(f"column {field.name!r}", field.type)
                good = good if fits is None else good & fits
            columns.append(column)
        for row, reason in sorted(reasons.items()):
            counter.add_counted(self._file.uri, row, reason, shown_row(table, row))
        counter.rows += table.num_rows
        cast = pa.Table.from_arrays(columns, schema=self.schema)
        return cast.filter(pa.array(good)) if reasons else cast

    def _field(self, field: pa.Field) -> pa.Field:
        if field.name not in self._casts:
            return field
        wanted = self._casts[field.name][1]
        return pa.field(field.name, wanted, nullable=field.nullable and not is_tensor(wanted))


class _Counter:
    """Passes bad rows on, and counts rows so that later ones are told by their places."""

    def __init__(self, bad: BadRowSink) -> None:
        self._bad = bad
        self.rows = 0

    def add(self, source: str, place: str, reason: str, excerpt: str, rows: int = 1) -> None:
        self._bad.add(source, place, reason, excerpt, rows)

    def add_counted(self, source: str, row: int, reason: str, excerpt: str) -> None:
        self._bad.add(source, f"row {self.rows + row + 1}", reason, excerpt)


def _cast_column(column: pa.ChunkedArray, cast: Cast, wanted: pa.DataType) -> tuple[pa.ChunkedArray, Fits]:
    parts = [cast_rows(chunk, cast) for chunk in column.chunks]
    cast_column = pa.chunked_array([values for values, _ in parts], type=wanted)
    if all(fits is None for _, fits in parts):
        return cast_column, None
    return cast_column, np.concatenate(
        [np.ones(len(values), np.bool_) if fits is None else fits for values, fits in parts]
    )
