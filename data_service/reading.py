"""Reads a committed version: its rows as Arrow IPC, every stored byte again to verify it, or a preview.

Rows are read a few row groups at a time. Verification reports all differences from the commit.

A preview has the first rows as values, and their images as one sheet.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import math
from bisect import bisect_right
from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from dataclasses import field as dataclass_field
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.types as kinds
from PIL import Image, ImageDraw, ImageOps

from shared.dataset_version import ROW_ID, DatasetVersion, RowGroup, VersionReader
from shared.dataset_version.manifest import ROW_ID_FIELD, DataFile, Split, sha256_hex
from shared.dataset_version.pages import FilePage, PageEntry, VersionFiles, open_files
from shared.dataset_version.parquet import GroupSizes, ReadBytes
from shared.dataset_version.version import MANIFEST, check_not_deleted
from shared.errors import DataLoss, invalid_field
from shared.storage import ObjectMissing, ObjectStore
from shared.streaming import framed
from shared.transforms.steps.images import FORMATS
from shared.value_texts import value_shown

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
    """Yield one Arrow IPC stream, in the order of row ids.

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
    """Yield the selected rows in chunks of about a message.

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
    """Return the row groups from row `offset` of these splits on, and the rows of the first group to skip."""
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
    """Return the chunk's rows as Arrow messages, split into response messages."""
    table = reader.read_many(chunk.groups, schema.names).slice(chunk.skip, chunk.row_count)
    return [
        framed(ARROW_IPC, parts) for batch in _batches(table) for parts in _cut(_arrow_message(batch), MESSAGE_BYTES)
    ]


def _arrow_message(batch: pa.RecordBatch) -> list[memoryview]:
    """Return the batch in Arrow's stream format, in parts that share the batch's memory."""
    sink = _Parts()
    with pa.ipc.new_stream(sink, batch.schema) as stream:
        stream.write_batch(batch)
        # The schema precedes the first batch of a stream, and was sent before.
        schema_bytes = batch.schema.serialize().size
        while schema_bytes > 0:
            schema_bytes -= len(sink.parts.pop(0))
        return list(sink.parts)


def _cut(parts: list[memoryview], max_bytes: int) -> Iterator[list[memoryview]]:
    """Yield the same bytes in lists of at most `max_bytes` each."""
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
        """Do nothing: no data is buffered."""

    def close(self) -> None:
        """Do nothing: the parts stay."""


