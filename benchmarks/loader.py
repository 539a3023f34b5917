"""`make bench-loader`: rows/s of shuffled, normalised training tensors, ours over torchvision's MNIST in a DataLoader.

Both read the same digits (MNIST_ROOT, or ../shared/data/mnist) and hand over float32 (128, 1, 28, 28) batches. Runs are
interleaved; figures are medians. The last line is one JSON object.
"""

from __future__ import annotations

import gzip
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import DataLoader
from torchvision import datasets, transforms

from shared.dataset_version import VersionReader, load_version
from shared.model_spec import ModelSpec
from shared.settings import StoreSettings
from shared.storage import ObjectStore, open_store
from tests.support.versions import commit_version
from train_service.domain.spec import TrainingSpec
from train_service.loader import Loader, Plan
from train_service.preprocessing import Preprocessing
from train_service.row_cache import RowCache

BATCH = 128
PAIRS = 7
MEAN, STD = 0.1307, 0.3081
VERSION = "datasets/digits/versions/v1"
SPEC = TrainingSpec(
    dataset_version=VERSION,
    transform={"steps": [{"toFloat": {}}, {"normalize": {"mean": [MEAN], "std": [STD]}}]},
    model=ModelSpec(builder="torchvision.resnet18", in_channels=1, num_classes=10),
    epochs=1,
    global_batch_size=BATCH,
)


def main() -> None:
    root = Path(os.environ.get("MNIST_ROOT") or "../shared/data/mnist")
    if not (root / "MNIST" / "raw").is_dir():
        sys.exit(f"bench-loader: no {root}/MNIST/raw; set MNIST_ROOT to a folder that torchvision's MNIST reads")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        plain = _unpacked(root, Path(scratch))
        digits = datasets.MNIST(str(plain), train=True)
        store = open_store(StoreSettings(url=(Path(scratch) / "store").as_uri()))
        commit_version(store, VERSION, {"train": (digits.data.numpy(), digits.targets.numpy())})
        peers = {f"torch_dataloader_{workers}_workers": _torch(plain, workers) for workers in (0, 2)}
        print(json.dumps(_measure(len(digits), {"millrace": _ours(store), **peers})))


def _ours(store: ObjectStore) -> Callable[[], Iterable[int]]:
    def batches() -> Iterable[int]:
        version = load_version(store, VERSION)
        preprocessing = Preprocessing(SPEC, version.columns)
        cache = RowCache(VersionReader(store, version), "train", preprocessing.columns, "label", 10, 1 << 29)
        plan = Plan(seed=1, lanes=24, global_batch=BATCH, epochs=1, rank=0, world_size=1)
        loader = Loader(cache, preprocessing, plan)
        return (len(torch.from_numpy(batch.inputs)) for batch in loader.batches(0))

    return batches


def _torch(root: Path, workers: int) -> Callable[[], Iterable[int]]:
    def batches() -> Iterable[int]:
        prepare = transforms.Compose([transforms.ToTensor(), transforms.Normalize(MEAN, STD)])
        digits = datasets.MNIST(str(root), train=True, transform=prepare)
        loader = DataLoader(digits, BATCH, shuffle=True, num_workers=workers)
        return (len(images) for images, _ in loader)

    return batches


def _measure(rows: int, contenders: dict[str, Callable[[], Iterable[int]]]) -> dict[str, float]:
    rates: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(PAIRS):
        for name, batches in contenders.items():
            started = time.perf_counter()
            seen = sum(batches())
            rates[name].append(seen / (time.perf_counter() - started))
            assert seen == rows, f"{name} gave {seen} of {rows} rows"
    medians = {name: statistics.median(values) for name, values in rates.items()}
    best_peer = max(value for name, value in medians.items() if name != "millrace")
    figures = {f"{name}_rows_per_s": round(value) for name, value in medians.items()}
    return {**figures, "loader_vs_torch_dataloader": round(float(np.divide(medians["millrace"], best_peer)), 2)}


def _unpacked(root: Path, scratch: Path) -> Path:
    """torchvision reads plain IDX files only."""
    folder = scratch / "MNIST" / "raw"
    folder.mkdir(parents=True)
    for file in (root / "MNIST" / "raw").iterdir():
        data = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
        (folder / file.name.removesuffix(".gz")).write_bytes(data)
    return scratch


if __name__ == "__main__":
    main()
