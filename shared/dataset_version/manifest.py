"""The manifest of a dataset version, as canonical JSON, and the types of the columns that it names.

The manifest names every file with its size and SHA-256. It contains nothing that differs between two runs on the same
rows (no time, no attempt, no machine), so equal inputs give equal digests. Of a version with many files it names pages
instead, which name the files (`shared.dataset_version.pages`); the digest of each page stands in the manifest.

Columns have logical Arrow types, and Parquet stores some of them in another form. A tensor column is logically a
`fixed_shape_tensor`. It is stored as FIXED_LEN_BYTE_ARRAY, row-major and little-endian, with value type and shape in
the field's metadata, which reads eight times faster than Parquet's nested lists (docs/decisions/0004). Parquet has no
whole seconds and stores them as milliseconds; the types in the manifest turn them into seconds again. Other columns are
stored unchanged. The names and the number of columns are limited.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from dataclasses import field as dataclass_field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.types as kinds

from shared.durable import fields_of
from shared.errors import DataLoss, InvalidArgument, invalid_field, shown

# --- Manifest ---

FORMAT = "millrace.dataset-version/2"
# The format of a manifest whose files are in pages.
PAGED_FORMAT = "millrace.dataset-version/3"
REPORT = "report.json"
QUARANTINE = "quarantine.jsonl"


@dataclass(frozen=True, kw_only=True)
class Column:
    """A column of a version.

    `arrow_type` is the logical type in Arrow's own spelling. `shape` is that of one row, empty for a scalar.
    `value_names` names the values 0, 1, …, if the source had names for them.
    """

    name: str
    arrow_type: str
    shape: list[int]
    value_names: list[str] = dataclass_field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Split:
    """A split: `row_count` consecutive row ids from `first_row_id` on."""

    name: str
    first_row_id: int
    row_count: int


@dataclass(frozen=True, kw_only=True)
class DataFile:
    """A Parquet file. `path` is relative to the manifest's folder; `row_groups` lists the rows of each group."""

    path: str
    split: str
    first_row_id: int
    row_count: int
    row_groups: list[int]
    size_bytes: int
    sha256: str
    # The SHA-256 of the file's last `footer_bytes`, which page checksums do not cover.
    footer_bytes: int
    footer_sha256: str
    # The size of the values as `shared.dataset_version.parquet.raw_bytes` counts it. Older manifests lack it.
    raw_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class Parent:
    """The version that this one was made from, as it was at that time."""

    version: str
    manifest_sha256: str


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """The checkpoint that predicted `columns`, and the version that it was `trained_on`, as they were at that time."""

    checkpoint: str
    checkpoint_sha256: str
    trained_on: str
    columns: list[str]


@dataclass(frozen=True, kw_only=True)
class Attachment:
    """A file beside the rows: `REPORT` or `QUARANTINE`. `path` is relative to the manifest's folder."""

    path: str
    size_bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class PageIndex:
    """Consecutive pages of one level, in the order of row ids; each list has an entry for each page.

    Pages of level 0 name files. A page of level n names pages of level n - 1.
    """

    level: int
    # The number of the first page here among all pages of its level.
    first_page: int
    # The first row id of each page's files.
    first_row_ids: list[int]
    file_counts: list[int]
    group_counts: list[int]
    # The size of each page itself.
    page_bytes: list[int]
    sha256: list[str]


@dataclass(frozen=True, kw_only=True)
class Pages:
    """The files of a version that has them in pages."""

    index: PageIndex
    # The number of all pages, of all levels.
    page_count: int
    # The size of the files of each split, in the order of the manifest's splits.
    split_bytes: list[int]

    @property
    def file_count(self) -> int:
        return sum(self.index.file_counts)


