"""Two controllers at one job: the later attempt wins, the other stops, and every checkpoint that counts is whole."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from shared.checkpoint import CheckpointEntry, CheckpointRegistry, load_checkpoint
from shared.resource_log import StaleAttempt
from shared.storage import ObjectStore, open_store
from tests.support.snapshots import JOB, RANKING, entries, policy, save_one, trained
from tests.support.waiting import wait_until
from train_service.checkpoints.writing_and_restoring import CheckpointWriter, newest_good

STEPS = 400


def write_on(store: ObjectStore, attempt: int, first: int, steps: int, keep: int) -> None:
    """As rank 0 does, a checkpoint after each step."""
    own = open_store(store.settings)
    registry = CheckpointRegistry(own, JOB)
    registry.fence(attempt, RANKING)
    model, optimizer = trained(1)
    with CheckpointWriter(own, registry, attempt, lambda _: None, policy=policy(keep)) as writer:
        for step in range(first, first + steps):
            save_one(writer, step, model, optimizer)
        writer.wait()


@pytest.mark.parametrize("keep", [0, 2])
def test_the_later_attempt_wins_and_the_earlier_stops(store: ObjectStore, keep: int) -> None:
    stopped: list[BaseException] = []

    def first() -> None:
        try:
            write_on(store, 1, 1, STEPS * 10, keep)
        except StaleAttempt as error:
            stopped.append(error)

    zombie = threading.Thread(target=first, daemon=True)
    zombie.start()
    wait_until(lambda: len(entries(store)) >= 2, "checkpoints of the first attempt")
    resumed = newest_good(store, CheckpointRegistry(store, JOB).fence(2), pytest.fail)
    assert resumed is not None
    write_on(store, 2, resumed.step + 1, 5, keep)
    zombie.join(240)

    assert len(stopped) == 1
    left = entries(store)
    assert [one.step for one in left if one.attempt == 2][-1] == resumed.step + 5
    assert max(one.step for one in left if one.attempt == 1) <= resumed.step if keep == 0 else len(left) == keep
    assert len({one.name for one in left}) == len(left)
    for one in left:
        load_checkpoint(store, one.folder, one.manifest_sha256).verify()


def test_of_two_that_take_up_the_job_at_once_only_the_later_one_commits(store: ObjectStore) -> None:
    """Both read the same entries; neither waits for the other."""
    registries = [CheckpointRegistry(open_store(store.settings), JOB) for _ in range(2)]
    registries[0].fence(1)
    registries[1].fence(2)
    (entry,) = _saved(store, attempt=2)

    with pytest.raises(StaleAttempt):
        registries[0].commit(replace(entry, attempt=1))
    with pytest.raises(StaleAttempt):
        registries[0].retire([entry], 1)
    with pytest.raises(StaleAttempt):
        _saved(store, attempt=1)

    assert entries(store) == [entry]
    load_checkpoint(store, entry.folder, entry.manifest_sha256).verify()


def _saved(store: ObjectStore, attempt: int) -> list[CheckpointEntry]:
    with CheckpointWriter(store, CheckpointRegistry(store, JOB), attempt, lambda _: None) as writer:
        save_one(writer, 3, *trained(0))
        writer.wait()
    return entries(store)
