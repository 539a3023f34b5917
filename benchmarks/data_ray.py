"""The peers on plain Ray Data, in a process of their own on the same cluster and store: the tutorial's way, and well done."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import ray
from pyarrow import fs
from ray.data import DataContext

from benchmarks.data_rows import MEAN, SIDE, STD
from shared.settings import StoreSettings
from shared.storage import open_store

PIXELS = SIDE * SIDE
FLOATS = pa.fixed_shape_tensor(pa.float32(), [1, SIDE, SIDE])
BATCH_SIZES: Sequence[int | None] = (1024, 4096, 16384, None)


def connect(address: str) -> None:
    """To be called once in the process."""
    ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    context = DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False


def map_batches(settings: StoreSettings, paths: Sequence[str], into: str, batch_size: int | None) -> float:
    """Zero-copy batches of Arrow, one vectorised pass in place, the same compression and checksums. Returns seconds."""

    def run(filesystem: fs.FileSystem) -> None:
        rows = ray.data.read_parquet(list(paths), filesystem=filesystem, columns=["image", "label"])
        rows = rows.map_batches(normalised_batch, batch_format="pyarrow", batch_size=batch_size, zero_copy_batch=True)
        rows.write_parquet(into, filesystem=filesystem, compression="lz4", write_page_checksum=True)

    return _timed(settings, into, run)


def normalised_batch(batch: pa.Table) -> pa.Table:
    images = batch.column("image").combine_chunks()
    if isinstance(images, pa.ChunkedArray):
        images = pa.concat_arrays(images.chunks)
    pixels = np.frombuffer(images.buffers()[1], np.uint8)[images.offset * PIXELS :][: len(images) * PIXELS]
    values = pixels.astype(np.float32)
    values *= 1 / (255 * STD)
    values -= MEAN / STD
    storage = pa.FixedSizeListArray.from_arrays(pa.array(values), PIXELS)
    return pa.table({"image": pa.ExtensionArray.from_storage(FLOATS, storage), "label": batch.column("label")})


def row_map(settings: StoreSettings, path: str, into: str) -> float:
    """As in Ray's tutorial: one Python call a row. Returns seconds."""

    def run(filesystem: fs.FileSystem) -> None:
        rows = ray.data.read_parquet(path, filesystem=filesystem).map(normalised_row)
        rows.write_parquet(into, filesystem=filesystem)

    return _timed(settings, into, run)


def normalised_row(row: dict[str, Any]) -> dict[str, Any]:
    image = row["image"]
    pixels = np.frombuffer(image, np.uint8) if isinstance(image, bytes) else np.array(list(image), np.uint8)
    values = pixels.reshape(1, SIDE, SIDE).astype(np.float32) / 255
    return {"image": (values - MEAN) / STD, "label": row["label"]}


def _timed(settings: StoreSettings, into: str, run: Callable[[fs.FileSystem], None]) -> float:
    store = open_store(settings)
    began = time.perf_counter()
    run(store.filesystem())
    took_s = time.perf_counter() - began
    store.delete_folder(into)
    return took_s
