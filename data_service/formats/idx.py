"""A pair of IDX files, the format of MNIST."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from copy import copy
from typing import Any

import numpy as np
import pyarrow as pa

from data_service.domain.idx import IdxHeader, read_header, read_rows, rows_per_chunk
from data_service.formats import interface
from data_service.formats.interface import BadRowSink, RowSource, blaming, content, is_compressed
from data_service.storage.source_files import SourceFile
from shared.dataset_version.manifest import tensor_array, tensor_field


class IdxPair:
    """Images (N, …) of uint8 and labels (N) of any integer, as the columns `image` and `label`.

    No single row is bad: an error fails the whole pair.
    """

    class_names: list[str] | None = None

    def __init__(self, images: SourceFile, labels: SourceFile) -> None:
        self._images, self._labels = images, labels
        self._rows: range | None = None
        self._header, self._label_header = self._checked_headers()
        self.row_count: int | None = self._header.row_count
        self.size_bytes = (images.size_bytes or 0) + (labels.size_bytes or 0)
        self.schema = pa.schema(
            [
                tensor_field("image", pa.uint8(), self._header.row_shape),
                pa.field("label", pa.int64(), nullable=False),
            ]
        )

    def parts(self) -> Sequence[RowSource]:
        """Divides the pair into ranges of images, unless one of the files is compressed.

        Uploads are verified first, as a whole. A header that claims other rows than its file has is never divided:
        reading the whole finds the error.
        """
        per_part = max(interface.PART_BYTES // self._header.row_bytes, 1)
        whole = range(self._header.row_count)
        if not self._can_be_divided or self._rows is not None or len(whole) <= per_part:
            return [self]
        if not (_fits(self._images, self._header) and _fits(self._labels, self._label_header)):
            return [self]
        return [self._only(whole[begin : begin + per_part]) for begin in range(0, len(whole), per_part)]

    def _only(self, rows: range) -> IdxPair:
        part = copy(self)
        part._rows, part.row_count = rows, len(rows)
        part.size_bytes = len(rows) * (self._header.row_bytes + self._label_header.row_bytes)
        return part

    def tables(self, bad: BadRowSink) -> Iterator[pa.Table]:  # noqa: ARG002 - the interface's
        for images, labels in self._chunks():
            columns = [tensor_array(images), pa.array(labels.astype(np.int64))]
            yield pa.Table.from_arrays(columns, schema=self.schema)

    def _checked_headers(self) -> tuple[IdxHeader, IdxHeader]:
        with blaming(self._images, "IDX"), content(self._images) as stream:
            images = read_header(stream)
            self._can_be_divided = not is_compressed(stream)
        with blaming(self._labels, "IDX"), content(self._labels) as stream:
            labels = read_header(stream)
            self._can_be_divided &= not is_compressed(stream)
        if images.value_type != np.uint8 or len(images.row_shape) < 2:
            raise self._images.corrupt(
                f"it holds {images.value_type} of shape {[images.row_count, *images.row_shape]}; images are uint8 of "
                "shape [rows, height, width] or [rows, height, width, channels]"
            )
        if labels.row_shape or labels.value_type.kind not in "iu":
            raise self._labels.corrupt(
                f"it holds {labels.value_type} of shape {[labels.row_count, *labels.row_shape]}; labels are integers "
                "of shape [rows]"
            )
        if images.row_count != labels.row_count:
            raise self._labels.corrupt(f"it has {labels.row_count} labels for {images.row_count} images")
        return images, labels

    def _chunks(self) -> Iterator[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]:
        rows = rows_per_chunk(self._header, interface.CHUNK_BYTES)
        images = _read(self._images, self._header, rows, self._rows)
        labels = _read(self._labels, self._label_header, rows, self._rows)
        with closing(images), closing(labels):
            # Both are read to their ends, where bytes after the last row are detected.
            yield from zip(images, labels, strict=True)


def _fits(file: SourceFile, header: IdxHeader) -> bool:
    """Returns whether the file, once it is whole, has the size that its header claims."""
    file.wait_until_whole()
    with closing(file.open()) as opened, blaming(file, "IDX"):
        opened.seek(0, 2)
        return opened.tell() == header.size_bytes


def _read(
    file: SourceFile, header: IdxHeader, rows_at_once: int, rows: range | None
) -> Generator[np.ndarray[Any, Any], None, None]:
    """Yields all rows, or `rows`, after a header that must still be the checked one."""
    with blaming(file, "IDX"), content(file) as stream:
        if read_header(stream) != header:
            raise file.corrupt("it changed while it was read")
        if rows is None:
            yield from read_rows(stream, header, rows_at_once)
    if rows is not None:
        with blaming(file, "IDX"), content(file, begin=header.position(rows.start)) as stream:
            yield from read_rows(stream, header, rows_at_once, rows)
