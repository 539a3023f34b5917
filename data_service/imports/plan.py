"""The plan of an import: its common columns, its parts, and which row ids the rows of each part have.

If an import appends to a version, that version's columns are included.

The parts depend on the sources and the request alone, never on the cluster: a part has files of its own, so other parts
would give the version another digest. An upload that is still open is another source in this respect, because its size
is not known yet.

The identity of rows is a digest that is the same in each process for the same rows of the same files.

It covers the rows' classes and members, such as files, cuts, columns and their casts. How the files are opened, such as
the store's keys, is no part of it.
"""

from __future__ import annotations

import hashlib
import io
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from dataclasses import field as dataclass_field
from functools import cached_property
from types import FunctionType, MappingProxyType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as kinds
from numpy.typing import NDArray

from data_service.domain.splits import Routing
from data_service.formats import OpenSource
from data_service.formats.images import ClassNames
from data_service.formats.interface import RowSource
from data_service.imports.reader import ChildRows
from data_service.storage.source_files import SourceFile
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
        """Convert a source's rows to the version's columns.

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
        """Map a source's class numbers to those of the version."""
        places = {name: number for number, name in enumerate(self.value_names[LABEL])}
        return np.array([places[name] for name in class_names], np.int64)

    def _refuse_lossy_labels(self, source: OpenSource) -> None:
        """Refuse labels that `column_types` gave a type that cannot hold the numbers."""
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
    """Replace each NaN in float columns by null; tensors, which have no nulls, stay as they are."""
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
    """Return the common schema; a column is nullable if it is in any source."""
    first_field, first = given[0]
    common = first
    for field, schema in given[1:]:
        _refuse_mismatch(field, schema, first_field, common, _goes_with)
        types = [_wider(one, other) for one, other in zip(common.types, schema.types, strict=True)]
        common = pa.schema(list(zip(first.names, types, strict=True)))
    return _nullable_as(common, [schema for _, schema in given])


def _schema_of_base(base: pa.Schema, given: Sequence[tuple[str, pa.Schema]]) -> pa.Schema:
    """Return the base's schema; a column is nullable if it is in any source."""
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
    """Return the names of the labels 0, 1, … in the version that is appended to."""
    return next((column.value_names for column in kept.version.columns if column.name == LABEL), []) if kept else []


def _value_names(kept: BaseRows | None, sources: Sequence[OpenSource]) -> Mapping[str, list[str]]:
    """Return the value names: those of the base, whose labels keep their numbers, then the sources' new classes."""
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
        """Yield the split's row groups in the order of row ids, page by page, with the stored bytes of each group.

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
        """Yield the rows of the groups."""
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
    """Describe the difference.

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
    """Join these names, out of `count`."""
    return ", ".join(first) + (f" and {count - len(first):,} more" if count > len(first) else "")


def _spelled(field: pa.Field) -> str:
    name = field.name if len(field.name) <= SHOWN_NAME else field.name[:SHOWN_NAME] + "…"
    return f"{name}: {field.type}"


# --- Plan ---

# A smaller import is one part for each split. One process reads it in less time than Ray needs to begin some tasks.
SMALL_BYTES = 64 * 1024 * 1024
# The bytes of sources in a part: enough to be worth a task and a few files, few enough to be repeated after a fault.
MAX_PART_BYTES = 32 * 1024 * 1024


@dataclass(frozen=True)
class BaseRun:
    """Consecutive row groups of the version that the import appends to."""

    groups: RowGroups
    size_bytes: int

    @property
    def row_count(self) -> int:
        return self.groups.row_count


@dataclass(frozen=True)
class SourceRun:
    """A source's rows, or some of them; `index` is the index of the request's source."""

    index: int
    rows: RowSource

    @property
    def size_bytes(self) -> int:
        return self.rows.size_bytes

    @property
    def row_count(self) -> int | None:
        return self.rows.row_count


Run = BaseRun | SourceRun


@dataclass(frozen=True)
class Place:
    """What stands before a part.

    `ordinal` counts the rows that the sources could read, `bad_rows` those that they could not, and `row_in_split` the
    rows of the imported split that are kept. `first_row_ids` are by target; empty until they are known.
    """

    ordinal: int = 0
    bad_rows: int = 0
    row_in_split: int = 0
    first_row_ids: Mapping[str, int] = dataclass_field(default_factory=dict)


