"""The formats of an import's sources: each yields tables of logical columns, and passes bad rows to a sink.

`open_sources` opens the sources of an import's request, in order: here are the registry of formats, and the partition
columns of folders.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from urllib.parse import unquote

import pyarrow as pa

from data_service.domain.import_spec import Source
from data_service.formats.arrow import ArrowRows
from data_service.formats.casts import CastRefused, cast_between, cast_rows
from data_service.formats.csv import open_csv
from data_service.formats.idx import IdxPair
from data_service.formats.images import MAX_IMAGES, ClassNames, ImageFolder, ImageTar
from data_service.formats.interface import BadRowSink, OpenSource, RowSource, UnitRunner, excerpt_of
from data_service.formats.json import open_json_lines
from data_service.formats.parquet import ParquetRows
from data_service.formats.typed_columns import Overrides, check_names
from data_service.storage.source_files import SourceFile, SourceFiles
from shared.dataset_version.manifest import MAX_COLUMNS
from shared.errors import invalid_field

__all__ = ["BadRowSink", "OpenSource", "RowSource", "open_sources"]


# --- Opening ---

# The formats whose folders may be partition columns. For images, folders are classes.
TABLES = ("parquet", "arrow", "csv", "json_lines")


def open_sources(
    sources: Sequence[Source],
    files: SourceFiles,
    column_types: Mapping[str, str],
    partitioning: str = "hive",
    run_units: UnitRunner | None = None,
) -> list[OpenSource]:
    """Open one row source for each file (pair, image folder), in order.

    Types are inferred over all files of a source. `partitioning` is one of `PARTITIONINGS`. `column_types` are in the
    order of the request.

    Inference reads CSV, JSON Lines and tars completely, and the beginnings of other formats. `run_units` reads large
    CSV and JSON Lines in tasks. Inference waits for open uploads as far as needed. Raises `NotFound`, `Unavailable`,
    and `InvalidArgument` naming a source's field or `column_types[i]`.
    """
    overrides = Overrides(column_types)
    classes = ClassNames()
    opened: list[OpenSource] = []
    for index, source in enumerate(sources):
        path = f"sources[{index}]"
        if source.format in TABLES:
            found = files.find_all(f"{path}.{source.format}.uri", source.uris[f"{source.format}.uri"])
            rows = _rows_of_tables(source, found, overrides, run_units)
            if partitioning == "hive":
                rows = HivePartitions(found, overrides).added_to(rows)
        else:
            rows = _rows_of_images(source, path, files, overrides, classes)
        opened.extend(OpenSource(index, source.split, row) for row in rows)
    overrides.refuse_unknown()
    return opened


def _rows_of_tables(
    source: Source, files: Sequence[SourceFile], overrides: Overrides, run_units: UnitRunner | None
) -> Iterator[RowSource]:
    if source.format == "csv":
        yield from open_csv(files, source.csv, overrides, run_units)
    elif source.format == "json_lines":
        yield from open_json_lines(files, overrides, run_units)
    else:
        open_file = ParquetRows if source.format == "parquet" else ArrowRows
        for file in files:
            yield overrides.applied_to(open_file(file, overrides.types), file)


def _rows_of_images(
    source: Source, path: str, files: SourceFiles, overrides: Overrides, classes: ClassNames
) -> Iterator[RowSource]:
    if source.format == "idx":
        pair = [files.find(f"{path}.{field}", source.uris[field]) for field in ("idx.images_uri", "idx.labels_uri")]
        yield overrides.applied_to(IdxPair(*pair), pair[0])
    elif source.format == "image_folder":
        field, uri = f"{path}.image_folder.uri", source.uris["image_folder.uri"]
        images = files.find_all(field, uri, MAX_IMAGES)
        yield overrides.applied_to(ImageFolder(images, classes), images[0])
    else:
        for file in files.find_all(f"{path}.image_tar.uri", source.uris["image_tar.uri"]):
            yield overrides.applied_to(ImageTar(file, classes), file)


# --- Partitions ---
# Hive partitioning: folders `name=value` between the folder that a request names and a file are columns of its rows.
#
# Names and values are read as in `pyarrow.dataset`: percent-decoded, and null for `__HIVE_DEFAULT_PARTITION__`. A
# column is int32 if all files of the source have whole numbers that fit, else string; `column_types` may ask for
# another type.

NULL_VALUE = "__HIVE_DEFAULT_PARTITION__"
_WHOLE_NUMBER = re.compile(r"-?[0-9]+")
_REMEDY = "rename the folders, or set partitioning to PARTITIONING_NONE"


@dataclass(frozen=True)
class _Value:
    """The value of a partition column for one file.

    `values` has one element of the column's type, null if the text in the folder's name does not fit.
    """

    field: pa.Field
    text: str | None
    values: pa.Array
    fits: bool


class HivePartitions:
    """The partition columns of one source's files.

    Raises `InvalidArgument` for files with other partition folders than the first one's, and for names that are no
    text.
    """

    def __init__(self, files: Sequence[SourceFile], overrides: Overrides) -> None:
        self._texts = [_texts_of(file) for file in files]
        self._files = files
        names = list(self._texts[0])
        for file, texts in zip(files, self._texts, strict=True):
            if list(texts) != names:
                raise file.corrupt(
                    f"its folders make the columns {_shown(list(texts))}, and those of {files[0].uri} {_shown(names)}; "
                    f"{_REMEDY}"
                )
        given = overrides.types_among(names)
        self._fields = [
            pa.field(name, given.get(name) or _inferred([texts[name] for texts in self._texts])) for name in names
        ]
        for field in self._fields:
            try:
                cast_between(pa.string(), field.type)
            except CastRefused as refused:
                place = f"{overrides.field(field.name)}.arrow_type"
                raise invalid_field(place, str(field.type), f"{refused}; use another") from None

    def added_to(self, sources: Iterator[RowSource]) -> Iterator[RowSource]:
        """Yield the sources, one for each file in order, with the partition columns appended.

        Raises `InvalidArgument` if a file has a column of such a name.
        """
        if not self._fields:
            yield from sources
            return
        for rows, file, texts in zip(sources, self._files, self._texts, strict=True):
            yield _PartitionedRows(rows, file, [_value(field, texts[field.name]) for field in self._fields])


class _PartitionedRows:
    def __init__(self, rows: RowSource, file: SourceFile, values: Sequence[_Value]) -> None:
        self._rows, self._file, self._values = rows, file, values
        own, added = rows.schema.names, [value.field.name for value in values]
        for name in added:
            if name in own:
                raise file.corrupt(f"it has a column {name!r}, and its folders make another of that name; {_REMEDY}")
        if (count := len(own) + len(added)) > MAX_COLUMNS:
            raise file.corrupt(f"it has {count} columns with those of its folders; at most {MAX_COLUMNS} are read")
        check_names(file, [*own, *added])
        self.schema = pa.schema([*rows.schema, *(one.field for one in values)])

    @property
    def class_names(self) -> list[str] | None:
        return self._rows.class_names

    @property
    def row_count(self) -> int | None:
        return self._rows.row_count if all(value.fits for value in self._values) else 0

    @property
    def size_bytes(self) -> int:
        return self._rows.size_bytes

    def parts(self) -> Sequence[RowSource]:
        if not all(value.fits for value in self._values):
            return [self]  # no row of it is good, and the tables' sizes are the places
        return [self._only(rows) for rows in self._rows.parts()]

    def _only(self, rows: RowSource) -> _PartitionedRows:
        part = copy(self)
        part._rows = rows
        return part

    def tables(self, bad: BadRowSink) -> Iterator[pa.Table]:
        misfit = next((value for value in self._values if not value.fits), None)
        row = 0
        for table in self._rows.tables(bad):
            count = table.num_rows
            if misfit is None:
                added = [one.values.take(pa.repeat(0, count)) for one in self._values]
                yield pa.Table.from_arrays([*table.columns, *added], schema=self.schema)
            elif count:
                name, arrow_type = misfit.field.name, misfit.field.type
                place = f"row {row + 1}" if count == 1 else f"rows {row + 1} to {row + count}"
                reason = f"column {name!r} is no {arrow_type}"
                bad.add(self._file.uri, place, reason, excerpt_of(f"{name}={misfit.text}"), count)
            row += count


def _texts_of(file: SourceFile) -> dict[str, str | None]:
    """Return the text of each partition column's value, in the order of the path; None for null."""
    found: dict[str, str | None] = {}
    for folder in file.relative.split("/")[:-1]:
        name, equals, value = folder.partition("=")
        if not (name and equals):
            continue
        try:
            name, value = unquote(name, errors="strict"), unquote(value, errors="strict")
            (name + value).encode()
        except UnicodeError:
            raise file.corrupt(f"the name of its folder {folder!r} is no UTF-8; {_REMEDY}") from None
        if name in found:
            raise file.corrupt(f"two of its folders give column {name!r} a value; {_REMEDY}")
        found[name] = None if value == NULL_VALUE else value
    return found


def _inferred(texts: Sequence[str | None]) -> pa.DataType:
    present = {text for text in texts if text is not None}
    whole = present and all(_WHOLE_NUMBER.fullmatch(text) for text in present)
    return pa.int32() if whole and all(-(2**31) <= int(text) < 2**31 for text in present) else pa.string()


def _value(field: pa.Field, text: str | None) -> _Value:
    values = pa.array([text], pa.string())
    cast = cast_between(pa.string(), field.type)
    fits = None
    if cast is not None:
        values, fits = cast_rows(values, cast)
    return _Value(field, text, values, fits is None or bool(fits.all()))


def _shown(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names)) or "none"
