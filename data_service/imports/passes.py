"""The work on one part of an import: reads its rows, leaves out the bad ones, and counts or writes the others."""

from __future__ import annotations

import pickle
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, TypeVar, cast

import numpy as np
import pyarrow as pa

from data_service.domain.bad_rows import BadRowLog, BadRowPart, BadRowPolicy, excerpt
from data_service.domain.checks_rows import CheckCounts, KeepFirst, Mask, Ordinals, Repeats, RowChecks, UniqueKeys
from data_service.domain.splits import Routing
from data_service.domain.statistics import SplitStatistics
from data_service.formats.interface import ScanUnit
from data_service.imports.plan import BaseRows, BaseRun, CommonColumns, ImportPart, Run, Tally, with_nan_as_null
from data_service.parallel import P, PartRunner, Pool, Results, Work
from data_service.version_attempt import ResultFormat, scratch_folder
from shared.dataset_version import DatasetVersion, SplitWriter
from shared.dataset_version.manifest import QUARANTINE, DataFile
from shared.errors import DataLoss, FailedPrecondition, InvalidArgument, MillraceError, NotFound
from shared.jobs import AttemptContext
from shared.settings import StoreSettings
from shared.storage import ObjectStore, open_store

Item = TypeVar("Item")

# --- Rows of a part ---


class Watch(Protocol):
    """Follows the work on a part within the attempt's own process."""

    def before_table(self) -> None:
        """Raise if the job is to stop."""

    def after_table(self, rows: int, left_out: int) -> None:
        """`rows` of the table are kept; `left_out` counts those of the part so far that are not."""


class NoWatch:
    """The watch of a task: the attempt itself ends the tasks of a job that is to stop."""

    def before_table(self) -> None: ...

    def after_table(self, rows: int, left_out: int) -> None: ...


@dataclass(frozen=True)
class PartRows:
    """Reads the rows of parts, and decides which of them are kept. Picklable.

    `base` is the version that the import appends to.
    """

    settings: StoreSettings
    base: DatasetVersion | None
    columns: CommonColumns
    checks: RowChecks
    policy: BadRowPolicy
    nan_as_null: bool

    def screen(
        self, part: ImportPart, quarantine: Path, keys: UniqueKeys | None = None, *, is_lenient: bool = False
    ) -> Screen:
        """Return the screen of a pass, which collects `keys` if they are given.

        A lenient screen raises for no row.
        """
        policy = BadRowPolicy(self.policy.quarantines, self.policy.max_rows, part.place.bad_rows)
        lenient = BadRowPolicy(quarantines=True)
        return Screen(self.checks, part, lenient if is_lenient else policy, quarantine, keys, is_lenient=is_lenient)

    def kept(
        self, part: ImportPart, screen: Screen, finder: Finder | None, store: ObjectStore, watch: Watch
    ) -> Iterator[pa.Table]:
        """Yield the rows of the part that are kept, a bounded number at a time.

        Raises the errors of `RowSource.tables` and of the screen.
        """
        kept = BaseRows(store, self.base) if self.base else None
        for run in part.runs:
            source, class_names = self._named(run)
            for table in self._tables(run, kept, screen):
                watch.before_table()
                rows = screen.kept(self.columns.fitted(table, class_names), source, finder)
                if len(rows):
                    yield rows

    def _tables(self, run: Run, kept: BaseRows | None, screen: Screen) -> Iterable[pa.Table]:
        if isinstance(run, BaseRun):
            assert kept is not None
            return kept.tables(run.groups)
        tables = run.rows.tables(screen)
        return map(with_nan_as_null, tables) if self.nan_as_null else tables

    def _named(self, run: Run) -> tuple[str, Sequence[str] | None]:
        """Return the name of the run's source, and the names of its classes."""
        if isinstance(run, BaseRun):
            assert self.base is not None
            return self.base.name, None
        return f"sources[{run.index}]", run.rows.class_names


# --- Screening ---
# Selects the rows of a part to keep: those that the source can read and no quality check rejects.

