"""The peers on plain Ray Data, in a separate process on the same cluster and store.

They are the tutorial's variant, and the same in an optimised form.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import ray
from pyarrow import fs
from ray.data import DataContext

from benchmarks.data_rows import MEAN, SIDE, STD, digits
from shared.dataset_version.manifest import to_stored
from shared.settings import StoreSettings
from shared.storage import open_store

PIXELS = SIDE * SIDE
FLOATS = pa.fixed_shape_tensor(pa.float32(), [1, SIDE, SIDE])
BATCH_SIZES: Sequence[int | None] = (1024, 4096, 16384, None)
# The form of images in the optimised variant: bytes of a fixed size, or tensors.
FORMS = ("bytes", "tensors")
# The form of images in the tutorial's variant: nested lists, as in the tutorial, or bytes, which it reads faster.
GIVEN_FORMS = ("lists", "bytes")


def connect(address: str) -> None:
    """Connect to Ray; call it once in the process."""
    ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    logging.getLogger("ray.data").setLevel(logging.WARNING)
    context = DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False


def map_batches(settings: StoreSettings, paths: Sequence[str], into: str, batch_size: int | None, form: str) -> float:
    """Run the optimised variant and return seconds.

    It uses zero-copy batches of Arrow, one vectorised pass in place, the same compression and checksums, and no
    dictionaries.
    """

    def run(filesystem: fs.FileSystem) -> None:
        rows = ray.data.read_parquet(list(paths), filesystem=filesystem, columns=["image", "label"])
        rows = rows.map_batches(
            normalised_batch if form == "bytes" else normalised_tensors,
            batch_format="pyarrow",
            batch_size=batch_size,
            zero_copy_batch=True,
        )
        rows.write_parquet(
            into,
            filesystem=filesystem,
            compression="lz4",
            write_page_checksum=True,
            use_dictionary=False,
            write_statistics=["label"],
        )

    return _timed(settings, into, run)


def normalised_batch(batch: pa.Table) -> pa.Table:
    values = _normalised(batch.column("image"))
    made = pa.Array.from_buffers(pa.binary(4 * PIXELS), batch.num_rows, [None, pa.py_buffer(values)])
    return pa.table({"image": made, "label": batch.column("label")})


def normalised_tensors(batch: pa.Table) -> pa.Table:
    storage = pa.FixedSizeListArray.from_arrays(pa.array(_normalised(batch.column("image"))), PIXELS)
    return pa.table({"image": pa.ExtensionArray.from_storage(FLOATS, storage), "label": batch.column("label")})


def _normalised(column: pa.ChunkedArray) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    images = column.chunk(0) if column.num_chunks == 1 else pa.concat_arrays(column.chunks)
    pixels = np.frombuffer(images.buffers()[1], np.uint8)[images.offset * PIXELS :][: len(images) * PIXELS]
    values = pixels.astype(np.float32)
    values *= 1 / (255 * STD)
    values -= MEAN / STD
    return values


def row_map(settings: StoreSettings, row_count: int, into: str, form: str) -> float:
    """Run the variant of Ray's tutorial and return seconds.

    It makes one Python call a row; `form` is one of `GIVEN_FORMS`.
    """
    rows, store = digits(row_count), open_store(settings)
    if form == "lists":
        images = rows.column("image").combine_chunks().to_numpy_ndarray().tolist()
        rows = pa.table({"image": pa.array(images, pa.list_(pa.list_(pa.uint8()))), "label": rows.column("label")})
    else:
        rows = to_stored(rows)
    path = f"{into}-given/{form}.parquet"
    store.filesystem().create_dir(f"{into}-given", recursive=True)
    pq.write_table(rows, path, filesystem=store.filesystem(), compression="lz4")

    def run(filesystem: fs.FileSystem) -> None:
        ray.data.read_parquet(path, filesystem=filesystem).map(normalised_row).write_parquet(
            into, filesystem=filesystem
        )

    took_s = _timed(settings, into, run)
    store.delete_folder(f"{into}-given")
    return took_s


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
