"""The spec of an import, checked as a whole: all problems are reported at once.

It names its sources by URIs: the allowed ones, the files that a pattern matches, and the error for missing ones.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import unquote

import pyarrow as pa

from shared.dataset_version.manifest import MAX_COLUMNS, name_problem, repeated, scalar_remedy
from shared.durable import fields_of
from shared.errors import NotFound, invalid_fields
from shared.names import ID, SPLIT, SPLIT_REMEDY

# --- Globs ---
# The files that a path with `*`, `?` and `**`, or one that ends in `/`, matches.
#
# `*` matches any characters of one name, `?` one character, `**` as a whole name any number of folders, including none.
# Names that begin with `.` or `_` below the folder where the pattern begins never match.

# Deeper than people nest folders. A deeper folder is refused, never skipped silently.
MAX_DEPTH = 64
ANY_FOLDERS = "**"


@dataclass(frozen=True)
class Glob:
    """A pattern.

    `names` are the names of a path relative to a folder, percent-encoded and with wildcards.
    """

    names: tuple[str, ...]

    @property
    def everything(self) -> bool:
        """Whether all files below the folder match."""
        return self.names == (ANY_FOLDERS,)

    @property
    def depth(self) -> int | None:
        """The number of names in a matching path; None for any number."""
        return None if ANY_FOLDERS in self.names else len(self.names)

    def matches(self, relative: str) -> bool:
        """Return whether the path matches.

        Follows all readings in parallel: no pattern takes longer than names times wildcards.
        """
        states = self._with_skips({0})
        for name in relative.split("/"):
            following = set()
            for state in states:
                if state == len(self.names):
                    continue
                if self.names[state] == ANY_FOLDERS:
                    following.add(state)
                elif _expression(self.names[state]).fullmatch(name):
                    following.add(state + 1)
            states = self._with_skips(following)
        return len(self.names) in states

    def _with_skips(self, states: Iterable[int]) -> set[int]:
        """Add the states in which a `**` matches no folder."""
        reached = set()
        for state in states:
            reached.add(state)
            while state < len(self.names) and self.names[state] == ANY_FOLDERS:
                state += 1
                reached.add(state)
        return reached


def parse_glob(quoted_path: str) -> tuple[str, Glob | None]:
    """Split a percent-encoded path before its first wildcard.

    Return the folder (or file) before it, still encoded, and the pattern below it; None if the path names one file.
    """
    if quoted_path.endswith("/") and not re.search(r"[*?]", quoted_path):
        return quoted_path.rstrip("/") or "/", Glob((ANY_FOLDERS,))
    first = re.search(r"[*?]", quoted_path)
    if first is None:
        return quoted_path, None
    cut = quoted_path.rfind("/", 0, first.start()) + 1
    names = [name for name in quoted_path[cut:].split("/") if name]
    if quoted_path.endswith("/"):
        names.append(ANY_FOLDERS)
    return quoted_path[:cut].rstrip("/") or "/", Glob(tuple(names))


def is_hidden(name: str) -> bool:
    return name.startswith((".", "_"))


@lru_cache(maxsize=1024)
def _expression(name: str) -> re.Pattern[str]:
    pieces = [piece for piece in re.split(r"(\*+)", name) if piece]
    # The first position where the text after a star fits is as good as any later one, so there is no backtracking.
    parts = []
    for index, piece in enumerate(pieces):
        if not piece.startswith("*"):
            parts.append(_literal(piece) if index == 0 else "")
        elif index == len(pieces) - 1:
            parts.append(".*")
        elif index == len(pieces) - 2:
            parts.append(f".*{_literal(pieces[index + 1])}")
        else:
            parts.append(f"(?>.*?{_literal(pieces[index + 1])})")
    return re.compile("".join(parts), re.DOTALL)


def _literal(text: str) -> str:
    return "".join(
        "." if piece == "?" else re.escape(unquote(piece, errors="surrogateescape"))
        for piece in re.split(r"(\?)", text)
    )


# --- Uris ---
# Source URIs: the files that a client may import.

MAX_URI = 2048
_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")


class UriRefused(ValueError):
    """The URI is refused; the text is the remedy."""


class _Selection:
    """What a source's `glob` says: one object, some of a folder, or a whole folder."""

    glob: Glob | None

    @property
    def single(self) -> bool:
        return self.glob is None

    @property
    def folder(self) -> bool:
        return self.glob is not None and self.glob.everything


@dataclass(frozen=True)
class FileSource(_Selection):
    """An absolute path without `..`.

    `glob` selects files below it; None: it is one file itself.
    """

    path: PurePosixPath
    glob: Glob | None = None


