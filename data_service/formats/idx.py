"""A pair of IDX files, the format of MNIST."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa

from data_service.domain.idx import IdxHeader, read_header, read_rows, rows_per_chunk
from data_service.formats import interface
from data_service.formats.interface import BadRowSink, RowSource, blaming, content
from data_service.storage.source_files import SourceFile
from shared.dataset_version.manifest import tensor_array, tensor_field


class IdxPair:
    """Images (N, …) of uint8 and labels (N) of any integer, as the columns `image` and `label`.

    No single row is bad: an error fails the whole pair.
    """

    class_names: list[str] | None = None

    def __init__(self, images: SourceFile, labels: SourceFile) -> None:
        self._images, self._labels = images, labels
        self._header = self._checked_headers()
        self.row_count: int | None = self._header.row_count
        self.size_bytes = (images.size_bytes or 0) + (labels.size_bytes or 0)
        self.schema = pa.schema(
            [
                tensor_field("image", pa.uint8(), self._header.row_shape),
                pa.field("label", pa.int64(), nullable=False),
            ]
        )

    def parts(self) -> Sequence[RowSource]:
        return [self]

    def tables(self, bad: BadRowSink) -> Iterator[pa.Table]:  # noqa: ARG002 - the interface's
        for images, labels in self._chunks():
            columns = [tensor_array(images), pa.array(labels.astype(np.int64))]
            yield pa.Table.from_arrays(columns, schema=self.schema)

    def _checked_headers(self) -> IdxHeader:
        with content(self._images) as stream, blaming(self._images, "IDX"):
            images = read_header(stream)
        with content(self._labels) as stream, blaming(self._labels, "IDX"):
            labels = read_header(stream)
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
        return images

    def _chunks(self) -> Iterator[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]:
        rows = rows_per_chunk(self._header, interface.CHUNK_BYTES)
        with content(self._images) as image_stream, content(self._labels) as label_stream:
            images = _blamed(self._images, image_stream, self._header, rows)
            labels = _blamed(self._labels, label_stream, self._header, rows)
            # Both are read to their ends, where bytes after the last row are detected.
            yield from zip(images, labels, strict=True)


def _blamed(file: SourceFile, stream: BinaryIO, images: IdxHeader, rows: int) -> Iterator[np.ndarray[Any, Any]]:
    """Yields the rows after a header that must still be the checked one."""
    with blaming(file, "IDX"):
        header = read_header(stream)
        if header.row_count != images.row_count:
            raise file.corrupt("it changed while it was read")
        yield from read_rows(stream, header, rows)
