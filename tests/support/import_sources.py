"""Opens sources for tests, and takes their bad rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

import pyarrow as pa

from data_service.domain.import_spec import CsvOptions, Source
from data_service.formats import OpenSource, RowSource, open_sources
from data_service.imports.reader import open_in_child
from data_service.storage.source_files import SourceFile, SourceFiles
from shared.errors import InvalidArgument


@dataclass(frozen=True)
class Bad:
    source: str
    place: str
    reason: str
    excerpt: str
    rows: int = 1


@dataclass
class Quarantine:
    """Takes every bad row; with `fail` the first one ends the import."""

    fail: bool = False
    rows: list[Bad] = field(default_factory=list)

    def add(self, source: str, place: str, reason: str, excerpt: str, rows: int = 1) -> None:
        excerpt.encode()
        if self.fail:
            raise InvalidArgument(f"{source}: {place}: {reason}", reason="BAD_ROW")
        self.rows.append(Bad(source, place, reason, excerpt, rows))

    @property
    def places(self) -> list[str]:
        return [row.place for row in self.rows]


def source_of(uris: str | Mapping[str, str], kind: str, split: str = "train", csv: CsvOptions | None = None) -> Source:
    named = {f"{kind}.uri": uris} if isinstance(uris, str) else dict(uris)
    return Source(split=split, format=kind, uris=named, csv=csv)


def opened(folder: Path, *sources: Source, types: Mapping[str, str] | None = None) -> list[OpenSource]:
    return open_sources(sources, SourceFiles([PurePosixPath(folder)], None), types or {})


def in_child(path: Path, kind: str, types: Mapping[str, str] | None = None) -> RowSource:
    """The rows of a file that may take a library more than a test's process has: a limited process reads them."""
    files = SourceFiles([PurePosixPath(path.parent)], None)
    (one,) = open_in_child([source_of(path.as_uri(), kind)], files, types or {})
    return one.rows


def found_file(path: Path, name: str = "sources[0].uri") -> SourceFile:
    return SourceFiles([PurePosixPath(path.parent)], None).find(name, path.as_uri())


def table_of(rows: RowSource, bad: Quarantine | None = None) -> pa.Table:
    """All good rows; without a quarantine the first bad one fails."""
    tables = list(rows.tables(Quarantine(fail=True) if bad is None else bad))
    return pa.concat_tables([rows.schema.empty_table(), *tables])


def whole(folder: Path, *sources: Source, types: Mapping[str, str] | None = None) -> tuple[pa.Table, Quarantine]:
    """All rows of all sources, and the bad ones."""
    bad = Quarantine()
    return pa.concat_tables([table_of(one.rows, bad) for one in opened(folder, *sources, types=types)]), bad