class FilesInPages(Sequence[DataFile]):
    """Takes the place of the files that a manifest has in pages. Any use is a mistake of the program, and raises.

    `VersionReader.files` and `open_files` give the files of any version.
    """

    def __getitem__(self, place: Any) -> Any:
        raise self._refusal()

    def __len__(self) -> int:
        raise self._refusal()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FilesInPages)

    __hash__ = None  # type: ignore[assignment]

    def _refusal(self) -> TypeError:
        return TypeError("the manifest has its files in pages; read them by open_files or VersionReader.files")


@dataclass(frozen=True, kw_only=True)
class Manifest:
    columns: list[Column]
    splits: list[Split]
    # In the order of row ids. `FilesInPages` if `pages` is set.
    files: Sequence[DataFile]
    parents: list[Parent] = dataclass_field(default_factory=list)
    # The columns of the rows as ingested: those of the oldest ancestor in a chain of transforms.
    ingested: list[Column] = dataclass_field(default_factory=list)
    # The transforms applied since, oldest first, each a frozen `Transform` as JSON.
    transforms: list[dict[str, Any]] = dataclass_field(default_factory=list)
    attachments: list[Attachment] = dataclass_field(default_factory=list)
    quarantined_row_count: int = 0
    # Set only for a version of predictions.
    prediction: Prediction | None = None
    # Set only for a version with many files.
    pages: Pages | None = None

    def attachment(self, path: str) -> Attachment | None:
        return next((one for one in self.attachments if one.path == path), None)

    @property
    def row_count(self) -> int:
        return sum(split.row_count for split in self.splits)

    @property
    def size_bytes(self) -> int:
        """The total size of all files."""
        if self.pages is not None:
            return sum(self.pages.split_bytes)
        return sum(file.size_bytes for file in self.files)

    @property
    def file_count(self) -> int:
        return len(self.files) if self.pages is None else self.pages.file_count

    def bytes_of_split(self, name: str) -> int:
        """Return the size of the files of a split."""
        if self.pages is None:
            return sum(file.size_bytes for file in self.files if file.split == name)
        return sum(size for split, size in zip(self.splits, self.pages.split_bytes, strict=True) if split.name == name)

    def to_json(self) -> bytes:
        record = {**asdict(replace(self, files=[])), "row_count": self.row_count, "size_bytes": self.size_bytes}
        if self.prediction is None:
            del record["prediction"]  # keeps the digests of versions that were made before this field existed
        if self.pages is None:
            del record["pages"]  # likewise
            record["files"] = [asdict(file) for file in self.files]
            for file in record["files"]:
                if file["raw_bytes"] is None:
                    del file["raw_bytes"]  # likewise
        else:
            del record["files"]
        record["format"] = FORMAT if self.pages is None else PAGED_FORMAT
        return json.dumps(record, sort_keys=True, separators=(",", ":")).encode()

    @classmethod
    def from_json(cls, data: bytes, expected_sha256: str) -> Manifest:
        """Parse a manifest. Raises `DataLoss` unless the bytes have that digest (hex)."""
        if sha256_hex(data) != expected_sha256:
            raise DataLoss(
                "the manifest does not have the digest that its commit names",
                reason="MANIFEST_DIGEST",
                metadata={"expected_sha256": expected_sha256, "found_sha256": sha256_hex(data)},
            )
        record: Mapping[str, Any] = json.loads(data)
        if record["format"] not in (FORMAT, PAGED_FORMAT):
            raise DataLoss(
                f"the manifest has the format {record['format']!r}; this program reads {FORMAT!r} and {PAGED_FORMAT!r}"
            )
        pages = _pages_of(record["pages"]) if record["format"] == PAGED_FORMAT else None
        return cls(
            columns=[Column(**fields_of(Column, column)) for column in record["columns"]],
            splits=[Split(**fields_of(Split, split)) for split in record["splits"]],
            files=(
                FilesInPages()
                if pages is not None
                else [DataFile(**fields_of(DataFile, file)) for file in record["files"]]
            ),
            parents=[Parent(**fields_of(Parent, parent)) for parent in record["parents"]],
            ingested=[Column(**fields_of(Column, column)) for column in record["ingested"]],
            transforms=record["transforms"],
            attachments=[Attachment(**fields_of(Attachment, attachment)) for attachment in record["attachments"]],
            quarantined_row_count=record["quarantined_row_count"],
            prediction=Prediction(**fields_of(Prediction, record["prediction"])) if "prediction" in record else None,
            pages=pages,
        )


