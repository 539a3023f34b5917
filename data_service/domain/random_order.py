"""Row ids in an order that is random, and the same for the same seed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from data_service.domain.statistics.hashing import mix

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_CHUNK_ROWS = 1 << 18
_RADIX_BITS = 16


def row_hashes(seed: int, row_ids: NDArray[np.int64]) -> NDArray[np.uint64]:
    """SplitMix64 (Steele, Lea and Flood 2014) of each row id, in a stream that the seed begins: a bijection of the row
    ids, so no two tie. Overflow is meant."""
    return mix(mix(np.array([seed], np.uint64)) + row_ids.astype(np.uint64) * _GOLDEN)


def hashes_of_rank(seed: int, row_count: int, ranks: Sequence[int]) -> NDArray[np.uint64]:
    """For each rank r the hash that exactly r rows' hashes are below, in memory that hardly grows with the rows: first
    the hashes are counted by their upper bits, then only those around the ranks are sorted."""

    def upper_bits() -> Iterator[tuple[NDArray[np.uint64], NDArray[np.int64]]]:
        for first in range(0, row_count, _CHUNK_ROWS):
            hashes = row_hashes(seed, np.arange(first, min(first + _CHUNK_ROWS, row_count), dtype=np.int64))
            yield hashes, (hashes >> np.uint64(64 - _RADIX_BITS)).astype(np.int64)

    counts = np.zeros(1 << _RADIX_BITS, np.int64)
    for _, buckets in upper_bits():
        counts += np.bincount(buckets, minlength=len(counts))
    upto = np.cumsum(counts)
    wanted = [int(np.searchsorted(upto, rank, side="right")) for rank in ranks]
    found: dict[int, list[NDArray[np.uint64]]] = {bucket: [] for bucket in wanted}
    for hashes, buckets in upper_bits():
        for bucket, pieces in found.items():
            pieces.append(hashes[buckets == bucket])
    bounds = []
    for rank, bucket in zip(ranks, wanted, strict=True):
        if bucket == len(counts):  # no row is left for the later shares
            bounds.append(np.iinfo(np.uint64).max)
            continue
        rows_before = int(upto[bucket] - counts[bucket])
        bounds.append(int(np.sort(np.concatenate(found[bucket]))[rank - rows_before]))
    return np.array(bounds, np.uint64)
