"""Counts of how often each row was consumed: by the loop, by a program's own dataset, or by its shards of a version.

All functions work on plain values. A program's process keeps its rank's record and may report anything, so each report
is checked.

A program that reads its own data prepares its DataLoaders (`ray.train.torch.prepare_data_loader`). The indices that
their samplers draw are known, and a rank counts them once it has got the batch of them. They are indices of the
program's dataset, [0, N), and no row ids of a dataset version.

The record of a loader, by its name `loader-0`, `loader-1`, … in the order of preparing:

    {"row_count": N, "done": passes that all ranks have ended, "passes": {"0": [seen, again], …}}

`seen` and `again` are sets of the indices that were given once or more, and twice or more, in that pass by all ranks.
A set is text: empty for none, `*` for all, else the bitmap (index i is bit i mod 8 of byte i div 8, the lowest first),
compressed, in base64. So a pass that gave each index once takes a few bytes.

A program that reads a shard of its dataset version has a place in it. A pass of W ranks over an epoch deals positions
out like cards: the i-th row of rank r is position base + r + W*i, and `order.EpochOrder` maps the position to a row.
`base` is 0, except for a pass that resumes in the middle of an epoch. So three numbers locate a rank, [epoch, base,
taken], and a range describes the positions that it was given, [epoch, start, stop, step]. N = rows of the split.

For each split a report has the result of `VersionShard.take`: the identity of the shard, the place of the rank, and the
ranges of positions that the rank was given since its last report. The check compares them with what the attempt itself
knows: the version and the job's specification, the bounds of the split, the number of workers, and the place at the
last report.
"""

from __future__ import annotations

import base64
import binascii
import itertools
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shared.errors import InvalidArgument, shown
from train_service.domain.order import EpochOrder, Ints
from train_service.domain.spec import TrainingSpec

# --- Counts ---

# The most row ids that are listed of each kind.
MAX_LISTED = 1000
# Rows scanned at a time. It is a multiple of eight, so that their bits fill whole bytes.
BLOCK_ROWS = 1 << 18
# Rows are counted, and not sorted, if the range that they lie in is at most this many times as long as they are many.
MAX_ROWS_A_SEEN_ROW = 4


@dataclass(frozen=True, kw_only=True)
class CoverageCounts:
    """Counts of the rows of a split.

    Each row counts once. `skipped` rows were only in steps that changed no weight. `missing` rows were never read.
    `repeated` rows were consumed twice or more. The lowest ids of each kind are listed.
    """

    row_count: int
    seen_once: int
    missing: int
    repeated: int
    missing_row_ids: list[int]
    repeated_row_ids: list[int]
    skipped: int = 0
    skipped_row_ids: list[int] = field(default_factory=list)


def count_rows(
    parts: Iterable[Ints],
    first: int,
    row_count: int,
    max_listed: int = MAX_LISTED,
    skipped_parts: Iterable[Ints] = (),
) -> CoverageCounts:
    """Count the row ids of a split.

    `parts` hold consumed ids. The split owns the ids [first, first + row_count). Memory: three bits a row, plus one
    part at a time. `skipped_parts` hold the rows of skipped steps; they are read after `parts`. Raises `ValueError` for
    an id that does not belong to the split.
    """
    seen, repeated, skipped = RowBits(row_count), RowBits(row_count), RowBits(row_count)
    for row_ids in parts:
        _check_rows(row_ids, first, row_count)
        rows, times = _distinct(row_ids - first)
        repeated.add(rows[(times > 1) | seen.has(rows)])
        seen.add(rows)
    for row_ids in skipped_parts:
        _check_rows(row_ids, first, row_count)
        rows, _ = _distinct(row_ids - first)
        skipped.add(rows[~seen.has(rows)])
    tally = Tally(max_listed)
    for begin in range(0, row_count, BLOCK_ROWS):
        seen_here, skipped_here = seen.block(begin), skipped.block(begin)
        tally.add("missing", begin, ~(seen_here | skipped_here))
        tally.add("repeated", begin, repeated.block(begin))
        tally.add("skipped", begin, skipped_here)
    count, listed = tally.count, tally.listed
    return CoverageCounts(
        row_count=row_count,
        seen_once=row_count - count["missing"] - count["repeated"] - count["skipped"],
        missing=count["missing"],
        repeated=count["repeated"],
        missing_row_ids=[first + row for row in listed["missing"]],
        repeated_row_ids=[first + row for row in listed["repeated"]],
        skipped=count["skipped"],
        skipped_row_ids=[first + row for row in listed["skipped"]],
    )


