"""The interface between formats and the import job."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import pyarrow as pa

# About so many bytes of rows are in one table.
CHUNK_BYTES = 4 * 1024 * 1024
# And so many rows where they have no fixed width.
MAX_CHUNK_ROWS = 4096
# What a few stored bytes may at most be decoded into at once.
MAX_DECODED_BYTES = 256 * 1024 * 1024
EXCERPT_CHARACTERS = 200


class BadRowSink(Protocol):
    """Takes rows that cannot be had as their columns' types."""

    def add(self, source: str, place: str, reason: str, excerpt: str, rows: int = 1) -> None:
        """`source` is the file's URI, `place` where in it: `line 17`, `lines 4 to 6`, `row 4`,
        `member train/ants/x.jpg`. `rows` is how many stand there: of a text file, its lines.

        Raises `InvalidArgument` where no (more) bad rows are allowed.
        """


class RowSource(Protocol):
    """The rows of one file, or of one pair or folder of files that belong together."""

    @property
    def schema(self) -> pa.Schema:
        """The logical columns, after inference and overrides."""

    @property
    def class_names(self) -> list[str] | None:
        """The names of the labels 0, 1, … where the source is of images in folders; else None."""

    def tables(self, bad: BadRowSink) -> Iterator[pa.Table]:
        """All good rows in their order, a bounded number at a time; bad rows go to the sink. May be called again.

        Raises `InvalidArgument` for a source that is damaged as a whole, `NotFound` and `Unavailable`.
        """


@dataclass(frozen=True)
class OpenSource:
    """`index` is that of the request's source; a folder or a pattern gives one for each file, in their order."""

    index: int
    split: str
    rows: RowSource


def excerpt_of(value: object) -> str:
    """The beginning of a bad row, as text that any message can carry: what is no text is shown escaped."""
    if isinstance(value, (bytes, memoryview)):
        text = bytes(value[: 4 * EXCERPT_CHARACTERS]).decode("utf-8", "backslashreplace")
    else:
        text = str(value)[:EXCERPT_CHARACTERS].encode("utf-8", "backslashreplace").decode("utf-8")
    return text[:EXCERPT_CHARACTERS]
