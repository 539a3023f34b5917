"""An import, as the durable job's attempt runs it: sources in, Parquet files and a manifest out.

Two passes over the sources. The first counts their rows, for row ids and hold-outs follow from the counts; the second
writes. Rows are in memory a row group at a time, a file on local disk until it is whole.
"""

from __future__ import annotations

import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any

import pyarrow as pa

from data_service.domain.import_spec import ImportSpec, Source
from data_service.domain.layout import LayoutError, Routing, SplitRange, lay_out, route
from data_service.row_sources import IdxPair, ParquetRows, RowSource
from data_service.source_files import SourceFiles, s3_of
from shared.dataset_version import SplitWriter
from shared.dataset_version.columns import shape_of
from shared.dataset_version.manifest import Column, DataFile, Manifest, Split, sha256_hex
from shared.errors import InvalidArgument, MillraceError
from shared.jobs import AttemptContext

REPORT_INTERVAL_S = 0.5


def run(context: AttemptContext) -> dict[str, Any]:
    """The job's entry. Its spec is `{"import": ImportSpec, "import_roots": [folders]}`; the result names the manifest.

    Whatever goes wrong, the attempt takes away what it wrote: nothing that failed stays readable.
    """
    folder = f"{context.folder}/data/a{context.attempt:05d}-{uuid.uuid4().hex[:8]}"
    spec = ImportSpec.from_record(context.job.spec["import"])
    files = SourceFiles([PurePosixPath(root) for root in context.job.spec["import_roots"]], s3_of(context.store))
    try:
        _sweep_lost_attempts(context)
        with tempfile.TemporaryDirectory(prefix="millrace-import-") as scratch:
            return _Import(context, spec, files, folder, Path(scratch)).run()
    except BaseException:
        with suppress(MillraceError):
            context.store.delete_folder(folder)
        raise


class _Import:
    def __init__(
        self, context: AttemptContext, spec: ImportSpec, files: SourceFiles, folder: str, scratch: Path
    ) -> None:
        self._context = context
        self._spec = spec
        self._folder = folder
        self._scratch = scratch
        self._progress = _Progress(context)
        self._sources: dict[str, list[RowSource]] = {split: [] for split in spec.imported_splits}
        for index, source in enumerate(spec.sources):
            self._sources[source.split].append(_open(index, source, files))
        self._schema = _common_schema([source for sources in self._sources.values() for source in sources])

    def run(self) -> dict[str, Any]:
        routings, ranges = self._plan()
        files = [file for split in routings for file in self._write(split, routings[split], ranges)]
        manifest = Manifest(
            columns=[
                Column(name=field.name, arrow_type=str(field.type), shape=shape_of(field.type))
                for field in self._schema
            ],
            splits=[Split(name=one.name, first_row_id=one.first_row_id, row_count=one.row_count) for one in ranges],
            files=sorted(files, key=lambda file: file.first_row_id),
        )
        data = manifest.to_json()
        self._context.store.put(f"{self._folder}/manifest.json", data)
        self._progress.report()
        return {"manifest": f"{self._folder}/manifest.json", "manifest_sha256": sha256_hex(data)}

    def _plan(self) -> tuple[dict[str, Routing], list[SplitRange]]:
        counts = {split: sum(map(self._counted, sources)) for split, sources in self._sources.items()}
        try:
            routings = {split: route(split, counts[split], self._spec.hold_outs) for split in counts}
            return routings, lay_out(routings.values(), self._spec.splits)
        except LayoutError as error:
            field = "sources" if error.hold_out is None else f"hold_outs[{error.hold_out}].fraction"
            raise InvalidArgument(
                f"{field}: {error}", reason="EMPTY_SPLIT", metadata={"field": field}, fields=[(field, str(error))]
            ) from None

    def _counted(self, source: RowSource) -> int:
        total = 0
        for rows in source.scan():
            self._context.raise_if_stopped()
            total += rows
        return total

    def _write(self, split: str, routing: Routing, ranges: list[SplitRange]) -> list[DataFile]:
        """Writes one imported split and what is held out of it, side by side."""
        first_row_ids = {one.name: one.first_row_id for one in ranges}
        writers = [
            SplitWriter(
                self._context.store,
                self._folder,
                self._scratch,
                schema=self._schema,
                split=target,
                first_row_id=first_row_ids[target],
            )
            for target in routing.targets
        ]
        done, counted = 0, sum(routing.counts)
        for table in self._tables(split):
            if done + table.num_rows > counted:
                raise _changed(split, counted)
            for target, writer in enumerate(writers):
                writer.write(_routed(table, routing, done, target))
            done += table.num_rows
        if done < counted:
            raise _changed(split, counted)
        return [file for writer in writers for file in writer.close()]

    def _tables(self, split: str) -> Iterator[pa.Table]:
        for source in self._sources[split]:
            for table in source.tables():
                self._context.raise_if_stopped()
                yield table.cast(self._schema) if table.schema != self._schema else table
                self._progress.add(table.num_rows)