def _batches(table: pa.Table) -> Iterator[pa.RecordBatch]:
    """Yield batches whose messages are smaller than `MESSAGE_BYTES`, unless a row is larger."""
    rows = max(1, table.num_rows * BATCH_BYTES // max(table.nbytes, 1))
    for batch in table.to_batches(max_chunksize=rows):
        yield from _halved(batch)


def _halved(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Halve the batch until each part fits, because row sizes differ."""
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
    """Check each file's size and SHA-256, each page's checksum, and the rows and row ids of each group.

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
    """Check the manifest, which may have been read long ago."""
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
    """Check a page of the manifest, and everything that it names unless it is damaged."""
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
    """Return the problem if the file's columns are not those of the manifest; else empty."""
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
    """Return the reason; Arrow reports a wrong checksum only by its text."""
    cause = error.__cause__
    if isinstance(cause, (pa.ArrowException, OSError)) and "CRC" in str(cause):
        return "a page's checksum is wrong"
    return error.message if cause is None else "it cannot be decoded"


# --- Preview ---
# The first rows of a committed version, for people to look at.

DEFAULT_PREVIEW_ROWS, MAX_PREVIEW_ROWS = 10, 100
# A preview is one message, and most clients accept at most 4 MiB: rows, sheet and report share it.
ARROW_BYTES = 1024 * 1024 + 256 * 1024
SHEET_BYTES = 1024 * 1024
# Arrow's end-of-stream marker.
END_BYTES = 8
# The limit of the rows that are read, even if they are not returned as rows: the sheet shows images that are too large
# for that.
PREVIEW_BYTES = 32 * 1024 * 1024


@dataclass(frozen=True)
class Preview:
    """A preview.

    `arrow_ipc` has an extra first column `split`; `contact_sheet_png` is empty if no column is an image. They have at
    most `ARROW_BYTES` and `SHEET_BYTES`. If the schema alone is larger, only the first columns are included.
    """

    arrow_ipc: bytes
    contact_sheet_png: bytes


def preview(reader: VersionReader, rows_per_split: int) -> Preview:
    """Return the first rows of each split, fewer if they do not fit one message.

    There are none if the first row does not fit. The contact sheet also shows images of rows that do not fit
    `arrow_ipc`. Rows are never truncated. About `PREVIEW_BYTES` of rows are in memory at once, plus one row group of
    each split.
    """
    if not 0 <= rows_per_split <= MAX_PREVIEW_ROWS:
        raise invalid_field(
            "rows_per_split", rows_per_split, f"use 0 (for {DEFAULT_PREVIEW_ROWS}) to {MAX_PREVIEW_ROWS}"
        )
    splits = [split.name for split in reader.version.manifest.splits]
    tables = {
        split: _first_rows(reader, split, rows_per_split or DEFAULT_PREVIEW_ROWS, PREVIEW_BYTES // len(splits))
        for split in splits
    }
    names = {column.name: column.value_names for column in reader.version.columns}
    return Preview(_arrow_ipc(tables), _sheet(tables, names))


def _first_rows(reader: VersionReader, split: str, rows: int, max_bytes: int) -> pa.Table:
    """Return the first rows in one chunk; at least one if the split has one."""
    pieces: list[pa.Table] = []
    missing, left_bytes = rows, max_bytes
    for group in reader.row_groups_from(split, 0):
        wanted = reader.read(group).slice(0, missing)
        piece = _fitting(wanted, left_bytes, at_least=0 if pieces else 1)
        if piece.num_rows:
            # A copy, which frees the rest of its group.
            pieces.append(piece.take(pa.array(range(piece.num_rows))))
        missing -= piece.num_rows
        left_bytes -= piece.nbytes
        if not missing or piece.num_rows < wanted.num_rows:
            break
    return pa.concat_tables(pieces).combine_chunks() if pieces else reader.select(None).empty_table()


def _fitting(table: pa.Table, max_bytes: int, *, at_least: int) -> pa.Table:
    """Return the first rows that fit `max_bytes`."""
    fitting = bisect_right(range(1, table.num_rows + 1), max_bytes, key=lambda rows: table.slice(0, rows).nbytes)
    return table.slice(0, max(fitting, min(at_least, table.num_rows)))


def _arrow_ipc(tables: Mapping[str, pa.Table]) -> bytes:
    labelled = [
        table.add_column(0, "split", pa.array([split] * table.num_rows, pa.string())) for split, table in tables.items()
    ]
    schema = _fitting_schema(labelled[0].schema)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema) as stream:
        capacity = (ARROW_BYTES - END_BYTES - schema.serialize().size) // len(labelled)
        for table in labelled:
            for batch in table.select(range(len(schema))).to_batches():
                fitting = _fitting_message(batch, capacity)
                # A batch without rows would still take bytes for each column.
                if fitting.num_rows:
                    stream.write_batch(fitting)
    return bytes(sink.getvalue().to_pybytes())


def _fitting_schema(schema: pa.Schema) -> pa.Schema:
    """Return the schema of the first columns that fit.

    If not all fit, half of the space is kept for rows.
    """

    def size_bytes(columns: int) -> int:
        return int(pa.schema([schema.field(place) for place in range(columns)]).serialize().size)

    if size_bytes(len(schema)) <= ARROW_BYTES - END_BYTES:
        return schema
    fitting = bisect_right(range(1, len(schema) + 1), ARROW_BYTES // 2, key=size_bytes)
    return pa.schema([schema.field(place) for place in range(fitting)])


def _fitting_message(batch: pa.RecordBatch, max_bytes: int) -> pa.RecordBatch:
    """Return the first rows whose message fits `max_bytes`, or none."""

    def size_bytes(rows: int) -> int:
        return int(pa.ipc.get_record_batch_size(batch.slice(0, rows)))

    return batch.slice(0, bisect_right(range(1, batch.num_rows + 1), max_bytes, key=size_bytes))


def _sheet(tables: Mapping[str, pa.Table], value_names: Mapping[str, Sequence[str]]) -> bytes:
    """Return the contact sheet, with fewer rows if it would be too large."""
    while len(png := contact_sheet(tables, value_names)) > SHEET_BYTES:
        most = max(table.num_rows for table in tables.values())
        if most <= 1:
            return b""
        # Scales by the sheet's size minus a tenth, since image sizes differ.
        keep = max(1, min(most - 1, most * SHEET_BYTES * 9 // (10 * len(png))))
        tables = {split: table.slice(0, keep) for split, table in tables.items()}
    return png


# --- Contact sheet ---
# The contact sheet: the images of some rows in a grid, each with its label, as one PNG.
#
# Images are uint8 tensors of shape (H, W) or (H, W, C), float tensors of shape (C, H, W) or (H, W, C), or the bytes of
# encoded images, of the formats that an import accepts. C is 1 or 3.

LABEL = "label"
COLUMNS = 10
MAX_IMAGE_COLUMNS = 8
# The longer side of an image on the sheet, in pixels.
CELL_PX = 84
CAPTION_PX = 14
GAP_PX = 6
MAX_CAPTION = 14
# A file may declare a size beyond memory: images with more pixels are not decoded.
MAX_DECODED_PX = 50_000_000
# The limits of one sheet, so that it takes seconds whatever the rows contain: values whose headers are read, and pixels
# that are decoded. A JPEG counts for 1 / JPEG_SHARE of its pixels, because it is shrunk while it is decoded.
MAX_HEADERS = 20_000
MAX_SHEET_PX = 200_000_000
JPEG_SHARE = 8
_BACKGROUND, _NO_IMAGE, _INK = "white", (225, 225, 225), "black"

Pixels = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Tile:
    """One image on the sheet.

    `image` is a tensor that `is_drawable`; None if the row has none.
    """

    image: npt.NDArray[Any] | None
    caption: str


class _Work:
    """The remaining work limit of one sheet."""

    def __init__(self) -> None:
        self._headers = MAX_HEADERS
        self._pixels = MAX_SHEET_PX

    def opened(self, data: bytes) -> Image.Image | None:
        """Open an image up to its header.

        Return None if it is no image, too large, or over the limit of headers.
        """
        if not self._headers:
            return None
        self._headers -= 1
        try:
            image = Image.open(io.BytesIO(data), formats=FORMATS)
        except Exception:
            return None
        return image if image.width * image.height <= MAX_DECODED_PX else None

    def decoded(self, data: bytes | None) -> Pixels | None:
        image = None if data is None else self.opened(data)
        if image is None:
            return None
        cost = image.width * image.height // (JPEG_SHARE if image.format == "JPEG" else 1)
        if cost > self._pixels:
            return None
        self._pixels -= cost
        try:
            image.draft("RGB", (2 * CELL_PX, 2 * CELL_PX))  # JPEG then decodes at a fraction of its size
            image.thumbnail((CELL_PX, CELL_PX))
            return np.asarray(ImageOps.exif_transpose(image).convert("RGB"))
        except Exception:  # truncated or damaged after the header, for which decoders raise nearly any exception
            return None


def contact_sheet(tables: Mapping[str, pa.Table], value_names: Mapping[str, Sequence[str]] | None = None) -> bytes:
    """Return a PNG of the first image columns of these rows; empty without image columns.

    It has a block for each column and split. Captions are the values of the column `label`, by their `value_names` if
    it has some. The result depends on the rows alone: the first images are drawn, and those beyond the work limit are
    not.
    """
    work = _Work()
    names = next(iter(tables.values())).schema.names
    images = (name for name in names if _is_image([table.column(name) for table in tables.values()], work))
    drawn = list(islice(images, MAX_IMAGE_COLUMNS))
    sections = [
        (split if len(drawn) == 1 else f"{split}, {name}", _tiles(table, name, value_names or {}, work))
        for name in drawn
        for split, table in tables.items()
    ]
    return draw(sections) if sections else b""


def is_drawable(value_type: str, shape: Sequence[int]) -> bool:
    """Return whether a tensor column with rows of this shape can be drawn."""
    if value_type == "uint8":
        return len(shape) == 2 or (len(shape) == 3 and shape[2] in (1, 3))
    is_float = value_type in ("halffloat", "float", "double")
    return is_float and len(shape) == 3 and (shape[0] in (1, 3) or shape[2] in (1, 3)) and min(shape[1:]) > 0


def draw(sections: Sequence[tuple[str, Sequence[Tile]]]) -> bytes:
    """Return a PNG with one titled block for each (title, tiles)."""
    width = GAP_PX + COLUMNS * (CELL_PX + GAP_PX)
    row_px = CELL_PX + CAPTION_PX + GAP_PX
    height = GAP_PX + sum(CAPTION_PX + GAP_PX + math.ceil(len(tiles) / COLUMNS) * row_px for _, tiles in sections)
    sheet = Image.new("RGB", (width, height), _BACKGROUND)
    pen = ImageDraw.Draw(sheet)
    top = GAP_PX
    for title, tiles in sections:
        pen.text((GAP_PX, top), _drawable_text(title), fill=_INK)
        top += CAPTION_PX + GAP_PX
        for index, tile in enumerate(tiles):
            left = GAP_PX + index % COLUMNS * (CELL_PX + GAP_PX)
            upper = top + index // COLUMNS * row_px
            if tile.image is None:
                pen.rectangle((left, upper, left + CELL_PX - 1, upper + CELL_PX - 1), fill=_NO_IMAGE)
                pen.text((left + 4, upper + CELL_PX // 2 - 6), "no image", fill=_INK)
            else:
                image = _fit(_pixels(tile.image))
                sheet.paste(image, (left + (CELL_PX - image.width) // 2, upper + (CELL_PX - image.height) // 2))
            pen.text((left, upper + CELL_PX + 1), _drawable_text(tile.caption[:MAX_CAPTION]), fill=_INK)
        top += math.ceil(len(tiles) / COLUMNS) * row_px
    buffer = io.BytesIO()
    sheet.save(buffer, "PNG")
    return buffer.getvalue()


def _is_image(columns: Sequence[pa.ChunkedArray], work: _Work) -> bool:
    arrow_type = columns[0].type
    if isinstance(arrow_type, pa.FixedShapeTensorType):
        return is_drawable(str(arrow_type.value_type), arrow_type.shape)
    if not (kinds.is_binary(arrow_type) or kinds.is_large_binary(arrow_type)):
        return False
    return any(work.opened(value.as_py()) is not None for column in columns for value in column if value.is_valid)


def _tiles(table: pa.Table, column: str, value_names: Mapping[str, Sequence[str]], work: _Work) -> list[Tile]:
    values = table.column(column)
    if isinstance(values.type, pa.FixedShapeTensorType):
        images: list[npt.NDArray[Any] | None] = [value.to_numpy() for value in values]
    else:
        images = [work.decoded(value.as_py()) for value in values]
    captions = [""] * table.num_rows
    if LABEL in table.schema.names:
        captions = [_caption(value, value_names.get(LABEL, ())) for value in table.column(LABEL)]
    return [Tile(image, caption) for image, caption in zip(images, captions, strict=True)]


def _caption(value: pa.Scalar, names: Sequence[str]) -> str:
    if kinds.is_integer(value.type) and value.is_valid and 0 <= value.as_py() < len(names):
        return str(names[value.as_py()])
    return value_shown(value) if kinds.is_temporal(value.type) else str(value.as_py())


def _pixels(tensor: npt.NDArray[Any]) -> Pixels:
    """Convert one image to bytes.

    Floats from 0 to 1 are used as they are; other ranges are scaled from minimum to maximum.
    """
    if tensor.dtype == np.uint8:
        return tensor.view(np.uint8)
    values = np.nan_to_num(tensor.astype(np.float64), nan=0.0, posinf=1.0, neginf=0.0)
    if values.shape[0] in (1, 3) and values.shape[2] not in (1, 3):
        values = values.transpose(1, 2, 0)
    least, most = float(values.min()), float(values.max())
    if least < 0 or most > 1:
        values = (values - least) / (most - least) if most > least else np.full_like(values, 0.5)
    pixels: Pixels = np.round(values * 255).astype(np.uint8)
    return pixels


def _fit(pixels: Pixels) -> Image.Image:
    """Scale an image to a cell.

    Small images are enlarged by whole multiples, so that each pixel stays a square; large ones are shrunk smoothly.
    """
    image = Image.fromarray(pixels[:, :, 0] if pixels.ndim == 3 and pixels.shape[2] == 1 else pixels)
    longer = max(image.size)
    if longer <= CELL_PX:
        factor = CELL_PX // longer
        return image.resize((image.width * factor, image.height * factor), Image.Resampling.NEAREST)
    image.thumbnail((CELL_PX, CELL_PX))
    return image


def _drawable_text(text: str) -> str:
    """Return the text as one line."""
    return " ".join(text.split()) or " "
