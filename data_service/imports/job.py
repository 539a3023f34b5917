"""An import as one attempt of the durable job: sources in, Parquet files and a manifest out."""

from __future__ import annotations

import pickle
import time
from collections import Counter
from collections.abc import Callable, Container, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from data_service import parallel
from data_service.datasets import confirm_follows
from data_service.domain.bad_rows import TOO_MANY_BAD_ROWS, BadRowLog, BadRowParts, BadRowPolicy, build_report
from data_service.domain.checks import CHECK_FAILED, fits, gate, parse_checks
from data_service.domain.checks_rows import (
    CheckCounts,
    KeepFirst,
    Keys,
    Ordinals,
    Repeats,
    RowChecks,
    UniqueKeys,
    repeats_among,
)
from data_service.domain.import_spec import Base, ImportSpec
from data_service.domain.splits import EmptySplit, LayoutError, Routing, SplitRange, lay_out, route
from data_service.domain.statistics import SplitStatistics
from data_service.imports.passes import (
    RESULTS,
    ROW_BITS,
    CountPart,
    GuardedRunner,
    OrderedUnits,
    PartFailed,
    PartRows,
    WritePart,
    Written,
    files_of,
)
from data_service.imports.plan import BaseRows, CommonColumns, ImportPart, Placer, Tally, plan_parts
from data_service.imports.reader import open_in_child, start_reader
from data_service.parallel import PartRunner, Passes, run_on_ray
from data_service.storage.source_files import SourceFiles, s3_of
from data_service.version_attempt import PINS, KeptPass, at_once, attempt_folder, columns_of, commit_version, new_folder
from shared.dataset_version import DatasetVersion, load_version
from shared.dataset_version.manifest import QUARANTINE, DataFile, Parent, sha256_hex
from shared.dataset_version.version import IMPORT_KIND, read_report
from shared.errors import FailedPrecondition, InvalidArgument, MillraceError
from shared.jobs import AttemptContext, Jobs
from shared.storage import ObjectStore

# --- The job ---
# The import is divided into parts. A small import has one part for each split; this process reads them one after the
# other, so each row's id is known when the row is read. The parts of a larger one are tasks of Ray that run at the same
# time. Their row ids need the number of rows in the parts before, and these are known if the sources say how many rows
# they have and all rows are good. So the parts are written with these numbers at once, and those that came to stand at
# another place are written again. If a source does not say how many rows it has, a pass first counts those of its
# parts.
# For hold-outs the pass counts all parts, because the rows that are held out depend on the counts, and so it does for
# checks of uniqueness, whose keys it collects.


def run_import(context: AttemptContext, run_parts: PartRunner = run_on_ray) -> dict[str, Any]:
    """Run an import and return the manifest's name.

    The job's spec is `{"import": ImportSpec, "import_roots": [folders]}`.
    """
    opened = _Opened(context, ImportSpec.from_record(context.job.spec["import"]), run_parts)
    with attempt_folder(context, keeps_parts=opened.in_tasks) as (folder, scratch):
        return _Import(context, opened, folder, scratch, run_parts).run()


class _Opened:
    """The open sources of an import, divided into parts."""

    def __init__(self, context: AttemptContext, spec: ImportSpec, run_parts: PartRunner) -> None:
        start_reader()  # it starts while the base is loaded
        self.spec = spec
        self.base = _base(context.store, spec.base) if spec.base else None
        if spec.base:
            base = Jobs(context.store, IMPORT_KIND).get(spec.base.version, spec.base.version)
            confirm_follows(context.store, base, context.job)
        appends = spec.base is not None and spec.base.mode == "append"
        kept = BaseRows(context.store, self.base) if self.base and appends else None
        roots = [PurePosixPath(root) for root in context.job.spec["import_roots"]]
        self.files = SourceFiles(
            roots,
            s3_of(context.store),
            context.store,
            on_wait=context.raise_if_stopped,
            on_read=context.raise_if_stopped,
        )
        sources = open_in_child(
            spec.sources,
            self.files,
            {column_type.column: column_type.arrow_type for column_type in spec.column_types},
            spec.partitioning,
            OrderedUnits(context, run_parts, lambda: self.files.kept_pins(new_folder(context))),
            on_wait=context.raise_if_stopped,
        )
        columns = CommonColumns(kept, sources, nan_as_null=spec.nan_as_null)
        checks = parse_checks(spec.checks)
        fits(checks, columns.schema, has_parent=self.base is not None)
        self.rows = PartRows(
            settings=context.store.settings,
            base=kept.version if kept else None,
            columns=columns,
            checks=RowChecks(checks, columns.schema),
            policy=BadRowPolicy(spec.bad_rows.action == "quarantine", spec.bad_rows.max_rows),
            nan_as_null=spec.nan_as_null,
        )
        # The base's splits in their order, then the sources'.
        self.splits = list(dict.fromkeys([*(kept.splits if kept else ()), *spec.imported_splits]))
        self.plan = plan_parts(self.splits, kept, sources)

    @property
    def in_tasks(self) -> bool:
        return len(self.plan.parts) > 1 and not self.plan.is_small


