"""Whatever has become of a checkpoint's files, the newest good one is taken, and each that was skipped is told."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import pytest

from shared.checkpoint import CheckpointEntry, CheckpointRegistry
from shared.checkpoint.format import MANIFEST, OPTIMIZER, WEIGHTS, sha256
from shared.errors import Unavailable
from shared.storage import ObjectStore
from tests.support.snapshots import CONTENT, JOB, RANKING, entries, load, policy, save, save_one, trained
from train_service.checkpoints.retention import retain
from train_service.checkpoints.writing_and_restoring import CheckpointWriter, newest_good

Damage = Callable[[ObjectStore, CheckpointEntry], None]
PATHS = [WEIGHTS, OPTIMIZER, MANIFEST]


def flipped(path: str, place: float) -> Damage:
    def damage(store: ObjectStore, entry: CheckpointEntry) -> None:
        data = bytearray(store.get(f"{entry.folder}/{path}"))
        data[int(place * (len(data) - 1))] ^= 1
        store.put(f"{entry.folder}/{path}", data)

    return damage


def cut(path: str, share: float) -> Damage:
    def damage(store: ObjectStore, entry: CheckpointEntry) -> None:
        data = store.get(f"{entry.folder}/{path}")
        store.put(f"{entry.folder}/{path}", data[: int(share * len(data))])

    return damage


def grown(path: str) -> Damage:
    return lambda store, entry: store.put(f"{entry.folder}/{path}", store.get(f"{entry.folder}/{path}") + b"\0")


def missing(path: str) -> Damage:
    return lambda store, entry: store.delete(f"{entry.folder}/{path}")


def folder_gone(store: ObjectStore, entry: CheckpointEntry) -> None:
    store.delete_folder(entry.folder)


def other_format(store: ObjectStore, entry: CheckpointEntry) -> None:
    """Of a release to come, and named by its digest as it should be."""
    manifest = json.loads(store.get(f"{entry.folder}/{MANIFEST}"))
    encoded = json.dumps({**manifest, "format": "millrace.checkpoint/99"}).encode()
    store.put(f"{entry.folder}/{MANIFEST}", encoded)
    CheckpointRegistry(store, JOB).commit(replace(entry, manifest_sha256=sha256(encoded)))


DAMAGES = {
    **{f"{path}-flipped-at-{place}": flipped(path, place) for path in PATHS for place in (0.0, 0.5, 1.0)},
    **{f"{path}-cut-to-{share}": cut(path, share) for path in PATHS for share in (0.0, 0.5, 0.99)},
    **{f"{path}-grown": grown(path) for path in PATHS},
    **{f"{path}-missing": missing(path) for path in PATHS},
    "folder-missing": folder_gone,
    "other-format": other_format,
}


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_one_is_skipped_and_reported_and_the_one_before_is_restored(store: ObjectStore, how: str) -> None:
    saved = save(store, 2, 4)
    DAMAGES[how](store, saved[1])
    warnings: list[str] = []
    damaged: set[str] = set()

    chosen = newest_good(store, entries(store), warnings.append, damaged)

    assert chosen == saved[0]
    assert [saved[1].name in one for one in warnings] == [True]
    # One of another release may be whole, and is not to be taken away.
    assert damaged == (set() if how == "other-format" else {saved[1].folder})
    load(store, chosen, *trained(0))


def test_one_that_is_being_retired_is_not_chosen_though_its_files_are_still_there(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dies(_: str) -> None:
        raise Unavailable("no answer")

    saved = save(store, 2, 4)
    with monkeypatch.context() as dying:
        dying.setattr(store, "delete_folder", dies)
        with pytest.raises(Unavailable):
            CheckpointRegistry(store, JOB).retire([saved[1]], 1)

    assert list(store.list(saved[1].folder))
    assert newest_good(store, entries(store), pytest.fail) == saved[0]


def test_a_damaged_one_furthest_on_does_not_push_out_what_the_next_attempt_makes(store: ObjectStore) -> None:
    """Attempt 2 found step 8 damaged and goes on from 4: its step 6 is the newest good one, though 8 is further on."""
    saved = save(store, 2, 4, 8)
    flipped(WEIGHTS, 0.5)(store, saved[2])
    damaged: set[str] = set()
    registry = CheckpointRegistry(store, JOB)
    assert newest_good(store, registry.fence(2, RANKING), lambda _: None, damaged) == saved[1]

    with CheckpointWriter(store, registry, 2, lambda _: None, policy=policy(keep_newest=1), damaged=damaged) as writer:
        save_one(writer, 6, *trained(6))
        writer.wait()

    (left,) = entries(store)
    assert (left.step, left.attempt) == (6, 2)
    assert newest_good(store, [left], pytest.fail) == left


def test_retention_keeps_the_newest_and_the_best_and_removes_the_files_of_the_rest(store: ObjectStore) -> None:
    registry = CheckpointRegistry(store, JOB)
    registry.fence(1, RANKING)
    with CheckpointWriter(store, registry, 1, lambda _: None, policy=policy(2)) as writer:
        for step, loss in ((2, 0.9), (4, 0.1), (6, 0.5), (8, float("nan")), (10, 0.6)):
            save_one(writer, step, *trained(0), validation_loss=loss)
        writer.save(lambda: replace(CONTENT, step=12), trained(0)[0].state_dict(), {}, final=True)
        writer.wait()

    left = entries(store)
    assert [one.step for one in left] == [4, 10, 12]
    assert set(store.folders(registry.data_folder)) == {one.folder.rsplit("/", 1)[1] for one in left}
    assert retain(store, CheckpointRegistry(store, JOB), policy(2), 1) == []
    assert all(newest_good(store, [one], pytest.fail) for one in left)


def test_each_run_of_a_script_keeps_its_own_checkpoints(store: ObjectStore) -> None:
    registry = CheckpointRegistry(store, JOB)
    registry.fence(1, RANKING)
    with CheckpointWriter(store, registry, 1, lambda _: None, policy=policy(0)) as writer:
        for step in (2, 4, 6, 8):
            save_one(writer, step, *trained(0))
        writer.wait()
    for one in entries(store):
        registry.commit(replace(one, fit=1 if one.step < 6 else 2))

    went = retain(store, registry, policy(keep_newest=1), 1, fit=2)

    assert [one.step for one in went] == [6]
    assert [one.step for one in entries(store)] == [2, 4, 8]