@dataclass(frozen=True)
class S3Source(_Selection):
    """An object, or objects, on S3.

    `key` is that of one object; with a `glob`, of the folder below which it searches, which may be empty.
    """

    bucket: str
    key: str
    glob: Glob | None = None


@dataclass(frozen=True)
class UploadSource:
    """An upload: `datasets/{d}/uploads/{u}`."""

    name: str
    single = True
    folder = False


def parse_uri(uri: str) -> FileSource | S3Source | UploadSource:
    """Parse a URI; names are taken as bytes, without normalisation.

    Raises `UriRefused`.
    """
    if not uri or len(uri) > MAX_URI:
        raise UriRefused(f"use a URI of 1 to {MAX_URI} characters")
    if uri.startswith("datasets/"):
        return _upload(uri)
    scheme, colon, rest = uri.partition(":")
    if not colon or scheme not in ("file", "s3"):
        raise UriRefused("use the scheme file or s3, or the name of an upload, datasets/{d}/uploads/{u}")
    if "#" in rest:
        raise UriRefused("leave out '#'; write it as %23 in a name")
    host, raw_path = _host_and_path(rest)
    whole = _unquoted(raw_path)
    if "\0" in whole:
        raise UriRefused("no name of a file has a zero byte")
    if ".." in whole.split("/"):
        raise UriRefused(
            "use an absolute path without '..'" if scheme == "file" else "use s3://bucket/key without '..'"
        )
    folder, glob = parse_glob(raw_path)
    path = _unquoted(folder)
    if scheme == "file":
        if host:
            raise UriRefused("use file:///absolute/path: three slashes, no host")
        if not path.startswith("/"):
            raise UriRefused("use an absolute path without '..'")
        # Two leading slashes have their own meaning in POSIX.
        return FileSource(PurePosixPath("/" + path.lstrip("/")), glob)
    key = path.removeprefix("/")
    if host and not _BUCKET.fullmatch(host):
        raise UriRefused("use s3://bucket/key; a bucket's name has 3 to 63 of a-z, 0-9, '.' and '-'")
    if not host or (not key and glob is None) or not _is_utf8(key):
        raise UriRefused("use s3://bucket/key")
    return S3Source(host, key, glob)


def check_allowed(source: FileSource | S3Source | UploadSource, roots: Sequence[PurePosixPath], *, s3: bool) -> None:
    """Raise `UriRefused` unless the server may read the source.

    A file is judged by its path text: the code that opens it must resolve links.
    """
    if isinstance(source, UploadSource):
        return
    if isinstance(source, S3Source):
        if not s3:
            raise UriRefused("this server has no S3 endpoint; it reads s3:// only where its own store is s3://")
        return
    if not roots:
        raise UriRefused("this server reads no local files; start it with MILLRACE_IMPORT_ROOTS set to their folder")
    if not any(source.path.is_relative_to(root) for root in roots):
        raise UriRefused("this path is not below a folder of the server's MILLRACE_IMPORT_ROOTS; upload it instead")


def _upload(name: str) -> UploadSource:
    parts = name.split("/")
    if len(parts) != 4 or parts[2] != "uploads" or not ID.fullmatch(parts[1]) or not ID.fullmatch(parts[3]):
        raise UriRefused("use datasets/{d}/uploads/{u} for an upload")
    return UploadSource(name)


def _host_and_path(rest: str) -> tuple[str, str]:
    """Split the text after the scheme's colon; there is a host only after two slashes."""
    if not rest.startswith("//"):
        return "", rest
    host, slash, path = rest[2:].partition("/")
    return host, slash + path


def _unquoted(text: str) -> str:
    # Python's spelling of file names: bytes that are no UTF-8 survive.
    return unquote(text, errors="surrogateescape")


def _is_utf8(text: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in text)


# --- Source errors ---
# Errors about files that an import names.


def source_not_found(field: str, uri: str, remedy: str = "name a file that exists") -> NotFound:
    return NotFound(
        f"{field}: {uri} does not exist",
        reason="SOURCE_NOT_FOUND",
        metadata={"field": field, "uri": uri},
        fields=[(field, remedy)],
    )


# --- Arrow types ---
# Arrow types as requests name them: in Arrow's own spelling, as in the columns of a version.

MAX_FIXED_BYTES = 16 * 1024 * 1024