class _Import:
    def __init__(
        self, context: AttemptContext, opened: _Opened, folder: str, scratch: Path, run_parts: PartRunner
    ) -> None:
        self._context = context
        self._opened = opened
        self._spec = opened.spec
        self._imported = opened.splits
        self._rows = opened.rows
        self._plan = opened.plan
        self._folder = folder
        self._scratch = scratch
        self._passes = Passes(context, folder, GuardedRunner(run_parts), _NoProgress(context))
        self._progress = Progress(context)
        self._outcome = _Outcome(self._rows, scratch)
        # Those of the splits with hold-outs, once their rows are counted.
        self._routings: dict[str, Routing] = {}
        self._first_row_ids: dict[str, int] = {}
        # The parts whose rows were counted, by number; the tallies of others are expectations.
        self._counted_parts: set[int] = set()

    def run(self) -> dict[str, Any]:
        if self._opened.in_tasks:
            self._opened.files.keep_pins(f"{self._folder}/{PINS}")
        counted, repeats = self._counted()
        if self._spec.hold_outs:
            assert counted is not None
            self._routings = self._routed(counted)
            self._first_row_ids = {one.name: one.first_row_id for one in self._lay_out(self._routings, counted)}
        work = WritePart(self._rows, self._routings, self._folder, numbered=not self._plan.is_small, repeats=repeats)
        tallies = self._write_in_tasks(work, counted) if self._opened.in_tasks else self._write_here(work, counted)
        routings = self._routings or {
            split: Routing([split], [count]) for split, count in self._kept_by_split(tallies).items()
        }
        return self._commit(self._lay_out(routings, tallies))

    def _counted(self) -> tuple[list[Tally] | None, Repeats | None]:
        """Count rows in a pass of its own, if that is needed, and find repeated values."""
        if not self._opened.in_tasks:
            return (self._count_here() if self._spec.hold_outs else None), None
        if self._rows.checks.needs_keys:
            return self._counted_with_keys()
        if not self._spec.hold_outs:
            return self._expected(self._plan.uncounted), None
        tallies: dict[int, Tally] = {}
        with closing(self._pass(CountPart(self._rows), self._placed(None), tallies, self._kept("count"))) as results:
            for _ in results:
                pass
        self._counted_parts = set(tallies)
        return [tallies[part.number] for part in self._plan.parts], None

    def _counted_with_keys(self) -> tuple[list[Tally], Repeats]:
        """Count the rows of each part without repeated values.

        Raises the error of the first part that fails or has a repeat that a check does not allow. Which rows are
        repeats is known only after the parts before, so the pass raises for no row, and that part is read again.
        """
        work = CountPart(self._rows, finds_keys=True, is_lenient=True)
        keys = SpilledKeys(self._rows.checks.empty_keys(), self._scratch)
        tallies: dict[int, Tally] = {}
        failed: dict[int, MillraceError | None] = {}
        first_failure = _FirstFailure(self._spec.bad_rows.max_rows)
        running = self._passes.over("", work, self._placed(None), foreign_code=False, kept=self._kept("count"))
        with closing(running) as results:
            for part, counted in results:
                if isinstance(counted, PartFailed):
                    failed[part.number] = counted.error
                else:
                    tallies[part.number] = counted.tally
                    keys.merge(counted.keys)
                    if counted.fails:
                        failed[part.number] = None
                if first_failure.number(tallies, failed) is not None:
                    break
        found = keys.repeats(self._context.raise_if_stopped).ordinals
        failing = [number for number in (first_failure.number(tallies, failed),) if number is not None]
        for index, ordinals in found.items():
            if len(ordinals) and not self._rows.checks.checks[index].quarantines:
                failing.append(int(ordinals[0] >> ROW_BITS))
        if failing:
            number = min(failing)
            before = [tallies[part.number] for part in self._plan.parts[:number]]
            strict = CountPart(self._rows, repeats=_among_all_rows(found, before))
            placed = self._placed_after(before)
            raise self._error_of(strict, placed) or failed.get(number) or _changed(placed.split, tallies[number].kept)
        self._counted_parts = set(tallies)
        return self._without_repeats([tallies[part.number] for part in self._plan.parts], found)

    def _expected(self, uncounted: Sequence[ImportPart]) -> list[Tally] | None:
        """Count the rows of some parts; return the tallies of all parts as if the rows of the others are all good.

        A part that cannot be counted ends the pass: the parts before may fail, too, so the next pass finds the failure
        to report.
        """
        if not uncounted:
            return None
        tallies = {part.number: Tally(part.row_count, part.row_count) for part in self._plan.parts}
        work = CountPart(self._rows, is_lenient=True)
        with closing(self._passes.over("", work, uncounted, foreign_code=False, kept=self._kept("count"))) as results:
            for part, counted in results:
                if isinstance(counted, PartFailed):
                    break
                tallies[part.number] = counted.tally
                self._counted_parts.add(part.number)
        return list(tallies.values())

    def _count_here(self) -> list[Tally]:
        work, finder, watch = CountPart(self._rows), KeepFirst(self._rows.checks), _Watch(self._context)
        placer, tallies = self._placer(), []
        for part in self._plan.parts:
            counted = work.count(placer.place(part), self._context.store, self._scratch, finder, watch)
            placer.advance(counted.tally)
            tallies.append(counted.tally)
        return tallies

    def _without_repeats(self, tallies: Sequence[Tally], found: Mapping[int, Ordinals]) -> tuple[list[Tally], Repeats]:
        """Return the tallies without the rows that a check of uniqueness leaves out, and the repeats by ordinal.

        In `found` the repeats are by the part and the row in it.
        """
        left_out = [Counter(tally.left_out) for tally in tallies]
        kept = [tally.kept for tally in tallies]
        for index, ordinals in found.items():
            parts = ordinals >> ROW_BITS
            check = self._rows.checks.checks[index]
            for number, rows in zip(*np.unique(parts, return_counts=True), strict=True) if check.quarantines else ():
                kept[number] -= int(rows)
                left_out[number][check.reason()] += int(rows)
        without = [
            replace(tally, kept=rows, left_out=dict(reasons))
            for tally, rows, reasons in zip(tallies, kept, left_out, strict=True)
        ]
        return without, _among_all_rows(found, tallies)

    def _routed(self, tallies: Sequence[Tally]) -> dict[str, Routing]:
        with self._problems(tallies).translating_errors():
            counts = self._kept_by_split(tallies)
            return {split: route(split, count, self._spec.hold_outs) for split, count in counts.items()}

    def _lay_out(self, routings: Mapping[str, Routing], tallies: Sequence[Tally]) -> list[SplitRange]:
        order = [*self._imported, *(out.to_split for out in self._spec.hold_outs)]
        with self._problems(tallies).translating_errors():
            return lay_out(routings.values(), order)

    def _problems(self, tallies: Sequence[Tally]) -> SplitProblems:
        left_out: dict[str, Counter[str]] = {split: Counter() for split in self._imported}
        for part, tally in zip(self._plan.parts, tallies, strict=True):
            left_out[part.split].update(tally.left_out)
        return SplitProblems(left_out)

    def _kept_by_split(self, tallies: Sequence[Tally]) -> dict[str, int]:
        counts = dict.fromkeys(self._imported, 0)
        for part, tally in zip(self._plan.parts, tallies, strict=True):
            counts[part.split] += tally.kept
        return counts

    def _placer(self) -> Placer:
        return Placer(self._routings, self._first_row_ids)

    def _placed(self, tallies: Sequence[Tally] | None) -> list[ImportPart]:
        """Return the parts where they stand; without `tallies`, where they stand if all rows are good."""
        placer, placed = self._placer(), []
        for part in self._plan.parts:
            placed.append(placer.place(part))
            placer.advance(tallies[part.number] if tallies else Tally(part.row_count, part.row_count))
        return placed

    def _write_here(self, work: WritePart, counted: Sequence[Tally] | None) -> list[Tally]:
        finder, watch = KeepFirst(self._rows.checks), _Watch(self._context, self._progress)
        placer, tallies = self._placer(), []
        for part in self._plan.parts:
            written = work.write(placer.place(part), self._context.store, self._scratch, finder, watch)
            if counted is not None:
                self._refuse_change(part, written.tally, counted)
            placer.advance(written.tally)
            tallies.append(written.tally)
            self._outcome.add(part, written)
            watch.left_out_before = self._outcome.left_out
        return tallies

    def _write_in_tasks(self, work: WritePart, counted: Sequence[Tally] | None) -> list[Tally]:
        tallies: dict[int, Tally] = {}
        arrivals = _Arrivals(self._placer(), self._outcome, self._scratch)
        kept = self._kept("write", work.repeats)
        with closing(self._pass(work, self._placed(counted), tallies, kept)) as results:
            for part, written in results:
                if counted is not None and part.number in self._counted_parts:
                    self._refuse_change(part, written.tally, counted)
                arrivals.add(part, written)
                self._progress.add(written.tally.kept, self._outcome.left_out)
        ordered = [tallies[part.number] for part in self._plan.parts]
        if arrivals.moved:
            for part in arrivals.moved:
                del tallies[part.number]
            kept = self._kept("write-again", work.repeats)
            with closing(self._pass(work, arrivals.moved, tallies, kept)) as results:
                for part, written in results:
                    self._refuse_change(part, written.tally, ordered)
                    self._outcome.add(part, written)
            # Only now: until then another attempt may need to know how many rows these parts have.
            stale = sorted(arrivals.stale_files - {file.path for file in self._outcome.files})
            with closing(at_once(self._context.store.delete, [f"{self._folder}/{path}" for path in stale])) as deleted:
                for _ in deleted:
                    self._context.raise_if_stopped()
        return ordered

    def _refuse_change(self, part: ImportPart, tally: Tally, counted: Sequence[Tally]) -> None:
        """Raise `InvalidArgument` unless the part has the rows that were counted before."""
        if tally != counted[part.number]:
            raise _changed(part.split, self._kept_by_split(counted)[part.split])

    def _pass(
        self,
        work: CountPart | WritePart,
        parts: Sequence[ImportPart],
        tallies: dict[int, Tally],
        kept: KeptPass | None = None,
    ) -> Generator[tuple[ImportPart, Any], None, None]:
        """Do the work on each part in a task; yield the part with its result, and keep the tally.

        `tallies` has those of the parts that are not in this pass, and of no other. Raises the error of the first part
        that fails, in row order: others may go on until the parts before are done.
        """
        first_failure = _FirstFailure(self._spec.bad_rows.max_rows)
        failed: dict[int, tuple[ImportPart, MillraceError]] = {}
        with closing(self._passes.over("", work, parts, foreign_code=False, kept=kept)) as results:
            for part, result in results:
                if isinstance(result, PartFailed):
                    failed[part.number] = part, result.error
                else:
                    tallies[part.number] = result.tally
                    yield part, result
                if first_failure.number(tallies, failed) is not None:
                    break
        number = first_failure.number(tallies, failed)
        if number is not None:
            raise self._failure(work, tallies, number, *failed.get(number, (None, None)))

    def _failure(
        self,
        work: CountPart | WritePart,
        tallies: Mapping[int, Tally],
        number: int,
        part: ImportPart | None,
        error: MillraceError | None,
    ) -> MillraceError:
        """Return the error of a part, all of whose parts before are done.

        It may name a row by what stands before the part, or be the last of too many bad rows: then the part is read
        again from where it stands. So is a part that fails for another reason if more bad rows stand before it than it
        counted: its own may be too many before it comes to that failure.
        """
        has_place = error is None or error.specific_reason in PLACED_REASONS
        if error is not None and not has_place and not self._spec.bad_rows.max_rows:
            return error
        placed = self._placed_after([tallies[before.number] for before in self._plan.parts[:number]])
        if error is not None and part is not None:
            has_more_before = part.place.bad_rows < placed.place.bad_rows
            if part.place == placed.place or not (has_place or has_more_before):
                return error
        return self._error_of(work, placed) or error or _changed(placed.split, tallies[number].kept)

    def _placed_after(self, before: Sequence[Tally]) -> ImportPart:
        """Return the part that follows the parts with these tallies, placed."""
        placer = self._placer()
        for part, tally in zip(self._plan.parts, before, strict=False):
            placer.place(part)
            placer.advance(tally)
        return placer.place(self._plan.parts[len(before)])

    def _error_of(self, work: CountPart | WritePart, part: ImportPart) -> MillraceError | None:
        """Do the work on one part; return its error, if it fails."""
        with closing(self._passes.over("", work, [part], foreign_code=False)) as results:
            return next((result.error for _, result in results if isinstance(result, PartFailed)), None)

    def _kept(self, name: str, repeats: Repeats | None = None) -> KeptPass:
        """Describe a pass, so that later attempts take over the results that depend on the same."""
        base, columns = self._opened.base, self._rows.columns
        ordinals = {} if repeats is None else repeats.ordinals
        depends_on = {
            "job": [self._context.job.uid, self._context.job.spec],
            "base": base.manifest_sha256 if base else "",
            "columns": [str(columns.schema), dict(columns.value_names)],
            "routings": {split: [routing.seeds, routing.limits] for split, routing in self._routings.items()},
            "repeats": {check: sha256_hex(found.tobytes()) for check, found in sorted(ordinals.items())},
        }
        return KeptPass(name, depends_on, RESULTS, files_of)

    def _commit(self, ranges: Sequence[SplitRange]) -> dict[str, Any]:
        outcome, checks = self._outcome, self._rows.checks.checks
        ordered = {one.name: outcome.statistics[one.name] for one in ranges}
        base, columns = self._opened.base, self._rows.columns
        parent_report = read_report(self._context.store, base) if base else None
        results = {**outcome.checks.results(), **gate(checks, ordered, parent_report)}
        bad_rows = outcome.bad_rows()
        result = commit_version(
            self._context.store,
            self._folder,
            columns=columns_of(columns.schema, columns.value_names),
            ranges=ranges,
            files=outcome.files,
            report=build_report(ordered, results, bad_rows),
            quarantine=bad_rows.path,
            quarantined_row_count=bad_rows.row_count,
            parents=[Parent(version=base.name, manifest_sha256=base.manifest_sha256)] if base else [],
        )
        self._progress.report()
        return result


