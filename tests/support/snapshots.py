"""Small models, and checkpoints of them as a run writes them."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from shared.checkpoint import CheckpointContent, CheckpointEntry, CheckpointRegistry, Ranking
from shared.model_spec import ModelSpec
from shared.models import load_weights
from shared.storage import ObjectStore, open_store
from train_service.checkpoints.writing_and_restoring import CheckpointWriter, restore
from train_service.domain.spec import CheckpointPolicy

JOB = "trainingJobs/a"
RANKING = Ranking("validation_loss", maximize=False)
CONTENT = CheckpointContent(
    training_job=JOB,
    dataset_version="datasets/d/versions/v",
    dataset_manifest_sha256="00",
    step=0,
    epoch=0,
    seed=1,
    metrics={},
    model=ModelSpec(builder="torchvision.resnet18", in_channels=1, num_classes=10),
    ingested=[],
    transforms=[],
    input_column="image",
)


def policy(keep_newest: int, keep_best: int = 1) -> CheckpointPolicy:
    return CheckpointPolicy(
        keep_newest=keep_newest, keep_best=keep_best, best_metric=RANKING.metric, maximize=RANKING.maximize
    )


def trained(steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    train(model, optimizer, steps)
    return model, optimizer


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 4, generator=torch.Generator().manual_seed(step))).square().sum().backward()
        optimizer.step()


def save_one(
    writer: CheckpointWriter, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, **metrics: float
) -> None:
    content = replace(CONTENT, step=step, metrics=metrics)
    writer.save(lambda: content, model.state_dict(), optimizer.state_dict())


def load(store: ObjectStore, entry: CheckpointEntry, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    restored = restore(store, entry)
    load_weights(model, restored.weights)
    optimizer.load_state_dict(restored.state)


def save(store: ObjectStore, *steps: int, attempt: int = 1) -> list[CheckpointEntry]:
    registry = CheckpointRegistry(store, JOB)
    with CheckpointWriter(store, registry, attempt, lambda _: None) as writer:
        for step in steps:
            save_one(writer, step, *trained(step))
        writer.wait()
    return entries(store)


def entries(store: ObjectStore) -> list[CheckpointEntry]:
    return CheckpointRegistry(open_store(store.settings), JOB).entries()
