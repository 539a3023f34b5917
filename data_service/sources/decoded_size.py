"""What a batch of a typed file takes in memory once it is decoded."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as kinds


def is_text(arrow_type: pa.DataType) -> bool:
    """Strings and bytes of any length."""
    checks = (
        kinds.is_string,
        kinds.is_binary,
        kinds.is_large_string,
        kinds.is_large_binary,
        kinds.is_string_view,
        kinds.is_binary_view,
    )
    return any(check(arrow_type) for check in checks)


def decoded_bytes(batch: pa.RecordBatch) -> int:
    """What the batch takes once every row has its own values: a long text that rows share takes it each time."""
    total = 0
    for column in (_plain(column) for column in batch.columns):
        if isinstance(column, pa.DictionaryArray):
            if is_text(column.dictionary.type):
                lengths = _text_lengths(column.dictionary)
                total += int(pc.sum(lengths.take(column.indices)).as_py() or 0)
            else:
                total += len(column) * (column.dictionary.nbytes // max(len(column.dictionary), 1) + 1)
        elif kinds.is_string_view(column.type) or kinds.is_binary_view(column.type):
            total += int(pc.sum(_text_lengths(column)).as_py() or 0)
        else:
            total += column.nbytes
    return total


def _plain(column: pa.Array) -> pa.Array:
    return _plain(column.storage) if isinstance(column, pa.ExtensionArray) else column


def _text_lengths(texts: pa.Array) -> pa.Array:
    """In bytes; 0 for nulls."""
    if kinds.is_string_view(texts.type) or kinds.is_binary_view(texts.type):
        # The first four bytes of each 16-byte view are its length.
        views = np.frombuffer(texts.buffers()[1], np.int32)[texts.offset * 4 : (texts.offset + len(texts)) * 4 : 4]
        return pc.if_else(texts.is_valid(), pa.array(views.astype(np.int64)), 0)
    return pc.fill_null(pc.binary_length(texts), 0).cast(pa.int64())