def _base(store: ObjectStore, base: Base) -> DatasetVersion:
    """Load the base; raise `FailedPrecondition` if its name now belongs to another version."""
    version = load_version(store, base.version)
    if base.manifest_sha256 and version.manifest_sha256 != base.manifest_sha256:
        raise FailedPrecondition(
            f"base.version: {base.version} is another version now; read it, and decide again",
            reason="BASE_CHANGED",
            metadata={"resource": base.version},
            fields=[("base.version", "it is another version now")],
        )
    return version


def _among_all_rows(found: Mapping[int, Ordinals], tallies: Sequence[Tally]) -> Repeats:
    """Return the repeats by their ordinals among all rows.

    `tallies` are those of the first parts. The repeats of later parts are left out, except for the part that follows.
    """
    first_ordinals = np.cumsum([0, *(tally.readable for tally in tallies)])
    repeats = {}
    for index, ordinals in found.items():
        known = ordinals[(ordinals >> ROW_BITS) < len(first_ordinals)]
        repeats[index] = first_ordinals[known >> ROW_BITS] + (known & ((1 << ROW_BITS) - 1))
    return Repeats(repeats)


def _changed(split: str, counted: int, whose: str = "") -> InvalidArgument:
    return InvalidArgument(
        f"sources: {whose or f'those of {split!r}'} had {counted} rows at first, and others when they were read again; "
        "import files that no other program writes",
        reason="SOURCE_CHANGED",
        metadata={"field": "sources", "split": split},
        fields=[("sources", f"the files of {split!r} changed during the import")],
    )


