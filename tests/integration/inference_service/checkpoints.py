"""A real checkpoint, written as training writes it: ResNet-18 with one channel, ten classes and seeded weights."""

from __future__ import annotations

import functools
import time
from dataclasses import dataclass

import torch
from safetensors.torch import save
from torch import nn

from shared.checkpoint import CheckpointContent, CheckpointEntry, CheckpointRegistry, write_checkpoint
from shared.checkpoint.format import WEIGHTS
from shared.model_spec import ModelSpec
from shared.models import build_model
from shared.resource_log import ResourceLog
from shared.storage import ObjectStore
from tests.support.versions import SCHEMA, columns_of

JOB = "trainingJobs/digits"
DATASET_VERSION = "datasets/digits/versions/v1"
CLASS_NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
MODEL = ModelSpec(builder="torchvision.resnet18", in_channels=1, num_classes=10)
TRANSFORM = {
    "steps": [
        {"column": "image", "toFloat": {}},
        {"column": "image", "normalize": {"mean": [0.1307], "std": [0.3081]}},
    ]
}


@dataclass(frozen=True)
class Written:
    entry: CheckpointEntry
    content: CheckpointContent


def content(accuracy: float, job: str = JOB) -> CheckpointContent:
    return CheckpointContent(
        training_job=job,
        dataset_version=DATASET_VERSION,
        dataset_manifest_sha256="0" * 64,
        step=100,
        epoch=1,
        seed=7,
        metrics={"validation_accuracy": accuracy},
        model=MODEL,
        ingested=columns_of(SCHEMA),
        transforms=[TRANSFORM],
        input_column="image",
        class_names=CLASS_NAMES,
    )


@functools.cache
def make_module() -> nn.Module:
    """Seeded weights, and running statistics of a few batches of noise, so that no layer is an identity."""
    torch.manual_seed(7)
    module = build_model(MODEL)
    with torch.no_grad():
        for _ in range(3):
            module(torch.randn(16, 1, 28, 28))
    return module.eval()


def write(
    store: ObjectStore,
    name: str = "c1",
    *,
    job: str = JOB,
    accuracy: float = 0.9,
    weights: bytes | None = None,
    said: CheckpointContent | None = None,
) -> Written:
    """Commit a checkpoint of `job`. `weights` replaces the file's bytes by others, with a digest that fits them;
    `said` is all that the manifest says."""
    registry = CheckpointRegistry(store, job)
    registry.fence(1)
    folder = f"{registry.data_folder}/{name}-a00001-test"
    files = {WEIGHTS: save(make_module().state_dict()) if weights is None else weights}
    said = said or content(accuracy, job)
    digest, size_bytes = write_checkpoint(store, folder, said, files)
    entry = CheckpointEntry(
        name=f"{job}/checkpoints/{name}",
        folder=folder,
        manifest_sha256=digest,
        step=said.step,
        epoch=said.epoch,
        attempt=1,
        size_bytes=size_bytes,
        create_time=time.time(),
        metrics=said.metrics,
    )
    registry.commit(entry)
    return Written(entry, said)


def write_job_without_checkpoint(store: ObjectStore, job: str) -> None:
    ResourceLog(store, f"{job}/log").append(None, {"state": "RUNNING"})
