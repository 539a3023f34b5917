"""Reads a committed version: its rows as Arrow IPC, or every stored byte again to verify it.

Rows are read a few row groups at a time. Verification reports all differences from the commit.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from dataclasses import field as dataclass_field

import numpy as np
import pyarrow as pa

from shared.dataset_version import ROW_ID, DatasetVersion, RowGroup, VersionReader
from shared.dataset_version.manifest import ROW_ID_FIELD, DataFile, Split, sha256_hex
from shared.dataset_version.pages import FilePage, PageEntry, VersionFiles, open_files
from shared.dataset_version.parquet import GroupSizes, ReadBytes
from shared.dataset_version.version import MANIFEST, check_not_deleted
from shared.errors import DataLoss, invalid_field
from shared.storage import ObjectMissing, ObjectStore
from shared.streaming import framed

# --- Reading ---

# Below the 4 MiB limit of most clients.
MESSAGE_BYTES = 3 * 1024 * 1024 + 512 * 1024
BATCH_BYTES = MESSAGE_BYTES - 64 * 1024
# The number of the field `arrow_ipc` in a ReadVersionResponse.
ARROW_IPC = 1
# The bytes that are read and decoded at a time, in READ_AHEAD threads.
CHUNK_BYTES = 3 * 1024 * 1024
# The limit for several groups together, even if their dictionary encoding hides the most.
MAX_CHUNK_BYTES = 12 * 1024 * 1024
READ_AHEAD = 2
# Arrow's end of a stream: a continuation marker, and a message of length 0.
END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"


@dataclass(frozen=True, kw_only=True)
class Selection:
    """The selected rows and columns.

    An empty split means all splits, no columns all but `_row_id`, a limit of 0 no limit.
    """

    split: str
    columns: Sequence[str]
    offset: int
    limit: int


def read_stream(reader: VersionReader, selection: Selection) -> Generator[bytes, None, None]:
    """Yields one Arrow IPC stream, in the order of row ids.

    The pieces are serialized `ReadVersionResponse`s of about `MESSAGE_BYTES`. A piece has whole Arrow messages, so that
    a reader need not concatenate them, unless a row is larger. While a piece is sent, up to `READ_AHEAD` chunks are
    read. Raises `InvalidArgument` for an unknown split or column or a negative range, and `DataLoss`.
    """
    for field, value in (("offset", selection.offset), ("limit", selection.limit)):
        if value < 0:
            raise invalid_field(field, value, "use 0 or more")
    schema = reader.select(selection.columns or None)
    chunks = _chunks(reader, selection, schema.names)
    yield framed(ARROW_IPC, [schema.serialize().to_pybytes()])
    with ThreadPoolExecutor(READ_AHEAD, thread_name_prefix="read-ahead") as pool:
        ahead: deque[Future[list[bytes]]] = deque()
        try:
            for chunk in chunks:
                ahead.append(pool.submit(_encoded, reader, chunk, schema))
                if len(ahead) > READ_AHEAD:
                    yield from ahead.popleft().result()
            while ahead:
                yield from ahead.popleft().result()
        finally:
            for pending in ahead:
                pending.cancel()
    yield framed(ARROW_IPC, [END_OF_STREAM])


@dataclass(frozen=True)
class _Chunk:
    """Row groups that are read together, and the selected rows in them."""

    groups: list[RowGroup]
    skip: int
    row_count: int


def _chunks(reader: VersionReader, selection: Selection, columns: Sequence[str]) -> Iterator[_Chunk]:
    """Yields the selected rows in chunks of about a message.

    Groups before the offset or after the limit are not read.
    """
    manifest = reader.version.manifest
    splits = [reader.version.split(selection.split)] if selection.split else manifest.splits
    left = selection.limit or sum(split.row_count for split in splits)
    groups, skip = _groups_of(reader, splits, selection.offset)
    sizes = GroupSizes(reader, columns)
    chunk: list[RowGroup] = []
    size, rows, first_skip = ReadBytes(), 0, 0
    for group in groups:
        if left <= 0:
            break
        with_group = size + sizes.bytes_of(group)
        if chunk and (with_group.expected > CHUNK_BYTES or with_group.most > MAX_CHUNK_BYTES):
            yield _Chunk(chunk, first_skip, rows)
            chunk, rows, with_group = [], 0, sizes.bytes_of(group)
        if not chunk:
            first_skip = skip
        chunk.append(group)
        taken = min(group.row_count - skip, left)
        skip = 0
        left -= taken
        rows += taken
        size = with_group
    if chunk:
        yield _Chunk(chunk, first_skip, rows)


def _groups_of(reader: VersionReader, splits: Sequence[Split], offset: int) -> tuple[Iterator[RowGroup], int]:
    """Returns the row groups from row `offset` of these splits on, and the rows of the first group to skip."""
    left = list(splits)
    while left and offset >= left[0].row_count:
        offset -= left.pop(0).row_count
    if not left:
        return iter(()), 0
    first_row_id = left[0].first_row_id + offset
    groups = itertools.chain(
        reader.row_groups_from(left[0].name, offset), *(reader.row_groups_from(split.name, 0) for split in left[1:])
    )
    first = next(groups, None)
    return (itertools.chain([first], groups), first_row_id - first.first_row_id) if first else (iter(()), 0)


def _encoded(reader: VersionReader, chunk: _Chunk, schema: pa.Schema) -> list[bytes]:
    """Returns the chunk's rows as Arrow messages, split into response messages."""
    table = reader.read_many(chunk.groups, schema.names).slice(chunk.skip, chunk.row_count)
    return [
        framed(ARROW_IPC, parts) for batch in _batches(table) for parts in _cut(_arrow_message(batch), MESSAGE_BYTES)
    ]