# --- Failures of parts ---

# The reasons of errors that depend on the rows before a part.
PLACED_REASONS = (CHECK_FAILED, TOO_MANY_BAD_ROWS)


class _FirstFailure:
    """Finds the first part that fails in row order, once all parts before it are done.

    Together the parts may leave out more bad rows than the `max_bad_rows` that are allowed; 0 is no limit.
    """

    def __init__(self, max_bad_rows: int) -> None:
        self._max_bad_rows = max_bad_rows
        self._next = self._bad_rows = 0

    def number(self, tallies: Mapping[int, Tally], failed: Container[int]) -> int | None:
        while self._next in tallies or self._next in failed:
            if self._next in failed:
                return self._next
            bad_rows = self._bad_rows + tallies[self._next].bad_rows
            if self._max_bad_rows and bad_rows > self._max_bad_rows:
                return self._next
            self._bad_rows = bad_rows
            self._next += 1
        return None


# --- Results of parts ---


class _Outcome:
    """The results of the parts that stand where they belong, in any order."""

    def __init__(self, rows: PartRows, scratch: Path) -> None:
        self.statistics: dict[str, SplitStatistics] = {}
        self.files: list[DataFile] = []
        self.checks = CheckCounts(rows.checks.checks)
        # The number of rows that were left out.
        self.left_out = 0
        self._scratch = scratch
        self._bad_rows = BadRowParts(scratch)

    def add(self, part: ImportPart, written: Written) -> None:
        self.files += written.files
        self.checks.merge(written.checks)
        for target, statistics in written.statistics.items():
            if target in self.statistics:
                self.statistics[target].merge(statistics)
            else:
                self.statistics[target] = statistics
        self._bad_rows.add(part.number, written.bad_rows)
        self.left_out += sum(written.tally.left_out.values())

    def bad_rows(self) -> BadRowLog:
        """Return the rows left out of all parts, in row order."""
        return self._bad_rows.merged(self._scratch / f"all-{QUARANTINE}")


