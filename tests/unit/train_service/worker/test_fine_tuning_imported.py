"""Weights that have learnt another task, taken home and brought in again, beat a start from scratch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import millrace_client as mc
from millrace_client.train import TrainClient
from shared.model_spec import ModelSpec
from shared.storage import ObjectStore
from tests.support.train_server import with_client
from tests.support.versions import commit_version
from tests.unit.train_service.worker.test_loop import ALONE, SPEC, config_of, entries, new_job
from train_service.domain.spec import OptimizerSpec
from train_service.worker.loop import Run

TEN, TWO = "datasets/ten/versions/v1", "datasets/two/versions/v1"
MODEL = ModelSpec(builder="torchvision.shufflenet_v2_x0_5", in_channels=1, num_classes=10)
Array = np.ndarray[Any, Any]


def stripes(rows: int, seed: int) -> tuple[Array, Array]:
    """Noisy images uint8 (rows, 28, 28), and in which of ten places each has a stripe."""
    generator = np.random.default_rng(seed)
    places = generator.integers(0, 10, rows)
    images = generator.integers(0, 120, (rows, 28, 28))
    for row, place in enumerate(places):
        images[row, :, 2 * place + 4 : 2 * place + 6] += 120
    return images.astype(np.uint8), places.astype(np.int64)


def odd_places(rows: int, seed: int) -> tuple[Array, Array]:
    images, places = stripes(rows, seed)
    return images, places % 2


def accuracy(store: ObjectStore, job: str, **changes: Any) -> float:
    """Of the last checkpoint of a run."""
    spec = replace(
        SPEC,
        optimizer=OptimizerSpec(learning_rate=0.003),
        checkpoint_every_steps=0,
        **changes,
    )
    new_job(store, job, spec)
    Run(config_of(store, job, spec=spec), ALONE).run()
    last = entries(store, job)[max(entries(store, job))]
    return last.metrics["validation_accuracy"]


@pytest.mark.long
@pytest.mark.timeout(900)
def test_fine_tuning_from_imported_weights_of_another_task_beats_scratch(store: ObjectStore, tmp_path: Path) -> None:
    commit_version(store, TEN, {"train": stripes(1_500, 1), "validation": stripes(200, 2)})
    commit_version(store, TWO, {"train": odd_places(60, 3), "validation": odd_places(400, 4)})
    ten = {"dataset_version": TEN, "model": MODEL, "epochs": 3, "global_batch_size": 50}
    assert accuracy(store, "trainingJobs/ten", **ten) > 0.9

    def brought_in(train: TrainClient) -> str:
        train.download_checkpoint("trainingJobs/ten", tmp_path / "ten")
        spec = mc.import_spec(
            model=MODEL.builder,
            in_channels=1,
            num_classes=10,
            input_shape=[28, 28],
            input_dtype="uint8",
            transform=[mc.to_float()],
        )
        made = train.import_checkpoint("brought", tmp_path / "ten" / "model.safetensors", spec)
        return str(made.checkpoint.name)

    brought = with_client(store, brought_in)
    two = {
        "dataset_version": TWO,
        "model": replace(MODEL, num_classes=2),
        "epochs": 4,
        "global_batch_size": 20,
    }
    scratch = accuracy(store, "trainingJobs/scratch", **two)
    tuned = accuracy(store, "trainingJobs/tuned", initial_checkpoint=brought, **two)
    assert tuned > scratch + 0.1, (tuned, scratch)
