"""An import, as the durable job's attempt runs it: sources in, Parquet files and a manifest out.

One pass over the rows: splits are written one after the other, so a row's id is known when the row comes. Only
hold-outs need a pass before, which counts, for who is held out follows from the counts. Rows are in memory some row
groups at a time, a file on local disk until it is whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path, PurePosixPath
from typing import Any

import pyarrow as pa

from data_service.attempt_folder import attempt_folder
from data_service.commit import columns_of, commit_version
from data_service.domain.bad_rows import BadRowPolicy, build_report
from data_service.domain.checks import fits, parse_checks
from data_service.domain.checks_gate import gate
from data_service.domain.import_spec import Base, ImportSpec
from data_service.domain.layout import Routing, SplitRange, lay_out, route
from data_service.domain.statistics import SplitStatistics
from data_service.formats import open_sources
from data_service.ingest.base_rows import BaseRows
from data_service.ingest.columns import CommonColumns, with_nan_as_null
from data_service.ingest.progress import Progress
from data_service.ingest.screening import Screen
from data_service.ingest.split_files import SplitFiles
from data_service.ingest.split_problems import SplitProblems
from data_service.ingest.threads import Behind, ahead
from data_service.storage.source_files import SourceFiles, s3_of
from data_service.successors import confirm_follows
from shared.dataset_version import DatasetVersion, load_version
from shared.dataset_version.attachments import read_report
from shared.dataset_version.manifest import QUARANTINE, DataFile, Parent
from shared.dataset_version.version import IMPORT_KIND
from shared.errors import FailedPrecondition, InvalidArgument
from shared.jobs import AttemptContext, Jobs
from shared.storage import ObjectStore


def run_import(context: AttemptContext) -> dict[str, Any]:
    """The job's spec is `{"import": ImportSpec, "import_roots": [folders]}`; the result names the manifest."""
    spec = ImportSpec.from_record(context.job.spec["import"])
    with attempt_folder(context) as (folder, scratch):
        return _Import(context, spec, folder, scratch).run()


