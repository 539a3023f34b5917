"""Which rows repeat the value of an earlier one, for columns of any number of rows.

A value becomes a key of 128 bits: numbers exactly, everything else by XXH3-128 of its bytes (two of 10^12 values share
one with a probability of 10^-15).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.types as kinds
import xxhash

from data_service.domain.statistics.bytes_of import byte_slices
from data_service.domain.statistics.hashing import hash_words, words_of
from data_service.domain.statistics.tensors import tensor_rows

Mask = npt.NDArray[np.bool_]
Ordinals = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Keys:
    """Two words a value. The high one looks random, so values seldom share it."""

    high: npt.NDArray[np.uint64]
    low: npt.NDArray[np.uint64]

    def __len__(self) -> int:
        return len(self.high)

    def at(self, rows: Any) -> Keys:
        return Keys(self.high[rows], self.low[rows])

    @classmethod
    def joined(cls, parts: Sequence[Keys]) -> Keys:
        empty = [np.empty(0, np.uint64)]
        return cls(
            np.concatenate(empty + [part.high for part in parts]), np.concatenate(empty + [part.low for part in parts])
        )


def keys_of(array: pa.Array) -> Keys:
    """Of values without nulls. -0.0 is 0.0, and NaN is equal to NaN."""
    if isinstance(array.type, pa.FixedShapeTensorType):
        rows = tensor_rows(array)
        if rows.dtype.kind == "f":
            rows = rows + rows.dtype.type(0)
            rows[np.isnan(rows)] = np.nan
        return _digests(np.ascontiguousarray(row).data.cast("B") for row in rows)
    if _is_bytes(array.type):
        return _digests(byte_slices(array))
    words = words_of(array)
    return Keys(hash_words(words), words if words.ndim == 1 else np.ascontiguousarray(words[:, 0]))


class KeySet:
    """A growing set of keys of 16 bytes each, in runs of which each is at most half as long as the one before.

    A run is in the order of the high words; keys that share one stand next to each other in any order.
    """

    def __init__(self) -> None:
        self._runs: list[Keys] = []

    def add_new(self, keys: Keys) -> Mask:
        """Adds the keys; true where one was there already, or earlier among these."""
        order = np.lexsort((keys.low, keys.high))  # stable: of equal keys the earlier row comes first
        ordered = keys.at(order)
        repeats = np.empty(len(keys), np.bool_)
        repeats[order] = _equals_previous(ordered) | self._contains(ordered)
        self._append(ordered.at(~repeats[order]))
        return repeats

    def _contains(self, keys: Keys) -> Mask:
        found = np.zeros(len(keys), np.bool_)
        for run in self._runs:
            places = np.searchsorted(run.high, keys.high)
            while True:
                alike = (places < len(run)) & (run.high[np.minimum(places, len(run) - 1)] == keys.high)
                if not alike.any():
                    break
                found |= alike & (run.low[np.minimum(places, len(run) - 1)] == keys.low)
                places = np.where(alike, places + 1, len(run))
        return found

    def _append(self, run: Keys) -> None:
        if not len(run):
            return
        while self._runs and len(self._runs[-1]) < 2 * len(run):
            run = _merged(self._runs.pop(), run)
        self._runs.append(run)


@dataclass(frozen=True)
class Repeats:
    """By check: the ordinals, ascending, of the rows that repeat the value of an earlier one."""

    ordinals: Mapping[int, Ordinals]

    def find(self, check: int, array: pa.Array, ordinals: Ordinals) -> Mask:  # noqa: ARG002
        """Of rows that pass everything so far and are not null: which are repeats."""
        repeated = self.ordinals.get(check, np.empty(0, np.int64))
        places = np.searchsorted(repeated, ordinals)
        if not len(repeated):
            return np.zeros(len(ordinals), np.bool_)
        found: Mask = repeated[np.minimum(places, len(repeated) - 1)] == ordinals
        return found


class UniqueKeys:
    """The keys of a part's rows with the rows' ordinals: 24 bytes a row and check. Picklable.

    `quarantines` says of each check, by its index, whether repeats are left out: the next check then does not see them.
    """

    def __init__(self, quarantines: Mapping[int, bool]) -> None:
        self._quarantines = dict(quarantines)
        self._parts: dict[int, list[tuple[Keys, Ordinals]]] = {check: [] for check in quarantines}

    def add(self, check: int, array: pa.Array, ordinals: Ordinals) -> None:
        """Values without nulls."""
        self._parts[check].append((keys_of(array), ordinals))

    def merge(self, other: UniqueKeys) -> None:
        """Takes in the keys of another part. A part that knew of no checks, as it had no rows, fits any other."""
        for check, parts in other._parts.items():
            self._quarantines.setdefault(check, other._quarantines[check])
            self._parts.setdefault(check, []).extend(parts)

    def repeats(self) -> Repeats:
        """Of equal values the one with the lowest ordinal stays."""
        found: dict[int, Ordinals] = {}
        left_out = np.empty(0, np.int64)
        for check, parts in sorted(self._parts.items()):
            keys = Keys.joined([keys for keys, _ in parts])
            ordinals = np.concatenate([np.empty(0, np.int64), *(ordinals for _, ordinals in parts)])
            if len(left_out):
                there = ~np.isin(ordinals, left_out)
                keys, ordinals = keys.at(there), ordinals[there]
            order = np.lexsort((ordinals, keys.low, keys.high))
            found[check] = np.sort(ordinals[order][_equals_previous(keys.at(order))])
            if self._quarantines[check]:
                left_out = np.union1d(left_out, found[check])
        return Repeats(found)


def _equals_previous(ordered: Keys) -> Mask:
    equal = np.zeros(len(ordered), np.bool_)
    equal[1:] = (ordered.high[1:] == ordered.high[:-1]) & (ordered.low[1:] == ordered.low[:-1])
    return equal


def _merged(long: Keys, short: Keys) -> Keys:
    places = np.searchsorted(long.high, short.high)
    return Keys(np.insert(long.high, places, short.high), np.insert(long.low, places, short.low))


def _digests(values: Any) -> Keys:
    words = np.frombuffer(b"".join(xxhash.xxh3_128_digest(value) for value in values), np.uint64).reshape(-1, 2)
    return Keys(np.ascontiguousarray(words[:, 0]), np.ascontiguousarray(words[:, 1]))


def _is_bytes(arrow_type: pa.DataType) -> bool:
    return bool(
        kinds.is_string(arrow_type)
        or kinds.is_large_string(arrow_type)
        or kinds.is_binary(arrow_type)
        or kinds.is_large_binary(arrow_type)
        or kinds.is_fixed_size_binary(arrow_type)
    )
