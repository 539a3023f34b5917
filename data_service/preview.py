"""Previews the first rows of a committed version: as values, and its images as one sheet."""

from __future__ import annotations

import io
import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.types as kinds
from PIL import Image, ImageDraw, ImageOps

from shared.dataset_version import VersionReader
from shared.errors import invalid_field
from shared.transforms.steps.images import FORMATS
from shared.value_texts import value_shown

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
READ_BYTES = 32 * 1024 * 1024


@dataclass(frozen=True)
class Preview:
    """A preview.

    `arrow_ipc` has an extra first column `split`; `contact_sheet_png` is empty if no column is an image. They have at
    most `ARROW_BYTES` and `SHEET_BYTES`. If the schema alone is larger, only the first columns are included.
    """

    arrow_ipc: bytes
    contact_sheet_png: bytes


def preview(reader: VersionReader, rows_per_split: int) -> Preview:
    """Returns the first rows of each split, fewer if they do not fit one message.

    There are none if the first row does not fit. The contact sheet also shows images of rows that do not fit
    `arrow_ipc`. Rows are never truncated. About `READ_BYTES` of rows are in memory at once, plus one row group of each
    split.
    """
    if not 0 <= rows_per_split <= MAX_PREVIEW_ROWS:
        raise invalid_field(
            "rows_per_split", rows_per_split, f"use 0 (for {DEFAULT_PREVIEW_ROWS}) to {MAX_PREVIEW_ROWS}"
        )
    splits = [split.name for split in reader.version.manifest.splits]
    tables = {
        split: _first_rows(reader, split, rows_per_split or DEFAULT_PREVIEW_ROWS, READ_BYTES // len(splits))
        for split in splits
    }
    names = {column.name: column.value_names for column in reader.version.columns}
    return Preview(_arrow_ipc(tables), _sheet(tables, names))


def _first_rows(reader: VersionReader, split: str, rows: int, max_bytes: int) -> pa.Table:
    """Returns the first rows in one chunk; at least one if the split has one."""
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
    """Returns the first rows that fit `max_bytes`."""
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
    """Returns the schema of the first columns that fit.

    If not all fit, half of the space is kept for rows.
    """

    def size_bytes(columns: int) -> int:
        return int(pa.schema([schema.field(place) for place in range(columns)]).serialize().size)

    if size_bytes(len(schema)) <= ARROW_BYTES - END_BYTES:
        return schema
    fitting = bisect_right(range(1, len(schema) + 1), ARROW_BYTES // 2, key=size_bytes)
    return pa.schema([schema.field(place) for place in range(fitting)])


def _fitting_message(batch: pa.RecordBatch, max_bytes: int) -> pa.RecordBatch:
    """Returns the first rows whose message fits `max_bytes`, or none."""

    def size_bytes(rows: int) -> int:
        return int(pa.ipc.get_record_batch_size(batch.slice(0, rows)))

    return batch.slice(0, bisect_right(range(1, batch.num_rows + 1), max_bytes, key=size_bytes))


def _sheet(tables: Mapping[str, pa.Table], value_names: Mapping[str, Sequence[str]]) -> bytes:
    """Returns the contact sheet, with fewer rows if it would be too large."""
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
        """Opens an image up to its header.

        Returns None if it is no image, too large, or over the limit of headers.
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
    """Returns a PNG of the first image columns of these rows; empty without image columns.

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
    """Returns whether a tensor column with rows of this shape can be drawn."""
    if value_type == "uint8":
        return len(shape) == 2 or (len(shape) == 3 and shape[2] in (1, 3))
    is_float = value_type in ("halffloat", "float", "double")
    return is_float and len(shape) == 3 and (shape[0] in (1, 3) or shape[2] in (1, 3)) and min(shape[1:]) > 0


def draw(sections: Sequence[tuple[str, Sequence[Tile]]]) -> bytes:
    """Returns a PNG with one titled block for each (title, tiles)."""
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
    """Converts one image to bytes.

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
    """Scales an image to a cell.

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
    """Returns the text as one line."""
    return " ".join(text.split()) or " "
