"""Those who come with a DataLoader get the order of a run, from any position on."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import millrace_client as mc
from millrace.train.v1 import resources_pb2
from shared.errors import InvalidArgument
from tests.unit.train_service.conftest import TRAIN_ROWS, VERSION, Committed
from tests.unit.train_service.loading.test_loader import loader
from train_service.torch_dataset import TrainingBatches

# Of a specification that names none, for a few workers.
LANES = 24
EXTENDING = Path(__file__).parents[3] / "docs" / "extending.md"


def test_a_data_loader_gives_the_batches_of_the_run(committed: Committed) -> None:
    given = list(DataLoader(TrainingBatches(loader(committed)), batch_size=None))

    wanted = list(loader(committed).batches(0))
    assert len(given) == len(wanted)
    for (inputs, labels), batch in zip(given, wanted, strict=True):
        assert torch.equal(inputs, torch.from_numpy(batch.inputs))
        assert torch.equal(labels, torch.from_numpy(batch.labels))


def test_a_restored_state_goes_on_with_the_next_batch(committed: Committed) -> None:
    first = TrainingBatches(loader(committed))
    taken = iter(first)
    for _ in range(5):
        next(taken)
    state = first.state_dict()
    rest = list(taken)

    second = TrainingBatches(loader(committed))
    second.load_state_dict(state)
    again = list(second)

    assert state == {"step": 5, "lanes": LANES}
    assert len(again) == len(rest)
    assert all(torch.equal(one, other) for one, other in zip(again[0], rest[0], strict=True))
    assert all(torch.equal(one, other) for one, other in zip(again[-1], rest[-1], strict=True))


def labels_of(batches: Iterable[Any]) -> list[list[int]]:
    return [labels.tolist() for _, labels in batches]


@pytest.mark.parametrize("epoch", [0, 1, np.int64(1)])
def test_an_epoch_that_is_chosen_is_given_alone(committed: Committed, epoch: int) -> None:
    made = loader(committed)
    dataset = TrainingBatches(made)
    dataset.set_epoch(epoch)

    wanted = [batch.labels.tolist() for batch in made.batches(0) if batch.epoch == epoch]
    assert labels_of(dataset) == wanted
    assert dataset.state_dict() == {"step": (epoch + 1) * made.steps_per_epoch, "lanes": LANES}


def test_the_usual_loop_over_epochs_gives_the_batches_of_the_run(committed: Committed) -> None:
    dataset = TrainingBatches(loader(committed))
    given = DataLoader(dataset, batch_size=None)
    seen = []
    for epoch in range(2):
        dataset.set_epoch(epoch)
        seen += labels_of(given)

    assert seen == labels_of(TrainingBatches(loader(committed)))


@pytest.mark.parametrize("taken", [5, 11, 17, 22], ids=["in-the-first", "at-its-end", "in-the-second", "at-the-end"])
def test_the_usual_loop_goes_on_from_a_restored_state(committed: Committed, taken: int) -> None:
    whole = labels_of(TrainingBatches(loader(committed)))
    dataset = TrainingBatches(loader(committed))
    dataset.load_state_dict({"step": taken, "lanes": LANES})
    seen = []
    for epoch in range(2):
        dataset.set_epoch(epoch)
        seen += labels_of(DataLoader(dataset, batch_size=None))

    assert dataset.state_dict() == {"step": len(whole), "lanes": LANES} == {"step": 22, "lanes": LANES}
    assert seen == whole[taken:]


def test_an_epoch_may_be_given_again(committed: Committed) -> None:
    made = loader(committed)
    dataset = TrainingBatches(made)
    for _ in range(2):
        dataset.set_epoch(0)
        assert len(list(dataset)) == made.steps_per_epoch


@pytest.mark.parametrize("epoch", [-1, 2, 99, 0.0, True, np.int64(2), np.float32(1), np.True_, "1", None])
def test_an_epoch_that_there_is_not_is_refused(committed: Committed, epoch: Any) -> None:
    with pytest.raises(ValueError, match=r"epoch is .*0 to 1"):
        TrainingBatches(loader(committed)).set_epoch(epoch)


@pytest.mark.parametrize("step", [-1, 10_000, "3", None])
def test_a_state_that_is_none_is_refused(committed: Committed, step: object) -> None:
    with pytest.raises(ValueError, match="state: step is"):
        TrainingBatches(loader(committed)).load_state_dict({"step": step, "lanes": LANES})


@pytest.mark.parametrize(
    ("state", "remedy"),
    [
        ({"step": 5, "lanes": 25}, "25 lanes, those of this spec to 24; set spec.lanes"),
        ({"step": 5}, "has no lanes; add those of the spec that it comes from, 24"),
    ],
)
def test_a_state_of_another_order_is_refused(committed: Committed, state: dict[str, Any], remedy: str) -> None:
    with pytest.raises(ValueError, match=remedy):
        TrainingBatches(loader(committed)).load_state_dict(state)


def test_worker_processes_are_refused(committed: Committed) -> None:
    with pytest.raises(ValueError, match="num_workers must be 0"):
        list(DataLoader(TrainingBatches(loader(committed)), batch_size=None, num_workers=1))


def spec(**changes: Any) -> resources_pb2.TrainingSpec:
    fields: dict[str, Any] = {"epochs": 2, "global_batch_size": 60, "seed": 7} | changes
    return mc.training_spec(
        VERSION, model="torchvision.resnet18", in_channels=1, num_classes=10, transform=[mc.to_float()], **fields
    )


def test_ranks_opened_from_a_specification_share_every_row_once_an_epoch(committed: Committed) -> None:
    opened = [TrainingBatches.open(spec(), committed.store.settings, rank=rank, world_size=2) for rank in range(2)]

    sizes = [[len(labels) for _, labels in one] for one in opened]
    assert len(sizes[0]) == len(sizes[1]) == 24
    assert sum(map(sum, sizes)) == 2 * TRAIN_ROWS


@pytest.mark.parametrize("workers", [None, 7])
def test_a_step_has_the_same_rows_on_any_number_of_ranks(committed: Committed, workers: int | None) -> None:
    asked = spec(num_workers=workers) if workers else spec()

    def rows_of_steps(world_size: int) -> list[list[bytes]]:
        ranks = [
            TrainingBatches.open(asked, committed.store.settings, rank=rank, world_size=world_size)
            for rank in range(world_size)
        ]
        return [
            sorted(row.tobytes() for inputs, _ in step for row in inputs.numpy()) for step in zip(*ranks, strict=True)
        ]

    assert rows_of_steps(5) == rows_of_steps(1)


@pytest.mark.parametrize(
    ("changes", "ranks", "path"),
    [
        ({"global_batch_size": 3}, (0, 2), "spec.global_batch_size"),
        ({"train_split": "absent"}, (0, 1), "spec.train_split"),
        ({}, (2, 2), "rank"),
    ],
)
def test_an_option_that_does_not_fit_is_refused_by_its_field(
    committed: Committed, changes: dict[str, Any], ranks: tuple[int, int], path: str
) -> None:
    with pytest.raises(InvalidArgument) as refused:
        TrainingBatches.open(spec(**changes), committed.store.settings.url, rank=ranks[0], world_size=ranks[1])

    assert [field for field, _ in refused.value.fields] == [path]


def test_the_example_of_the_documentation_runs(committed: Committed) -> None:
    section = EXTENDING.read_text().partition("\n## A loop of your own\n")[2]
    (example,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    names: dict[str, Any] = {"store": committed.store.settings.url}
    exec(example, names)

    whole = list(TrainingBatches.open(names["spec"], committed.store.settings))
    assert names["state"] == {"step": 5, "lanes": LANES}
    assert len(names["rest"]) == len(whole) - 5
    assert all(torch.equal(one, other) for one, other in zip(names["rest"][0], whole[5], strict=True))
