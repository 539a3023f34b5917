"""Writes IDX files for tests."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path
from typing import Any

import numpy as np

TYPE_CODES = {"u1": 0x08, "i1": 0x09, "i2": 0x0B, "i4": 0x0C, "f4": 0x0D, "f8": 0x0E}


def idx_bytes(values: np.ndarray[Any, Any]) -> bytes:
    """The whole file, uncompressed."""
    code = TYPE_CODES[values.dtype.str[1:]]
    header = struct.pack(f">HBB{values.ndim}I", 0, code, values.ndim, *values.shape)
    return header + values.astype(values.dtype.newbyteorder(">")).tobytes()


def write_idx(path: Path, values: np.ndarray[Any, Any]) -> str:
    """They are gzipped if the name ends so. Return the file's URI."""
    data = idx_bytes(values)
    path.write_bytes(gzip.compress(data, 1, mtime=0) if path.suffix == ".gz" else data)
    return path.as_uri()


def digits(rows: int, seed: int = 0) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Images (rows, 28, 28) that differ from one another, and labels (rows)."""
    images = np.random.default_rng(seed).integers(0, 256, (rows, 28, 28), np.uint8)
    return images, (np.arange(rows) % 10).astype(np.uint8)
