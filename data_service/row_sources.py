"""What an import reads rows from: a pair of IDX files or a Parquet file, as tables of logical columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any, BinaryIO, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pyarrow.types as kinds

from data_service.domain.decompression import DecompressionError, decompressed
from data_service.domain.idx import IdxError, IdxHeader, read_header, read_rows, rows_per_chunk
from data_service.source_files import SourceFile
from shared.dataset_version.columns import (
    ROW_ID,
    is_tensor,
    logical_field,
    refuse_nulls,
    row_bytes,
    tensor_array,
    tensor_field,
)
from shared.errors import InvalidArgument, Unavailable

CHUNK_BYTES = 4 * 1024 * 1024
MAX_BATCH_ROWS = 1024
# A tiny Parquet page may decode to anything; so much of one batch is taken.
MAX_BATCH_BYTES = 256 * 1024 * 1024


class RowSource(Protocol):
    @property
    def schema(self) -> pa.Schema:
        """The logical columns."""

    def scan(self) -> Iterator[int]:
        """Checks how many rows there are; yields numbers that add up to it. Raises `InvalidArgument`."""

    def tables(self) -> Iterator[pa.Table]:
        """All rows in their order, a bounded number at a time. Raises `InvalidArgument`."""


class IdxPair:
    """Images (N, …) of uint8 and labels (N) of any integer, as the columns `image` and `label`."""

    def __init__(self, images: SourceFile, labels: SourceFile) -> None:
        self._images, self._labels = images, labels
        self._header = self._checked_headers()
        self.schema = pa.schema(
            [
                tensor_field("image", pa.uint8(), self._header.row_shape),
                pa.field("label", pa.int64(), nullable=False),
            ]
        )

    def scan(self) -> Iterator[int]:
        # Without this pass a lying header would set the ids of all rows that follow.
        for images, _ in self._chunks():
            yield len(images)

    def tables(self) -> Iterator[pa.Table]:
        for images, labels in self._chunks():
            columns = [tensor_array(images), pa.array(labels.astype(np.int64))]
            yield pa.Table.from_arrays(columns, schema=self.schema)

    def _checked_headers(self) -> IdxHeader:
        with _content(self._images) as stream, _blaming(self._images):
            images = read_header(stream)
        with _content(self._labels) as stream, _blaming(self._labels):
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
        rows = rows_per_chunk(self._header, CHUNK_BYTES)
        with _content(self._images) as image_stream, _content(self._labels) as label_stream:
            images = _blamed(self._images, image_stream, self._header, rows)
            labels = _blamed(self._labels, label_stream, self._header, rows)
            # Both are run to their ends: what follows the last row is looked at there.
            yield from zip(images, labels, strict=True)


class ParquetRows:
    """One Parquet file; its columns keep their types as far as a version has them (`logical_field`)."""

    def __init__(self, file: SourceFile) -> None:
        self._file = file
        with closing(file.open()) as opened, _blaming(file):
            parquet = _parquet(opened)
            given = parquet.schema_arrow
            self._texts = [field.name for field in given if _is_text(field.type)]
            footer = parquet.metadata
        self.schema = self._checked(given)
        claimed_bytes = sum(footer.row_group(index).total_byte_size for index in range(footer.num_row_groups))
        width = max(row_bytes(self.schema) or 0, claimed_bytes // max(footer.num_rows, 1), 1)
        self._batch_rows = min(max(CHUNK_BYTES // width, 1), MAX_BATCH_ROWS)

    def scan(self) -> Iterator[int]:
        # The footer's number is not believed: one column, decoded, tells the rows.
        narrow = next((field.name for field in self.schema if not is_tensor(field.type)), self.schema.names[0])
        yield from (batch.num_rows for batch in self._batches([narrow]))

    def tables(self) -> Iterator[pa.Table]:
        yield from (self._logical(pa.Table.from_batches([batch])) for batch in self._batches(None))

    def _batches(self, columns: list[str] | None) -> Iterator[pa.RecordBatch]:
        with closing(self._file.open()) as opened, _blaming(self._file):
            parquet = _parquet(opened, self._texts)
            for batch in parquet.iter_batches(self._batch_rows, columns=columns, use_threads=False):
                size_bytes = _decoded_bytes(batch)
                if size_bytes > MAX_BATCH_BYTES:
                    raise self._file.corrupt(f"{batch.num_rows} of its rows decode to {size_bytes} bytes")
                yield batch

    def _checked(self, given: pa.Schema) -> pa.Schema:
        if ROW_ID in given.names:
            raise self._file.corrupt(f"it has a column {ROW_ID!r}, the name that row ids have; rename it")
        if not given.names or len(set(given.names)) < len(given.names) or "" in given.names:
            raise self._file.corrupt("it needs columns, each with a name of its own")
        try:
            return pa.schema([logical_field(field) for field in given])
        except InvalidArgument as error:
            raise self._file.corrupt(error.message) from None

    def _logical(self, table: pa.Table) -> pa.Table:
        columns = []
        for field, column in zip(self.schema, table.columns, strict=True):
            if is_tensor(field.type):
                self._refuse_nulls(field.name, column)
            given = column.type.storage_type if isinstance(column.type, pa.BaseExtensionType) else column.type
            wanted = field.type.storage_type if isinstance(field.type, pa.BaseExtensionType) else field.type
            plain = column.cast(given) if given != column.type else column
            plain = plain.cast(wanted) if given != wanted else plain
            columns.append(plain.cast(field.type) if wanted != field.type else plain)
        return pa.Table.from_arrays(columns, schema=self.schema)

    def _refuse_nulls(self, name: str, column: pa.ChunkedArray) -> None:
        try:
            refuse_nulls(name, column)
        except InvalidArgument as error:
            raise self._file.corrupt(error.message) from None


def _decoded_bytes(batch: pa.RecordBatch) -> int:
    """What the batch takes once its dictionaries are taken off: a long text that many rows share takes it each time."""
    total = 0
    for column in batch.columns:
        values = column.dictionary if isinstance(column, pa.DictionaryArray) else None
        if values is None or not _is_text(values.type):
            total += column.nbytes
        else:
            total += pc.sum(pc.binary_length(values).take(column.indices).cast(pa.int64())).as_py() or 0
    return total


def _is_text(arrow_type: pa.DataType) -> bool:
    """Strings and bytes of any length."""
    checks = (kinds.is_string, kinds.is_binary, kinds.is_large_string, kinds.is_large_binary)
    return any(check(arrow_type) for check in checks)


def _parquet(opened: BinaryIO, as_dictionaries: Sequence[str] = ()) -> pq.ParquetFile:
    # Unbuffered would hold whole column chunks, however large the writer made its row groups.
    return pq.ParquetFile(
        opened,
        read_dictionary=list(as_dictionaries),
        buffer_size=1024 * 1024,
        pre_buffer=False,
        page_checksum_verification=True,
        thrift_string_size_limit=100_000_000,
        thrift_container_size_limit=1_000_000,
    )


@contextmanager
def _content(file: SourceFile) -> Iterator[BinaryIO]:
    with closing(file.open()) as opened:
        yield decompressed(opened, file.size_bytes)


def _blamed(file: SourceFile, stream: BinaryIO, images: IdxHeader, rows: int) -> Iterator[np.ndarray[Any, Any]]:
    """The rows behind a header that must still be the one that was checked."""
    with _blaming(file):
        header = read_header(stream)
        if header.row_count != images.row_count:
            raise file.corrupt("it changed while it was read")
        yield from read_rows(stream, header, rows)


@contextmanager
def _blaming(file: SourceFile) -> Iterator[None]:
    """Turns whatever a reader says about the bytes into an error that names the source."""
    try:
        yield
    except (IdxError, DecompressionError) as error:
        raise file.corrupt(str(error)) from None
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        if (isinstance(error, OSError) and error.errno) or "AWS Error" in str(error):
            raise Unavailable(f"{file.field}: {file.uri} cannot be read at present", retry_after_s=1.0) from error
        raise file.corrupt(f"it is not a whole Parquet file: {str(error).splitlines()[0][:200]}") from None
