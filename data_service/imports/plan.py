"""Divides an import into parts, and says which row ids the rows of each part have.

The parts depend on the sources and the request alone, never on the cluster: a part has files of its own, so other parts
would give the version another digest. An upload that is still open is another source in this respect, because its size
is not known yet.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from data_service.domain.layout import Routing
from data_service.formats import OpenSource
from data_service.formats.interface import RowSource
from data_service.imports.columns import BaseRows
from data_service.imports.part_identity import identity_of
from shared.dataset_version import RowGroups

# --- Plan ---

# A smaller import is one part for each split. One process reads it in less time than Ray needs to begin some tasks.
SMALL_BYTES = 64 * 1024 * 1024
# The bytes of sources in a part: enough to be worth a task and a few files, few enough to be repeated after a fault.
MAX_PART_BYTES = 32 * 1024 * 1024


@dataclass(frozen=True)
class BaseRun:
    """Consecutive row groups of the version that the import appends to."""

    groups: RowGroups
    size_bytes: int

    @property
    def row_count(self) -> int:
        return self.groups.row_count


@dataclass(frozen=True)
class SourceRun:
    """A source's rows, or some of them; `index` is the index of the request's source."""

    index: int
    rows: RowSource

    @property
    def size_bytes(self) -> int:
        return self.rows.size_bytes

    @property
    def row_count(self) -> int | None:
        return self.rows.row_count


Run = BaseRun | SourceRun


@dataclass(frozen=True)
class Place:
    """What stands before a part.

    `ordinal` counts the rows that the sources could read, `bad_rows` those that they could not, and `row_in_split` the
    rows of the imported split that are kept. `first_row_ids` are by target; empty until they are known.
    """

    ordinal: int = 0
    bad_rows: int = 0
    row_in_split: int = 0
    first_row_ids: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class ImportPart:
    """Consecutive rows of one imported split; `number` counts from 0 over all splits."""

    number: int
    split: str
    runs: tuple[Run, ...]
    place: Place = Place()

    @property
    def expected_rows(self) -> int | None:
        """The number of rows if all are good; None if it is unknown."""
        counts = [run.row_count for run in self.runs]
        return None if None in counts else sum(count for count in counts if count is not None)

    @property
    def row_count(self) -> int:
        return self.expected_rows or 0

    @property
    def where(self) -> str:
        names = [f"sources[{run.index}]" if isinstance(run, SourceRun) else "base.version" for run in self.runs]
        through = f" to {names[-1]}" if names[:1] != names[-1:] else ""
        return f"part {self.number}: {', '.join(names[:1])}{through}, of split {self.split!r}"

    def __repr__(self) -> str:
        """The same in each process for the same rows at the same place, and another for others."""
        return f"ImportPart({self.number}, {self.split!r}, runs {self._runs_sha256}, {self.place})"

    def placed(self, place: Place) -> ImportPart:
        """Returns the part at another place; the digest of its runs is computed once for all places."""
        part = replace(self, place=place)
        part.__dict__["_unplaced"] = self._unplaced
        return part

    @cached_property
    def _unplaced(self) -> ImportPart:
        return self

    @property
    def _runs_sha256(self) -> str:
        return self._unplaced._own_runs_sha256

    @cached_property
    def _own_runs_sha256(self) -> str:
        return identity_of(self.runs)

    def __reduce__(self) -> tuple[Any, ...]:
        # The digest travels, too. Sources have members that cloudpickle alone can send.
        return _sent, (self.number, self.split, self.runs, self.place, self._runs_sha256)


def _sent(number: int, split: str, runs: tuple[Run, ...], place: Place, runs_sha256: str) -> ImportPart:
    part = ImportPart(number, split, runs, place)
    part.__dict__["_own_runs_sha256"] = runs_sha256
    return part


@dataclass(frozen=True)
class Plan:
    """The parts in row order; each imported split has at least one."""

    parts: Sequence[ImportPart]
    is_small: bool

    @property
    def uncounted(self) -> list[ImportPart]:
        """The parts whose sources do not say how many rows they have."""
        return [part for part in self.parts if part.expected_rows is None]


def plan_parts(splits: Sequence[str], kept: BaseRows | None, sources: Sequence[OpenSource]) -> Plan:
    """Divides the rows of the splits: first the base's, then those of the sources in their order."""
    base = {split: list(_base_runs(split, kept)) if kept else [] for split in splits}
    base_bytes = sum(run.size_bytes for of_split in base.values() for run in of_split)
    is_small = base_bytes + sum(source.rows.size_bytes for source in sources) < SMALL_BYTES
    parts: list[ImportPart] = []
    for split in splits:
        runs: list[Run] = [*base[split]]
        for source in sources:
            if source.split == split:
                divided = [source.rows] if is_small else source.rows.parts()
                runs += [SourceRun(source.index, rows) for rows in divided]
        for packed in [tuple(runs)] if is_small else _packed(runs):
            parts.append(ImportPart(len(parts), split, packed))
    return Plan(parts, is_small)


