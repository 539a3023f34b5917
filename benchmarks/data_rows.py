"""The rows of all contenders: the MNIST digits, repeated."""

from __future__ import annotations

import gzip
import os
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from shared.dataset_version.manifest import tensor_array

SIDE = 28
MEAN, STD = 0.1307, 0.3081
# IDX: magic, number of items, and for images their height and width.
IMAGES_HEADER, LABELS_HEADER = 16, 8


def mnist_folder() -> Path:
    return Path(os.environ.get("MNIST_ROOT") or "../shared/data/mnist") / "MNIST" / "raw"


def mnist_arrays(row_count: int) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Return images (rows, 28, 28) and labels (rows,)."""
    images = np.concatenate([_idx(f"{part}-images-idx3-ubyte.gz", IMAGES_HEADER) for part in ("train", "t10k")])
    labels = np.concatenate([_idx(f"{part}-labels-idx1-ubyte.gz", LABELS_HEADER) for part in ("train", "t10k")])
    repeated = np.resize(images.reshape(-1, SIDE, SIDE), (row_count, SIDE, SIDE))
    return repeated, np.resize(labels.astype(np.int64), row_count)


def digits(row_count: int) -> pa.Table:
    """Return `image`, uint8 tensors of (28, 28), and `label`, int64."""
    images, labels = mnist_arrays(row_count)
    return pa.table({"image": tensor_array(images), "label": labels})


def _idx(name: str, header_bytes: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.frombuffer(gzip.decompress((mnist_folder() / name).read_bytes()), np.uint8, offset=header_bytes)
