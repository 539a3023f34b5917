"""Checkpoints and registry entries to test with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shared.checkpoint import Checkpoint, CheckpointContent, CheckpointEntry, load_checkpoint, write_checkpoint
from shared.checkpoint.format import WEIGHTS
from shared.model_spec import ModelSpec
from shared.settings import StoreSettings
from shared.storage import ObjectStore, open_store
from tests.support.versions import SCHEMA, columns_of

JOB = "trainingJobs/j"
FILES = {"model.safetensors": b"weights" * 100, "optimizer.safetensors": b"momenta" * 50}


def content(**values: Any) -> CheckpointContent:
    return CheckpointContent(
        **{
            "training_job": JOB,
            "dataset_version": "datasets/d/versions/v1",
            "dataset_manifest_sha256": "0" * 64,
            "step": 30,
            "epoch": 1,
            "seed": 7,
            "metrics": {"validation_accuracy": 0.9},
            "model": ModelSpec(builder="torchvision.resnet18", in_channels=1, num_classes=10),
            "ingested": columns_of(SCHEMA),
            "transforms": [
                {
                    "steps": [
                        {"column": "image", "toFloat": {}},
                        {"column": "image", "normalize": {"mean": [0.1307], "std": [0.3081]}},
                    ]
                }
            ],
            "input_column": "image",
            **values,
        }
    )


def entry(step: int, *, attempt: int = 1, name: str = "", **metrics: float) -> CheckpointEntry:
    return CheckpointEntry(
        name=f"{JOB}/checkpoints/{name or f'step-{step}'}",
        folder=f"{JOB}/checkpoints/data/step-{step}-a{attempt}",
        manifest_sha256="f" * 64,
        step=step,
        epoch=0,
        attempt=attempt,
        size_bytes=1,
        create_time=1.0,
        metrics=metrics,
    )


def write(store: ObjectStore, folder: str = "checkpoint") -> str:
    """Return the manifest's digest."""
    return write_checkpoint(store, folder, content(), FILES)[0]


def stored_checkpoint(folder: Path, content: CheckpointContent, weights: bytes) -> Checkpoint:
    """Write a checkpoint with these weights to a store of its own in `folder`."""
    store = open_store(StoreSettings(url=f"file://{folder}"))
    manifest_sha256, _ = write_checkpoint(store, "checkpoint", content, {WEIGHTS: weights})
    return load_checkpoint(store, "checkpoint", manifest_sha256)