_PLAIN = {
    "bool": pa.bool_(),
    "int8": pa.int8(),
    "int16": pa.int16(),
    "int32": pa.int32(),
    "int64": pa.int64(),
    "uint8": pa.uint8(),
    "uint16": pa.uint16(),
    "uint32": pa.uint32(),
    "uint64": pa.uint64(),
    "halffloat": pa.float16(),
    "float16": pa.float16(),
    "float": pa.float32(),
    "float32": pa.float32(),
    "double": pa.float64(),
    "float64": pa.float64(),
    "string": pa.string(),
    "binary": pa.binary(),
    "date32": pa.date32(),
    "date32[day]": pa.date32(),
    "time32[s]": pa.time32("s"),
    "time32[ms]": pa.time32("ms"),
    "time64[us]": pa.time64("us"),
    "time64[ns]": pa.time64("ns"),
}
_TIMESTAMP = re.compile(r"timestamp\[(s|ms|us|ns)(?:, ?tz=(.+))?\]")
_DECIMAL = re.compile(r"decimal128\((\d{1,2}), ?(-?\d{1,2})\)")
_FIXED_BINARY = re.compile(r"fixed_size_binary\[(\d{1,9})\]")
_TENSOR = re.compile(
    r"(?:extension<arrow\.)?"
    r"fixed_shape_tensor\[value_type=(\w+), ?shape=\[(\d{1,9}(?:, ?\d{1,9}){0,7})\](?:, ?[^<>]*)?\]>?"
)


class TypeRefused(ValueError):
    """No column of a version has that type; the text is the remedy."""


def parse_type(text: str) -> pa.DataType:
    """Return the type that `text` names.

    Examples are `int64`, `timestamp[us, tz=UTC]`, `decimal128(10, 2)` and `fixed_shape_tensor[value_type=uint8,
    shape=[28,28]]`. Raises `TypeRefused`.
    """
    if text in _PLAIN:
        return _PLAIN[text]
    if match := _TIMESTAMP.fullmatch(text):
        return _kept(pa.timestamp(match[1], tz=match[2]))
    if match := _DECIMAL.fullmatch(text):
        return _decimal(int(match[1]), int(match[2]))
    if match := _FIXED_BINARY.fullmatch(text):
        if not 1 <= int(match[1]) <= MAX_FIXED_BYTES:
            raise TypeRefused(f"use 1 to {MAX_FIXED_BYTES} bytes")
        return pa.binary(int(match[1]))
    if match := _TENSOR.fullmatch(text):
        return _tensor(match[1], [int(side) for side in match[2].split(",")])
    raise TypeRefused(
        "use an Arrow type such as int64, double, bool, string, binary, date32, timestamp[us], decimal128(10, 2) or "
        "fixed_shape_tensor[value_type=float, shape=[28,28]]"
    )


def _decimal(precision: int, scale: int) -> pa.DataType:
    if not (1 <= precision <= 38 and 0 <= scale <= precision):
        raise TypeRefused("use a precision of 1 to 38 and a scale of 0 to the precision")
    return pa.decimal128(precision, scale)


def _kept(scalar: pa.DataType) -> pa.DataType:
    if remedy := scalar_remedy(scalar):
        raise TypeRefused(remedy)
    return scalar


def _tensor(value_name: str, shape: list[int]) -> pa.DataType:
    value_type = _PLAIN.get(value_name)
    if value_type is None or not (pa.types.is_integer(value_type) or pa.types.is_floating(value_type)):
        raise TypeRefused("use a tensor of integers or floats")
    if not 0 < math.prod(shape) * value_type.bit_width // 8 <= MAX_FIXED_BYTES:
        raise TypeRefused(f"use a shape of 1 to {MAX_FIXED_BYTES} bytes")
    return pa.fixed_shape_tensor(value_type, shape)


# --- Import spec ---

MAX_SOURCES = 64
MAX_HOLD_OUTS = 64
MAX_NULL_VALUES = 1000
FORMATS = ("idx", "parquet", "arrow", "csv", "json_lines", "image_folder", "image_tar")
PARTITIONINGS = ("hive", "none")
ENCODINGS = ("utf-8", "utf-16", "latin-1", "windows-1252")
# Fields that name one file; other fields may name a folder or a pattern.
SINGLE_FILES = ("idx.images_uri", "idx.labels_uri")

Problem = tuple[str, object, str]


@dataclass(frozen=True, kw_only=True)
class CsvOptions:
    """The options of CSV, as in the request: empty means the default."""

    delimiter: str = ""
    column_names: list[str] = field(default_factory=list)
    null_values: list[str] = field(default_factory=list)
    encoding: str = ""


