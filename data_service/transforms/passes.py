"""The parts of a version, one for each task, and the work on one part.

The parts depend on the version and the new columns alone. A part's files depend on the part, so the cluster must not
influence it: otherwise the same transform on more machines would give other digests.

Rows are read in batches, the pipeline's steps are applied, and the results are written or counted.
"""

from __future__ import annotations

import copy
import faulthandler
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from data_service.domain.bad_rows import BadRowLog, BadRowPart, BadRowPolicy, excerpt
from data_service.domain.checks_rows import CheckCounts, Repeats, RowChecks, UniqueKeys
from data_service.domain.splits import Divider
from data_service.domain.statistics import SplitStatistics
from data_service.version_attempt import ResultFormat, scratch_folder
from shared.dataset_version import RowGroup, RowGroups, SplitWriter, VersionReader
from shared.dataset_version.manifest import ROW_ID, DataFile, DatasetVersion, Split, row_bytes
from shared.dataset_version.pages import FilePage, Ints
from shared.dataset_version.parquet import DEFAULT_GROUP_ROWS, GroupSizes
from shared.errors import InvalidArgument
from shared.settings import StoreSettings
from shared.storage import open_store
from shared.transforms.batch import Batch, RowError, Schema, Step, batch_of, table_of
from shared.transforms.pipeline import BatchContext, Fitter, Pipeline, Sliced, needed_columns, sliced
from shared.transforms.steps.images import DecodeImage, side_by_side

# --- Parts ---

# The uncompressed bytes of a part's rows, before or after the work: enough to be worth a task, few enough to have
# several in a machine's memory.
MAX_PART_BYTES = 32 * 1024 * 1024
MIN_PART_BYTES = 8 * 1024 * 1024
# A version too small for this many parts of the maximum size has smaller parts, so that a cluster can share the work.
WANTED_PARTS = 16
# The approximate compression factor of LZ4 for texts and numbers.
COMPRESSION = 3


@dataclass(frozen=True)
class PartitionRange:
    """Consecutive row groups of one split, as one part of a pass.

    `number` counts from 0 in the order of row ids. `first_row_ids` are the first row ids of its results, by split;
    empty until they are known.
    """

    number: int
    split: str
    groups: Sequence[RowGroup]
    first_row_ids: Mapping[str, int] = field(default_factory=dict)

    @property
    def first_row_id(self) -> int:
        return self.groups[0].first_row_id

    @property
    def row_count(self) -> int:
        last = self.groups[-1]
        return last.first_row_id + last.row_count - self.first_row_id

    @property
    def where(self) -> str:
        return f"rows {self.first_row_id} to {self.first_row_id + self.row_count - 1} of split {self.split!r}"


def plan_parts(
    reader: VersionReader, output: pa.Schema, splits: Sequence[str] = (), min_bytes: int = 0
) -> list[PartitionRange]:
    """Divide a version into parts.

    `output` has the columns of the work's results; `splits` empty: all. `min_bytes` is the minimum size of a part, 0
    for that of a transform.
    """
    return list(parts_of(reader, output, splits, min_bytes))


