"""Hashes that are the same on every machine and in every run.

They decide which rows a sample takes and how many different values a column has, so they may never change: two versions
made of the same rows would then differ in their reports.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.types as kinds
import xxhash

Hashes = npt.NDArray[np.uint64]

_DECIMAL_BYTES = 16
_ROW_SALT = np.uint64(0x6D696C6C72616365)


def mix(words: npt.NDArray[Any]) -> Hashes:
    """A bijection of 64-bit words whose result looks random.

    Source: the finalizer of SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014).
    """
    z = words.view(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def row_hashes(row_ids: npt.NDArray[np.int64]) -> Hashes:
    """One hash a row; different rows never share one."""
    return mix(row_ids.view(np.uint64) ^ _ROW_SALT)


def float_words(values: npt.NDArray[Any]) -> Hashes:
    """Floats as 64-bit words, equal for equal values: -0.0 as 0.0, and every NaN alike."""
    doubles = values.astype(np.float64) + 0.0
    doubles[np.isnan(doubles)] = np.nan
    return doubles.view(np.uint64)


def words_of(array: pa.Array) -> npt.NDArray[np.uint64]:
    """Values without nulls as words that are equal exactly where the values are: (N,), or (N, 2) for decimals.

    For numbers, booleans, dates, times, timestamps and decimals of 128 bits.
    """
    arrow_type = array.type
    if kinds.is_floating(arrow_type):
        return float_words(array.to_numpy(zero_copy_only=False))
    if kinds.is_boolean(arrow_type):
        return np.asarray(array.to_numpy(zero_copy_only=False), np.uint64)
    if kinds.is_decimal(arrow_type):
        data = np.frombuffer(array.buffers()[1], np.uint64)
        first = array.offset * _DECIMAL_BYTES // 8
        words: npt.NDArray[np.uint64] = data[first : first + 2 * len(array)].reshape(-1, 2)
        return words
    return integers_of(array).view(np.uint64)


def integers_of(array: pa.Array) -> npt.NDArray[Any]:
    """Integers, dates, times and timestamps without nulls as int64 in their own unit; uint64 stays uint64."""
    if kinds.is_temporal(array.type):
        array = array.view(pa.int32() if array.type.bit_width == 32 else pa.int64())
    values: npt.NDArray[Any] = array.to_numpy(zero_copy_only=False)
    return values if values.dtype == np.uint64 else values.astype(np.int64, copy=False)


def hash_words(words: npt.NDArray[np.uint64]) -> Hashes:
    """(N,) or (N, 2) words → N hashes."""
    if words.ndim == 1:
        return mix(words)
    return mix(np.ascontiguousarray(words[:, 0]) ^ mix(np.ascontiguousarray(words[:, 1])))


def hash_bytes(values: Iterable[bytes | memoryview]) -> Hashes:
    """XXH3 of each value's bytes."""
    return np.fromiter((xxhash.xxh3_64_intdigest(value) for value in values), np.uint64)