@dataclass(frozen=True)
class ImportPart:
    """Consecutive rows of one imported split; `number` counts from 0 over all splits."""

    number: int
    split: str
    runs: tuple[Run, ...]
    place: Place = Place()

    @property
    def expected_rows(self) -> int | None:
        """The number of rows if all are good; None if it is unknown."""
        counts = [run.row_count for run in self.runs]
        return None if None in counts else sum(count for count in counts if count is not None)

    @property
    def row_count(self) -> int:
        return self.expected_rows or 0

    @property
    def where(self) -> str:
        names = [f"sources[{run.index}]" if isinstance(run, SourceRun) else "base.version" for run in self.runs]
        through = f" to {names[-1]}" if names[:1] != names[-1:] else ""
        return f"part {self.number}: {', '.join(names[:1])}{through}, of split {self.split!r}"

    def __repr__(self) -> str:
        """The same in each process for the same rows at the same place, and another for others."""
        return f"ImportPart({self.number}, {self.split!r}, runs {self._runs_sha256}, {self.place})"

    def placed(self, place: Place) -> ImportPart:
        """Return the part at another place; the digest of its runs is computed once for all places."""
        part = replace(self, place=place)
        part.__dict__["_unplaced"] = self._unplaced
        return part

    @cached_property
    def _unplaced(self) -> ImportPart:
        return self

    @property
    def _runs_sha256(self) -> str:
        return self._unplaced._own_runs_sha256

    @cached_property
    def _own_runs_sha256(self) -> str:
        return identity_of(self.runs)

    def __reduce__(self) -> tuple[Any, ...]:
        # The digest travels, too. Sources have members that cloudpickle alone can send.
        return _sent, (self.number, self.split, self.runs, self.place, self._runs_sha256)


def _sent(number: int, split: str, runs: tuple[Run, ...], place: Place, runs_sha256: str) -> ImportPart:
    part = ImportPart(number, split, runs, place)
    part.__dict__["_own_runs_sha256"] = runs_sha256
    return part


@dataclass(frozen=True)
class Plan:
    """The parts in row order; each imported split has at least one."""

    parts: Sequence[ImportPart]
    is_small: bool

    @property
    def uncounted(self) -> list[ImportPart]:
        """The parts whose sources do not say how many rows they have."""
        return [part for part in self.parts if part.expected_rows is None]


def plan_parts(splits: Sequence[str], kept: BaseRows | None, sources: Sequence[OpenSource]) -> Plan:
    """Divide the rows of the splits: first the base's, then those of the sources in their order."""
    base = {split: list(_base_runs(split, kept)) if kept else [] for split in splits}
    base_bytes = sum(run.size_bytes for of_split in base.values() for run in of_split)
    is_small = base_bytes + sum(source.rows.size_bytes for source in sources) < SMALL_BYTES
    parts: list[ImportPart] = []
    for split in splits:
        runs: list[Run] = [*base[split]]
        for source in sources:
            if source.split == split:
                divided = [source.rows] if is_small else source.rows.parts()
                runs += [SourceRun(source.index, rows) for rows in divided]
        for packed in [tuple(runs)] if is_small else _packed(runs):
            parts.append(ImportPart(len(parts), split, packed))
    return Plan(parts, is_small)


def _base_runs(split: str, kept: BaseRows) -> Iterator[BaseRun]:
    """Yield runs of row groups, each up to the group with which it reaches `MAX_PART_BYTES`."""
    left, left_bytes = RowGroups.joined([]), np.zeros(0, np.int64)
    for page, page_bytes in kept.groups(split):
        groups, group_bytes = RowGroups.joined([left, page]), np.concatenate([left_bytes, page_bytes])
        ends, begin, before = np.cumsum(group_bytes), 0, 0
        while (end := int(np.searchsorted(ends, before + MAX_PART_BYTES)) + 1) <= len(groups):
            yield BaseRun(groups[begin:end], int(ends[end - 1]) - before)
            begin, before = end, int(ends[end - 1])
        left, left_bytes = groups[begin:], group_bytes[begin:]
    if len(left):
        yield BaseRun(left, int(left_bytes.sum()))


def _packed(runs: Iterable[Run]) -> Iterator[tuple[Run, ...]]:
    """Yield runs that together stay within `MAX_PART_BYTES`, or a single one; at least one part."""
    packed: list[Run] = []
    size_bytes = 0
    for run in runs:
        if packed and size_bytes + run.size_bytes > MAX_PART_BYTES:
            yield tuple(packed)
            packed, size_bytes = [], 0
        packed.append(run)
        size_bytes += run.size_bytes
    yield tuple(packed)