def _arrow_message(batch: pa.RecordBatch) -> list[memoryview]:
    """Returns the batch in Arrow's stream format, in parts that share the batch's memory."""
    sink = _Parts()
    with pa.ipc.new_stream(sink, batch.schema) as stream:
        stream.write_batch(batch)
        # The schema precedes the first batch of a stream, and was sent before.
        schema_bytes = batch.schema.serialize().size
        while schema_bytes > 0:
            schema_bytes -= len(sink.parts.pop(0))
        return list(sink.parts)


def _cut(parts: list[memoryview], max_bytes: int) -> Iterator[list[memoryview]]:
    """Yields the same bytes in lists of at most `max_bytes` each."""
    taken: list[memoryview] = []
    capacity = max_bytes
    for part in parts:
        left = part
        while len(left) > capacity:
            yield [*taken, left[:capacity]]
            taken, left, capacity = [], left[capacity:], max_bytes
        taken.append(left)
        capacity -= len(left)
    yield taken


class _Parts:
    """A sink for Arrow that keeps the written parts without copying them."""

    closed = False

    def __init__(self) -> None:
        self.parts: list[memoryview] = []

    def write(self, data: bytes | pa.Buffer) -> int:
        self.parts.append(memoryview(data))
        return len(data)

    def flush(self) -> None:
        """Does nothing: no data is buffered."""

    def close(self) -> None:
        """Does nothing: the parts stay."""


