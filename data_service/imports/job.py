"""An import as one attempt of the durable job: sources in, Parquet files and a manifest out."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import Any, TypeVar, cast

import pyarrow as pa

from data_service.attempt import attempt_folder, columns_of, commit_version
from data_service.domain.bad_rows import BadRowLog, BadRowPolicy, build_report, excerpt
from data_service.domain.checks import Check, fits, parse_checks
from data_service.domain.checks_gate import gate
from data_service.domain.checks_rows import CheckCounts, KeepFirst, RowChecks
from data_service.domain.import_spec import Base, ImportSpec
from data_service.domain.layout import EmptySplit, LayoutError, Routing, SplitRange, lay_out, route
from data_service.domain.statistics import SplitStatistics
from data_service.formats import open_sources
from data_service.imports.columns import BaseRows, CommonColumns, with_nan_as_null
from data_service.storage.source_files import SourceFiles, s3_of
from data_service.version_catalog import confirm_follows
from shared.dataset_version import DatasetVersion, SplitWriter, load_version
from shared.dataset_version.manifest import QUARANTINE, DataFile, Parent
from shared.dataset_version.version import IMPORT_KIND, read_report
from shared.errors import FailedPrecondition, InvalidArgument
from shared.jobs import AttemptContext, Jobs
from shared.storage import ObjectStore

# --- The job ---
# One pass over the rows: splits are written one after the other, so each row's id is known when the row is read. Only
# hold-outs need a counting pass first, because the rows that are held out depend on the counts. A few row groups at a
# time are in memory; a file stays on the local disk until it is complete.


def run_import(context: AttemptContext) -> dict[str, Any]:
    """Runs an import and returns the manifest's name.

    The job's spec is `{"import": ImportSpec, "import_roots": [folders]}`.
    """
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
            {column_type.column: column_type.arrow_type for column_type in spec.column_types},
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
        """Returns the base's splits in their order, then the sources'."""
        return list(dict.fromkeys([*(self._kept.splits if self._kept else ()), *self._spec.imported_splits]))

    def _planned(self) -> dict[str, Routing]:
        """Reads all rows once to count them, and routes each split."""
        screen = self._screen(f"counted-{QUARANTINE}")
        with screen.bad_rows:
            counts = {split: sum(len(table) for table in self._rows(split, screen)) for split in self._imported}
        with self._problems.translating_errors():
            return {split: route(split, counts[split], self._spec.hold_outs) for split in counts}

    def _lay_out(self, routings: Mapping[str, Routing]) -> list[SplitRange]:
        order = [*self._imported, *(out.to_split for out in self._spec.hold_outs)]
        with self._problems.translating_errors():
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
        """Yields the kept rows of the base, then of each source."""
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
    """Loads the base; raises `FailedPrecondition` if its name now belongs to another version."""
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
        "that no other program writes",
        reason="SOURCE_CHANGED",
        metadata={"field": "sources", "split": split},
        fields=[("sources", f"the files of {split!r} changed during the import")],
    )


# --- Screening ---
# Selects the rows of an import's sources to keep: those that the source can read and no quality check rejects.


class Screen:
    """One screening pass over all rows, in their order.

    It is also the sink of the sources' bad rows.
    """

    def __init__(self, checks: Sequence[Check], schema: pa.Schema, policy: BadRowPolicy, quarantine: Path) -> None:
        self._checks = RowChecks(checks, schema)
        self._keep_first = KeepFirst(self._checks)
        self._rows_seen = 0
        self.counts = CheckCounts(checks)
        self.bad_rows = BadRowLog(quarantine, policy)
        self.add = self.bad_rows.add

    def kept(self, table: pa.Table, source: str) -> pa.Table:
        """Returns the rows of the next table that are kept.

        Raises `FailedPrecondition` for a row that violates a failing check.
        """
        if self._checks.are_none:
            return table
        first = self._rows_seen
        self._rows_seen += table.num_rows
        verdict = self._keep_first.apply(table, first)
        self.counts.add(verdict)
        self.counts.refuse(lambda ordinal: f"row {ordinal} of all sources")
        for row, reason in verdict.quarantined():
            self.bad_rows.leave_out(source, f"row {first + row} of all sources", reason, excerpt(table, row))
        return table if verdict.keep.all() else table.filter(pa.array(verdict.keep))


# --- Split files ---
# Writes one imported split and its hold-outs at the same time, and computes their statistics.


class SplitFiles:
    """The files of one imported split and its hold-outs.

    `first_row_ids`, `statistics` and `row_counts` are keyed by the routing's targets. The thread of `behind` writes the
    files.
    """

    def __init__(
        self,
        store: ObjectStore,
        folder: str,
        scratch: Path,
        schema: pa.Schema,
        routing: Routing,
        first_row_ids: Mapping[str, int],
        behind: Behind,
    ) -> None:
        self._behind = behind
        self._routing = routing
        self._first_row_ids = first_row_ids
        self._writers = {
            target: SplitWriter(store, folder, scratch, schema=schema, split=target, first_row_id=first_row_ids[target])
            for target in routing.targets
        }
        self.statistics = {target: SplitStatistics(schema) for target in routing.targets}
        self.row_counts = dict.fromkeys(routing.targets, 0)

    @property
    def rows_added(self) -> int:
        return sum(self.row_counts.values())

    def add(self, table: pa.Table) -> None:
        """Adds the next rows of the imported split."""
        begin = self.rows_added
        for number, target in enumerate(self._routing.targets):
            rows = self._routed(table, begin, number)
            self._behind.do(self._writers[target].write, rows)
            self.statistics[target].update(rows, self._first_row_ids[target] + self.row_counts[target])
            self.row_counts[target] += rows.num_rows

    def close(self) -> list[DataFile]:
        """Writes and uploads the pending rows; returns the files."""
        return [file for writer in self._writers.values() for file in self._behind.result(writer.close)]

    def _routed(self, table: pa.Table, begin: int, target: int) -> pa.Table:
        """Returns the rows of `table` that belong to target number `target`.

        `table` starts at row `begin` of its split.
        """
        choice = self._routing.choice
        return table if choice is None else table.filter(pa.array(choice[begin : begin + table.num_rows] == target))


# --- Threads ---
# Reading, statistics and writing run at the same time, each on its own thread, a few tables apart.
#
# Arrow releases the GIL while it decodes, compresses and writes, so a second core helps.

Item = TypeVar("Item")
# The number of tables that are read ahead, and that wait to be written.
DEPTH = 2
_END = object()


def ahead(items: Iterator[Item]) -> Generator[Item, None, None]:
    """Computes the items on another thread, at most `DEPTH` ahead.

    Errors of `items` are raised here. Closing this generator cancels the items that are not begun.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="ahead") as pool:
        following: deque[Future[Any]] = deque(pool.submit(next, items, _END) for _ in range(DEPTH))
        try:
            while (item := following.popleft().result()) is not _END:
                following.append(pool.submit(next, items, _END))
                yield cast(Item, item)
        finally:
            for one in following:
                one.cancel()