# Finds repeats of earlier values: by those of all parts, or as the parts come one after the other.
Finder = Repeats | KeepFirst
# The ordinals of a pass that collects keys before it is known how many rows each part has: the part's number, and then
# the row in it.
ROW_BITS = 40


class Screen:
    """One screening pass over the rows of a part, in their order.

    It is also the sink of the sources' bad rows. With `keys` it collects the keys for checks of uniqueness. If it is
    lenient, it raises for no row that violates a failing check; `has_violations` says that there was one.
    """

    def __init__(
        self,
        checks: RowChecks,
        part: ImportPart,
        policy: BadRowPolicy,
        quarantine: Path,
        keys: UniqueKeys | None,
        *,
        is_lenient: bool,
    ) -> None:
        self._checks = checks
        self._part = part
        self._keys = None if keys is None else _KeyCollector(keys)
        self._is_lenient = is_lenient
        self._readable = self._kept = 0
        self.has_violations = False
        self.counts = CheckCounts(checks.checks)
        self.bad_rows = BadRowLog(quarantine, policy)
        self.add = self.bad_rows.add

    def kept(self, table: pa.Table, source: str, finder: Finder | None) -> pa.Table:
        """Return the rows of the next table that are kept.

        Raises `FailedPrecondition` for a row that violates a failing check.
        """
        first = self._readable
        self._readable += table.num_rows
        if not self._checks.are_none:
            table = self._checked(table, source, first, finder)
        self._kept += table.num_rows
        return table

    def tally(self) -> Tally:
        left_out = {str(one["reason"]): int(one["rowCount"]) for one in self.bad_rows.to_json()}
        return Tally(self._readable, self._kept, self.bad_rows.bad_count, left_out)

    def _checked(self, table: pa.Table, source: str, first: int, finder: Finder | None) -> pa.Table:
        if self._is_lenient:
            verdict = self._checks.apply(table, (self._part.number << ROW_BITS) + first, self._keys)
            self.has_violations |= verdict.failure is not None
            # Of these rows only their number is needed.
            for reason, rows in Counter(reason for _, reason in verdict.quarantined()).items():
                self.bad_rows.leave_out(source, "", reason, "", rows)
            return table.filter(pa.array(verdict.keep))
        ordinal = self._part.place.ordinal + first
        verdict = self._checks.apply(table, ordinal, finder)
        self.counts.add(verdict)
        self.counts.refuse(lambda failed: f"row {failed} of all sources")
        for row, reason in verdict.quarantined():
            self.bad_rows.leave_out(source, f"row {ordinal + row} of all sources", reason, excerpt(table, row))
        return table if verdict.keep.all() else table.filter(pa.array(verdict.keep))


class _KeyCollector:
    """A `RepeatFinder` that finds none, and remembers the values that it was asked for."""

    def __init__(self, keys: UniqueKeys) -> None:
        self._keys = keys

    def find(self, check: int, array: pa.Array, ordinals: Ordinals) -> Mask:
        self._keys.add(check, array, ordinals)
        return np.zeros(len(ordinals), np.bool_)


# --- Counting ---


@dataclass(frozen=True)
class Counted:
    """The rows of a part; with `keys`, the repeats are still among the kept ones.

    `fails` says of a lenient count that a pass that is not lenient raises for a row.
    """

    tally: Tally
    keys: UniqueKeys | None = None
    fails: bool = False


@dataclass(frozen=True)
class CountPart:
    """Counts the rows of a part; `finds_keys` says that it collects the keys for checks of uniqueness.

    `is_lenient` leaves it to a later pass to raise for single rows. A count that is not lenient needs `repeats` for
    checks of uniqueness.
    """

    rows: PartRows
    finds_keys: bool = False
    is_lenient: bool = False
    repeats: Repeats | None = None

    def __call__(self, part: ImportPart) -> Counted:
        with scratch_folder() as scratch:
            return self.count(part, open_store(self.rows.settings), scratch, self.repeats, NoWatch())

    def count(
        self, part: ImportPart, store: ObjectStore, scratch: Path, finder: Finder | None, watch: Watch
    ) -> Counted:
        keys = self.rows.checks.empty_keys() if self.finds_keys else None
        screen = self.rows.screen(part, scratch / f"counted-{QUARANTINE}", keys, is_lenient=self.is_lenient)
        with screen.bad_rows:
            for _ in self.rows.kept(part, screen, finder, store, watch):
                pass
            tally = screen.tally()
            has_bad_rows = tally.bad_rows > 0 and not self.rows.policy.quarantines
            return Counted(tally, keys, screen.has_violations or has_bad_rows)


