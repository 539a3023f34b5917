"""Learners on rows of a table, in float64 where it says so, and what ranks that learn together come to."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor
from torch.nn import functional as F

from shared.dataset_version import VersionReader, load_version
from shared.model_spec import ModelSpec
from shared.settings import StoreSettings
from shared.storage import ObjectStore, open_store
from shared.transforms import TensorSpec
from train_service.domain.order import rank_positions
from train_service.domain.spec import FSDP, REGRESSION, LossSpec, OptimizerSpec, Placement, TrainingSpec
from train_service.learning.learner import Learner
from train_service.learning.ranks import Ranks
from train_service.loading.loader import Batch, RowCache
from train_service.loading.preprocessing import Preprocessing

ALONE = Ranks(0, 1, torch.device("cpu"))
VERSION = "datasets/table/versions/v1"
ROWS, WIDTH, CLASSES = 61, 6, 3
INPUT = TensorSpec("x", "float32", (WIDTH,))
SPEC = TrainingSpec(
    dataset_version=VERSION,
    validation_split="validation",
    input_column="x",
    model=ModelSpec(builder="mlp", in_channels=WIDTH, num_classes=CLASSES, kwargs={"hidden": [16, 8]}),
    optimizer=OptimizerSpec(name="AdamW", learning_rate=0.01),
    epochs=2,
    global_batch_size=ROWS,
)
NUMBERS = replace(
    SPEC,
    task=REGRESSION,
    model=replace(SPEC.model, num_classes=1),
    loss=LossSpec(name="mse"),
    metrics=("mae", "r2"),
    label_column="y",
)
CLIPPED = 0.05
STEPS = 10


def vectors(rows: int = ROWS, seed: int = 6) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).standard_normal((rows, WIDTH))


def classes(rows: int = ROWS, seed: int = 6) -> np.ndarray[Any, Any]:
    chosen: np.ndarray[Any, Any] = vectors(rows, seed)[:, :CLASSES].argmax(1)
    return chosen


def numbers(rows: int = ROWS, seed: int = 6) -> np.ndarray[Any, Any]:
    made: np.ndarray[Any, Any] = vectors(rows, seed) @ np.arange(WIDTH) + 0.5
    return made.astype(np.float32)


def batch(ranks: Ranks = ALONE, step: int = 0, *, spec: TrainingSpec = SPEC, dtype: Any = np.float32) -> Batch:
    """This rank's rows of a step that has all of them; every step its own."""
    mine = rank_positions(0, ROWS, 24, ranks.rank, ranks.world_size)
    labels = numbers(ROWS, 6 + step) if spec.task == REGRESSION else classes(ROWS, 6 + step)
    return Batch(step, 0, vectors(ROWS, 6 + step).astype(dtype)[mine], labels[mine], mine + 1000, ROWS)


def learner(
    spec: TrainingSpec = SPEC, ranks: Ranks = ALONE, *, doubled: bool = False, prepared: bool = True
) -> Learner:
    made = Learner(spec, ranks, INPUT, STEPS // 2, STEPS)
    if doubled:
        made.model.double()
    if prepared:
        made.prepare()
    return made


def trained(spec: TrainingSpec, steps: Iterable[int], ranks: Ranks = ALONE) -> Learner:
    made = learner(spec, ranks)
    for step in steps:
        made.step(batch(ranks, step, spec=spec))
    return made


def gradients(spec: TrainingSpec, ranks: Ranks) -> list[Tensor]:
    """Of one step in float64, averaged over ranks."""
    made = learner(spec, ranks, doubled=True)
    made.step(batch(ranks, spec=spec, dtype=np.float64))
    return [one.grad.clone() for one in made.model.parameters() if one.grad is not None]


def expected_gradients() -> list[Tensor]:
    """Of the plain mean over all rows."""
    model = learner(doubled=True).model
    given = batch(dtype=np.float64)
    outputs = model(torch.from_numpy(given.inputs))
    F.cross_entropy(outputs, torch.from_numpy(given.labels)).backward()  # type: ignore[no-untyped-call]
    return [one.grad.clone() for one in model.parameters() if one.grad is not None]


def commit_table(store: ObjectStore) -> None:
    """700 rows `train` and 523 rows `validation`: x (6), label, y."""
    # Imports Ray, which ranks that import this module do not need.
    from tests.support.transforming import commit_tables

    def table(rows: int, seed: int) -> pa.Table:
        x = pa.FixedShapeTensorArray.from_numpy_ndarray(vectors(rows, seed).astype(np.float32))
        return pa.table({"x": x, "label": classes(rows, seed), "y": numbers(rows, seed)})

    commit_tables(store, {"train": table(700, 1), "validation": table(523, 2)}, VERSION)


def validation(spec: TrainingSpec, store: ObjectStore) -> tuple[RowCache, Preprocessing]:
    version = load_version(store, VERSION)
    reader, columns = VersionReader(store, version), Preprocessing(spec, version.columns)
    cache = RowCache(reader, "validation", columns.columns, spec.label_column, spec.model.num_classes, 2**30, spec.task)
    return cache, columns


def what_ranks_learn(ranks: Ranks, settings: StoreSettings) -> dict[str, Any]:
    """The same on one rank or several."""
    accumulating = replace(SPEC, accumulation_steps=3, max_gradient_norm=CLIPPED)
    sharded = replace(accumulating, placement=Placement(parallel=FSDP))
    cache, preprocessing = validation(SPEC, open_store(settings))
    reported: dict[str, Any] = {
        "gradients": gradients(SPEC, ranks),
        "accumulated": gradients(replace(SPEC, accumulation_steps=3), ranks),
        "shrunk": gradients(replace(SPEC, num_workers=8), ranks),
        "clipped": gradients(replace(SPEC, max_gradient_norm=CLIPPED), ranks),
        "whole": trained(accumulating, range(STEPS), ranks).weights(),
    }
    made = learner(SPEC, ranks)
    reported["described"] = made.describe(ranks.add(made.step(batch(ranks))).result())
    shards = trained(sharded, range(STEPS), ranks)
    reported["sharded"] = shards.weights()
    reported["measured"] = shards.evaluate(cache, preprocessing)
    reported["resumed"] = resumed(sharded, ranks)
    reported["from one"] = resumed(sharded, ranks, saved_on=ALONE)
    reported["to one"] = resumed(sharded, ALONE, saved_on=ranks)
    plain = replace(sharded, optimizer=OptimizerSpec(name="SGD", learning_rate=0.05))
    reported["plain"], reported["plain resumed"] = trained(plain, range(STEPS), ranks).weights(), resumed(plain, ranks)
    reported["layers"] = {
        name: tuple(getattr(one, "to_local", lambda one=one: one)().shape)
        for name, one in shards.model.named_parameters()
    }
    return reported


def resumed(
    spec: TrainingSpec, ranks: Ranks, saved_on: Ranks | None = None, *, steps: int = STEPS
) -> dict[str, Tensor]:
    """Half, a new learner from what was saved, and the other half."""
    saving = saved_on or ranks
    half = trained(spec, range(steps // 2), saving)
    shared = saving if saving.world_size > 1 else ranks
    weights, state = shared.share((half.weights(), half.state()))
    rest = learner(spec, ranks, prepared=False)
    rest.load(weights, state)
    rest.prepare()
    for step in range(steps // 2, steps):
        rest.step(batch(ranks, step))
    return rest.weights()


def norm(tensors: Iterable[Tensor]) -> float:
    return math.sqrt(sum(float(one.square().sum()) for one in tensors))