@dataclass(frozen=True)
class DatasetVersion:
    """A committed version, immutable. `folder` is the key prefix of its files in the store."""

    name: str
    manifest: Manifest
    manifest_sha256: str
    folder: str

    @property
    def columns(self) -> list[Column]:
        return self.manifest.columns

    def split(self, name: str) -> Split:
        """Return a split. Raises `InvalidArgument`, naming the existing splits."""
        for split in self.manifest.splits:
            if split.name == name:
                return split
        raise invalid_field("split", name, f"use one of {', '.join(split.name for split in self.manifest.splits)}")


def _pages_of(record: Mapping[str, Any]) -> Pages:
    index = PageIndex(**fields_of(PageIndex, record["index"]))
    return Pages(**{**fields_of(Pages, record), "index": index})


def sha256_hex(data: bytes | memoryview) -> str:
    return hashlib.sha256(data).hexdigest()


# --- Columns ---

ROW_ID = "_row_id"
ROW_ID_FIELD = pa.field(ROW_ID, pa.int64(), nullable=False)
TENSOR_KEY = b"millrace.tensor"

_SCALARS = (
    kinds.is_boolean,
    kinds.is_integer,
    kinds.is_floating,
    kinds.is_string,
    kinds.is_binary,
    kinds.is_date32,
    kinds.is_time,
)
_ZONE = re.compile(r"[A-Za-z0-9_+:/-]{1,64}")


def logical_field(field: pa.Field) -> pa.Field:
    """Return the field under which a version stores a source's column.

    The values must be cast to its type. Dictionaries and large strings lose their encoding; fixed-size lists of numbers
    become tensors. Raises `InvalidArgument`, naming the column, if a version cannot store its type.
    """
    kept = _logical_type(field.name, field.type)
    return pa.field(field.name, kept, nullable=field.nullable and not is_tensor(kept))


def scalar_remedy(data_type: pa.DataType) -> str | None:
    """Return what to use instead of a scalar type; None if a version stores the type unchanged."""
    if kinds.is_decimal128(data_type):
        return None if 0 <= data_type.scale <= data_type.precision else "use a scale of 0 to the decimal's precision"
    if kinds.is_timestamp(data_type):
        named = data_type.tz is None or _ZONE.fullmatch(data_type.tz)
        return None if named else "name a time zone such as UTC, +02:00 or Europe/Berlin"
    if kinds.is_fixed_size_binary(data_type):
        return None if data_type.byte_width else "use values of at least one byte"
    if any(check(data_type) for check in _SCALARS):
        return None
    return "use numbers, booleans, strings, binary, dates, times or timestamps"


def refuse_beyond_milliseconds(scalars: pa.Array) -> None:
    """Raise `pa.ArrowInvalid` for whole seconds that do not fit the milliseconds of a version's files."""
    if scalars.type == pa.time32("s"):
        scalars.validate(full=True)  # a cast would wrap around
    elif kinds.is_timestamp(scalars.type) and scalars.type.unit == "s":
        scalars.cast(pa.timestamp("ms", scalars.type.tz))


def is_tensor(arrow_type: pa.DataType) -> bool:
    return isinstance(arrow_type, pa.FixedShapeTensorType)


def tensor_field(name: str, value_type: pa.DataType, shape: tuple[int, ...]) -> pa.Field:
    """Return the field of a tensor column; `shape` is that of one row."""
    return pa.field(name, pa.fixed_shape_tensor(value_type, list(shape)), nullable=False)