# --- Writing ---


@dataclass(frozen=True)
class Written:
    """The result of writing a part; `statistics` are by target."""

    tally: Tally
    files: list[DataFile]
    statistics: dict[str, SplitStatistics]
    checks: CheckCounts
    bad_rows: BadRowPart


@dataclass(frozen=True)
class WritePart:
    """Writes the rows of a part as files of its own below `folder`, and computes their statistics.

    `routings` has those of the splits with hold-outs. `repeats` are needed for checks of uniqueness in tasks.
    `numbered` puts the part's number and its first row id into the names of its files: a part that is written once
    more, at another place, has other files.
    """

    rows: PartRows
    routings: Mapping[str, Routing]
    folder: str
    numbered: bool
    repeats: Repeats | None = None

    def __call__(self, part: ImportPart) -> Written:
        with scratch_folder() as scratch:
            return self.write(part, open_store(self.rows.settings), scratch, self.repeats, NoWatch())

    def write(
        self, part: ImportPart, store: ObjectStore, scratch: Path, finder: Finder | None, watch: Watch
    ) -> Written:
        screen = self.rows.screen(part, scratch / QUARANTINE)
        with screen.bad_rows, WriterThread() as writer_thread:
            files = _PartFiles(self, part, store, scratch, writer_thread)
            with closing(prefetched(self.rows.kept(part, screen, finder, store, watch))) as tables:
                for table in tables:
                    files.add(table)
                    watch.after_table(len(table), screen.bad_rows.row_count)
            written = files.close()
        return Written(screen.tally(), written, files.statistics, screen.counts, screen.bad_rows.part())


# How these results are stored, for the attempt that follows a lost one.
RESULTS = ResultFormat(
    classes=frozenset(
        (
            "data_service.domain.bad_rows.*",
            "data_service.domain.checks.*",
            "data_service.domain.checks_rows.*",
            "data_service.domain.statistics.*",
            "data_service.imports.plan.Tally",
            "data_service.imports.passes.Counted",
            "data_service.imports.passes.Written",
            "shared.dataset_version.manifest.DataFile",
        )
    )
)


def files_of(result: object) -> list[str]:
    """Return the paths of a result's data files, relative to the attempt's folder."""
    return [file.path for file in result.files] if isinstance(result, Written) else []


class _PartFiles:
    """The files of one part: of its imported split, and of that split's hold-outs.

    `writer_thread` writes them.
    """

    def __init__(
        self, work: WritePart, part: ImportPart, store: ObjectStore, scratch: Path, writer_thread: WriterThread
    ) -> None:
        self._writer_thread = writer_thread
        self._routing = work.routings.get(part.split) or Routing([part.split], [0])
        self._place = part.place
        schema = work.rows.columns.schema
        self._writers = {
            target: SplitWriter(
                store,
                work.folder,
                scratch,
                schema=schema,
                split=target,
                first_row_id=part.place.first_row_ids[target],
                name=f"{target}-p{part.number:05d}-{part.place.first_row_ids[target]}" if work.numbered else "",
            )
            for target in self._routing.targets
        }
        self.statistics = {target: SplitStatistics(schema) for target in self._routing.targets}
        self._rows_added = 0

    def add(self, table: pa.Table) -> None:
        """Add the next rows of the part."""
        choice = self._routing.choice(self._place.row_in_split + self._rows_added, table.num_rows)
        self._rows_added += table.num_rows
        for number, target in enumerate(self._routing.targets):
            rows = table if choice is None else table.filter(pa.array(choice == number))
            statistics = self.statistics[target]
            self._writer_thread.do(self._writers[target].write, rows)
            statistics.update(rows, self._place.first_row_ids[target] + statistics.row_count)

    def close(self) -> list[DataFile]:
        """Write and upload the pending rows; return the files."""
        return [file for writer in self._writers.values() for file in self._writer_thread.result(writer.close)]


