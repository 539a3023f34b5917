"""What `millrace train create` with only a version trains, and how good that is: the median over seeds."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from google.protobuf import json_format

from millrace.data.v1.data_service_pb2 import ImportSource
from millrace.train.v1 import resources_pb2
from millrace_client.specs import csv_source, idx_source, image_folder_source
from shared.checkpoint import CheckpointRegistry
from shared.settings import StoreSettings
from shared.storage import ObjectStore, open_store
from tests.support.real_data import real_data
from tests.support.service_process import store_environ
from tests.support.transforming import rows_of
from tests.support.versions_here import import_here, prepare_here, suggest_here


@dataclass(frozen=True)
class Bar:
    """`metric` of the best checkpoint over validation rows, the median of so many seeds."""

    sources: Callable[[Path], list[ImportSource]]
    metric: str
    seeds: int
    passed: Callable[[float, float], bool]
    guess: Callable[[ObjectStore, str, str, str], float]


def accuracy_of_the_commonest(store: ObjectStore, version: str, label: str, split: str) -> float:
    labels = rows_of(store, version)[split][label]
    return max(map(labels.count, set(labels))) / len(labels)


def rmse_of_the_mean(store: ObjectStore, version: str, label: str, split: str) -> float:
    """Of answering each row with the mean over the training rows."""
    rows = rows_of(store, version)
    return float(np.sqrt(np.mean((np.array(rows[split][label]) - np.mean(rows["train"][label])) ** 2)))


def digits(data: Path) -> list[ImportSource]:
    folder = data / "mnist" / "MNIST" / "raw"
    pairs = {"train": "train", "test": "t10k"}
    return [
        idx_source(split, *(folder / f"{name}-{kind}.gz" for kind in ("images-idx3-ubyte", "labels-idx1-ubyte")))
        for split, name in pairs.items()
    ]


def photos(data: Path) -> list[ImportSource]:
    return [image_folder_source(split, data / "ants_bees" / split) for split in ("train", "val")]


def table(name: str) -> Callable[[Path], list[ImportSource]]:
    return lambda data: [csv_source("train", data / "tabular" / f"{name}.csv")]


BARS = {
    "penguins": Bar(table("penguins"), "accuracy", 5, lambda it, _: it >= 0.95, accuracy_of_the_commonest),
    "taxis": Bar(table("taxis"), "rmse", 5, lambda it, guess: it <= guess / 2, rmse_of_the_mean),
    "ants-bees": Bar(photos, "accuracy", 5, lambda it, guess: it > guess, accuracy_of_the_commonest),
    "digits": Bar(digits, "accuracy", 5, lambda it, _: it >= 0.97, accuracy_of_the_commonest),
}


@pytest.mark.long
@pytest.mark.timeout(3 * 3600)
@pytest.mark.parametrize("dataset", BARS)
def test_a_version_alone_is_enough_to_train_something_good(dataset: str, tmp_path: Path) -> None:
    data, bar = real_data(), BARS[dataset]
    store = open_store(StoreSettings(url=(tmp_path / "store").as_uri()))
    source = f"datasets/{dataset}/versions/v1"
    import_here(store, source, data, bar.sources(data))
    reached, guessed = [], []
    for seed in range(1, bar.seeds + 1):
        answer, version = suggest_here(store, source), source
        if answer.HasField("preparation"):
            version = f"datasets/{dataset}/versions/seed{seed}"
            prepare_here(store, version, answer.preparation, seed)
            answer = suggest_here(store, version, answer.spec)
        answer.spec.seed = seed
        reached.append(trained(store, tmp_path, answer.spec, f"seed{seed}")[f"validation_{bar.metric}"])
        guessed.append(bar.guess(store, version, answer.spec.label_column, answer.spec.validation_split))
    shown = ", ".join(f"{one:.4f}" for one in reached)
    print(f"{dataset}: {bar.metric} {shown}; median {statistics.median(reached):.4f}; guessing {guessed[0]:.4f}")
    assert bar.passed(statistics.median(reached), statistics.median(guessed))


def trained(store: ObjectStore, folder: Path, spec: resources_pb2.TrainingSpec, job: str) -> dict[str, float]:
    """The metrics of the run's best checkpoint."""
    file = folder / f"{job}.json"
    file.write_text(json_format.MessageToJson(spec))
    command = [sys.executable, "-m", "train_service.torchrun_main", str(file), "--job", job]
    run = subprocess.run(
        command,
        env={**os.environ, **store_environ(store.settings)},
        capture_output=True,
        text=True,
        check=False,
        timeout=3600,  # a busy machine takes many times as long
    )
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]
    entries = CheckpointRegistry(store, f"trainingJobs/{job}").entries()
    best = run.stdout.rpartition("best ")[2].split()[0]
    return next(dict(entry.metrics) for entry in entries if entry.name == best)
