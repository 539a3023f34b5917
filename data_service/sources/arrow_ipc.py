"""Arrow IPC, as a stream or as a file: both from front to back, so an upload is read while it grows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from types import MappingProxyType

import pyarrow as pa
import pyarrow.types as kinds

from data_service.domain.arrow_messages import ArrowMessageError, PieceReader, checked_messages
from data_service.sources import interface
from data_service.sources.content import blaming
from data_service.sources.decoded_size import decoded_bytes, is_text
from data_service.sources.interface import BadRowSink
from data_service.sources.source_files import SourceFile
from data_service.sources.typed_columns import TypedColumns, logical_schema_of
from shared.dataset_version.columns import row_bytes


class ArrowRows:
    """One stream or file; its columns keep their types as far as a version has them (`logical_field`), and have that of
    `types` where it does not.

    Record batches may have any size up to `arrow_messages.MAX_BODY_BYTES`; one is in memory at a time.
    """

    class_names: list[str] | None = None

    def __init__(self, file: SourceFile, types: Mapping[str, pa.DataType] = MappingProxyType({})) -> None:
        self._file = file
        self._types = types
        with self._reader() as (reader, _):
            self.schema = logical_schema_of(file, reader.schema, types)
        width = row_bytes(self.schema)
        self._chunk_rows = interface.MAX_CHUNK_ROWS if width is None else max(interface.CHUNK_BYTES // max(width, 1), 1)

    def tables(self, bad: BadRowSink) -> Iterator[pa.Table]:
        columns = TypedColumns(self._file, self.schema)
        with self._reader() as (reader, rest):
            if logical_schema_of(self._file, reader.schema, self._types) != self.schema:
                raise self._file.corrupt("it changed while it was read")
            for batch in reader:
                batch.validate(full=any(_needs_a_look(field.type) for field in batch.schema))
                for piece in self._pieces(batch):
                    yield columns.table(piece, bad)
            # Arrow stops at the end marker; what follows it is looked at, too.
            for _ in rest:
                pass

    def _pieces(self, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        rows = self._chunk_rows
        if row_bytes(self.schema) is None:
            rows = max(1, min(rows, batch.num_rows * interface.CHUNK_BYTES // max(decoded_bytes(batch), 1)))
        for begin in range(0, batch.num_rows, rows):
            piece = batch.slice(begin, rows)
            size_bytes = decoded_bytes(piece)
            if size_bytes > interface.MAX_DECODED_BYTES:
                raise self._file.corrupt(f"{piece.num_rows} of its rows decode to {size_bytes} bytes")
            yield piece

    @contextmanager
    def _reader(self) -> Iterator[tuple[pa.RecordBatchReader, Iterator[bytes]]]:
        with closing(self._file.open()) as opened, blaming(self._file, "Arrow"):
            try:
                pieces = checked_messages(opened)
                yield pa.ipc.open_stream(pa.PythonFile(PieceReader(pieces), mode="r")), pieces
            except ArrowMessageError as error:
                raise self._file.corrupt(str(error)) from None


def _needs_a_look(arrow_type: pa.DataType) -> bool:
    """Whether values themselves can be malformed: offsets, indices, UTF-8, decimals, times of day."""
    if isinstance(arrow_type, pa.BaseExtensionType):
        return _needs_a_look(arrow_type.storage_type)
    if kinds.is_fixed_size_list(arrow_type):
        return _needs_a_look(arrow_type.value_type)
    if kinds.is_dictionary(arrow_type) or kinds.is_nested(arrow_type) or is_text(arrow_type):
        return True
    return bool(kinds.is_decimal(arrow_type) or kinds.is_time(arrow_type) or kinds.is_date64(arrow_type))