# --- Failures ---
# Several parts may fail at the same time. The import reports the first one in the order of the rows, so a task returns
# what fails its part, and the attempt decides.

# The errors that another try would meet again.
LASTING = (InvalidArgument, FailedPrecondition, NotFound, DataLoss)


@dataclass(frozen=True)
class PartFailed:
    error: MillraceError


@dataclass(frozen=True)
class Guarded:
    """Does `work`, and returns a lasting error as `PartFailed`."""

    work: Work[Any]

    def __call__(self, part: Any) -> Any:
        try:
            return self.work(part)
        except LASTING as error:
            return PartFailed(error)


@dataclass(frozen=True)
class GuardedRunner:
    """A `PartRunner` whose work is `Guarded`."""

    run_parts: PartRunner

    def __call__(
        self,
        context: AttemptContext,
        folder: str,
        work: Work[P],
        parts: Sequence[P],
        *,
        foreign_code: bool,
        pool: Pool | None = None,
    ) -> Results[P]:
        return self.run_parts(context, folder, Guarded(work), parts, foreign_code=foreign_code, pool=pool)


@dataclass(frozen=True)
class Pickled:
    """Does `work`, and returns its result as bytes."""

    work: Work[Any]

    def __call__(self, part: Any) -> bytes:
        return pickle.dumps(self.work(part))


class OrderedUnits:
    """Works on units in tasks, before there are parts; a `UnitRunner`.

    A lost attempt leaves nothing of it: only results of parts are kept. A result that waits for an earlier one waits as
    bytes: its objects, a few for each column, take several times the memory. `keeping` is entered for each pass, to
    have in the store what units would otherwise carry.
    """

    def __init__(
        self,
        context: AttemptContext,
        run_parts: PartRunner,
        keeping: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._context = context
        self._run_parts = GuardedRunner(run_parts)
        self._keeping = keeping

    def __call__(self, work: Callable[[ScanUnit], Item], units: Sequence[ScanUnit]) -> Iterator[Item]:
        results: dict[int, bytes | PartFailed] = {}
        following = 0
        with (
            self._keeping(),
            closing(self._run_parts(self._context, "", Pickled(work), units, foreign_code=False)) as running,
        ):
            for unit, result in running:
                results[unit.number] = result
                while following in results:
                    found = results.pop(following)
                    if isinstance(found, PartFailed):
                        raise found.error
                    yield pickle.loads(found)
                    following += 1


# --- Threads ---
# Reading, statistics and writing run at the same time, each on its own thread, a few tables apart.
#
# Arrow releases the GIL while it decodes, compresses and writes, so a second core helps. In a task the threads wait for
# the store at the same time.

# The number of tables that are read ahead, and that wait to be written.
DEPTH = 2
_END = object()


def prefetched(items: Iterator[Item]) -> Generator[Item, None, None]:
    """Compute the items on another thread, at most `DEPTH` ahead.

    Errors of `items` are raised here. Closing this generator cancels the items that are not begun.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="prefetch") as pool:
        following: deque[Future[Any]] = deque(pool.submit(next, items, _END) for _ in range(DEPTH))
        try:
            while (item := following.popleft().result()) is not _END:
                following.append(pool.submit(next, items, _END))
                yield cast(Item, item)
        finally:
            for one in following:
                one.cancel()


class WriterThread:
    """Runs work on another thread, in order, with at most `DEPTH` pieces pending.

    The error of a piece is raised by a later call, or at the latest when the body ends. The body's end waits for all
    pieces.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="writer")
        self._waiting: deque[Future[Any]] = deque()

    def __enter__(self) -> WriterThread:
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
        """Wait for all pending work, then run this and return its result."""
        self._settle(0)
        return self._pool.submit(work).result()

    def _settle(self, most: int) -> None:
        while len(self._waiting) > most:
            self._waiting.popleft().result()