def tensor_array(values: np.ndarray[Any, Any]) -> pa.Array:
    """Convert an array of shape (N, *shape) to N tensors, without a copy if `values` is contiguous."""
    flat = pa.array(np.ascontiguousarray(values).reshape(-1))
    storage = pa.FixedSizeListArray.from_arrays(flat, math.prod(values.shape[1:]))
    return pa.ExtensionArray.from_storage(pa.fixed_shape_tensor(flat.type, list(values.shape[1:])), storage)


def shape_of(arrow_type: pa.DataType) -> list[int]:
    """Return the shape of one row; [] for a scalar."""
    return list(arrow_type.shape) if is_tensor(arrow_type) else []


def row_bytes(schema: pa.Schema) -> int | None:
    """Return the bytes of a row with logical or stored types; None if a column has no fixed width."""
    total_bits = 0
    for field in schema:
        width = _bits(field.type)
        if width is None:
            return None
        total_bits += width
    return math.ceil(total_bits / 8)


def stored_schema(schema: pa.Schema) -> pa.Schema:
    """Return the schema in which Parquet stores columns of these logical types."""
    return pa.schema([_stored_field(field) for field in schema])


def logical_schema(stored: pa.Schema, spellings: Mapping[str, str]) -> pa.Schema:
    """Invert `stored_schema`; `spellings` are the manifest's types by column."""
    fields = []
    for field in stored:
        described = (field.metadata or {}).get(TENSOR_KEY)
        if described is None:
            seconds = _in_seconds(field.type)
            wanted = seconds if spellings.get(field.name) == str(seconds) else field.type
            fields.append(field.remove_metadata().with_type(wanted))
        else:
            tensor = json.loads(described)
            value_type = pa.type_for_alias(tensor["value_type"])
            fields.append(tensor_field(field.name, value_type, tuple(tensor["shape"])))
    return pa.schema(fields)


def to_stored(table: pa.Table) -> pa.Table:
    """Convert logical to stored columns without copying values.

    Raises `InvalidArgument` for a tensor column with nulls.
    """
    columns = []
    for field, column in zip(table.schema, table.columns, strict=True):
        if is_tensor(field.type):
            refuse_nulls(field.name, column)
            column = pa.chunked_array([_as_bytes(chunk) for chunk in column.chunks], type=_binary(field.type))
        columns.append(column)
    return pa.Table.from_arrays(columns, schema=stored_schema(table.schema))