def _base_runs(split: str, kept: BaseRows) -> Iterator[BaseRun]:
    """Yields runs of row groups, each up to the group with which it reaches `MAX_PART_BYTES`."""
    left, left_bytes = RowGroups.joined([]), np.zeros(0, np.int64)
    for page, page_bytes in kept.groups(split):
        groups, group_bytes = RowGroups.joined([left, page]), np.concatenate([left_bytes, page_bytes])
        ends, begin, before = np.cumsum(group_bytes), 0, 0
        while (end := int(np.searchsorted(ends, before + MAX_PART_BYTES)) + 1) <= len(groups):
            yield BaseRun(groups[begin:end], int(ends[end - 1]) - before)
            begin, before = end, int(ends[end - 1])
        left, left_bytes = groups[begin:], group_bytes[begin:]
    if len(left):
        yield BaseRun(left, int(left_bytes.sum()))


def _packed(runs: Iterable[Run]) -> Iterator[tuple[Run, ...]]:
    """Yields runs that together stay within `MAX_PART_BYTES`, or a single one; at least one part."""
    packed: list[Run] = []
    size_bytes = 0
    for run in runs:
        if packed and size_bytes + run.size_bytes > MAX_PART_BYTES:
            yield tuple(packed)
            packed, size_bytes = [], 0
        packed.append(run)
        size_bytes += run.size_bytes
    yield tuple(packed)


# --- Placing ---
# Row ids follow from the number of rows in each part: the parts of a split stand one after the other.


@dataclass(frozen=True)
class Tally:
    """The rows of a part.

    `readable` are those that the sources could read, `kept` those of them that also pass all checks. `bad_rows` are the
    others, and `left_out` counts all rows that are not kept by the reason.
    """

    readable: int
    kept: int
    bad_rows: int = field(default=0, compare=False)
    left_out: Mapping[str, int] = field(default_factory=dict, compare=False)


class Placer:
    """Places one part after the other.

    `routings` and `first_row_ids` are those of the splits' hold-outs; without hold-outs they are empty.
    """

    def __init__(self, routings: Mapping[str, Routing], first_row_ids: Mapping[str, int]) -> None:
        self._routings = routings
        self._next_row_ids = dict(first_row_ids)
        self._row_id = self._ordinal = self._bad_rows = self._row_in_split = 0
        self._split = ""

    def place(self, part: ImportPart) -> ImportPart:
        """Returns the next part, placed."""
        if part.split != self._split:
            self._split, self._row_in_split = part.split, 0
        if self._routings:
            first_row_ids = {target: self._next_row_ids[target] for target in self._routings[part.split].targets}
        else:
            first_row_ids = {part.split: self._row_id}
        return part.placed(Place(self._ordinal, self._bad_rows, self._row_in_split, first_row_ids))

    def advance(self, tally: Tally) -> None:
        """Goes past the part that was placed last."""
        if self._routings:
            routing = self._routings[self._split]
            counts = routing.counts_of(self._row_in_split, tally.kept)
            for target, count in zip(routing.targets, counts, strict=True):
                self._next_row_ids[target] += count
        self._row_id += tally.kept
        self._row_in_split += tally.kept
        self._ordinal += tally.readable
        self._bad_rows += tally.bad_rows
