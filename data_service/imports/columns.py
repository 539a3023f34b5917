"""The common columns of an import's sources, and the conversion of rows to them.

If an import appends to a version, that version's columns are included.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as kinds
from numpy.typing import NDArray

from data_service.formats import OpenSource
from shared.dataset_version import DatasetVersion, RowGroup, RowGroups, VersionReader
from shared.dataset_version.pages import Ints
from shared.errors import InvalidArgument, first_line, shown
from shared.storage import ObjectStore

# --- Columns ---

LABEL = "label"


class CommonColumns:
    """The columns of the new version.

    `schema` is the version's; `value_names` names the labels if a source has names for them.

    A column with integers in one source and doubles in another becomes doubles, because a text file's rows determine
    which of both it shows. The types of a base are fixed: integers become its doubles, and doubles do not fit its
    integers. Raises `InvalidArgument` naming the source that does not fit.
    """

    def __init__(self, kept: BaseRows | None, sources: Sequence[OpenSource], *, nan_as_null: bool = False) -> None:
        """With `nan_as_null`, the sources' tables pass through `with_nan_as_null`."""
        schemas = [_with_nullable_floats(one.rows.schema) if nan_as_null else one.rows.schema for one in sources]
        given = [(f"sources[{source.index}]", schema) for source, schema in zip(sources, schemas, strict=True)]
        self.schema = _schema_of_base(kept.schema, given) if kept else _common_schema(given)
        self.value_names = _value_names(kept, sources)
        for source in sources:
            self._refuse_lossy_labels(source)

    def fitted(self, table: pa.Table, class_names: Sequence[str] | None) -> pa.Table:
        """Converts a source's rows to the version's columns.

        Raises `InvalidArgument` for an integer that no double represents.
        """
        if class_names is not None and list(class_names) != self.value_names.get(LABEL):
            table = _renumbered(table, self._numbers(class_names))
        if table.schema.equals(self.schema):
            return table
        try:
            return table.cast(self.schema)
        except pa.ArrowInvalid as error:
            raise InvalidArgument(
                "sources: a value does not fit the type that its column has in the base or in another source: "
                f"{first_line(error)}; set column_types",
                reason="SCHEMA_MISMATCH",
                metadata={"field": "sources"},
                fields=[("sources", "types differ")],
            ) from None

    def _numbers(self, class_names: Sequence[str]) -> NDArray[np.int64]:
        """Maps a source's class numbers to those of the version."""
        places = {name: number for number, name in enumerate(self.value_names[LABEL])}
        return np.array([places[name] for name in class_names], np.int64)

    def _refuse_lossy_labels(self, source: OpenSource) -> None:
        """Refuses labels that `column_types` gave a type that cannot hold the numbers."""
        names = source.rows.class_names
        if not names or list(names) == self.value_names.get(LABEL):
            return
        kind = source.rows.schema.field(LABEL).type
        numbers = np.concatenate([np.arange(len(names)), self._numbers(names)])
        try:
            same = _whole_numbers(pa.array(numbers).cast(kind)).equals(pa.array(numbers))
        except pa.ArrowException:
            same = False
        if not same:
            field = f"sources[{source.index}]"
            why = (
                f"its classes have other numbers in the base, which {LABEL!r} as {kind} cannot hold; import all images "
                "anew, with labels of int64"
            )
            raise InvalidArgument(
                f"{field}: {why}", reason="SCHEMA_MISMATCH", metadata={"field": field}, fields=[(field, why)]
            )


def with_nan_as_null(table: pa.Table) -> pa.Table:
    """Replaces each NaN in float columns by null; tensors, which have no nulls, stay as they are."""
    schema = _with_nullable_floats(table.schema)
    columns = [_without_nan(column) if kinds.is_floating(column.type) else column for column in table.columns]
    return pa.Table.from_arrays(columns, schema=schema)


def _without_nan(column: pa.ChunkedArray) -> pa.ChunkedArray:
    are_nan = pc.is_nan(column)
    if not pc.any(are_nan).as_py():
        return column
    return pc.if_else(are_nan, pa.scalar(None, column.type), column)


def _with_nullable_floats(schema: pa.Schema) -> pa.Schema:
    return pa.schema([field.with_nullable(True) if kinds.is_floating(field.type) else field for field in schema])


def _common_schema(given: Sequence[tuple[str, pa.Schema]]) -> pa.Schema:
    """Returns the common schema; a column is nullable if it is in any source."""
    first_field, first = given[0]
    common = first
    for field, schema in given[1:]:
        _refuse_mismatch(field, schema, first_field, common, _goes_with)
        types = [_wider(one, other) for one, other in zip(common.types, schema.types, strict=True)]
        common = pa.schema(list(zip(first.names, types, strict=True)))
    return _nullable_as(common, [schema for _, schema in given])


def _schema_of_base(base: pa.Schema, given: Sequence[tuple[str, pa.Schema]]) -> pa.Schema:
    """Returns the base's schema; a column is nullable if it is in any source."""
    for field, schema in given:
        _refuse_mismatch(field, schema, "base.version", base, _goes_into)
    return _nullable_as(base, [base, *(schema for _, schema in given)])


def _nullable_as(schema: pa.Schema, schemas: Sequence[pa.Schema]) -> pa.Schema:
    nullable = [any(one.field(index).nullable for one in schemas) for index in range(len(schema))]
    return pa.schema([field.with_nullable(may) for field, may in zip(schema, nullable, strict=True)])


