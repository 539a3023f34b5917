"""Checkpoints: what is saved comes back bit for bit, and what is damaged is not taken."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from shared.checkpoint import CheckpointContent, CheckpointEntry, CheckpointRegistry
from shared.checkpoint.format import MANIFEST, OPTIMIZER, WEIGHTS
from shared.errors import DataLoss
from shared.log import StaleAttempt
from shared.model_spec import ModelSpec
from shared.storage import ObjectStore
from train_service.snapshots import CheckpointWriter, epoch_ends, newest_good, read

JOB = "trainingJobs/a"
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
CPU = torch.device("cpu")


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


def save(store: ObjectStore, *steps: int, attempt: int = 1) -> list[CheckpointEntry]:
    registry = CheckpointRegistry(store, JOB)
    with CheckpointWriter(store, registry, attempt, lambda _: None) as writer:
        for step in steps:
            writer.save(replace(CONTENT, step=step), *of(*trained(step)))
        writer.wait()
    return CheckpointRegistry(store, JOB).entries()


def of(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """What a checkpoint keeps: copied weights, and the state itself."""
    return {name: value.clone() for name, value in model.state_dict().items()}, optimizer.state_dict()


def restore(store: ObjectStore, entry: CheckpointEntry, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    weights, state = read(store, entry, CPU)
    model.load_state_dict(weights)
    optimizer.load_state_dict(state)


def damage(store: ObjectStore, entry: CheckpointEntry, path: str) -> None:
    data = bytearray(store.get(f"{entry.folder}/{path}"))
    data[len(data) // 2] ^= 1
    store.put(f"{entry.folder}/{path}", bytes(data))


def test_what_was_saved_comes_back_bit_for_bit_and_trains_on_alike(store: ObjectStore) -> None:
    (saved,) = save(store, 5)
    model, optimizer = trained(0)

    restore(store, saved, model, optimizer)

    undisturbed, its_optimizer = trained(5)
    for one in ((model, optimizer), (undisturbed, its_optimizer)):
        train(*one, steps=3)
    expected = undisturbed.state_dict()
    assert model.state_dict().keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())


def test_a_checkpoint_holds_the_state_at_its_step_even_if_training_goes_on_meanwhile(store: ObjectStore) -> None:
    model, optimizer = trained(4)
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    with CheckpointWriter(store, CheckpointRegistry(store, JOB), 1, lambda _: None) as writer:
        writer.save(replace(CONTENT, step=4), *of(model, optimizer))
        train(model, optimizer, 3)

    again, its_optimizer = trained(0)
    restore(store, CheckpointRegistry(store, JOB).entries()[0], again, its_optimizer)
    assert all(torch.equal(value, expected[name]) for name, value in again.state_dict().items())


def test_leaving_the_writer_commits_and_tells_the_checkpoint_under_way(store: ObjectStore) -> None:
    told: list[CheckpointEntry] = []
    slow = threading.Event()

    def tell(entry: CheckpointEntry) -> None:
        slow.wait(0.2)
        told.append(entry)

    with CheckpointWriter(store, CheckpointRegistry(store, JOB), 1, tell) as writer:
        writer.save(replace(CONTENT, step=2), *of(*trained(2)))

    assert told == CheckpointRegistry(store, JOB).entries()


def test_the_newest_checkpoint_is_chosen_when_all_are_good(store: ObjectStore) -> None:
    entries = save(store, 5, 10, 15)
    warnings: list[str] = []

    assert newest_good(store, entries, warnings.append) == entries[2]
    assert not warnings


@pytest.mark.parametrize("path", [WEIGHTS, OPTIMIZER, MANIFEST])
@pytest.mark.parametrize("how", ["damaged", "missing", "cut"])
def test_a_damaged_checkpoint_is_skipped_with_a_warning_that_names_it(store: ObjectStore, path: str, how: str) -> None:
    entries = save(store, 5, 10)
    key = f"{entries[1].folder}/{path}"
    if how == "damaged":
        damage(store, entries[1], path)
    elif how == "missing":
        store.delete(key)
    else:
        store.put(key, store.get(key)[:-1])
    warnings: list[str] = []

    assert newest_good(store, entries, warnings.append) == entries[0]
    assert len(warnings) == 1
    assert entries[1].name in warnings[0]
    assert path in warnings[0]


def test_a_run_whose_every_checkpoint_is_damaged_begins_anew(store: ObjectStore) -> None:
    entries = save(store, 5, 10)
    for one in entries:
        damage(store, one, WEIGHTS)
    warnings: list[str] = []

    assert newest_good(store, entries, warnings.append) is None
    assert len(warnings) == 2


def test_nothing_is_loaded_from_a_damaged_checkpoint(store: ObjectStore) -> None:
    (saved,) = save(store, 5)
    damage(store, saved, OPTIMIZER)

    with pytest.raises(DataLoss):
        read(store, saved, CPU)


def test_what_epochs_measured_is_read_from_their_checkpoints(store: ObjectStore) -> None:
    registry = CheckpointRegistry(store, JOB)
    measured = {5: (1, {"m": 0.1}), 7: (1, {}), 10: (2, {"m": 0.3}), 15: (3, {"m": 0.2})}
    with CheckpointWriter(store, registry, 1, lambda _: None) as writer:
        for step, (epoch, metrics) in measured.items():
            writer.save(replace(CONTENT, step=step, epoch=epoch, metrics=metrics), *of(*trained(1)))
        writer.wait()
    entries = registry.entries()

    assert epoch_ends(entries, entries[-1], "m") == [(0, 0.1), (1, 0.3), (2, 0.2)]
    assert epoch_ends(entries, entries[2], "m") == [(0, 0.1), (1, 0.3)]


def test_a_stale_attempt_cannot_add_a_checkpoint(store: ObjectStore) -> None:
    CheckpointRegistry(store, JOB).fence(2)

    with pytest.raises(StaleAttempt):
        save(store, 5, attempt=1)

    assert not CheckpointRegistry(store, JOB).entries()


def test_the_same_step_saved_again_by_a_later_attempt_replaces_the_first(store: ObjectStore) -> None:
    first = save(store, 5, 10)
    registry = CheckpointRegistry(store, JOB)
    registry.fence(2)

    again = save(store, 10, attempt=2)

    assert [one.step for one in again] == [5, 10]
    assert again[0] == first[0]
    assert again[1].attempt == 2
    assert again[1].folder != first[1].folder
    assert store.get(f"{again[1].folder}/{WEIGHTS}") == store.get(f"{first[1].folder}/{WEIGHTS}")