@dataclass(frozen=True, kw_only=True)
class Source:
    """A source of rows for one split.

    `uris` maps a field of the request, e.g. `csv.uri`, to its URI; `format` is one of `FORMATS`, or empty if the
    request sets none; `csv` is set for CSV only.
    """

    split: str
    format: str
    uris: dict[str, str]
    csv: CsvOptions | None = None

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Source:
        options = record.get("csv")
        return cls(
            split=record["split"],
            format=record["format"],
            uris=dict(record["uris"]),
            csv=None if options is None else CsvOptions(**fields_of(CsvOptions, options)),
        )


@dataclass(frozen=True, kw_only=True)
class HoldOut:
    from_split: str
    to_split: str
    fraction: float
    seed: int


@dataclass(frozen=True, kw_only=True)
class ColumnType:
    """The type of a column.

    `arrow_type` is in Arrow's spelling (`parse_type`).
    """

    column: str
    arrow_type: str


@dataclass(frozen=True, kw_only=True)
class BadRows:
    """The handling of bad rows.

    `action` is `fail` or `quarantine`; `max_rows` limits the quarantine, 0 means no limit.
    """

    action: str = "fail"
    max_rows: int = 0

    @property
    def are_left_out(self) -> bool:
        return self.action == "quarantine"


@dataclass(frozen=True, kw_only=True)
class Base:
    """The version that the new one follows.

    `mode` is `append` or `replace`, or empty if the request sets none. `manifest_sha256` is the digest of the version
    at the time of the request.
    """

    version: str
    mode: str
    manifest_sha256: str = ""