# --- Placing ---
# Row ids follow from the number of rows in each part: the parts of a split stand one after the other.


@dataclass(frozen=True)
class Tally:
    """The rows of a part.

    `readable` are those that the sources could read, `kept` those of them that also pass all checks. `bad_rows` are the
    others, and `left_out` counts all rows that are not kept by the reason.
    """

    readable: int
    kept: int
    bad_rows: int = dataclass_field(default=0, compare=False)
    left_out: Mapping[str, int] = dataclass_field(default_factory=dict, compare=False)


class Placer:
    """Places one part after the other.

    `routings` and `first_row_ids` are those of the splits' hold-outs; without hold-outs they are empty.
    """

    def __init__(self, routings: Mapping[str, Routing], first_row_ids: Mapping[str, int]) -> None:
        self._routings = routings
        self._next_row_ids = dict(first_row_ids)
        self._row_id = self._ordinal = self._bad_rows = self._row_in_split = 0
        self._split = ""

    def place(self, part: ImportPart) -> ImportPart:
        """Return the next part, placed."""
        if part.split != self._split:
            self._split, self._row_in_split = part.split, 0
        if self._routings:
            first_row_ids = {target: self._next_row_ids[target] for target in self._routings[part.split].targets}
        else:
            first_row_ids = {part.split: self._row_id}
        return part.placed(Place(self._ordinal, self._bad_rows, self._row_in_split, first_row_ids))

    def advance(self, tally: Tally) -> None:
        """Go past the part that was placed last."""
        if self._routings:
            routing = self._routings[self._split]
            counts = routing.counts_of(self._row_in_split, tally.kept)
            for target, count in zip(routing.targets, counts, strict=True):
                self._next_row_ids[target] += count
        self._row_id += tally.kept
        self._row_in_split += tally.kept
        self._ordinal += tally.readable
        self._bad_rows += tally.bad_rows


# --- Identity of rows ---


def identity_of(rows: object) -> str:
    """Return the digest of rows, such as a tuple of runs."""
    file = io.BytesIO()
    _Identity(file).dump(rows)
    return hashlib.sha256(file.getvalue()).hexdigest()


class _Identity(pickle.Pickler):
    """Writes bytes that are compared and never read.

    What differs by process, or says nothing about the rows, is written in another form, or left out. What the parts of
    a source have in common, such as its columns and their casts, is written as a digest, which is computed once.
    """

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=5)
        # Without a memo. With one, the bytes depend on which of the equal values are one object.
        self.fast = True

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, SourceFile):
            return tuple, (["file", *obj.identity],)
        if isinstance(obj, ClassNames):  # a set, and what was computed of it so far
            return tuple, (["classes", *obj.names],)
        if isinstance(obj, ChildRows):
            return tuple, (["rows", obj.identity],)
        if isinstance(obj, (FunctionType, pa.Schema, MappingProxyType)):
            return tuple, (["shared", _SHARED.digest_of(obj)],)
        if isinstance(obj, pa.Array):  # its buffers may have unused bits
            return tuple, (["array", obj.type, obj.to_pylist()],)
        return NotImplemented


class _SharedDigests:
    """The digests of functions, schemas and mappings, which do not change.

    Each is kept with its object, so that no other object gets the same id meanwhile.
    """

    MAX = 10_000

    def __init__(self) -> None:
        self._found: dict[int, tuple[object, str]] = {}

    def digest_of(self, shared: FunctionType | pa.Schema | MappingProxyType[Any, Any]) -> str:
        found = self._found.get(id(shared))
        if found is None:
            if len(self._found) >= self.MAX:
                self._found.clear()
            found = self._found[id(shared)] = shared, identity_of(_members_of(shared))
        return found[1]


_SHARED = _SharedDigests()


def _members_of(shared: FunctionType | pa.Schema | MappingProxyType[Any, Any]) -> list[Any]:
    if isinstance(shared, FunctionType):
        return ["function", *_identity_of_function(shared)]
    if isinstance(shared, pa.Schema):
        fields = [(field.name, field.type, field.nullable, field.metadata) for field in shared]
        return ["schema", fields, shared.metadata]
    return ["mapping", dict(shared)]


def _identity_of_function(function: FunctionType) -> tuple[Any, ...]:
    """Return its place in the code, and all that it got from the function that made it."""
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    place = function.__module__, function.__qualname__, function.__code__.co_firstlineno
    return *place, cells, function.__defaults__, function.__kwdefaults__
