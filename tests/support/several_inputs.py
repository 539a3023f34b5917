"""Rows and models of several inputs for tests: an image, a number, a flag and the ids of tokens, to 3 classes."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from safetensors.torch import save

from shared.checkpoint import CheckpointContent, CheckpointEntry, CheckpointRegistry, write_checkpoint
from shared.checkpoint.format import WEIGHTS
from shared.code_bundle_registry import load_code
from shared.model_spec import ModelSpec
from shared.models import build_model
from shared.storage import ObjectStore
from shared.transforms import batch_of
from tests.support.code_folders import store_bundle
from tests.support.own_models import own
from tests.support.versions import columns_of
from train_service.domain.spec import OwnModelFacts, TrainingSpec, settled

VERSION = "datasets/several/versions/v1"
INPUTS = ("image", "age", "smokes", "tokens")
CLASSES, VOCABULARY, TOKENS = 3, 50, 5
ROWS, VALIDATION_ROWS = 70, 33
STEPS = [{"column": "image", "toFloat": {}}]
FACTS = OwnModelFacts(num_classes=CLASSES)

# Each input counts for the output; dropout and BatchNorm have noise and buffers.
SOURCE = """
import torch
from torch import nn


class Four(nn.Module):
    def __init__(self, width=8, dropout=0.2, norm=True):
        super().__init__()
        self.images = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 16, width))
        self.tokens = nn.EmbeddingBag(50, width)
        self.numbers = nn.Linear(2, width)
        norms = nn.BatchNorm1d(3 * width) if norm else nn.Identity()
        self.head = nn.Sequential(norms, nn.Dropout(dropout), nn.Linear(3 * width, 3))

    def forward(self, inputs):
        assert inputs["tokens"].dtype == torch.int64 and inputs["smokes"].dtype == torch.bool
        numbers = torch.stack([inputs["age"] / 50, inputs["smokes"].float()], 1)
        parts = [self.images(inputs["image"]), self.tokens(inputs["tokens"]), self.numbers(numbers)]
        return self.head(torch.cat(parts, 1))


class Trained(Four):
    def training_step(self, batch, batch_idx):
        inputs, labels = batch
        loss = nn.functional.cross_entropy(self(inputs), labels)
        self.log("oldest", inputs["age"].max())
        return loss

    def validation_step(self, batch, batch_idx):
        inputs, labels = batch
        self.log("val_accuracy", (self(inputs).argmax(1) == labels).float().mean())
        return nn.functional.cross_entropy(self(inputs), labels)
"""


def table(rows: int, seed: int = 0) -> pa.Table:
    """Rows whose label follows from the ids of their tokens."""
    rng = np.random.default_rng(seed)
    images = rng.integers(0, 256, (rows, 6, 6), np.uint8)
    tokens = rng.integers(0, VOCABULARY, (rows, TOKENS)).astype(np.int32)
    return pa.table(
        {
            "image": pa.FixedShapeTensorArray.from_numpy_ndarray(images),
            "age": pa.array(rng.uniform(18, 90, rows), pa.float64()),
            "smokes": pa.array(rng.integers(0, 2, rows) == 1),
            "tokens": pa.FixedShapeTensorArray.from_numpy_ndarray(tokens),
            "label": pa.array(tokens[:, 0] % CLASSES, pa.int64()),
        }
    )


def commit_rows(store: ObjectStore) -> None:
    # Imports Ray, which ranks that import this module do not need.
    from tests.support.transforming import commit_tables

    commit_tables(store, {"train": table(ROWS), "validation": table(VALIDATION_ROWS, 1)}, VERSION)


def base(**change: Any) -> TrainingSpec:
    """A specification of these rows; its model is replaced."""
    return TrainingSpec(
        **{
            "dataset_version": VERSION,
            "validation_split": "validation",
            "input_column": "",
            "input_columns": INPUTS,
            "transform": {"steps": STEPS},
            "model": ModelSpec(builder="", in_channels=0, num_classes=0),
            "epochs": 2,
            "global_batch_size": 14,
            "lanes": 2,
            "checkpoint_every_steps": 3,
            **change,
        }
    )


def asked(store: ObjectStore, entry: str = "net:Four", *, kwargs: Any = None, **change: Any) -> TrainingSpec:
    """The specification as a client sends it: what follows from version and code is left out."""
    return own(store, base(**change), SOURCE, entry, kwargs=kwargs)


def spec_of_four(store: ObjectStore, *, kwargs: Any = None, **change: Any) -> TrainingSpec:
    return settled(asked(store, kwargs=kwargs, **change), FACTS, ())


JOB = "trainingJobs/several"


def write_model(store: ObjectStore, name: str = f"{JOB}/checkpoints/c1") -> tuple[CheckpointEntry, torch.nn.Module]:
    """A checkpoint as training writes it, and its model. The tests' process has loaded the code afterwards."""
    bundle = store_bundle(store, {"net.py": SOURCE}).name
    load_code(store, bundle)
    model = ModelSpec(builder="", in_channels=0, num_classes=CLASSES, code_bundle=bundle, entry="net:Four")
    torch.manual_seed(7)
    module = build_model(model).eval()
    content = CheckpointContent(
        training_job=JOB,
        dataset_version=VERSION,
        dataset_manifest_sha256="0" * 64,
        step=1,
        epoch=1,
        seed=7,
        metrics={"validation_accuracy": 0.9},
        model=model,
        ingested=columns_of(table(1).schema),
        transforms=[{"steps": STEPS}],
        input_column="",
        input_columns=INPUTS,
    )
    registry = CheckpointRegistry(store, JOB)
    registry.fence(1)
    folder = f"{registry.data_folder}/c1-a00001-test"
    digest, size_bytes = write_checkpoint(store, folder, content, {WEIGHTS: save(module.state_dict())})
    entry = CheckpointEntry(
        name=name,
        folder=folder,
        manifest_sha256=digest,
        step=1,
        epoch=1,
        attempt=1,
        size_bytes=size_bytes,
        create_time=time.time(),
        metrics=content.metrics,
        code_bundle=bundle,
        model_entry="net:Four",
    )
    registry.commit(entry)
    return entry, module


def arrays(rows: pa.Table) -> dict[str, np.ndarray[Any, Any]]:
    """The inputs of these rows as a client sends them."""
    return {
        name: np.array(column if isinstance(column, np.ndarray) else column.to_numpy(zero_copy_only=False))
        for name, column in batch_of(rows.select(INPUTS)).items()
    }


def logits_of(module: torch.nn.Module, inputs: dict[str, np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    """What the model itself gives for what a client sends."""
    tensors = {
        "image": torch.from_numpy(inputs["image"]).unsqueeze(1) / 255,
        "age": torch.from_numpy(inputs["age"]).float(),
        "smokes": torch.from_numpy(inputs["smokes"]),
        "tokens": torch.from_numpy(inputs["tokens"]).long(),
    }
    with torch.inference_mode():
        found: np.ndarray[Any, Any] = module(tensors).numpy()
    return found