class _Arrivals:
    """Adds the parts that were written where they belong to the outcome; `moved` are the others, placed anew.

    That is known of a part once all parts before it are written. Until then its result waits on the disk.
    `stale_files` are the paths of the moved parts' files.
    """

    def __init__(self, placer: Placer, outcome: _Outcome, scratch: Path) -> None:
        self._placer = placer
        self._outcome = outcome
        self._scratch = scratch
        self._next = 0
        self._waiting: dict[int, ImportPart] = {}
        self.moved: list[ImportPart] = []
        self.stale_files: set[str] = set()

    def add(self, part: ImportPart, written: Written) -> None:
        if part.number != self._next:
            self._waiting[part.number] = part
            self._path(part.number).write_bytes(pickle.dumps(written))
            return
        self._judge(part, written)
        while self._next in self._waiting:
            path = self._path(self._next)
            self._judge(self._waiting.pop(self._next), pickle.loads(path.read_bytes()))
            path.unlink()

    def _judge(self, part: ImportPart, written: Written) -> None:
        if part.expected_rows is not None and written.tally.readable > part.expected_rows:
            raise _changed(part.split, part.expected_rows, part.where)
        placed = self._placer.place(part)
        self._placer.advance(written.tally)
        self._next += 1
        # The places of rows that a check leaves out count from the import's first row.
        same_names = part.place.ordinal == placed.place.ordinal or not written.tally.left_out
        if part.place.first_row_ids == placed.place.first_row_ids and same_names:
            self._outcome.add(part, written)
        else:
            self.moved.append(placed)
            self.stale_files.update(file.path for file in written.files)

    def _path(self, number: int) -> Path:
        return self._scratch / f"written-{number}"


