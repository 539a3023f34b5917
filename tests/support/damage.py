"""Damaged copies of files for tests."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np


def truncations(data: bytes, parts: int = 50) -> Iterator[tuple[int, bytes]]:
    """(length, beginning) at every 1/`parts`, the empty file first and the whole never."""
    for part in range(parts):
        size = len(data) * part // parts
        yield size, data[:size]


def flips(data: bytes, count: int = 60, seed: int = 0) -> Iterator[tuple[int, bytes]]:
    """(position, copy) with one bit flipped at seeded random places."""
    generator = np.random.default_rng(seed)
    for position in generator.integers(0, len(data), count).tolist():
        damaged = bytearray(data)
        damaged[position] ^= 1 << int(generator.integers(8))
        yield position, bytes(damaged)