def _changed(split: str, counted: int) -> InvalidArgument:
    return InvalidArgument(
        f"sources: those of {split!r} had {counted} rows at first, and others when they were read again; import files "
        "that nobody writes",
        reason="SOURCE_CHANGED",
        metadata={"field": "sources", "split": split},
        fields=[("sources", f"the files of {split!r} changed during the import")],
    )


def _routed(table: pa.Table, routing: Routing, begin: int, target: int) -> pa.Table:
    """The rows of `table`, which starts at row `begin` of its split, that belong to `target`."""
    if routing.choice is None:
        return table
    return table.filter(pa.array(routing.choice[begin : begin + table.num_rows] == target))


class _Progress:
    """Tells how many rows were read, at most twice a second."""

    def __init__(self, context: AttemptContext) -> None:
        self._context = context
        self._rows = 0
        self._reported_at = 0.0

    def add(self, rows: int) -> None:
        self._rows += rows
        if time.monotonic() - self._reported_at > REPORT_INTERVAL_S:
            self.report()

    def report(self) -> None:
        self._context.report(rows_read=self._rows)
        self._reported_at = time.monotonic()


def _open(index: int, source: Source, files: SourceFiles) -> RowSource:
    found = {field: files.find(f"sources[{index}].{field}", uri) for field, uri in source.uris.items()}
    if source.format == "idx":
        return IdxPair(found["idx.images_uri"], found["idx.labels_uri"])
    return ParquetRows(found["parquet.uri"])


def _common_schema(sources: list[RowSource]) -> pa.Schema:
    """The columns of all sources, which must agree; a column may be null where it may be in any source."""
    first = sources[0].schema
    wanted = [(field.name, field.type) for field in first]
    for index, source in enumerate(sources):
        given = [(field.name, field.type) for field in source.schema]
        if given != wanted:
            why = f"it has the columns {_columns(source.schema)}, but the first source has {_columns(first)}"
            raise InvalidArgument(
                f"sources[{index}]: {why}",
                reason="SCHEMA_MISMATCH",
                metadata={"field": f"sources[{index}]"},
                fields=[(f"sources[{index}]", why)],
            )
    nullable = [any(source.schema.field(i).nullable for source in sources) for i in range(len(first))]
    return pa.schema([field.with_nullable(may) for field, may in zip(first, nullable, strict=True)])


def _columns(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name}: {field.type}" for field in schema)


def _sweep_lost_attempts(context: AttemptContext) -> None:
    """Takes away what earlier attempts left: the log has fenced them, so none of it can be committed any more."""
    own = f"a{context.attempt:05d}"
    for attempt in context.store.folders(f"{context.folder}/data"):
        if attempt < own:
            context.store.delete_folder(f"{context.folder}/data/{attempt}")