# --- Problems of splits ---
# Finds the cause of splits that cannot be built as requested: the request, or the rows that were left out.


class SplitProblems:
    """`left_out` counts the rows that were left out, by split and reason."""

    def __init__(self, left_out: Mapping[str, Counter[str]]) -> None:
        self._left_out = left_out

    @contextmanager
    def translating_errors(self) -> Iterator[None]:
        """Translate layout errors of the body.

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
        """Add `rows` read rows; `quarantined` is the total so far."""
        self._rows += rows
        self._quarantined = quarantined
        if time.monotonic() - self._reported_at > REPORT_INTERVAL_S:
            self.report()

    def report(self) -> None:
        self._context.report(rows_read=self._rows, rows_quarantined=self._quarantined)
        self._reported_at = time.monotonic()


class _NoProgress(parallel.Progress):
    """The progress of passes: an import reports the rows as they are kept, and not by pass."""

    def begin(self, phase: str, rows: int) -> None: ...

    def add(self, rows: int) -> None: ...

    def report(self) -> None: ...


class _Watch:
    """Stops the work in the attempt's own process if the job is to stop, and reports its progress."""

    def __init__(self, context: AttemptContext, progress: Progress | None = None) -> None:
        self._context = context
        self._progress = progress
        # The rows that were left out of the parts before.
        self.left_out_before = 0

    def before_table(self) -> None:
        self._context.raise_if_stopped()

    def after_table(self, rows: int, left_out: int) -> None:
        if self._progress:
            self._progress.add(rows, self.left_out_before + left_out)