def _batches(table: pa.Table) -> Iterator[pa.RecordBatch]:
    """Yields batches whose messages are smaller than `MESSAGE_BYTES`, unless a row is larger."""
    rows = max(1, table.num_rows * BATCH_BYTES // max(table.nbytes, 1))
    for batch in table.to_batches(max_chunksize=rows):
        yield from _halved(batch)


def _halved(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Halves the batch until each part fits, because row sizes differ."""
    if batch.nbytes <= BATCH_BYTES or batch.num_rows == 1:
        yield batch
        return
    middle = batch.num_rows // 2
    yield from _halved(batch.slice(0, middle))
    yield from _halved(batch.slice(middle))


# --- Verification ---

# The bytes in memory at a time, besides one decoded row group.
READ_BYTES = 4 * 1024 * 1024
# A message is sent at least after this many bytes.
REPORT_EVERY_BYTES = 16 * 1024 * 1024


@dataclass(frozen=True)
class Damage:
    """A damaged file; `path` is relative to the version's folder."""

    path: str
    description: str


@dataclass(frozen=True, kw_only=True)
class Verified:
    """The progress; `damages` are those found since the previous message."""

    files_checked: int = 0
    files_total: int = 0
    bytes_checked: int = 0
    rows_checked: int = 0
    damages: list[Damage] = dataclass_field(default_factory=list)


@dataclass(frozen=True)
class _Step:
    bytes_checked: int = 0
    rows_checked: int = 0
    damage: Damage | None = None


def verify(store: ObjectStore, version: DatasetVersion) -> Generator[Verified, None, None]:
    """Checks each file's size and SHA-256, each page's checksum, and the rows and row ids of each group.

    The manifest is one of the files. Damage is reported, never raised. Raises `Unavailable`, and `NotFound` if the
    version is deleted meanwhile: missing files are then no damage.
    """
    manifest = version.manifest
    page_count = manifest.pages.page_count if manifest.pages else 0
    state = Verified(files_total=1 + page_count + manifest.file_count + len(manifest.attachments))
    yield state
    reported_bytes = 0
    for steps in _files(store, version):
        for step in steps:
            if step.damage:
                check_not_deleted(store, version)
            state = replace(
                state,
                bytes_checked=state.bytes_checked + step.bytes_checked,
                rows_checked=state.rows_checked + step.rows_checked,
                damages=[step.damage] if step.damage else [],
            )
            if step.damage or state.bytes_checked - reported_bytes >= REPORT_EVERY_BYTES:
                yield state
                reported_bytes = state.bytes_checked
        state = replace(state, files_checked=state.files_checked + 1, damages=[])
        yield state


def _files(store: ObjectStore, version: DatasetVersion) -> Iterator[Iterator[_Step]]:
    yield _manifest(store, version)
    files = open_files(store, version)
    if version.manifest.pages is None:
        for file in files:
            yield _data_file(store, version, file)
    for entry in files.entries():
        yield from _page(store, version, files, entry)
    for attachment in version.manifest.attachments:
        yield _bytes_of(store, version, attachment.path, attachment.size_bytes, attachment.sha256)


def _manifest(store: ObjectStore, version: DatasetVersion) -> Iterator[_Step]:
    """Checks the manifest, which may have been read long ago."""
    try:
        data = store.get(f"{version.folder}/{MANIFEST}")
    except ObjectMissing:
        yield _Step(damage=Damage(MANIFEST, "is gone"))
        return
    if sha256_hex(data) != version.manifest_sha256:
        yield _Step(damage=Damage(MANIFEST, f"its SHA-256 is {sha256_hex(data)}, not {version.manifest_sha256}"))
    yield _Step(bytes_checked=len(data))


def _page(
    store: ObjectStore, version: DatasetVersion, files: VersionFiles, entry: PageEntry
) -> Iterator[Iterator[_Step]]:
    """Checks a page of the manifest, and everything that it names unless it is damaged."""
    yield _bytes_of(store, version, entry.path, entry.size_bytes, entry.sha256)
    try:
        named = files.entries(entry) if entry.level else files.page(entry)
    except DataLoss:
        yield iter([_Step(damage=Damage(entry.path, "names files that cannot be checked"))])
        return
    if isinstance(named, FilePage):
        for place in range(len(named)):
            yield _data_file(store, version, named.file(place))
    else:
        for child in named:
            yield from _page(store, version, files, child)


def _data_file(store: ObjectStore, version: DatasetVersion, file: DataFile) -> Iterator[_Step]:
    yield from _bytes_of(store, version, file.path, file.size_bytes, file.sha256)
    if store.size(f"{version.folder}/{file.path}") is None:
        check_not_deleted(store, version)
        return  # reported already; each of its groups would report it again
    # A reader of this file alone, so that another file's damage does not count here, and no cached footer is used.
    reader = VersionReader(store, replace(version, manifest=replace(version.manifest, files=[file], pages=None)))
    try:
        schema = reader.schema
    except DataLoss as error:
        yield _Step(damage=Damage(file.path, error.message))
        return
    if columns := _other_columns(version, schema):
        yield _Step(damage=Damage(file.path, columns))
    first = file.first_row_id
    for group_index, rows in enumerate(file.row_groups):
        yield _row_group(reader, file.path, RowGroup(0, group_index, first, rows))
        first += rows


def _other_columns(version: DatasetVersion, schema: pa.Schema) -> str:
    """Returns the problem if the file's columns are not those of the manifest; else empty."""
    found = [(one.name, str(one.type)) for one in schema]
    wanted = [*((column.name, column.arrow_type) for column in version.columns), (ROW_ID, str(ROW_ID_FIELD.type))]
    if found == wanted:
        return ""
    return f"has the columns {found}, not {wanted}"


def _bytes_of(store: ObjectStore, version: DatasetVersion, path: str, size_bytes: int, sha256: str) -> Iterator[_Step]:
    key = f"{version.folder}/{path}"
    found = store.size(key)
    if found is None:
        yield _Step(damage=Damage(path, "is gone"))
        return
    if found != size_bytes:
        yield _Step(damage=Damage(path, f"has {found:,} bytes, not {size_bytes:,}"))
    digest = hashlib.sha256()
    for start in range(0, found, READ_BYTES):
        try:
            data = store.get_range(key, start, min(READ_BYTES, found - start))
        except (ObjectMissing, DataLoss):
            yield _Step(damage=Damage(path, "changed while it was read"))
            return
        digest.update(data)
        yield _Step(bytes_checked=len(data))
    if found == size_bytes and digest.hexdigest() != sha256:
        yield _Step(damage=Damage(path, f"its SHA-256 is {digest.hexdigest()}, not {sha256}"))


def _row_group(reader: VersionReader, path: str, group: RowGroup) -> _Step:
    place = f"row group {group.group_index}"
    try:
        table = reader.read(group, reader.schema.names)
    except DataLoss as error:
        return _Step(damage=Damage(path, f"{place}: {_why(error)}"))
    ids = table.column(ROW_ID).to_numpy()
    wanted = np.arange(group.first_row_id, group.first_row_id + group.row_count)
    wrong = np.flatnonzero(ids != wanted)
    if wrong.size:
        at = int(wrong[0])
        return _Step(
            rows_checked=table.num_rows,
            damage=Damage(path, f"{place}: row {at} has the id {int(ids[at])}, not {int(wanted[at])}"),
        )
    return _Step(rows_checked=table.num_rows)


def _why(error: DataLoss) -> str:
    """Returns the reason; Arrow reports a wrong checksum only by its text."""
    cause = error.__cause__
    if isinstance(cause, (pa.ArrowException, OSError)) and "CRC" in str(cause):
        return "a page's checksum is wrong"
    return error.message if cause is None else "it cannot be decoded"