@dataclass(frozen=True, kw_only=True)
class ImportSpec:
    """The spec of an import.

    `checks` are quality checks as JSON, parsed by `data_service.domain.checks`. `partitioning` is one of
    `PARTITIONINGS`: whether folders `name=value` are columns. With `nan_as_null`, NaN of float columns becomes null;
    tensors keep theirs.
    """

    sources: list[Source]
    hold_outs: list[HoldOut]
    column_types: list[ColumnType] = field(default_factory=list)
    bad_rows: BadRows = field(default_factory=BadRows)
    checks: list[dict[str, Any]] = field(default_factory=list)
    base: Base | None = None
    partitioning: str = "hive"
    nan_as_null: bool = False

    @property
    def imported_splits(self) -> list[str]:
        """The imported splits, in the order in which sources first name them."""
        return list(dict.fromkeys(source.split for source in self.sources))

    @property
    def splits(self) -> list[str]:
        """All splits in the order of their row ids."""
        return [*self.imported_splits, *(out.to_split for out in self.hold_outs)]

    @property
    def types_by_column(self) -> dict[str, str]:
        """The types by column, in the order of the request, so that an index is one of `column_types`."""
        return {column_type.column: column_type.arrow_type for column_type in self.column_types}

    def as_record(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> ImportSpec:
        base = record.get("base")
        return cls(
            sources=[Source.from_record(source) for source in record["sources"]],
            hold_outs=[HoldOut(**fields_of(HoldOut, hold_out)) for hold_out in record["hold_outs"]],
            column_types=[ColumnType(**fields_of(ColumnType, one)) for one in record.get("column_types", [])],
            bad_rows=BadRows(**fields_of(BadRows, record.get("bad_rows", {}))),
            checks=list(record.get("checks", [])),
            base=None if base is None else Base(**fields_of(Base, base)),
            # An import that was requested before this option existed keeps its behavior.
            partitioning=record.get("partitioning", "none"),
            nan_as_null=record.get("nan_as_null", False),
        )


def check(spec: ImportSpec, roots: Sequence[PurePosixPath], *, s3: bool) -> None:
    """Raise `InvalidArgument` naming every invalid field.

    `roots` are the folders allowed for files, `s3` says whether the server can read s3://.
    """
    problems = [
        *_source_problems(spec, roots, s3),
        *_hold_out_problems(spec),
        *_column_type_problems(spec.column_types),
        *bad_rows_problems(spec.bad_rows),
        *_base_problems(spec.base),
        *_partitioning_problems(spec.partitioning),
    ]
    if problems:
        raise invalid_fields(problems)


def _source_problems(spec: ImportSpec, roots: Sequence[PurePosixPath], s3: bool) -> Iterator[Problem]:
    if not 1 <= len(spec.sources) <= MAX_SOURCES:
        yield "sources", len(spec.sources), f"name 1 to {MAX_SOURCES} sources"
        return
    for index, source in enumerate(spec.sources):
        path = f"sources[{index}]"
        if not SPLIT.fullmatch(source.split):
            yield f"{path}.split", source.split, SPLIT_REMEDY
        if source.format not in FORMATS:
            yield path, source.format, f"set one of {', '.join(FORMATS)}"
        for name, uri in source.uris.items():
            try:
                found = parse_uri(uri)
                check_allowed(found, roots, s3=s3)
            except UriRefused as refused:
                yield f"{path}.{name}", uri, str(refused)
                continue
            if name in SINGLE_FILES and not found.single:
                yield f"{path}.{name}", uri, "name one file, not a folder or a pattern"
            if source.format == "image_folder" and not found.folder:
                yield f"{path}.{name}", uri, "name a folder: end it in '/', and use no pattern"
        if source.csv is not None:
            yield from _csv_problems(f"{path}.csv", source.csv)


def _csv_problems(path: str, options: CsvOptions) -> Iterator[Problem]:
    delimiter, names = options.delimiter, options.column_names
    if delimiter and (len(delimiter) != 1 or not delimiter.isascii() or delimiter in '"\r\n\0'):
        yield f"{path}.delimiter", delimiter, "use one ASCII character that is neither a quote nor a line's end"
    yield from _name_problems(f"{path}.column_names", names)
    if len(options.null_values) > MAX_NULL_VALUES:
        yield f"{path}.null_values", len(options.null_values), f"name at most {MAX_NULL_VALUES}"
    if options.encoding and options.encoding not in ENCODINGS:
        yield f"{path}.encoding", options.encoding, f"use one of {', '.join(ENCODINGS)}"


def _name_problems(path: str, names: Sequence[str]) -> Iterator[Problem]:
    if len(names) > MAX_COLUMNS:
        yield path, len(names), f"name at most {MAX_COLUMNS}"
        return
    again = set(repeated(names))
    for index, name in enumerate(names):
        if not name or index in again:
            yield f"{path}[{index}]", name, "give each column a name of its own"
        elif problem := name_problem(name):
            yield f"{path}[{index}]", name, problem


def _hold_out_problems(spec: ImportSpec) -> Iterator[Problem]:
    if len(spec.hold_outs) > MAX_HOLD_OUTS:
        yield "hold_outs", len(spec.hold_outs), f"name at most {MAX_HOLD_OUTS}"
        return
    taken = set(spec.imported_splits)
    for index, hold_out in enumerate(spec.hold_outs):
        path = f"hold_outs[{index}]"
        if hold_out.from_split not in spec.imported_splits:
            yield f"{path}.from_split", hold_out.from_split, "name the split of a source"
        if not SPLIT.fullmatch(hold_out.to_split):
            yield f"{path}.to_split", hold_out.to_split, SPLIT_REMEDY
        elif hold_out.to_split in taken:
            yield f"{path}.to_split", hold_out.to_split, "name a split that no source and no other hold-out makes"
        taken.add(hold_out.to_split)
        if not (math.isfinite(hold_out.fraction) and 0 < hold_out.fraction < 1):
            yield f"{path}.fraction", hold_out.fraction, "use a number above 0 and below 1"


def _column_type_problems(column_types: Sequence[ColumnType]) -> Iterator[Problem]:
    if len(column_types) > MAX_COLUMNS:
        yield "column_types", len(column_types), f"name at most {MAX_COLUMNS}"
        return
    seen: set[str] = set()
    for index, column_type in enumerate(column_types):
        path = f"column_types[{index}]"
        if not column_type.column:
            yield f"{path}.column", column_type.column, "name a column"
        elif column_type.column in seen:
            yield f"{path}.column", column_type.column, "name each column once"
        seen.add(column_type.column)
        try:
            parse_type(column_type.arrow_type)
        except TypeRefused as refused:
            yield f"{path}.arrow_type", column_type.arrow_type, str(refused)


def bad_rows_problems(bad_rows: BadRows) -> Iterator[Problem]:
    if bad_rows.action not in ("fail", "quarantine"):
        yield "bad_rows.action", bad_rows.action, "use ACTION_FAIL or ACTION_QUARANTINE"
    if bad_rows.max_rows < 0:
        yield "bad_rows.max_rows", bad_rows.max_rows, "use 0 for no limit, or a number of rows"


def _base_problems(base: Base | None) -> Iterator[Problem]:
    if base is None:
        return
    parts = base.version.split("/")
    if parts[::2] != ["datasets", "versions"] or len(parts) != 4 or not all(map(ID.fullmatch, parts[1::2])):
        yield "base.version", base.version, "use a name of the form datasets/{d}/versions/{v}"
    if base.mode not in ("append", "replace"):
        yield "base.mode", base.mode, "use MODE_APPEND or MODE_REPLACE"


def _partitioning_problems(partitioning: str) -> Iterator[Problem]:
    if partitioning not in PARTITIONINGS:
        yield "partitioning", partitioning, "use PARTITIONING_HIVE or PARTITIONING_NONE"
