"""From one checkpoint, taken in the middle of an epoch, one, two or three workers go on alike: in float64 to 1e-12."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from shared.settings import StoreSettings
from shared.storage import open_store
from tests.unit.train_service.from_checkpoint import RUN, FirstStep, entry_at, first_step, plain_gradients, saved_at
from tests.unit.train_service.in_ranks import in_ranks
from tests.unit.train_service.learners import ALONE, ROWS, commit_table
from tests.unit.train_service.worker.test_loop import new_job, run_of

JOB = "trainingJobs/a"
# Of the twelve steps of the second epoch three are done.
AT, STEPS_PER_EPOCH = 15, 12
WORLD_SIZES = (1, 2, 3)


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> StoreSettings:
    """A store with a run that one worker has trained to its end, and all its checkpoints."""
    store = open_store(StoreSettings(url=(tmp_path_factory.mktemp("trained") / "store").as_uri()))
    commit_table(store)
    new_job(store, JOB)
    run_of(store, JOB, spec=RUN).run()
    return store.settings


@pytest.fixture(scope="module")
def steps(settings: StoreSettings, tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[FirstStep]]:
    """By world size, what each rank did first."""
    reported = {1: [first_step(ALONE, settings, JOB, AT)]}
    for world_size in WORLD_SIZES[1:]:
        folder: Path = tmp_path_factory.mktemp(f"on-{world_size}")
        reported[world_size] = in_ranks(world_size, first_step, folder, settings, JOB, AT)
    return reported


def assert_exact(given: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    assert len(given) == len(expected) > 0
    for ours, theirs in zip(given, expected, strict=True):
        assert ours.dtype == theirs.dtype == torch.float64
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_the_checkpoint_is_of_trained_weights_within_an_epoch(settings: StoreSettings) -> None:
    store = open_store(settings)
    entry, saved, early = entry_at(store, JOB, AT), saved_at(store, JOB, AT), saved_at(store, JOB, 5)

    assert (entry.epoch, entry.step % STEPS_PER_EPOCH) == (1, 3)
    assert all(not torch.equal(saved.weights[name], early.weights[name]) for name in saved.weights)
    assert all(float(one["exp_avg"].abs().sum()) > 0 for one in saved.state["optimizer"]["state"].values())


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_the_step_after_a_checkpoint_has_the_gradients_of_all_rows_on_any_number_of_workers(
    settings: StoreSettings, steps: dict[int, list[FirstStep]], world_size: int
) -> None:
    ranks, alone = steps[world_size], steps[1][0]
    row_ids = np.concatenate([one.row_ids for one in ranks])
    assert sorted(row_ids) == sorted(alone.row_ids)
    assert len(set(row_ids.tolist())) == len(row_ids) in (ROWS - 3, ROWS - 2)
    expected = plain_gradients(saved_at(open_store(settings), JOB, AT).weights, row_ids)

    for one in ranks:
        assert_exact(one.gradients, expected)
        assert_exact(one.gradients, alone.gradients)
        # The state of the optimizer came along, too.
        assert_exact(list(one.weights.values()), list(alone.weights.values()))
