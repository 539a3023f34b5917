"""The first step that an attempt takes from a checkpoint, in float64; a module of its own, for real processes import
it."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from shared.checkpoint import CheckpointEntry, CheckpointRegistry
from shared.dataset_version import load_version
from shared.models import build_model
from shared.settings import StoreSettings
from shared.storage import ObjectStore, open_store
from tests.unit.train_service.learners import SPEC, classes, vectors
from train_service.checkpoints.writing_and_restoring import Restored, restore
from train_service.domain.order import Ints
from train_service.domain.spec import TrainingSpec
from train_service.learning.learner import Learner
from train_service.learning.ranks import Ranks
from train_service.loading.loader import LoaderFactory

TRAIN_ROWS = 700
# Fewer workers than this compute a step in parts, as those of a run do that has shrunk.
RUN = replace(SPEC, num_workers=3, checkpoint_every_steps=5)


@dataclass(frozen=True)
class FirstStep:
    """`gradients` and `weights` as one rank has them after the step, `row_ids` those that it computed."""

    gradients: list[Tensor]
    weights: dict[str, Tensor]
    row_ids: Ints


def first_step(ranks: Ranks, settings: StoreSettings, job: str, at: int, spec: TrainingSpec = RUN) -> FirstStep:
    """Step number `at` of the run, on as many ranks as there are."""
    store = open_store(settings)
    restored = saved_at(store, job, at)
    batches = LoaderFactory(store, load_version(store, spec.dataset_version), spec)
    loader = batches.loader(ranks.rank, ranks.world_size)
    learner = Learner(spec, ranks, batches.preprocessing.output, loader.steps_per_epoch, loader.total_steps)
    learner.model.double()
    learner.load(restored.weights, restored.state)
    learner.prepare()
    with closing(loader.batches(at)) as following:
        batch = next(following)
    learner.step(replace(batch, inputs=batch.inputs.astype(np.float64)))
    made = [one.grad.clone() for one in learner.model.parameters() if one.grad is not None]
    return FirstStep(made, {name: one.clone() for name, one in learner.model.state_dict().items()}, batch.row_ids)


def saved_at(store: ObjectStore, job: str, step: int) -> Restored:
    restored = restore(store, entry_at(store, job, step))
    restored.state.pop("history")
    return restored


def entry_at(store: ObjectStore, job: str, step: int) -> CheckpointEntry:
    return next(entry for entry in CheckpointRegistry(store, job).entries() if entry.step == step)


def plain_gradients(weights: dict[str, Tensor], row_ids: Ints) -> list[Tensor]:
    """Of the mean loss over these rows, by torch alone: neither our batches nor our steps."""
    model = build_model(RUN.model)
    model.load_state_dict(weights)
    model.double()
    inputs = vectors(TRAIN_ROWS, 1).astype(np.float32).astype(np.float64)[row_ids]
    labels = torch.from_numpy(classes(TRAIN_ROWS, 1)[row_ids])
    F.cross_entropy(model(torch.from_numpy(inputs)), labels).backward()  # type: ignore[no-untyped-call]
    return [one.grad.clone() for one in model.parameters() if one.grad is not None]