def _distinct(rows: Ints) -> tuple[Ints, Ints]:
    """Return the distinct rows in ascending order, and how often each occurs.

    Shuffled rows of a narrow range are counted, which takes a fraction of the time of sorting them.
    """
    if not len(rows):
        return rows, rows
    low = int(rows.min())
    if int(rows.max()) - low >= MAX_ROWS_A_SEEN_ROW * len(rows):
        return np.unique(rows, return_counts=True)
    times = np.bincount(rows - low)
    distinct = np.flatnonzero(times)
    return distinct + low, times[distinct]


class RowBits:
    """A set of the rows [0, N). Each row takes one bit: row r is bit r mod 8, the lowest first, of byte r div 8."""

    def __init__(self, row_count: int) -> None:
        self._row_count = row_count
        self._bytes = np.zeros(-(-row_count // 8), np.uint8)

    def add(self, rows: Ints) -> None:
        """Add `rows`, which are sorted and unique."""
        if not len(rows):
            return
        places = rows >> 3
        bits = np.left_shift(1, rows & 7).astype(np.uint8)
        begins = np.flatnonzero(np.diff(places, prepend=-1))
        self._bytes[places[begins]] |= np.bitwise_or.reduceat(bits, begins)

    def has(self, rows: Ints) -> NDArray[np.bool_]:
        """Return for each row whether the set has it."""
        found: NDArray[np.bool_] = (self._bytes[rows >> 3] >> (rows & 7)) & 1 == 1
        return found

    def block(self, begin: int) -> NDArray[np.bool_]:
        """Return the membership of a block of rows.

        The block has `BLOCK_ROWS` rows from `begin`, a multiple of eight.
        """
        rows = min(BLOCK_ROWS, self._row_count - begin)
        packed = self._bytes[begin // 8 : (begin + BLOCK_ROWS) // 8]
        return np.unpackbits(packed, count=rows, bitorder="little").astype(bool)


class Tally:
    """The number of rows of each kind.

    The lowest `max_listed` rows of each kind are listed, too. Rows are collected block by block.
    """

    def __init__(self, max_listed: int) -> None:
        self._max_listed = max_listed
        self.count: Counter[str] = Counter()
        self.listed: defaultdict[str, list[int]] = defaultdict(list)

    def add(self, kind: str, begin: int, here: NDArray[np.bool_]) -> None:
        """Count a block that begins at row `begin`. Blocks must come in order."""
        listed = self.listed[kind]
        rows = np.flatnonzero(here)
        self.count[kind] += len(rows)
        listed += (begin + rows[: self._max_listed - len(listed)]).tolist()


def _check_rows(row_ids: Ints, first: int, row_count: int) -> None:
    if row_ids.size and (row_ids.min() < first or row_ids.max() >= first + row_count):
        stranger = row_ids[(row_ids < first) | (row_ids >= first + row_count)][0]
        raise ValueError(f"row {stranger} is not among the rows {first} to {first + row_count - 1}")


# --- Indices of a program's own dataset ---

Flags = NDArray[np.bool_]
Record = dict[str, Any]

# A report and a manifest hold the sets of a cut pass, at most N / 8 bytes each.
MAX_ROWS = 1 << 24
MAX_LOADERS = 16
MAX_PASSES = 1 << 31
# Passes of a loader that one report may touch.
MAX_PASSES_A_REPORT = 10_000
NONE, ALL = "", "*"
PREFIX = "loader-"
WRONG_INDICES = "WRONG_INDICES"


def encode(flags: Flags) -> str:
    if not flags.any():
        return NONE
    if flags.all():
        return ALL
    return base64.b64encode(zlib.compress(np.packbits(flags, bitorder="little").tobytes(), 6)).decode()


def decode(text: str, row_count: int) -> Flags:
    """Return the set as flags (N,). Raises `ValueError` for a text that no set of N indices has."""
    if text in (NONE, ALL):
        return np.full(row_count, text == ALL)
    size = -(-row_count // 8)
    try:
        packed = zlib.decompressobj().decompress(base64.b64decode(text, validate=True), size + 1)
    except (binascii.Error, zlib.error) as error:
        raise ValueError(f"it is no compressed bitmap: {error}") from None
    if len(packed) != size:
        raise ValueError(f"it has not the {size} bytes of {row_count} indices")
    bits = np.unpackbits(np.frombuffer(packed, np.uint8), bitorder="little")
    if bits[row_count:].any():
        raise ValueError(f"it has indices beyond {row_count - 1}")
    return bits[:row_count].astype(bool)


def check_drawn(rank: int, said: object, before: Mapping[str, Record]) -> None:
    """Raise `InvalidArgument`, which names the rank and the value, for a report that no rank can make.

    `said` is the rank's report by loader. `before` is the result of `merge_drawn` for the last report.
    """
    if not isinstance(said, Mapping) or len(said) > MAX_LOADERS:
        raise _wrong_indices(rank, "loaders", said, f"must be at most {MAX_LOADERS} loaders by name")
    known = {f"{PREFIX}{number}" for number in range(MAX_LOADERS)}
    for name, record in said.items():
        if name not in known or not isinstance(record, Mapping):
            raise _wrong_indices(
                rank, "loader", name, f"must be {PREFIX}0 to {PREFIX}{MAX_LOADERS - 1}, with its record"
            )
        rows, done, passes = (record.get(key) for key in ("row_count", "done", "passes"))
        if type(rows) is not int or not 1 <= rows <= MAX_ROWS or rows != before.get(name, {}).get("row_count", rows):
            raise _wrong_indices(
                rank, f"{name}.row_count", rows, f"must be 1 to {MAX_ROWS}, and the same in each report"
            )
        if type(done) is not int or not 0 <= done <= MAX_PASSES:
            raise _wrong_indices(rank, f"{name}.done", done, f"must be 0 to {MAX_PASSES}")
        if not isinstance(passes, Mapping) or len(passes) > MAX_PASSES_A_REPORT:
            raise _wrong_indices(rank, f"{name}.passes", passes, f"must be at most {MAX_PASSES_A_REPORT} passes")
        for number, sets in passes.items():
            if not _is_pass(number) or not _is_pair(sets):
                raise _wrong_indices(
                    rank, f"{name}.passes", number, "must be numbers of passes from 0, each with two sets"
                )
            try:
                for text in sets:
                    decode(text, rows)
            except ValueError as error:
                raise _wrong_indices(rank, f"{name}.passes[{number}]", sets, str(error)) from None


def merge_drawn(before: Mapping[str, Record], parts: Sequence[Mapping[str, Record]]) -> dict[str, Record]:
    """Return the record for a checkpoint: `before`, that of the previous report, with the checked reports of all ranks.

    Raises `InvalidArgument` if ranks say different numbers of rows of one loader.
    """
    merged = {name: dict(one) for name, one in before.items()}
    for name in sorted({name for part in parts for name in part}):
        mine = [part[name] for part in parts if name in part]
        rows = mine[0]["row_count"]
        if any(one["row_count"] != rows for one in mine):
            counts = ", ".join(str(one["row_count"]) for one in mine)
            raise InvalidArgument(f"ranks have datasets of {counts} rows behind {name}; give all ranks the same one")
        passes = dict(merged.get(name, {}).get("passes", {}))
        for number in sorted({number for one in mine for number in one["passes"]}, key=int):
            sets = [one["passes"][number] for one in mine if number in one["passes"]]
            passes[number] = _joined_indices([*([passes[number]] if number in passes else []), *sets], rows)
        merged[name] = {"row_count": rows, "done": min(one["done"] for one in mine), "passes": passes}
    return merged


def last_pass(record: Record) -> int:
    """Return the last pass with a given index. It is 0 before the first."""
    return max(map(int, record["passes"]), default=0)


def count_drawn(record: Record, number: int) -> CoverageCounts:
    """Return how often each index was given in a pass."""
    rows = record["row_count"]
    seen_text, again_text = record["passes"].get(str(number), [NONE, NONE])
    seen, again = decode(seen_text, rows), decode(again_text, rows)
    missing, repeated = np.flatnonzero(~seen), np.flatnonzero(again)
    return CoverageCounts(
        row_count=rows,
        seen_once=rows - len(missing) - len(repeated),
        missing=len(missing),
        repeated=len(repeated),
        missing_row_ids=missing[:MAX_LISTED].tolist(),
        repeated_row_ids=repeated[:MAX_LISTED].tolist(),
    )


def _joined_indices(sets: Sequence[Sequence[str]], rows: int) -> list[str]:
    if len(sets) == 1:
        return list(sets[0])
    seen, again = np.zeros(rows, np.bool_), np.zeros(rows, np.bool_)
    for one, more in sets:
        given = decode(one, rows)
        again |= (seen & given) | decode(more, rows)
        seen |= given
    return [encode(seen), encode(again)]


def _is_pass(number: object) -> bool:
    return isinstance(number, str) and number.isascii() and number.isdigit() and len(number) <= 10


def _is_pair(sets: object) -> bool:
    return isinstance(sets, Sequence) and len(sets) == 2 and all(isinstance(one, str) for one in sets)


def _wrong_indices(rank: int, what: str, value: object, remedy: str) -> InvalidArgument:
    return InvalidArgument(
        f"rank {rank} reports {what} {shown(str(value))} of its DataLoaders: {remedy}",
        reason=WRONG_INDICES,
        metadata={"ranks": str(rank)},
    )


# --- Positions ---

# A shard's `state_dict` must match the job's in all keys except `epoch` and `rows`.
STATE_FORMAT = "millrace.shard/1"
# [epoch, start, stop, step] of positions.
Span = list[int]
# Counts of how often a position was given stop here.
OFTEN = 2
# How many of the newest spans `extend` searches; a rank leaves only a few between two reports.
LOOK_BACK = 128


@dataclass(frozen=True)
class Pass:
    """The pass of W ranks over an epoch.

    It covers the positions [base, N). If `keeps_remainder` is set, the first ranks have one row more. Otherwise the
    last (N - base) mod W positions are left out, and all ranks have equally many rows.
    """

    row_count: int
    base: int
    world_size: int
    keeps_remainder: bool = False

    def rows_of(self, rank: int) -> int:
        left = self.row_count - self.base
        return max(0, -(-(left - rank) // self.world_size)) if self.keeps_remainder else left // self.world_size

    def first_position(self, rank: int, taken: int) -> int:
        """Return the position after `taken` rows."""
        return self.base + rank + self.world_size * taken

    def positions(self, rank: int, begin: int, end: int) -> Ints:
        """Return the positions of a rank's rows. The rows are [begin, end), so the shape is (end - begin,)."""
        return self.first_position(rank, 0) + self.world_size * np.arange(begin, end, dtype=np.int64)

    def rows_before(self, rank: int, position: int) -> int:
        """Return how many rows have lower positions. Only the rank's own rows count."""
        return max(0, -(-(position - self.base - rank) // self.world_size))


@dataclass(frozen=True)
class Place:
    """The place of a rank in a pass. The rank was given `taken` rows of the pass that began at `base`."""

    epoch: int = 0
    base: int = 0
    taken: int = 0


def shard_identity(
    version: str, manifest_sha256: str, split: str, row_count: int, spec: TrainingSpec
) -> dict[str, Any]:
    """Return the identity of a shard.

    Its values determine which rows the positions of the shard denote. If any value differs, the same positions denote
    other rows.
    """
    return {
        "format": STATE_FORMAT,
        "dataset_version": version,
        "manifest_sha256": manifest_sha256,
        "split": split,
        "row_count": row_count,
        "seed": spec.seed,
        "lanes": spec.lanes,
        "window_rows": spec.window_rows,
    }


def extend(spans: list[Span], span: Span) -> None:
    """Append `span` to `spans`. If it continues one of the newest spans, that span is extended instead."""
    for last in spans[-LOOK_BACK:]:
        if last[0] == span[0] and last[3] == span[3] and last[2] == span[1]:
            last[2] = span[2]
            return
    spans.append(list(span))


def merge_reports(
    reports: Sequence[Sequence[Mapping[str, Any]]], world_size: int, before: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the positions of all shards for a checkpoint.

    `reports` are the reports since the last checkpoint, oldest first. Each has the result of `ProgramShards.take` for
    each rank. `before` is this function's result for the previous checkpoint.
    """
    merged = {name: dict(one) for name, one in before.items()}
    for report in reports:
        for name in sorted({name for said in report for name in said}):
            parts = [said.get(name) for said in report]
            about = next(part for part in parts if part is not None)
            known = merged.get(name, {})
            spans = join_spans(known.get("given", ()), [span for part in parts if part for span in part["given"]])
            places = _settled(
                [part["place"] if part else place_before(known, rank, world_size) for rank, part in enumerate(parts)],
                about["shard"]["row_count"],
            )
            merged[name] = {
                **about["shard"],
                "world_size": world_size,
                "places": places[:1] if all(place == places[0] for place in places) else places,
                "given": spans,
            }
    return merged


def place_before(known: Mapping[str, Any], rank: int, world_size: int) -> list[int] | None:
    """Return the last known place of a rank.

    The rank has not read the shard in this attempt. None means the beginning.
    """
    places: list[list[int] | None] = known.get("places") or [None]
    if len(places) == 1:
        return places[0]
    return places[rank] if known.get("world_size") == world_size else None


def _settled(places: list[list[int] | None], row_count: int) -> list[list[int] | None]:
    """Return the places of all ranks.

    Once the last rank has no rows of an epoch left, all ranks move to the next epoch. A rank that finishes earlier
    cannot know that.
    """
    epoch = min(place[0] for place in places if place)

    def is_out(rank: int, place: list[int]) -> bool:
        if place[0] != epoch:
            return place == [epoch + 1, 0, 0]
        _, base, taken = place
        most = Pass(row_count, base, len(places), keeps_remainder=True).rows_of(rank)
        return base + taken > 0 and taken >= most

    if all(is_out(rank, place) for rank, place in enumerate(places) if place):
        return [[epoch + 1, 0, 0] if place else None for place in places]
    return places


def join_spans(before: Sequence[Span], fresh: Sequence[Span]) -> list[Span]:
    """Return the positions of both in few spans.

    Each position keeps its multiplicity. Only epochs of `fresh` are examined.

    A pass of W ranks takes one span of step 1, up to its first position that was not given, and one span of step W for
    each rank that is ahead of that position. No rank is ahead if the ranks advance in step, or once all have reached
    the end. So a pass that stops before its end, for example in a lost attempt, may keep W spans for good, and so may a
    pass whose ranks drop different last rows. Each pass over the same epoch has spans of its own.
    """
    epochs = sorted({span[0] for span in fresh})
    joined = [span for span in before if span[0] not in epochs]
    for epoch in epochs:
        joined += _joined(epoch, [span for span in (*before, *fresh) if span[0] == epoch])
    return joined


def _joined(epoch: int, spans: Sequence[Span]) -> list[Span]:
    steps = sorted({span[3] for span in spans} | {1})
    blocks = _chained([(start, stop) for _, start, stop, step in spans if step == 1])
    left: list[Span] = []
    for world_size in steps[1:]:
        lanes: dict[int, list[int]] = {}
        for start, stop in _chained([(start, stop) for _, start, stop, step in spans if step == world_size]):
            lanes.setdefault(start, []).append(stop)
        blocks = [(start, _advance(stop, lanes, world_size)) for start, stop in blocks]
        for start in sorted(lanes):
            if all(lanes.get(start + rank) for rank in range(world_size)):
                blocks.append((start, _advance(start, lanes, world_size)))
        left += [[epoch, start, stop, world_size] for start, stops in sorted(lanes.items()) for stop in stops]
    return [[epoch, start, stop, 1] for start, stop in _chained(blocks)] + left


def _chained(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return sorted ranges with adjacent ones joined. All ranges have the same step."""
    ends: dict[int, list[int]] = {}
    chained: list[list[int]] = []
    for start, stop in sorted(ranges):
        number = ends[start].pop() if ends.get(start) else len(chained)
        if number == len(chained):
            chained.append([start, stop])
        chained[number][1] = stop
        ends.setdefault(stop, []).append(number)
    return [(start, stop) for start, stop in chained]


def _advance(stop: int, lanes: dict[int, list[int]], world_size: int) -> int:
    """Return the new end of an extended block.

    The block ends at `stop` and takes the adjoining rows of `lanes`. The rows are removed from `lanes`. The block grows
    by all ranks' rows up to the end of the shortest lane, then by one row of each rank that is ahead.
    """
    while True:
        run = list(itertools.takewhile(lanes.get, range(stop, stop + world_size)))
        if not run:
            return stop
        whole = len(run) == world_size
        rows = min((lanes[start][-1] - start) // world_size for start in run) if whole else 1
        for start in run:
            end = lanes[start].pop()
            if start + rows * world_size < end:
                lanes.setdefault(start + rows * world_size, []).append(end)
        stop += rows * world_size if whole else len(run)


class UnevenRanks(ValueError):
    """Ranks at different places cannot resume on a different number of ranks."""


def place_to_resume(saved: Mapping[str, Any], rank: int, world_size: int, *, goes_on: bool) -> Place:
    """Return the place where a rank resumes.

    `saved` is the shard of the checkpoint, from `merge_reports`. With `goes_on` the rank begins with the rest of the
    epoch, otherwise with the beginning of the epoch, in the same order.

    Ranks that never read the shard do not count: a split that one rank reads belongs to that rank alone. All ranks
    begin in the same epoch, unless each rank resumes from a place of its own. Raises `UnevenRanks`.
    """
    places = [Place(*place) if place else None for place in saved["places"]]
    begun = [place for place in places if place is not None]
    earliest = Place(min((place.epoch for place in begun), default=0))
    if not goes_on:
        return earliest
    if len(places) == 1:
        (place,) = begun
        if saved["world_size"] == world_size:
            return place
        return Place(place.epoch, place.base + saved["world_size"] * place.taken)
    if saved["world_size"] == world_size:
        return places[rank] or earliest
    if any(place.base or place.taken for place in begun):
        raise UnevenRanks(
            f"its {saved['world_size']} workers had read different numbers of rows at the checkpoint, so {world_size} "
            "workers cannot go on from there"
        )
    return earliest


def last_epoch(saved: Mapping[str, Any]) -> int:
    """Return the last epoch with a given row. It is 0 before the first row."""
    return max((span[0] for span in saved["given"]), default=0)


def is_epoch_done(saved: Mapping[str, Any], epoch: int) -> bool:
    """Return whether all ranks have finished `epoch`. Only ranks that read the shard count."""
    return all(place[0] > epoch for place in saved["places"] if place)


def times_given(spans: Iterable[Span], begin: int, end: int) -> NDArray[np.uint8]:
    """Return how often each position was given.

    The positions are [begin, end), and `spans` are those of one epoch; the shape is (end - begin,). 2 stands for twice
    or more.
    """
    times = np.zeros(end - begin, np.uint8)
    for _, start, stop, step in spans:
        # The span's first position at or after `begin`, relative to `begin`.
        first = start - begin if start >= begin else (start - begin) % step
        mine = times[first : max(0, min(stop, end) - begin) : step]
        np.minimum(mine + 1, OFTEN, out=mine)
    return times


def count_given(spans: Iterable[Span], order: EpochOrder, first_row_id: int) -> CoverageCounts:
    """Return how often each row was given.

    The epoch is that of `order`. The function processes positions in blocks of whole windows of all lanes, so that each
    window is computed once. It needs memory for one block, however many rows there are.
    """
    of_epoch = [span for span in spans if span[0] == order.epoch]
    count: Counter[int] = Counter()
    lowest = {often: np.empty(0, np.int64) for often in (0, OFTEN)}
    window = order.lanes * order.window_rows
    block = window * max(1, BLOCK_ROWS // window)
    for begin in range(0, order.row_count, block):
        end = min(begin + block, order.row_count)
        times = times_given(of_epoch, begin, end)
        for often in lowest:
            positions = begin + np.flatnonzero(times == often)
            if len(positions):
                count[often] += len(positions)
                found = np.concatenate([lowest[often], order.rows(positions)])
                lowest[often] = np.sort(found)[:MAX_LISTED]
    return CoverageCounts(
        row_count=order.row_count,
        seen_once=order.row_count - count[0] - count[OFTEN],
        missing=count[0],
        repeated=count[OFTEN],
        missing_row_ids=(first_row_id + lowest[0]).tolist(),
        repeated_row_ids=(first_row_id + lowest[OFTEN]).tolist(),
    )


# --- Checks of reports ---

# The contract's epoch is an int32.
MAX_EPOCHS = 2**31 - 1
WRONG_POSITION = "WRONG_SHARD_POSITION"


def check_shards(
    rank: int,
    said: object,
    identities: Mapping[str, Mapping[str, Any]],
    world_size: int,
    before: Mapping[str, Any],
    *,
    keeps_remainder: bool,
) -> None:
    """Raise `InvalidArgument` for a wrong report.

    The error names the rank, the value and what it must be. `said` is the rank's report, by split. `identities` are
    those of the existing shards. `before` is the result of `merge_reports` for the last report.
    """
    if not isinstance(said, Mapping):
        raise _wrong(rank, "shards", said, "must be shards by the name of their split")
    for split, shard in said.items():
        if split not in identities:
            raise _wrong(rank, "split", split, f"must be one of {', '.join(identities) or 'none'}")
        path = f"shards[{split!r}]"
        if not isinstance(shard, Mapping) or set(shard) != {"shard", "place", "given"}:
            raise _wrong(rank, path, shard, "must have shard, place and given")
        _check_identity(rank, path, shard["shard"], identities[split])
        check = _ShardCheck(rank, path, identities[split]["row_count"], world_size, keeps_remainder)
        check.check_given(shard["given"])
        check.check_place(shard["place"], shard["given"], place_before(before.get(split, {}), rank, world_size))


class _ShardCheck:
    def __init__(self, rank: int, path: str, row_count: int, world_size: int, keeps_remainder: bool) -> None:
        self._rank = rank
        self._path = path
        self._row_count = row_count
        self._world_size = world_size
        self._keeps_remainder = keeps_remainder

    def check_given(self, given: object) -> None:
        """Check the ranges that a rank was given.

        Each range must have every W-th position, lie in the split, and have at least one row.
        """
        if not isinstance(given, list):
            raise _wrong(self._rank, f"{self._path}.given", given, "must be a list of ranges")
        for number, span in enumerate(given):
            path = f"{self._path}.given[{number}]"
            if not _is_ints(span, 4):
                raise _wrong(self._rank, path, span, "must be 4 whole numbers: epoch, start, stop, step")
            epoch, start, stop, step = span
            if step != self._world_size:
                raise _wrong(self._rank, path, span, f"must have the step {self._world_size}, one for each worker")
            if not 0 <= epoch <= MAX_EPOCHS:
                raise _wrong(self._rank, path, span, f"must have an epoch from 0 to {MAX_EPOCHS}")
            if not (0 <= start < stop and (stop - start) % step == 0 and stop - step < self._row_count):
                raise _wrong(
                    self._rank, path, span, f"must be positions from 0 to below {self._row_count}, whole steps apart"
                )

    def check_place(self, place: object, given: Sequence[Sequence[int]], before: Sequence[int] | None) -> None:
        """Check the place of a rank.

        It must be within its pass and, if rows of the pass were given, behind the last of them.
        """
        path = f"{self._path}.place"
        if not _is_ints(place, 3):
            raise _wrong(self._rank, path, place, "must be 3 whole numbers: epoch, base, taken")
        assert isinstance(place, list)
        epoch, base, taken = place
        if not (0 <= epoch <= MAX_EPOCHS and 0 <= base <= self._row_count):
            raise _wrong(
                self._rank, path, place, f"must have an epoch from 0 to {MAX_EPOCHS} and a base from 0 to the "
                f"{self._row_count} rows of the split"
            )  # fmt: skip
        way = Pass(self._row_count, base, self._world_size, self._keeps_remainder)
        most = way.rows_of(self._rank)
        if not 0 <= taken <= most:
            raise _wrong(self._rank, path, place, f"must have taken 0 to {most} rows, those of the rank in this pass")
        if not 0 < taken < most:
            return  # at either end no row need have been given since the last report
        end = way.first_position(self._rank, taken)
        if given:
            if not any(span[0] == epoch and span[2] == end for span in given):
                raise _wrong(self._rank, path, place, f"is at position {end}, where none of the given rows ends")
        elif before is None or list(before) != place:
            raise _wrong(self._rank, path, place, f"must be {before}, as at the last report: no row was given since")


def _check_identity(rank: int, path: str, said: object, identity: Mapping[str, Any]) -> None:
    if not isinstance(said, Mapping):
        raise _wrong(rank, f"{path}.shard", said, "must say which shard it is")
    for key in sorted({*said, *identity}, key=str):
        if key not in identity:
            raise _wrong(rank, f"{path}.shard", key, "is no part of a shard's identity")
        value, wanted = said.get(key), identity[key]
        if type(value) is not type(wanted) or value != wanted:
            raise _wrong(rank, f"{path}.shard.{key}", value, f"must be {wanted!r}, that of this job")


def _is_ints(value: object, count: int) -> bool:
    return isinstance(value, list) and len(value) == count and all(type(one) is int for one in value)


def _wrong(rank: int, path: str, value: object, remedy: str) -> InvalidArgument:
    return InvalidArgument(
        f"rank {rank} reports a wrong position of its data: {path} = {shown(value)} {remedy}; let "
        "ray.train.get_dataset_shard keep the position, and change neither it nor what a report has of it",
        reason=WRONG_POSITION,
        metadata={"ranks": str(rank)},
    )
