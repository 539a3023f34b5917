"""Parquet's footer, as far as it says where columns lie.

Source: https://github.com/apache/parquet-format (parquet.thrift, FileMetaData). Arrow's own reader takes a kilobyte or
more for each column chunk of a footer, where three bytes can claim one, and ends the process when it is asked for the
metadata of a chunk that contradicts itself; so a footer is read here before Arrow sees it.
"""

from __future__ import annotations

from dataclasses import dataclass

from data_service.domain.thrift_compact import CompactReader, ThriftError

MAX_CHUNKS = 250_000
MAX_VALUES = 10_000_000


class FooterError(ValueError):
    """The bytes are no footer that may be read; the text says why."""


@dataclass(frozen=True)
class ColumnChunk:
    """Its pages lie in the file's `size_bytes` from `begin` on. `path` joins the names of nested fields by dots."""

    path: str
    begin: int
    size_bytes: int


@dataclass(frozen=True)
class RowGroupFooter:
    total_bytes: int
    columns: list[ColumnChunk]


@dataclass(frozen=True)
class Footer:
    """All as the file claims it. `leaf_count` is how many columns each row group must have."""

    row_count: int
    leaf_count: int
    row_groups: list[RowGroupFooter]


def parse_footer(data: bytes) -> Footer:
    """Raises `FooterError`."""
    try:
        return _parsed(CompactReader(data, MAX_VALUES))
    except ThriftError as error:
        raise FooterError(f"its footer is damaged: {error}") from None
    except IndexError:
        raise FooterError("its footer is damaged: it ends too early") from None


def _parsed(reader: CompactReader) -> Footer:
    row_count = leaf_count = chunk_count = 0
    groups: list[RowGroupFooter] = []
    for field, kind in reader.fields():
        if field == 2:
            # The first is the root, which holds all others.
            leaf_count = sum([_is_leaf(reader) for _ in reader.structs(kind)][1:])
        elif field == 3:
            row_count = reader.whole_number(kind)
        elif field == 4:
            for _ in reader.structs(kind):
                groups.append(_row_group(reader, MAX_CHUNKS - chunk_count))
                chunk_count += len(groups[-1].columns)
        else:
            reader.skip(kind)
    if any(len(group.columns) != leaf_count for group in groups):
        raise FooterError("its footer is damaged: a row group has other columns than the file")
    return Footer(row_count, leaf_count, groups)


def _is_leaf(reader: CompactReader) -> bool:
    """Of a SchemaElement: whether it has no children."""
    children = 0
    for field, kind in reader.fields():
        if field == 5:
            children = reader.whole_number(kind)
        else:
            reader.skip(kind)
    return children == 0


def _row_group(reader: CompactReader, most_chunks: int) -> RowGroupFooter:
    total_bytes, columns = 0, []
    for field, kind in reader.fields():
        if field == 1:
            for _ in reader.structs(kind):
                columns.append(_chunk(reader))
                if len(columns) > most_chunks:
                    raise FooterError(
                        f"its row groups have more than {MAX_CHUNKS} columns together; write larger row groups"
                    )
        elif field == 2:
            total_bytes = reader.whole_number(kind)
        else:
            reader.skip(kind)
    return RowGroupFooter(total_bytes, columns)


def _chunk(reader: CompactReader) -> ColumnChunk:
    found = None
    for field, kind in reader.fields():
        if field == 3:
            found = _column_metadata(reader)
        else:
            reader.skip(kind)
    if found is None:
        raise FooterError("its footer is damaged: a column has no metadata")
    return found


def _column_metadata(reader: CompactReader) -> ColumnChunk:
    path, size_bytes = "", 0
    offsets = []
    for field, kind in reader.fields():
        if field == 3:
            path = ".".join(name.decode("utf-8", "replace") for name in reader.texts(kind))
        elif field == 7:
            size_bytes = reader.whole_number(kind)
        elif field in (9, 11):  # of the first data page, and of the dictionary's, which comes before
            offsets.append(reader.whole_number(kind))
        else:
            reader.skip(kind)
    # A column without a value has only the one or the other, at 0.
    return ColumnChunk(path, min((one for one in offsets if one), default=0), size_bytes)
