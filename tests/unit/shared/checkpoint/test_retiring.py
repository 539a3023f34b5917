"""A checkpoint that goes: whoever has it keeps it, and what dies half-way is finished by the next."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

from shared.checkpoint import CheckpointEntry, CheckpointRegistry, Ranking, resolve
from shared.checkpoint.references import live_references, using
from shared.errors import NotFound, Unavailable
from shared.resource_log import StaleAttempt
from shared.storage import ObjectStore, open_store
from tests.support.checkpoint_samples import JOB, entry

HOLDER = "deployments/m"


@pytest.fixture
def named(store: ObjectStore) -> list[CheckpointEntry]:
    """Steps 10, 20 and 30, each with a file."""
    made = CheckpointRegistry(store, JOB)
    made.fence(1)
    for step in (10, 20, 30):
        store.put(f"{entry(step).folder}/model.safetensors", b"x")
        store.put(f"{entry(step).folder}/manifest.json", b"x")
        made.commit(entry(step))
    return made.entries()


def steps(store: ObjectStore) -> list[int]:
    return [one.step for one in CheckpointRegistry(store, JOB).entries()]


def with_files(store: ObjectStore) -> set[int]:
    """Those of which every file is there."""
    keys = {info.key for info in store.list(f"{JOB}/checkpoints/data")}
    files = ("model.safetensors", "manifest.json")
    return {step for step in (10, 20, 30) if all(f"{entry(step).folder}/{one}" in keys for one in files)}


def use(store: ObjectStore, step: int) -> None:
    with using(store, "f", f"{JOB}/checkpoints/step-{step}", "deployment", "u1", HOLDER, ends_in="GONE"):
        pass


def test_a_retired_checkpoint_is_removed_with_its_files(store: ObjectStore, named: list[CheckpointEntry]) -> None:
    gone = CheckpointRegistry(store, JOB).retire(named[:2], 1)

    assert gone == named[:2]
    assert steps(store) == [30]
    assert with_files(store) == {30}
    assert not CheckpointRegistry(store, JOB).read().retiring
    assert not list(store.list(named[0].folder))
    with pytest.raises(NotFound):
        resolve(store, "f", named[0].name)


def test_one_that_somebody_uses_stays(store: ObjectStore, named: list[CheckpointEntry]) -> None:
    use(store, 10)

    assert CheckpointRegistry(store, JOB).retire(named[:2], 1) == [named[1]]
    assert steps(store) == [10, 30]
    assert with_files(store) == {10, 30}


def test_an_earlier_attempt_retires_nothing(store: ObjectStore, named: list[CheckpointEntry]) -> None:
    zombie = CheckpointRegistry(store, JOB)
    zombie.fence(1)
    CheckpointRegistry(store, JOB).fence(2)

    with pytest.raises(StaleAttempt):
        zombie.retire(named[:1], 1)

    assert with_files(store) == set(steps(store)) == {10, 20, 30}


def test_who_comes_when_it_is_no_longer_named_does_not_get_it(
    store: ObjectStore, named: list[CheckpointEntry], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Marks first, looks second: here it looks after the checkpoint was last named."""

    def marked_just_before(*arguments: Any) -> list[str]:
        monkeypatch.undo()
        # Its resolve fails now: nobody is told that he has it who does not.
        with pytest.raises(NotFound):
            use(open_store(store.settings), 10)
        return live_references(*arguments)

    monkeypatch.setattr("shared.checkpoint.registry.live_references", marked_just_before)
    CheckpointRegistry(store, JOB).retire(named[:1], 1)

    assert with_files(store) == set(steps(store)) == {20, 30}


@pytest.mark.parametrize("dies", [False, True], ids=["finishes", "dies before the files go"])
def test_one_that_finds_a_user_too_late_cannot_put_back_what_another_has_condemned(
    store: ObjectStore, named: list[CheckpointEntry], monkeypatch: pytest.MonkeyPatch, dies: bool
) -> None:
    elsewhere = open_store(store.settings)

    def no_answer(_: str) -> None:
        raise Unavailable("no answer")

    def user_but_the_other_goes_on(*_: Any) -> list[str]:
        monkeypatch.undo()
        if dies:
            monkeypatch.setattr(elsewhere, "delete_folder", no_answer)
        with contextlib.suppress(Unavailable):
            CheckpointRegistry(elsewhere, JOB).settle()
        return [HOLDER]

    monkeypatch.setattr("shared.checkpoint.registry.live_references", user_but_the_other_goes_on)
    CheckpointRegistry(store, JOB).retire(named[:1], 1)

    assert with_files(store) == set(steps(store)) == {20, 30}


