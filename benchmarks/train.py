"""`make bench-train`: loader, step, checkpoint, recovery and whole loops of the train service, and ten kills' cost.

Peers run in the same run. Contenders take turns; ratios are of medians. The last line is one JSON object, which lists
the bars that are met.

    python -m benchmarks.train [--rows 200000] [--pairs 7] [--only loader bytes steps programs recovery kills]
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
import torch
from torchvision import datasets

from benchmarks import train_loader, train_programs, train_recovery, train_steps
from benchmarks.cpu_idle import come_to_rest
from benchmarks.data_rows import mnist_arrays, mnist_folder
from benchmarks.signals import exit_on_signals
from shared.settings import StoreSettings
from shared.storage import ObjectStore, open_store
from tests.support.ray_head import RayHead, ray_head
from tests.support.training import train_stack
from tests.support.versions import commit_version
from tests.support.witnessed import killed_beside_undisturbed, witness_environment, witnessed_stack

PARTS = ("loader", "bytes", "steps", "programs", "recovery", "kills")
# The tutorial's variant prepares a few thousand rows a second.
ROW_MAP_ROWS = 20_000
# The rows of an epoch of the step loops.
STEP_ROWS = 25_600
BARS = {
    "share_of_pyarrow_limit": (0.6, "at least"),
    "loader_vs_torch_dataloader": (4.0, "at least"),
    "loader_vs_ray_map_batches": (10.0, "at least"),
    "bytes_per_rank_times_workers": (1.2, "at most"),
    "step_overhead": (1.05, "at most"),
    "checkpoint_cost": (1.03, "at most"),
    "whole_loop_vs_ray_train": (1.05, "at most"),
    "report_100mb_vs_ray_train": (1.3, "at most"),
    "recovery_vs_ray_train": (0.7, "at most"),
    "missing_rows": (0, "at most"),
    "repeated_rows": (0, "at most"),
}
KILLS, KILLED_WORKERS, KILLED_EPOCHS, KILLED_SEED = 10, 2, 12, 11


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench-train")
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    given = parser.parse_args()
    exit_on_signals()
    if not mnist_folder().is_dir():
        sys.exit(f"bench-train: no {mnist_folder()}; set MNIST_ROOT to a folder that torchvision's MNIST reads")
    torch.set_num_threads(1)
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        if "steps" in given.only:
            figures |= _steps(folder, given.pairs)
        if {"loader", "bytes"} & set(given.only):
            store = _digits(folder, given.rows)
            if "bytes" in given.only:
                figures["bytes_per_rank_times_workers"] = round(train_loader.bytes_read_times_workers(store, 3), 3)
        if "loader" in given.only:
            with _driven_head():
                figures |= _loader(folder, store, given.rows, given.pairs)
        if "programs" in given.only:
            figures |= _programs(folder / "programs", given.pairs)
        if "recovery" in given.only:
            figures |= _recovery(folder / "recovery", given.pairs)
        if "kills" in given.only:
            figures |= _kills(folder / "kills")
    print(json.dumps(_report(figures, given)))


@contextmanager
def _driven_head() -> Iterator[RayHead]:
    """Run a Ray head with this process as its driver."""
    with ray_head(num_cpus=4) as head:
        ray.init(address=head.address, log_to_driver=False)
        try:
            yield head
        finally:  # before its head ends: otherwise Ray ends this process, and hides the error
            ray.shutdown()


def _digits(folder: Path, rows: int) -> ObjectStore:
    images, labels = mnist_arrays(rows)
    store = open_store(StoreSettings(url=(folder / "store").as_uri()))
    commit_version(store, train_loader.VERSION, {"train": (images, labels)})
    return store


def _loader(folder: Path, store: ObjectStore, rows: int, pairs: int) -> dict[str, float]:
    files = sorted((folder / "store" / train_loader.VERSION / "data").rglob("*.parquet"))
    plain = _unpacked(folder / "plain")
    train_rows = len(datasets.MNIST(str(plain), train=True))
    contenders: dict[str, tuple[Callable[[], int], int]] = {
        "millrace": (train_loader.ours(store), rows),
        "pyarrow_limit": (train_loader.pyarrow_limit(files), rows),
        # All rows of the folder: torchvision's data set cannot be repeated.
        **{f"torch_dataloader_{n}": (train_loader.torch_dataloader(plain, n), train_rows) for n in (0, 1, 2)},
        "ray_map_batches": (train_loader.ray_map_batches(files), rows),
        "ray_row_map": (train_loader.ray_row_map(files, ROW_MAP_ROWS), ROW_MAP_ROWS),
    }
    rates: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(pairs):
        for name, (epoch, wanted) in contenders.items():
            come_to_rest()
            rates[name].append(train_loader.rows_per_second(epoch, wanted))
    medians = {name: statistics.median(values) for name, values in rates.items()}
    best = max(value for name, value in medians.items() if name.startswith("torch"))
    mine = medians["millrace"]
    return {
        "share_of_pyarrow_limit": round(mine / medians["pyarrow_limit"], 3),
        "loader_vs_torch_dataloader": round(mine / best, 2),
        "loader_vs_ray_map_batches": round(mine / medians["ray_map_batches"], 2),
        "loader_vs_ray_row_map": round(mine / medians["ray_row_map"], 1),
        **{f"{name}_rows_per_s": round(value) for name, value in medians.items()},
    }


def _steps(folder: Path, pairs: int) -> dict[str, float]:
    images, labels = mnist_arrays(STEP_ROWS)
    settings = StoreSettings(url=(folder / "steps").as_uri())
    commit_version(open_store(settings), train_loader.VERSION, {"train": (images, labels)})
    return train_steps.measure(settings, images, labels, workers=2, pairs=pairs)


def _programs(folder: Path, pairs: int) -> dict[str, Any]:
    folder.mkdir()
    settings = StoreSettings(url=(folder / "store").as_uri())
    with _driven_head() as head, train_stack(settings, head.address, folder) as stack:
        return train_programs.measure(stack, folder, pairs)


def _recovery(folder: Path, pairs: int) -> dict[str, Any]:
    settings = StoreSettings(url=(folder / "store").as_uri())
    with (
        witnessed_stack(settings, folder) as place,
        witness_environment(folder / "plain") as witness,
        _driven_head() as head,
    ):
        seconds = [(train_recovery.ours(place), train_recovery.plain_ray_train(witness, head)) for _ in range(pairs)]
    ours, plain = [one for one, _ in seconds], [other for _, other in seconds]
    totals = [one["first_step"] for one in ours]
    return {
        "recovery_vs_ray_train": round(statistics.median(totals) / statistics.median(plain), 3),
        "recovery_s": round(statistics.median(totals), 2),
        "recovery_s_range": [round(min(totals), 2), round(max(totals), 2)],
        "recovery_reached_after_s": {name: round(statistics.median(one[name] for one in ours), 2) for name in ours[0]},
        "ray_train_recovery_s": round(statistics.median(plain), 2),
        "ray_train_recovery_s_range": [round(min(plain), 2), round(max(plain), 2)],
    }


def _kills(folder: Path) -> dict[str, Any]:
    with witnessed_stack(StoreSettings(url=(folder / "store").as_uri()), folder) as place:
        proof = killed_beside_undisturbed(
            place, workers=KILLED_WORKERS, kills=KILLS, epochs=KILLED_EPOCHS, seed=KILLED_SEED
        )
    figures = proof.figures()
    return {"kills" if name == "strikes" else name: value for name, value in figures.items() if name != "workers"}


def _unpacked(folder: Path) -> Path:
    """Unpack the files, since torchvision reads only plain IDX files."""
    raw = folder / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for file in mnist_folder().iterdir():
        data = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
        (raw / file.name.removesuffix(".gz")).write_bytes(data)
    return folder


def _report(figures: dict[str, Any], given: argparse.Namespace) -> dict[str, Any]:
    met = {
        name: figures[name] >= bar if sense == "at least" else figures[name] <= bar
        for name, (bar, sense) in BARS.items()
        if name in figures
    }
    bars = {name: f"{sense} {bar}" for name, (bar, sense) in BARS.items()}
    machine = {"cpus": os.cpu_count(), "load_average": round(os.getloadavg()[0], 1)}
    return {**figures, "bars": bars, "met": met, "rows": given.rows, "pairs": given.pairs, "machine": machine}


if __name__ == "__main__":
    main()
