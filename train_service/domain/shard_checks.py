"""Whether what a rank says of its shards can be: a program's process holds the rank's end, and may say anything.

A report has for each split what `VersionShard.take` makes: the identity of the shard, the place of the rank, and the
ranges of positions that it was given since its last report. Each is compared with what the attempt knows by itself:
the version and the job's specification, the bounds of the split, the number of workers, and the place before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from shared.errors import InvalidArgument, shown
from train_service.domain.shard_positions import Pass, place_before

# An epoch is an int32 of the contract.
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
    """`said` is what the rank reported, by split. `identities` are those of the shards that there are; `before` is what
    `merge_reports` made of the last report. Raises `InvalidArgument` naming the rank, the value and what it must be."""
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
        """Each range of a rank is of every W-th position, in the split, and of one row at least."""
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
        """In the bounds of its pass; and where rows of it were given, behind the last one that was."""
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