def test_one_that_found_no_user_leaves_the_files_of_what_another_has_put_back(
    store: ObjectStore, named: list[CheckpointEntry], monkeypatch: pytest.MonkeyPatch
) -> None:
    use(store, 10)

    def nobody_but_the_other_finds_one(*_: Any) -> list[str]:
        monkeypatch.undo()
        CheckpointRegistry(open_store(store.settings), JOB).settle()
        return []

    monkeypatch.setattr("shared.checkpoint.registry.live_references", nobody_but_the_other_finds_one)
    assert CheckpointRegistry(store, JOB).retire(named[:1], 1) == []

    assert with_files(store) == set(steps(store)) == {10, 20, 30}


# Three writes of the log (no longer named, condemned, forgotten) and two files.
@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("dies_at", range(5))
def test_whatever_an_outage_leaves_every_named_one_has_its_files_and_the_next_finishes(
    store: ObjectStore, named: list[CheckpointEntry], monkeypatch: pytest.MonkeyPatch, dies_at: int, used: bool
) -> None:
    if used:
        use(store, 10)
    writes = 0

    def dying(method: Any) -> Any:
        def step(*arguments: Any) -> Any:
            nonlocal writes
            writes += 1
            if writes > dies_at:
                raise Unavailable("no answer")
            return method(*arguments)

        return step

    with monkeypatch.context() as outage:
        for method in ("put_if_absent", "delete"):
            outage.setattr(store, method, dying(getattr(store, method)))
        try:
            CheckpointRegistry(store, JOB).retire(named[:1], 1)
        except Unavailable:
            assert writes > dies_at
    assert set(steps(store)) <= with_files(store)
    CheckpointRegistry(store, JOB).settle()

    begun = dies_at > 0
    assert set(steps(store)) == with_files(store) == ({20, 30} if begun and not used else {10, 20, 30})
    assert not CheckpointRegistry(store, JOB).read().retiring


def test_one_that_was_written_again_meanwhile_keeps_its_new_files(
    store: ObjectStore, named: list[CheckpointEntry], monkeypatch: pytest.MonkeyPatch
) -> None:
    use(store, 10)

    def committed_again(*arguments: Any) -> list[str]:
        monkeypatch.undo()
        CheckpointRegistry(open_store(store.settings), JOB).commit(entry(10, attempt=2))
        return live_references(*arguments)

    monkeypatch.setattr("shared.checkpoint.registry.live_references", committed_again)
    CheckpointRegistry(store, JOB).retire(named[:1])

    (again,) = [one for one in CheckpointRegistry(store, JOB).entries() if one.step == 10]
    assert again.attempt == 2
    assert 10 in with_files(store)  # the user still has the old ones


def test_the_jobs_own_metric_says_which_is_the_best_from_its_first_attempt_on(store: ObjectStore) -> None:
    made = CheckpointRegistry(store, JOB)
    made.fence(1, Ranking("validation_loss", maximize=False))
    made.commit(entry(10, validation_loss=0.1, validation_accuracy=0.1))
    made.commit(entry(20, validation_loss=0.5, validation_accuracy=0.9))

    assert resolve(store, "f", JOB).step == 10
    CheckpointRegistry(store, JOB).fence(2)
    assert resolve(store, "f", JOB).step == 10
    CheckpointRegistry(store, JOB).fence(2, Ranking("validation_accuracy"))
    best = CheckpointRegistry(store, JOB).best()
    assert best is not None
    assert best.step == 20


def test_the_final_checkpoint_can_be_asked_for(store: ObjectStore) -> None:
    made = CheckpointRegistry(store, JOB)
    made.commit(entry(10))
    with pytest.raises(NotFound):
        resolve(store, "f", f"{JOB}/checkpoints/final")
    made.commit(CheckpointEntry(**{**vars(entry(20)), "final": True}))
    made.commit(entry(30))

    assert resolve(store, "f", f"{JOB}/checkpoints/final").step == 20