# --- Keys of checks of uniqueness ---
# The keys of checks of uniqueness are collected over all parts of an import, in bounded memory.
#
# Keys wait in memory until they take `SPILL_BYTES`. Then they go to buckets on the disk, by their first bits: equal
# keys are in the same bucket, so repeats are found in one bucket after the other.

# The most bytes of keys that wait in memory: a small job has fewer, and writes none.
SPILL_BYTES = 64 * 1024 * 1024
# The buckets of one check. A billion rows have 94 MB in each.
BUCKET_BITS = 8
# One row of a bucket's file: a key of two numbers, and the row's ordinal.
_ROW = np.dtype([("high", np.uint64), ("low", np.uint64), ("ordinal", np.int64)])


class SpilledKeys:
    """Collects the keys of parts, in any order. `folder` is on the disk, and belongs to the attempt."""

    def __init__(self, keys: UniqueKeys, folder: Path) -> None:
        self._waiting = keys
        self._folder = folder
        self._quarantines: dict[int, bool] = dict(keys.quarantines)
        self._has_spilled = False

    def merge(self, other: UniqueKeys) -> None:
        """Add the keys of another part."""
        self._waiting.merge(other)
        self._quarantines |= other.quarantines
        if self._waiting.row_count * _ROW.itemsize >= SPILL_BYTES:
            self._spill()

    def repeats(self, raise_if_stopped: Callable[[], None]) -> Repeats:
        """Return the repeats, as `UniqueKeys.repeats` does for all parts together.

        `raise_if_stopped` is called before each bucket; what it raises ends the search.
        """
        if not self._has_spilled:
            return self._waiting.repeats()
        self._spill()
        found: dict[int, Ordinals] = {}
        left_out = np.empty(0, np.int64)
        for check, quarantines in sorted(self._quarantines.items()):
            in_buckets = [repeats_among(*bucket, left_out) for bucket in self._buckets(check, raise_if_stopped)]
            found[check] = np.sort(np.concatenate(in_buckets))
            if quarantines:
                left_out = np.union1d(left_out, found[check])
        return Repeats(found)

    def _spill(self) -> None:
        self._has_spilled = True
        for check, (keys, ordinals) in self._waiting.take().items():
            buckets = (keys.high >> np.uint64(64 - BUCKET_BITS)).astype(np.int64)
            order = np.argsort(buckets, kind="stable")
            rows = np.empty(len(ordinals), _ROW)
            rows["high"], rows["low"], rows["ordinal"] = keys.high[order], keys.low[order], ordinals[order]
            ends = np.cumsum(np.bincount(buckets, minlength=1 << BUCKET_BITS))
            for number, (begin, end) in enumerate(zip(np.r_[0, ends[:-1]].tolist(), ends.tolist(), strict=True)):
                if begin < end:
                    with self._path(check, number).open("ab") as file:
                        file.write(rows[begin:end].tobytes())

    def _buckets(self, check: int, raise_if_stopped: Callable[[], None]) -> Iterator[tuple[Keys, Ordinals]]:
        for number in range(1 << BUCKET_BITS):
            raise_if_stopped()
            yield self._bucket(check, number)

    def _bucket(self, check: int, number: int) -> tuple[Keys, Ordinals]:
        path = self._path(check, number)
        rows = np.fromfile(path, _ROW) if path.exists() else np.empty(0, _ROW)
        high, low, ordinals = (np.ascontiguousarray(rows[name]) for name in ("high", "low", "ordinal"))
        return Keys(high, low), ordinals

    def _path(self, check: int, number: int) -> Path:
        return self._folder / f"keys-{check}-{number:03d}"