def to_logical(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """Convert stored columns to the logical columns of `schema`, each in one chunk."""
    columns = []
    for field, column in zip(schema, table.columns, strict=True):
        array = column.combine_chunks()
        if isinstance(array, pa.ChunkedArray):
            array = array.chunk(0) if array.num_chunks else pa.array([], column.type)
        columns.append(_as_tensors(array, field.type) if is_tensor(field.type) else array.cast(field.type))
    return pa.Table.from_arrays(columns, schema=schema)


def refuse_nulls(name: str, tensors: pa.ChunkedArray) -> None:
    """Raise `InvalidArgument` if a row, or a value within one, is null.

    `tensors` may be plain fixed-size lists.
    """
    lists = [chunk.storage if isinstance(chunk, pa.ExtensionArray) else chunk for chunk in tensors.chunks]
    if any(one.null_count or one.flatten().null_count for one in lists):
        raise InvalidArgument(
            f"column {name!r} has nulls, and a tensor has no place for them; fill them before importing",
            reason="NULL_TENSOR",
            metadata={"column": name},
        )


def _logical_type(name: str, data_type: pa.DataType) -> pa.DataType:
    if kinds.is_dictionary(data_type):
        return _logical_type(name, data_type.value_type)
    if kinds.is_large_string(data_type) or kinds.is_string_view(data_type):
        return pa.string()
    if kinds.is_large_binary(data_type) or kinds.is_binary_view(data_type):
        return pa.binary()
    if is_tensor(data_type) and _is_row_major(data_type) and _is_number(data_type.value_type):
        return pa.fixed_shape_tensor(data_type.value_type, data_type.shape)
    if kinds.is_fixed_size_list(data_type) and data_type.list_size > 0 and _is_number(data_type.value_type):
        return pa.fixed_shape_tensor(data_type.value_type, [data_type.list_size])
    remedy = scalar_remedy(data_type)
    if remedy is None:
        return data_type
    if kinds.is_nested(data_type) or isinstance(data_type, pa.BaseExtensionType):
        remedy = "use scalars, strings, binary, or fixed-size lists of numbers"
    raise InvalidArgument(
        f"column {name!r} has the type {data_type}, which a version cannot keep; {remedy}",
        reason="UNSUPPORTED_COLUMN",
        metadata={"column": name, "arrow_type": str(data_type)},
    )


def _in_seconds(arrow_type: pa.DataType) -> pa.DataType:
    """Return the type of whole seconds for a type of milliseconds; other types unchanged.

    Parquet stores whole seconds as milliseconds.
    """
    if arrow_type == pa.time32("ms"):
        return pa.time32("s")
    if kinds.is_timestamp(arrow_type) and arrow_type.unit == "ms":
        return pa.timestamp("s", arrow_type.tz)
    return arrow_type


def _is_row_major(tensor: pa.FixedShapeTensorType) -> bool:
    return tensor.permutation is None or list(tensor.permutation) == list(range(len(tensor.shape)))


def _is_number(value_type: pa.DataType) -> bool:
    return bool(kinds.is_integer(value_type) or kinds.is_floating(value_type))


def _binary(tensor: pa.FixedShapeTensorType) -> pa.DataType:
    return pa.binary(math.prod(tensor.shape) * tensor.value_type.bit_width // 8)


def _bits(arrow_type: pa.DataType) -> int | None:
    if is_tensor(arrow_type):
        return int(_binary(arrow_type).byte_width) * 8
    try:
        return int(arrow_type.bit_width)
    except ValueError:
        return None


def _stored_field(field: pa.Field) -> pa.Field:
    if not is_tensor(field.type):
        return field.remove_metadata()
    described = {"value_type": str(field.type.value_type), "shape": list(field.type.shape)}
    return pa.field(field.name, _binary(field.type), nullable=False, metadata={TENSOR_KEY: json.dumps(described)})


def _as_bytes(tensors: pa.ExtensionArray) -> pa.Array:
    values = tensors.storage.flatten()
    width = values.type.bit_width // 8
    data = values.buffers()[1].slice(values.offset * width, len(values) * width) if len(values) else pa.py_buffer(b"")
    return pa.Array.from_buffers(_binary(tensors.type), len(tensors), [None, data])


def _as_tensors(binary: pa.Array, tensor: pa.FixedShapeTensorType) -> pa.ExtensionArray:
    per_row = math.prod(tensor.shape)
    values = pa.Array.from_buffers(
        tensor.value_type, len(binary) * per_row, [None, binary.buffers()[1]], offset=binary.offset * per_row
    )
    return pa.ExtensionArray.from_storage(tensor, pa.FixedSizeListArray.from_arrays(values, per_row))


# --- Names of columns ---

MAX_COLUMNS = 10_000
# Every report, error and quarantined row repeats the column's name.
MAX_NAME_BYTES = 1024


def name_problem(name: str) -> str | None:
    """Explain why no version can have a column of that name; None if one can."""
    if name in ("", ROW_ID):
        return f"a column must not be named {name!r}; choose another name"
    if (size := len(name.encode())) > MAX_NAME_BYTES:
        return f"a column has a name of {size} bytes; at most {MAX_NAME_BYTES} are kept: {shown(name)}"
    if "\0" in name:
        return f"column {shown(name)} has a zero byte in its name; rename it"
    return None


def repeated(names: Sequence[str]) -> Iterator[int]:
    """Yield the indices of names that occur earlier, too."""
    seen: set[str] = set()
    for place, name in enumerate(names):
        if name in seen:
            yield place
        seen.add(name)
