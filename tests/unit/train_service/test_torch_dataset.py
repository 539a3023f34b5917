"""Those who come with a DataLoader get the order of a run, from any position on."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader

from tests.unit.train_service.conftest import Committed
from tests.unit.train_service.test_loader import loader
from train_service.torch_dataset import TrainingBatches


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

    assert state == {"step": 5}
    assert len(again) == len(rest)
    assert all(torch.equal(one, other) for one, other in zip(again[0], rest[0], strict=True))
    assert all(torch.equal(one, other) for one, other in zip(again[-1], rest[-1], strict=True))


def test_an_epoch_can_be_chosen(committed: Committed) -> None:
    made = loader(committed)
    dataset = TrainingBatches(made)
    dataset.set_epoch(1)

    assert len(list(dataset)) == made.steps_per_epoch


@pytest.mark.parametrize("step", [-1, 10_000, "3", None])
def test_a_state_that_is_none_is_refused(committed: Committed, step: object) -> None:
    with pytest.raises(ValueError, match="state: step is"):
        TrainingBatches(loader(committed)).load_state_dict({"step": step})


def test_worker_processes_are_refused(committed: Committed) -> None:
    with pytest.raises(ValueError, match="num_workers must be 0"):
        list(DataLoader(TrainingBatches(loader(committed)), batch_size=None, num_workers=1))
