"""Checkpoints: what is saved comes back bit for bit, and what is damaged is not taken."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from shared.checkpoint import CheckpointEntry, CheckpointRegistry
from shared.checkpoint.format import MANIFEST, OPTIMIZER, WEIGHTS
from shared.errors import DataLoss
from shared.resource_log import StaleAttempt
from shared.storage import ObjectStore
from tests.support.snapshots import JOB, load, save, save_one, train, trained
from tests.support.waiting import wait_until
from train_service.checkpoints.writing_and_restoring import CheckpointWriter, newest_good, restore
from train_service.domain.watchdog import Phase, hung
from train_service.worker.heartbeat import HeartbeatSender, HeartbeatServer


def damage(store: ObjectStore, entry: CheckpointEntry, path: str) -> None:
    data = bytearray(store.get(f"{entry.folder}/{path}"))
    data[len(data) // 2] ^= 1
    store.put(f"{entry.folder}/{path}", bytes(data))


def test_saved_state_comes_back_bit_for_bit_and_trains_on_alike(store: ObjectStore) -> None:
    (saved,) = save(store, 5)
    model, optimizer = trained(0)

    load(store, saved, model, optimizer)

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
        save_one(writer, 4, model, optimizer)
        train(model, optimizer, 3)

    again, its_optimizer = trained(0)
    load(store, CheckpointRegistry(store, JOB).entries()[0], again, its_optimizer)
    assert all(torch.equal(value, expected[name]) for name, value in again.state_dict().items())


class Held(ObjectStore):
    """A real store that answers no `put` before it is let go."""

    def __init__(self, store: ObjectStore) -> None:
        self.__dict__.update(vars(store))
        self.let_go = threading.Event()

    def put(self, key: str, data: bytes | bytearray | memoryview) -> None:
        self.let_go.wait()
        super().put(key, data)


def test_a_rank_that_hangs_while_a_checkpoint_is_uploaded_is_found(store: ObjectStore) -> None:
    model, optimizer = trained(4)
    store = Held(store)
    with (
        HeartbeatServer("127.0.0.1") as heartbeats,
        HeartbeatSender(0, heartbeats.address) as heartbeat,
        CheckpointWriter(store, CheckpointRegistry(store, JOB), 1, lambda _: None) as writer,
    ):
        try:
            save_one(writer, 4, model, optimizer)
            heartbeat.at(4, Phase.TRAINING)
            wait_until(lambda: any(one.step == 4 for one in heartbeats.heard()), "the rank to be heard")
            assert not CheckpointRegistry(store, JOB).entries()  # it is on its way
            (first,) = (one.state(time.monotonic()) for one in heartbeats.heard())
            waits_in_the_step = replace(first, still_s=300.0)

            assert hung([waits_in_the_step, replace(waits_in_the_step, rank=1, step=3)], 30.0) == [1]

            def let_go_once_excused() -> None:
                try:
                    wait_until(lambda: heartbeats.heard()[0].waits_for_store, "the excuse")
                finally:
                    store.let_go.set()

            with ThreadPoolExecutor(1) as looking:
                seen = looking.submit(let_go_once_excused)
                writer.wait()
                seen.result()
        finally:
            store.let_go.set()
    assert [one.step for one in CheckpointRegistry(store, JOB).entries()] == [4]


def test_leaving_the_writer_commits_and_reports_the_checkpoint_under_way(store: ObjectStore) -> None:
    reported: list[CheckpointEntry] = []
    slow = threading.Event()

    def tell(entry: CheckpointEntry) -> None:
        slow.wait(0.2)
        reported.append(entry)

    with CheckpointWriter(store, CheckpointRegistry(store, JOB), 1, tell) as writer:
        save_one(writer, 2, *trained(2))

    assert reported == CheckpointRegistry(store, JOB).entries()


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


def test_a_checkpoint_of_another_release_is_skipped_but_not_held_for_damaged(store: ObjectStore) -> None:
    entries = save(store, 5, 10)
    manifest = json.loads(store.get(f"{entries[1].folder}/{MANIFEST}"))
    encoded = json.dumps({**manifest, "format": "millrace.checkpoint/99"}).encode()
    store.put(f"{entries[1].folder}/{MANIFEST}", encoded)
    newer = replace(entries[1], manifest_sha256=hashlib.sha256(encoded).hexdigest())
    warnings: list[str] = []
    damaged: set[str] = set()

    assert newest_good(store, [entries[0], newer], warnings.append, damaged) == entries[0]
    assert "millrace.checkpoint/99" in warnings[0]
    assert not damaged


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
        restore(store, saved)


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