def parts_of(
    reader: VersionReader, output: pa.Schema, splits: Sequence[str] = (), min_bytes: int = 0
) -> Iterator[PartitionRange]:
    """Yield the parts of `plan_parts`, each when it is asked for: the first ones cost the same in any version."""
    wanted = [split for split in reader.version.manifest.splits if not splits or split.name in splits]
    widths = _WorkWidths(reader, output)
    max_bytes = min(MAX_PART_BYTES, max(min_bytes or MIN_PART_BYTES, widths.total_bytes(wanted) // WANTED_PARTS))
    number = 0
    for split in wanted:
        for groups in _packed(widths.groups_of(split), max_bytes):
            yield PartitionRange(number, split.name, groups)
            number += 1


def _packed(pages: Iterable[tuple[RowGroups, Ints]], max_bytes: int) -> Iterator[RowGroups]:
    """Yield runs of groups of at most `max_bytes`, of one group at least.

    The groups come page by page, with the bytes of each group.
    """
    left, left_bytes = RowGroups.joined([]), np.zeros(0, np.int64)
    for page, page_bytes in pages:
        groups, group_bytes = RowGroups.joined([left, page]), np.concatenate([left_bytes, page_bytes])
        ends, begin, before = np.cumsum(group_bytes), 0, 0
        while True:
            end = max(begin + 1, int(np.searchsorted(ends, before + max_bytes, side="right")))
            if end >= len(groups):  # groups of the next page may fit
                break
            yield groups[begin:end]
            begin, before = end, int(ends[end - 1])
        left, left_bytes = groups[begin:], group_bytes[begin:]
    if len(left):
        yield left


class _WorkWidths:
    """The bytes per row during the work: the wider of input and output.

    If the types do not determine the width, the file's size does: row sizes may vary much within a version, and less
    within a file.
    """

    def __init__(self, reader: VersionReader, output: pa.Schema) -> None:
        source = pa.schema([field for field in reader.schema if field.name != ROW_ID])
        widths = [row_bytes(schema) for schema in (source, output)]
        self._reader = reader
        self._fixed = max(1, *(width or 0 for width in widths))
        self._is_fixed = None not in widths

    def groups_of(self, split: Split) -> Iterator[tuple[RowGroups, Ints]]:
        """Yield the row groups of a split, page by page, with the bytes of each."""
        end_row_id = split.first_row_id + split.row_count
        for page, groups in self._reader.files.row_groups_by_page(split.first_row_id, end_row_id):
            group_counts = np.diff(groups.file_starts, append=len(groups))
            widths = self._of(page)[groups.file_indices - page.first_file]
            yield groups, groups.row_counts * np.repeat(widths, group_counts)

    def total_bytes(self, splits: Sequence[Split]) -> int:
        """Return the bytes of these splits, or a smaller number that is enough for parts of `MAX_PART_BYTES`."""
        rows = sum(split.row_count for split in splits)
        if self._is_fixed:
            return rows * self._fixed
        # Each file's width is rounded down, by less than a byte for each of its rows.
        stored = sum(self._reader.version.manifest.bytes_of_split(split.name) for split in splits)
        at_least = max(rows * self._fixed, COMPRESSION * stored - rows)
        if at_least >= MAX_PART_BYTES * WANTED_PARTS:
            return at_least
        return sum(int(group_bytes.sum()) for split in splits for _, group_bytes in self.groups_of(split))

    def _of(self, page: FilePage) -> Ints:
        """Return the bytes per row of each file of the page."""
        if self._is_fixed:
            return np.full(len(page), self._fixed)
        return np.maximum(COMPRESSION * page.size_bytes // np.maximum(page.row_counts, 1), self._fixed)


# --- Work on a part ---
# The work on one part of a version: within one Ray task, or within the process in a test.
#
# The result depends on the part alone, so a retried part gives the same bytes.


@dataclass(frozen=True)
class FitPart:
    """Fits the steps on the part's rows of `fit_split`.

    Returns a copy of `fitter`, which has seen no rows before, after it has seen these.
    """

    source: VersionRows
    fitter: Fitter
    fit_split: str
    columns: list[str]

    def __call__(self, part: PartitionRange) -> Fitter:
        fitter = copy.deepcopy(self.fitter)

        def fit(batch: Batch) -> None:
            with ended_in_time(fitter.applies):
                fitter.update(batch)

        for rows in self.source.divided(part, self.columns):
            if rows.split == self.fit_split:
                rows.apply_to_rows(fit)
        return fitter


@dataclass(frozen=True)
class LeftOut:
    """A row of the source with no result, and its beginning as text."""

    row_id: int
    reason: str
    excerpt: str


@dataclass(frozen=True)
class TransformedRows:
    """Rows of one split after the steps; `row_ids` are their ids in the source."""

    split: str
    table: pa.Table
    row_ids: NDArray[np.int64]
    left_out: Sequence[LeftOut] = ()


class RowMaker(Protocol):
    """Computes the columns of `schema` from the rows of `source`.

    Must be picklable, to travel to Ray's workers.
    """

    @property
    def source(self) -> VersionRows: ...
    @property
    def schema(self) -> pa.Schema: ...

    def rows(self, part: PartitionRange) -> Iterator[TransformedRows]:
        """Yield the rows in the order of their ids.

        Raises the errors of `VersionRows.divided`, and `InvalidArgument` naming a row.
        """


@dataclass(frozen=True)
class RowTransformer:
    """The `RowMaker` of transforms: yields the rows that pass the filters."""

    source: VersionRows
    chain: StepChain
    schema: pa.Schema

    def rows(self, part: PartitionRange) -> Iterator[TransformedRows]:
        for rows in self.source.divided(part, self.chain.reads):
            batch, left = rows.apply_to_rows(self.chain.apply)
            row_ids = rows.row_ids if left is None else rows.row_ids[left]
            # A counting pass may need no column at all.
            table = table_of(batch, self.schema) if len(self.schema) else pa.table({})
            yield TransformedRows(rows.split, table, row_ids)


@dataclass(frozen=True)
class FindKeys:
    """Collects the keys for checks of uniqueness.

    Uses the rows that pass all other checks.
    """

    maker: RowTransformer
    checks: RowChecks

    def __call__(self, part: PartitionRange) -> UniqueKeys:
        found = UniqueKeys({})
        for index, row in enumerate(self.maker.rows(part)):
            keys = self.checks.keys(row.table, row.row_ids)
            if index == 0:
                found = keys
            else:
                found.merge(keys)
        return found


@dataclass(frozen=True)
class Counted:
    """The remaining rows by split, and the results of the checks."""

    rows: Counter[str]
    checks: CheckCounts


@dataclass(frozen=True)
class CountPart:
    """Counts the part's rows; `maker` computes the columns that row checks read."""

    maker: RowMaker
    checks: RowChecks
    repeats: Repeats | None

    def __call__(self, part: PartitionRange) -> Counted:
        counted = Counted(Counter(), CheckCounts(self.checks.checks))
        for row in self.maker.rows(part):
            if self.checks.are_none:
                counted.rows[row.split] += len(row.row_ids)
                continue
            verdict = self.checks.apply(row.table, row.row_ids, self.repeats)
            counted.checks.add(verdict)
            counted.rows[row.split] += int(verdict.keep.sum())
        return counted


@dataclass(frozen=True)
class Written:
    """The result of writing a part; `rows` counts by split."""

    rows: Counter[str]
    files: list[DataFile]
    statistics: dict[str, SplitStatistics]
    checks: CheckCounts
    bad_rows: BadRowPart


# How the results of these kinds of work are stored. A fitter is read back without its pipeline, to be merged into one
# that has it.
RESULTS = ResultFormat(
    classes=frozenset(
        (
            "data_service.domain.bad_rows.*",
            "data_service.domain.checks.*",
            "data_service.domain.checks_rows.*",
            "data_service.domain.statistics.*",
            "data_service.transforms.passes.Counted",
            "data_service.transforms.passes.Written",
            "shared.dataset_version.manifest.DataFile",
            "shared.transforms.steps.fitted.*",
            "shared.transforms.pipeline.Fitter",
            "shared.transforms.steps.fitted._CategoriesAccumulator",
            "shared.transforms.steps.fitted._CountsAccumulator",
            "shared.transforms.steps.fitted._MeanAccumulator",
            "shared.transforms.steps.fitted._BoundsAccumulator",
            "shared.transforms.steps.fitted._MomentsAccumulator",
            "shared.transforms.steps.tokenizing._WordsAccumulator",
        )
    ),
    left_out=(Pipeline, Step),
)


def files_of(result: object) -> list[str]:
    """Return the paths of a result's data files, relative to the attempt's folder."""
    return [file.path for file in result.files] if isinstance(result, Written) else []


@dataclass(frozen=True)
class WritePart:
    """Writes the rows below `folder`, with separate files for each split."""

    maker: RowMaker
    checks: RowChecks
    repeats: Repeats | None
    folder: str

    def __call__(self, part: PartitionRange) -> Written:
        with (
            scratch_folder() as scratch,
            BadRowLog(scratch / "quarantine.jsonl", BadRowPolicy(quarantines=True)) as bad_rows,
        ):
            writing = _Writing(self, part, scratch, bad_rows)
            for row in self.maker.rows(part):
                writing.add(row)
            return writing.written()


class _Writing:
    def __init__(self, work: WritePart, part: PartitionRange, scratch: Path, bad_rows: BadRowLog) -> None:
        self._work = work
        self._part = part
        self._scratch = scratch
        self._store = open_store(work.maker.source.settings)
        self._writers: dict[str, SplitWriter] = {}
        self._bad_rows = bad_rows
        self._checks = CheckCounts(work.checks.checks)
        self._statistics: dict[str, SplitStatistics] = {}
        self._rows: Counter[str] = Counter()

    def add(self, transformed_rows: TransformedRows) -> None:
        name = self._work.maker.source.version.name
        for one in transformed_rows.left_out:
            self._bad_rows.add(name, f"row {one.row_id}", one.reason, one.excerpt)
        table = transformed_rows.table if self._work.checks.are_none else self._passing(transformed_rows)
        if not table.num_rows:
            return
        if transformed_rows.split not in self._writers:
            self._begin(transformed_rows.split)
        first_row_id = self._first_row_id(transformed_rows.split) + self._rows[transformed_rows.split]
        self._writers[transformed_rows.split].write(table)
        self._statistics[transformed_rows.split].update(table, first_row_id)
        self._rows[transformed_rows.split] += table.num_rows

    def written(self) -> Written:
        files = [file for writer in self._writers.values() for file in writer.close()]
        return Written(self._rows, files, self._statistics, self._checks, self._bad_rows.part())

    def _passing(self, transformed_rows: TransformedRows) -> pa.Table:
        verdict = self._work.checks.apply(transformed_rows.table, transformed_rows.row_ids, self._work.repeats)
        self._checks.add(verdict)
        keep = verdict.keep
        if keep.all():
            return transformed_rows.table
        name = self._work.maker.source.version.name
        for row, reason in verdict.quarantined():
            self._bad_rows.add(
                name, f"row {transformed_rows.row_ids[row]}", reason, excerpt(transformed_rows.table, row)
            )
        return transformed_rows.table.filter(pa.array(keep)).combine_chunks()

    def _begin(self, split: str) -> None:
        schema = self._work.maker.schema
        self._statistics[split] = SplitStatistics(schema)
        self._writers[split] = SplitWriter(
            self._store,
            self._work.folder,
            self._scratch,
            schema=schema,
            split=split,
            first_row_id=self._first_row_id(split),
            name=f"{split}-p{self._part.number:05d}",
        )

    def _first_row_id(self, split: str) -> int:
        # The counting pass may not have found this split here. The attempt detects and reports that when it compares
        # the counts.
        return self._part.first_row_ids.get(split, 0)


# --- Rows ---
# The rows of a part in batches, divided by the split that they go to.

# The size of a batch, before or after the steps, whichever is wider: it fits a processor's cache.
BATCH_BYTES = 2 * 1024 * 1024
MIN_BATCH_ROWS, MAX_BATCH_ROWS = 16, 16_384
# The batch size for rows without a fixed width.
DEFAULT_BATCH_ROWS = 1024
# The bytes that are read and decoded at once, unless a single row group has more.
READ_BYTES = 4 * 1024 * 1024
# Dictionary encoding hides the decoded size of a group's texts, but no group exceeds its share of the read. So read at
# most the groups that make up a default batch.
UNEQUAL_GROUPS = DEFAULT_BATCH_ROWS // DEFAULT_GROUP_ROWS
# Decoded images may be large until they are resized. So few are decoded at a time, and fewer if they declare too many
# pixels.
DECODED_BATCH_ROWS = 16
# If a batch fails within this time, it is searched for the row at fault.
SEARCH_TIMEOUT_S = 1.0

T = TypeVar("T")


def batch_rows(pipeline: Pipeline, schema: pa.Schema, made: pa.Schema) -> int:
    """Return the number of rows to process at a time."""
    if any(isinstance(step, DecodeImage) for step in pipeline.steps):
        return DECODED_BATCH_ROWS
    widths = [row_bytes(schema), row_bytes(made)]
    if None in widths:
        return DEFAULT_BATCH_ROWS
    widest = max(1, *(width for width in widths if width is not None))
    return min(MAX_BATCH_ROWS, max(MIN_BATCH_ROWS, BATCH_BYTES // widest))


@dataclass(frozen=True)
class SplitRows:
    """Rows of one batch that go to one split, in the order of their ids in the source."""

    split: str
    table: pa.Table
    row_ids: NDArray[np.int64]

    def apply_to_rows(self, work: Callable[[Batch], T]) -> T:
        """Apply `work`, steps that work row by row, to the rows.

        Raises the steps' errors, but with row ids.
        """
        started = time.monotonic()
        try:
            return work(batch_of(self.table))
        except RowError as error:
            row_id = str(self.row_ids[error.row])
            raise bad_row(error.path, f"row {row_id}: {error.problem}", {"row_id": row_id}) from error
        except InvalidArgument as error:
            # A custom function reports only that it failed. A slow failure would take long to search.
            searched = time.monotonic() - started < SEARCH_TIMEOUT_S
            rows = self._smallest_refused(work) if searched else self
            raise rows._named(error) from error

    def few_pixels(self, images: Sequence[str]) -> Iterator[SplitRows]:
        """Split the rows into pieces whose images may be decoded together.

        `images` are the columns with images.
        """
        if not images:
            yield self
            return
        for begin, end in side_by_side(map(self.table.column, images), len(self.row_ids)):
            yield self._slice(begin, end)

    def _smallest_refused(self, work: Callable[[Batch], object]) -> SplitRows:
        """Halve the rows repeatedly to find the first row that `work` refuses."""
        half = len(self.row_ids) // 2
        if not half:
            return self
        for part in (self._slice(0, half), self._slice(half, len(self.row_ids))):
            try:
                work(batch_of(part.table))
            except InvalidArgument:
                return part._smallest_refused(work)
        return self  # only all rows together are refused

    def _slice(self, begin: int, end: int) -> SplitRows:
        return SplitRows(self.split, self.table.slice(begin, end - begin), self.row_ids[begin:end])

    def _named(self, error: InvalidArgument) -> InvalidArgument:
        first, last = self.row_ids[0], self.row_ids[-1]
        where = f"row {first}" if first == last else f"rows {first} to {last}"
        field = error.metadata.get("field", "")
        why = error.message.removeprefix(f"{field}: ")
        return bad_row(field, f"{where}: {why}", {"row_id": str(first)})


def bad_row(field: str, why: str, metadata: dict[str, str]) -> InvalidArgument:
    return InvalidArgument(
        f"{field}: {why}", reason="BAD_ROW", metadata={"field": field, **metadata}, fields=[(field, why)]
    )


@dataclass(frozen=True)
class VersionRows:
    """Reads parts of a version, at most `batch_rows` rows at a time.

    Picklable, to travel to Ray's workers. Without a divider rows stay in their split. `images` are columns whose images
    will be decoded; they limit a batch to the rows that may be decoded together.
    """

    settings: StoreSettings
    version: DatasetVersion
    divider: Divider | None
    batch_rows: int
    images: tuple[str, ...] = ()

    def divided(self, part: PartitionRange, columns: Sequence[str]) -> Iterator[SplitRows]:
        """Yield the part's rows with the named columns, by split.

        Raises `InvalidArgument` for a row without a split, `DataLoss` for a damaged source.
        """
        images = [name for name in self.images if name in columns]
        for rows in self._divided(part, columns):
            yield from rows.few_pixels(images)

    def _divided(self, part: PartitionRange, columns: Sequence[str]) -> Iterator[SplitRows]:
        keys = self.divider.columns if self.divider else []
        wanted = [*columns, *(name for name in keys if name not in columns)]
        for table, row_ids in self._batches(part, wanted):
            if self.divider is None:
                yield SplitRows(part.split, table, row_ids)
                continue
            assigned = self.divider.assign(table, row_ids)
            mine = table.select(columns)
            for index, split in enumerate(assigned.splits):
                chosen = assigned.choice == index
                if chosen.all():
                    yield SplitRows(split, mine, row_ids)
                elif chosen.any():
                    yield SplitRows(split, mine.filter(pa.array(chosen)).combine_chunks(), row_ids[chosen])

    def _batches(self, part: PartitionRange, columns: Sequence[str]) -> Iterator[tuple[pa.Table, NDArray[np.int64]]]:
        reader = VersionReader(open_store(self.settings), self.version)
        for groups in self._together(reader, part.groups, columns):
            row_count = sum(group.row_count for group in groups)
            # A table without columns would have no rows.
            table = reader.read_many(groups, columns) if columns else None
            for begin in range(0, row_count, self.batch_rows):
                rows = min(self.batch_rows, row_count - begin)
                row_ids = np.arange(begin, begin + rows, dtype=np.int64) + groups[0].first_row_id
                yield pa.table({}) if table is None else table.slice(begin, rows), row_ids

    def _together(
        self, reader: VersionReader, groups: Sequence[RowGroup], columns: Sequence[str]
    ) -> Iterator[list[RowGroup]]:
        """Yield the groups to read together, at least one at a time.

        A read costs the same few milliseconds, however small, so it covers several batches if rows are wider after the
        work than before.
        """
        max_groups = UNEQUAL_GROUPS if row_bytes(reader.select(columns)) is None else MAX_BATCH_ROWS
        sizes = GroupSizes(reader, columns)
        packed: list[RowGroup] = []
        size_bytes = 0
        for group in groups:
            group_bytes = sizes.reported_bytes(group)
            size_bytes += group_bytes
            if packed and (len(packed) == max_groups or size_bytes > READ_BYTES):
                yield packed
                packed, size_bytes = [], group_bytes
            packed.append(group)
        if packed:
            yield packed


# --- Chain ---
# The steps of a pipeline that some columns need, and the rows that remain after them.

# Time beyond its own timeout for a custom function that Python cannot interrupt.
GRACE_S = 10.0
# The timeout of a custom step that names none.
DEFAULT_TIMEOUT_S = 60.0


@contextmanager
def ended_in_time(steps: Iterable[Step]) -> Iterator[None]:
    """End this process if a custom function hangs outside Python.

    The function's own timeout works only while Python can interrupt it.
    """
    limits_s = [step.to_proto().custom.timeout_s or DEFAULT_TIMEOUT_S for step in steps if step.op == "custom"]
    if not limits_s:
        yield
        return
    # This watchdog thread needs no Python lock, which the function may hold.
    faulthandler.dump_traceback_later(sum(limits_s) + GRACE_S, exit=True, file=sys.__stderr__ or sys.stderr)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


class _BatchContext(BatchContext):
    @property
    def left(self) -> NDArray[np.intp] | None:
        return self._origin


@dataclass(frozen=True)
class StepChain:
    """A pipeline's steps, limited to the columns that are needed.

    `reads` are its input columns, `field` the path under which errors name the steps. Picklable.
    """

    steps: Sliced
    reads: list[str]
    field: str = "transform"

    @classmethod
    def towards(cls, pipeline: Pipeline, schema: Schema, outputs: Collection[str] | None) -> StepChain:
        """Return the chain that computes `outputs` (None: all) and the remaining rows."""
        schemas = [schema]
        for step in pipeline.steps:
            schemas.append(step.output(schemas[-1]))
        needed = needed_columns(pipeline.steps, schemas, frozenset(schemas[-1] if outputs is None else outputs))
        reads = [name for name in schema if name in needed[0]]
        return cls(sliced(pipeline.steps, [{name: schema[name] for name in reads}, *schemas[1:]], needed), reads)

    def apply(self, batch: Batch) -> tuple[Batch, NDArray[np.intp] | None]:
        """Return the remaining rows and their indices in `batch`, None if all remain.

        Raises the errors of `Pipeline`.
        """
        walk = _BatchContext(batch)
        with ended_in_time(step for _, step in self.steps):
            for place, step in self.steps:
                walk.through(step, f"{self.field}.steps[{place}]", place)
        return walk.batch, walk.left
