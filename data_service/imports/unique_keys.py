"""The keys of checks of uniqueness, over all parts of an import or a transform, in bounded memory.

Keys wait in memory until they take `SPILL_BYTES`. Then they go to buckets on the disk, by their first bits: equal keys
are in the same bucket, so repeats are found in one bucket after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from data_service.domain.checks_rows import Keys, Ordinals, Repeats, UniqueKeys, repeats_among

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
        """Adds the keys of another part."""
        self._waiting.merge(other)
        self._quarantines |= other.quarantines
        if self._waiting.row_count * _ROW.itemsize >= SPILL_BYTES:
            self._spill()

    def repeats(self, raise_if_stopped: Callable[[], None]) -> Repeats:
        """Returns the repeats, as `UniqueKeys.repeats` does for all parts together.

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