def _refuse_mismatch(field: str, schema: pa.Schema, first_field: str, first: pa.Schema, fits: Fits) -> None:
    fitting = schema.names == first.names and all(map(fits, first.types, schema.types))
    if not fitting:
        why = difference(schema, first_field, first, fits)
        raise InvalidArgument(
            f"{field}: {why}", reason="SCHEMA_MISMATCH", metadata={"field": field}, fields=[(field, why)]
        )


def _wider(data_type: pa.DataType, other: pa.DataType) -> pa.DataType | None:
    if data_type == other:
        return data_type
    if {data_type, other} == {pa.int64(), pa.float64()}:
        return pa.float64()
    return None


def _goes_with(data_type: pa.DataType, other: pa.DataType) -> bool:
    return _wider(data_type, other) is not None


def _goes_into(data_type: pa.DataType, other: pa.DataType) -> bool:
    return bool(_wider(data_type, other) == data_type)


def known_classes(kept: BaseRows | None) -> list[str]:
    """Returns the names of the labels 0, 1, … in the version that is appended to."""
    return next((column.value_names for column in kept.version.columns if column.name == LABEL), []) if kept else []


def _value_names(kept: BaseRows | None, sources: Sequence[OpenSource]) -> Mapping[str, list[str]]:
    """Returns the value names: those of the base, whose labels keep their numbers, then the sources' new classes."""
    names = {column.name: list(column.value_names) for column in kept.version.columns} if kept else {}
    classes = sorted({name for source in sources for name in source.rows.class_names or ()}, key=str.encode)
    if classes:
        known = known_classes(kept)
        if kept and not known:
            raise InvalidArgument(
                "base.version: its labels have no names, so folders of classes cannot be appended to it",
                reason="SCHEMA_MISMATCH",
                metadata={"field": "base.version"},
                fields=[("base.version", "its labels have no names")],
            )
        names[LABEL] = known + [name for name in classes if name not in known]
    return {column: values for column, values in names.items() if values}


def _renumbered(table: pa.Table, numbers: NDArray[np.int64]) -> pa.Table:
    place = table.schema.get_field_index(LABEL)
    field = table.schema.field(place)
    labels = pa.array(numbers[_whole_numbers(table.column(place)).to_numpy()])
    return table.set_column(place, field, labels.cast(field.type))


def _whole_numbers(labels: pa.Array | pa.ChunkedArray) -> pa.Array | pa.ChunkedArray:
    return labels.cast(pa.int64())


# --- Base rows ---
# The rows of the version that an import appends to.


class BaseRows:
    """Reads the base's rows; raises `DataLoss` if the version cannot be read."""

    def __init__(self, store: ObjectStore, version: DatasetVersion) -> None:
        self.version = version
        self._reader = VersionReader(store, version)
        self.schema: pa.Schema = self._reader.select(None)
        self.splits = [split.name for split in version.manifest.splits]

    def groups(self, split: str) -> Iterator[tuple[RowGroups, Ints]]:
        """Yields the split's row groups in the order of row ids, page by page, with the stored bytes of each group.

        There are none for an unknown split.
        """
        if split not in self.splits:
            return
        found = self.version.split(split)
        end_row_id = found.first_row_id + found.row_count
        for page, groups in self._reader.files.row_groups_by_page(found.first_row_id, end_row_id):
            files = np.repeat(groups.file_indices - page.first_file, np.diff(groups.file_starts, append=len(groups)))
            yield groups, page.size_bytes[files] * groups.row_counts // np.maximum(page.row_counts[files], 1)

    def tables(self, groups: Iterable[RowGroup]) -> Iterator[pa.Table]:
        """Yields the rows of the groups."""
        for group in groups:
            yield self._reader.read(group)


# --- Mismatch ---
# Describes how the columns of a source differ from the expected ones, so that they can be corrected.

# The number of columns that are named.
SHOWN = 5
# The characters of a name that are shown, if its type is shown too.
SHOWN_NAME = 200

Fits = Callable[[pa.DataType, pa.DataType], bool]


def difference(schema: pa.Schema, first_field: str, first: pa.Schema, fits: Fits) -> str:
    """Describes the difference.

    `first` are the columns of `first_field`; `fits` returns whether a type is compatible with one of them.
    """
    theirs, ours = frozenset(first.names), frozenset(schema.names)
    lacking = [name for name in first.names if name not in ours]
    more = [name for name in schema.names if name not in theirs]
    differences = []
    if lacking:
        differences.append(f"it lacks {_columns(lacking)}, which {first_field} has")
    if more:
        differences.append(f"it has {_columns(more)}, which {first_field} lacks")
    if differences:
        return ", and ".join(differences)
    moved = next(((one, two) for one, two in zip(schema.names, first.names, strict=True) if one != two), None)
    if moved:
        return (
            f"it has the columns of {first_field} in another order: {shown(moved[0])} comes first where that has "
            f"{shown(moved[1])}; write them in one order"
        )
    unfit = [(one, two) for one, two in zip(schema, first, strict=True) if not fits(two.type, one.type)]
    pairs = [f"{_spelled(one)} where {first_field} has {_spelled(two)}" for one, two in unfit[:SHOWN]]
    return f"it has {_some(pairs, len(unfit))}; set column_types, or write them alike"


def _columns(names: Sequence[str]) -> str:
    some = _some([shown(name) for name in names[:SHOWN]], len(names))
    return f"the column{'s' if len(names) > 1 else ''} {some}"


def _some(first: Sequence[str], count: int) -> str:
    """Joins these names, out of `count`."""
    return ", ".join(first) + (f" and {count - len(first):,} more" if count > len(first) else "")


def _spelled(field: pa.Field) -> str:
    name = field.name if len(field.name) <= SHOWN_NAME else field.name[:SHOWN_NAME] + "…"
    return f"{name}: {field.type}"
