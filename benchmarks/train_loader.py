"""Ready, shuffled, normalised tensors: rows/s of our loader and of its peers, all on the same MNIST rows.

Every contender yields float32 (128, 1, 28, 28) batches of one epoch, except for the limit, which reads in file order.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import ray.data
import torch
from torch.utils.data import DataLoader
from torchvision import datasets, transforms

from shared.dataset_version import VersionReader, load_version
from shared.model_spec import ModelSpec
from shared.storage import ObjectStore
from train_service.domain.order import BatchPlan
from train_service.domain.spec import TrainingSpec
from train_service.loading.loader import Loader, RowCache
from train_service.loading.preprocessing import Preprocessing

BATCH = 128
MEAN, STD = 0.1307, 0.3081
VERSION = "datasets/digits/versions/v1"
CACHE_BYTES = 512 * 1024 * 1024
LOCAL_SHUFFLE_ROWS = 10_000
SPEC = TrainingSpec(
    dataset_version=VERSION,
    transform={"steps": [{"toFloat": {}}, {"normalize": {"mean": [MEAN], "std": [STD]}}]},
    model=ModelSpec(builder="torchvision.resnet18", in_channels=1, num_classes=10),
    epochs=1,
    global_batch_size=BATCH,
)
# Runs an epoch and returns its number of rows.
Epoch = Callable[[], int]


def rows_per_second(epoch: Epoch, rows: int) -> float:
    started = time.perf_counter()
    seen = epoch()
    seconds = time.perf_counter() - started
    assert seen == rows, f"gave {seen} of {rows} rows"
    return rows / seconds


def loader(store: ObjectStore, rank: int = 0, world_size: int = 1) -> tuple[Loader, VersionReader]:
    version = load_version(store, VERSION)
    preprocessing = Preprocessing(SPEC, version.columns)
    reader, classes = VersionReader(store, version), SPEC.model.num_classes
    cache = RowCache(reader, "train", preprocessing.columns, "label", classes, CACHE_BYTES)
    plan = BatchPlan(1, SPEC.lanes, BATCH, 1, rank, world_size)
    return Loader(cache, preprocessing, plan), reader


def ours(store: ObjectStore) -> Epoch:
    """Load from a newly opened version, as at the start of an attempt."""

    def epoch() -> int:
        made, _ = loader(store)
        return sum(len(torch.from_numpy(batch.inputs)) for batch in made.batches(0))

    return epoch


def bytes_read_times_workers(store: ObjectStore, workers: int) -> float:
    """Return the maximum bytes that a rank fetches in an epoch, times the ranks, over the bytes of the version's
    files.
    """

    def fetched(rank: int) -> int:
        made, reader = loader(store, rank, workers)
        for _ in made.batches(0):
            pass
        return reader.bytes_fetched

    size_bytes = load_version(store, VERSION).manifest.size_bytes
    return max(fetched(rank) for rank in range(workers)) * workers / size_bytes


def pyarrow_limit(files: list[Path]) -> Epoch:
    """Read the same Parquet files in file order, with one vectorised conversion to float for each row group."""
    scale, offset = np.float32(1 / 255 / STD), np.float32(MEAN / STD)

    def epoch() -> int:
        rows = 0
        for file in files:
            parquet = pq.ParquetFile(file)
            for number in range(parquet.num_row_groups):
                table = parquet.read_row_group(number, ["image", "label"])
                images = table.column("image").chunk(0)
                pixels = np.frombuffer(images.buffers()[1], np.uint8, len(images) * 784, images.offset * 784)
                ready = pixels.astype(np.float32)
                ready *= scale
                ready -= offset
                rows += len(torch.from_numpy(ready.reshape(-1, 1, 28, 28)))
        return rows

    return epoch


def torch_dataloader(root: Path, workers: int) -> Epoch:
    def epoch() -> int:
        prepare = transforms.Compose([transforms.ToTensor(), transforms.Normalize((MEAN,), (STD,))])
        digits = datasets.MNIST(str(root), train=True, transform=prepare)
        batches: Any = DataLoader(digits, BATCH, shuffle=True, num_workers=workers)
        return sum(len(images) for images, _ in batches)

    return epoch


def ray_map_batches(files: list[Path]) -> Epoch:
    """Load with optimised plain Ray Data: batches as numpy, a local shuffle, torch tensors at the end."""

    def normalize(batch: pa.Table) -> dict[str, np.ndarray[Any, Any]]:
        images = batch.column("image").combine_chunks()
        pixels = np.frombuffer(images.buffers()[1], np.uint8, len(images) * 784, images.offset * 784)
        ready = (pixels.astype(np.float32).reshape(-1, 1, 28, 28) / 255 - MEAN) / STD
        return {"image": ready, "label": batch.column("label").to_numpy()}

    def epoch() -> int:
        given = ray.data.read_parquet(list(map(str, files)), columns=["image", "label"])
        rows = given.map_batches(normalize, batch_format="pyarrow", zero_copy_batch=True)
        return _rows(rows.iter_torch_batches(batch_size=BATCH, local_shuffle_buffer_size=LOCAL_SHUFFLE_ROWS))

    return epoch


def ray_row_map(files: list[Path], limit: int) -> Epoch:
    """Load with the tutorial's variant, on `limit` rows."""

    def normalize(row: dict[str, Any]) -> dict[str, Any]:
        pixels = np.frombuffer(row["image"], np.uint8).reshape(1, 28, 28)
        return {"image": (pixels.astype(np.float32) / 255 - MEAN) / STD, "label": row["label"]}

    def epoch() -> int:
        rows = ray.data.read_parquet(list(map(str, files)), columns=["image", "label"]).limit(limit).map(normalize)
        return _rows(rows.iter_torch_batches(batch_size=BATCH, local_shuffle_buffer_size=LOCAL_SHUFFLE_ROWS))

    return epoch


def _rows(batches: Iterator[dict[str, torch.Tensor]] | Any) -> int:
    return sum(len(batch["image"]) for batch in batches)