class Behind:
    """Runs work on another thread, in order, with at most `DEPTH` pieces pending.

    The error of a piece is raised by a later call, or at the latest when the body ends. The body's end waits for all
    pieces.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="behind")
        self._waiting: deque[Future[Any]] = deque()

    def __enter__(self) -> Behind:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self._settle(0)
        finally:
            self._pool.shutdown(cancel_futures=True)

    def do(self, work: Callable[..., object], *arguments: object) -> None:
        self._settle(DEPTH - 1)
        self._waiting.append(self._pool.submit(work, *arguments))

    def result(self, work: Callable[[], Item]) -> Item:
        """Waits for all pending work, then runs this and returns its result."""
        self._settle(0)
        return self._pool.submit(work).result()

    def _settle(self, most: int) -> None:
        while len(self._waiting) > most:
            self._waiting.popleft().result()


# --- Problems of splits ---
# Finds the cause of splits that cannot be built as requested: the request, or the rows that were left out.


class SplitProblems:
    def __init__(self) -> None:
        # By split: the rows left out in the last pass, counted by reason.
        self._left_out: dict[str, Counter[str]] = {}

    @contextmanager
    def counting(self, split: str, bad_rows: BadRowLog) -> Iterator[None]:
        """Counts the rows left out within the body for `split`."""
        before = _counts(bad_rows)
        try:
            yield
        finally:
            self._left_out[split] = _counts(bad_rows) - before

    @contextmanager
    def translating_errors(self) -> Iterator[None]:
        """Translates layout errors of the body.

        Raises `FailedPrecondition` for a split whose rows were all left out, and `InvalidArgument` naming the field for
        other splits.
        """
        try:
            yield
        except EmptySplit as error:
            if left_out := self._left_out.get(error.split):
                raise _all_left_out(error, left_out) from None
            raise _refused("sources", error) from None
        except LayoutError as error:
            raise _refused(f"hold_outs[{error.hold_out}].fraction", error) from None


def _counts(bad_rows: BadRowLog) -> Counter[str]:
    return Counter({str(one["reason"]): int(one["rowCount"]) for one in bad_rows.to_json()})


def _refused(field: str, error: LayoutError) -> InvalidArgument:
    return InvalidArgument(
        f"{field}: {error}", reason="EMPTY_SPLIT", metadata={"field": field}, fields=[(field, str(error))]
    )


def _all_left_out(error: EmptySplit, left_out: Counter[str]) -> FailedPrecondition:
    rows, (reason, _) = left_out.total(), left_out.most_common(1)[0]
    return FailedPrecondition(
        f"{error}: {rows:,} rows were left out, most of them for this reason: {reason}; mend its sources or change the "
        "checks, or leave the split out",
        reason="EMPTY_SPLIT",
        metadata={"field": "sources", "split": error.split, "rows_left_out": str(rows)},
    )


# --- Progress ---
# The progress of an import.

REPORT_INTERVAL_S = 0.5


class Progress:
    """Reports the rows read and left out, at most twice a second."""

    def __init__(self, context: AttemptContext) -> None:
        self._context = context
        self._rows = self._quarantined = 0
        self._reported_at = 0.0

    def add(self, rows: int, quarantined: int) -> None:
        """Adds `rows` read rows; `quarantined` is the total so far."""
        self._rows += rows
        self._quarantined = quarantined
        if time.monotonic() - self._reported_at > REPORT_INTERVAL_S:
            self.report()

    def report(self) -> None:
        self._context.report(rows_read=self._rows, rows_quarantined=self._quarantined)
        self._reported_at = time.monotonic()
