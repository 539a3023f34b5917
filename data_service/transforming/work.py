"""What is done to one part of a version: within one task of Ray, or in a test in this process.

All of it is a function of the part alone, so a part that is done again gives the same bytes.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from data_service.domain.bad_rows import BadRowLog, BadRowPart, BadRowPolicy, excerpt
from data_service.domain.checks_rows import CheckCounts, Repeats, RowChecks, UniqueKeys
from data_service.domain.statistics import SplitStatistics
from data_service.scratch import scratch_folder
from data_service.transforming.chain import Chain, ended_in_time
from data_service.transforming.plan import Part
from data_service.transforming.rows import RowSource
from shared.dataset_version import SplitWriter
from shared.dataset_version.manifest import DataFile
from shared.storage import open_store
from shared.transforms.batch import Batch, table_of
from shared.transforms.fitting import Fitter


@dataclass(frozen=True)
class FitPart:
    """Learns from the rows of `fit_split`: gives what `fitter`, which has seen nothing, has seen then."""

    source: RowSource
    fitter: Fitter
    fit_split: str
    columns: list[str]

    def __call__(self, part: Part) -> Fitter:
        fitter = copy.deepcopy(self.fitter)

        def learn(batch: Batch) -> None:
            with ended_in_time(fitter.applies):
                fitter.update(batch)

        for rows in self.source.divided(part, self.columns):
            if rows.split == self.fit_split:
                rows.worked(learn)
        return fitter


@dataclass(frozen=True)
class LeftOut:
    """A row of the source that nothing can be made of, and its beginning as text."""

    row_id: int
    reason: str
    excerpt: str


@dataclass(frozen=True)
class Made:
    """Rows of one split after the steps. `row_ids` are those that they have in the source."""

    split: str
    table: pa.Table
    row_ids: NDArray[np.int64]
    left_out: Sequence[LeftOut] = ()


class RowMaker(Protocol):
    """Makes the columns of `schema` of the rows of `source`. It travels by pickle to where it works."""

    @property
    def source(self) -> RowSource: ...
    @property
    def schema(self) -> pa.Schema: ...

    def rows(self, part: Part) -> Iterator[Made]:
        """In the order of their ids. Raises as `RowSource.divided`, and `InvalidArgument` naming a row."""


@dataclass(frozen=True)
class Maker:
    """A `RowMaker`, of the rows that filters leave."""

    source: RowSource
    chain: Chain
    schema: pa.Schema

    def rows(self, part: Part) -> Iterator[Made]:
        for rows in self.source.divided(part, self.chain.reads):
            batch, left = rows.worked(self.chain.apply)
            row_ids = rows.row_ids if left is None else rows.row_ids[left]
            # Counting may need no column at all.
            table = table_of(batch, self.schema) if len(self.schema) else pa.table({})
            yield Made(rows.split, table, row_ids)


@dataclass(frozen=True)
class FindKeys:
    """For checks of uniqueness, the keys of the rows that pass all others."""

    maker: Maker
    checks: RowChecks

    def __call__(self, part: Part) -> UniqueKeys:
        found = UniqueKeys({})
        for index, made in enumerate(self.maker.rows(part)):
            keys = self.checks.keys(made.table, made.row_ids)
            if index == 0:
                found = keys
            else:
                found.merge(keys)
        return found


@dataclass(frozen=True)
class Counted:
    """The rows that are left, by split, and what the checks found."""

    rows: Counter[str]
    checks: CheckCounts


@dataclass(frozen=True)
class CountPart:
    """`maker` makes the columns that checks of rows look at."""

    maker: RowMaker
    checks: RowChecks
    repeats: Repeats | None

    def __call__(self, part: Part) -> Counted:
        counted = Counted(Counter(), CheckCounts(self.checks.checks))
        for made in self.maker.rows(part):
            if self.checks.are_none:
                counted.rows[made.split] += len(made.row_ids)
                continue
            verdict = self.checks.apply(made.table, made.row_ids, self.repeats)
            counted.checks.add(verdict)
            counted.rows[made.split] += int(verdict.keep.sum())
        return counted


@dataclass(frozen=True)
class Written:
    """What a part has become; `rows` by split."""

    rows: Counter[str]
    files: list[DataFile]
    statistics: dict[str, SplitStatistics]
    checks: CheckCounts
    bad_rows: BadRowPart


@dataclass(frozen=True)
class WritePart:
    """Writes the rows below `folder`, each split into files of its own."""

    maker: RowMaker
    checks: RowChecks
    repeats: Repeats | None
    folder: str

    def __call__(self, part: Part) -> Written:
        with (
            scratch_folder() as scratch,
            BadRowLog(scratch / "quarantine.jsonl", BadRowPolicy(quarantines=True)) as bad_rows,
        ):
            writing = _Writing(self, part, scratch, bad_rows)
            for made in self.maker.rows(part):
                writing.add(made)
            return writing.written()


class _Writing:
    def __init__(self, work: WritePart, part: Part, scratch: Path, bad_rows: BadRowLog) -> None:
        self._work = work
        self._part = part
        self._scratch = scratch
        self._store = open_store(work.maker.source.settings)
        self._writers: dict[str, SplitWriter] = {}
        self._bad_rows = bad_rows
        self._checks = CheckCounts(work.checks.checks)
        self._statistics: dict[str, SplitStatistics] = {}
        self._rows: Counter[str] = Counter()

    def add(self, made: Made) -> None:
        name = self._work.maker.source.version.name
        for one in made.left_out:
            self._bad_rows.add(name, f"row {one.row_id}", one.reason, one.excerpt)
        table = made.table if self._work.checks.are_none else self._passing(made)
        if not table.num_rows:
            return
        if made.split not in self._writers:
            self._begin(made.split)
        first_row_id = self._first_row_id(made.split) + self._rows[made.split]
        self._writers[made.split].write(table)
        self._statistics[made.split].update(table, first_row_id)
        self._rows[made.split] += table.num_rows

    def written(self) -> Written:
        files = [file for writer in self._writers.values() for file in writer.close()]
        return Written(self._rows, files, self._statistics, self._checks, self._bad_rows.part())

    def _passing(self, made: Made) -> pa.Table:
        verdict = self._work.checks.apply(made.table, made.row_ids, self._work.repeats)
        self._checks.add(verdict)
        keep = verdict.keep
        if keep.all():
            return made.table
        name = self._work.maker.source.version.name
        for row, reason in verdict.quarantined():
            self._bad_rows.add(name, f"row {made.row_ids[row]}", reason, excerpt(made.table, row))
        return made.table.filter(pa.array(keep)).combine_chunks()

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
        # A split that the counting did not find here: the attempt finds out, and says why, when it compares the counts.
        return self._part.first_row_ids.get(split, 0)