class _Import:
    def __init__(self, context: AttemptContext, spec: ImportSpec, folder: str, scratch: Path) -> None:
        self._context = context
        self._spec = spec
        self._folder = folder
        self._scratch = scratch
        self._base = _base(context.store, spec.base) if spec.base else None
        if spec.base:
            base = Jobs(context.store, IMPORT_KIND).get(spec.base.version, spec.base.version)
            confirm_follows(context.store, base, context.job)
        appends = spec.base is not None and spec.base.mode == "append"
        self._kept = BaseRows(context.store, self._base) if self._base and appends else None
        roots = [PurePosixPath(root) for root in context.job.spec["import_roots"]]
        self._sources = open_sources(
            spec.sources,
            SourceFiles(
                roots,
                s3_of(context.store),
                context.store,
                on_wait=context.raise_if_stopped,
                on_read=context.raise_if_stopped,
            ),
            {one.column: one.arrow_type for one in spec.column_types},
            spec.partitioning,
        )
        self._columns = CommonColumns(self._kept, self._sources, nan_as_null=spec.nan_as_null)
        self._checks = parse_checks(spec.checks)
        fits(self._checks, self._columns.schema, has_parent=self._base is not None)
        self._progress = Progress(context)
        self._problems = SplitProblems()

    def run(self) -> dict[str, Any]:
        planned = self._planned() if self._spec.hold_outs else None
        routings: dict[str, Routing] = {}
        files: list[DataFile] = []
        statistics: dict[str, SplitStatistics] = {}
        next_row_id = 0
        screen = self._screen(QUARANTINE)
        with screen.bad_rows, Behind() as behind:
            for split in self._imported:
                routing = planned[split] if planned else Routing([split], [])
                first_row_ids = _first_row_ids(self._lay_out(planned)) if planned else {split: next_row_id}
                written = SplitFiles(
                    self._context.store,
                    self._folder,
                    self._scratch,
                    self._columns.schema,
                    routing,
                    first_row_ids,
                    behind,
                )
                self._write(split, screen, written, counted=sum(routing.counts) if planned else None)
                files += written.close()
                statistics |= written.statistics
                routings[split] = Routing(routing.targets, list(written.row_counts.values()))
                next_row_id += written.rows_added
        return self._commit(self._lay_out(routings), files, statistics, screen)

    @property
    def _imported(self) -> list[str]:
        """The base's splits in their order, then the sources'."""
        return list(dict.fromkeys([*(self._kept.splits if self._kept else ()), *self._spec.imported_splits]))

    def _planned(self) -> dict[str, Routing]:
        """The pass that counts."""
        screen = self._screen(f"counted-{QUARANTINE}")
        with screen.bad_rows:
            counts = {split: sum(len(table) for table in self._rows(split, screen)) for split in self._imported}
        with self._problems.told():
            return {split: route(split, counts[split], self._spec.hold_outs) for split in counts}

    def _lay_out(self, routings: Mapping[str, Routing]) -> list[SplitRange]:
        order = [*self._imported, *(one.to_split for one in self._spec.hold_outs)]
        with self._problems.told():
            return lay_out(routings.values(), order)

    def _write(self, split: str, screen: Screen, written: SplitFiles, counted: int | None) -> None:
        with closing(ahead(self._rows(split, screen))) as tables:
            for table in tables:
                if counted is not None and written.rows_added + len(table) > counted:
                    raise _changed(split, counted)
                written.add(table)
                self._progress.add(len(table), screen.bad_rows.row_count)
        if counted is not None and written.rows_added < counted:
            raise _changed(split, counted)

    def _rows(self, split: str, screen: Screen) -> Iterator[pa.Table]:
        """What is kept of the base's rows and then of each source's."""
        with self._problems.counting(split, screen.bad_rows):
            if self._kept:
                yield from self._screened(self._kept.tables(split), screen, self._kept.version.name, None)
            for source in self._sources:
                if source.split == split:
                    name = f"sources[{source.index}]"
                    tables = source.rows.tables(screen)
                    if self._spec.nan_as_null:
                        tables = map(with_nan_as_null, tables)
                    yield from self._screened(tables, screen, name, source.rows.class_names)

    def _screened(
        self, tables: Iterable[pa.Table], screen: Screen, source: str, class_names: Sequence[str] | None
    ) -> Iterator[pa.Table]:
        for table in tables:
            self._context.raise_if_stopped()
            kept = screen.kept(self._columns.fitted(table, class_names), source)
            if len(kept):
                yield kept

    def _screen(self, quarantine: str) -> Screen:
        policy = BadRowPolicy(self._spec.bad_rows.action == "quarantine", self._spec.bad_rows.max_rows)
        return Screen(self._checks, self._columns.schema, policy, self._scratch / quarantine)

    def _commit(
        self,
        ranges: Sequence[SplitRange],
        files: Sequence[DataFile],
        statistics: Mapping[str, SplitStatistics],
        screen: Screen,
    ) -> dict[str, Any]:
        ordered = {one.name: statistics[one.name] for one in ranges}
        parent_report = read_report(self._context.store, self._base) if self._base else None
        results = {**screen.counts.results(), **gate(self._checks, ordered, parent_report)}
        result = commit_version(
            self._context.store,
            self._folder,
            columns=columns_of(self._columns.schema, self._columns.value_names),
            ranges=ranges,
            files=files,
            report=build_report(ordered, results, screen.bad_rows),
            quarantine=screen.bad_rows.path,
            quarantined_row_count=screen.bad_rows.row_count,
            parents=[Parent(version=self._base.name, manifest_sha256=self._base.manifest_sha256)] if self._base else [],
        )
        self._progress.report()
        return result


def _base(store: ObjectStore, base: Base) -> DatasetVersion:
    """Raises `FailedPrecondition` where another version has taken the name since."""
    version = load_version(store, base.version)
    if base.manifest_sha256 and version.manifest_sha256 != base.manifest_sha256:
        raise FailedPrecondition(
            f"base.version: {base.version} is another version now; read it, and decide again",
            reason="BASE_CHANGED",
            metadata={"resource": base.version},
            fields=[("base.version", "it is another version now")],
        )
    return version


def _first_row_ids(ranges: Sequence[SplitRange]) -> dict[str, int]:
    return {one.name: one.first_row_id for one in ranges}


def _changed(split: str, counted: int) -> InvalidArgument:
    return InvalidArgument(
        f"sources: those of {split!r} had {counted} rows at first, and others when they were read again; import files "
        "that nobody writes",
        reason="SOURCE_CHANGED",
        metadata={"field": "sources", "split": split},
        fields=[("sources", f"the files of {split!r} changed during the import")],
    )
