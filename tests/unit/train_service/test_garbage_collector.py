"""What crashes leave behind goes, and nothing that somebody may still name or use."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import pytest

from shared.checkpoint import CheckpointEntry, CheckpointRegistry
from shared.checkpoint.references import using
from shared.errors import NotFound, Unavailable
from shared.jobs import JobRecord, Jobs
from shared.jobs.transitions import begin_attempt, fail
from shared.resource_log import StaleAttempt
from shared.storage import ObjectStore
from tests.support.counting_store import CountingStore
from tests.support.snapshots import JOB, entries, save
from train_service.jobs.deletion import Deletions, GarbageCollector
from train_service.records import event_log
from train_service.records.event_log import TRAIN_KIND, EventKind, EventLog

DATA = f"{JOB}/checkpoints/data"
T = TypeVar("T")


@pytest.fixture
def jobs(store: ObjectStore) -> Jobs:
    """`trainingJobs/a`, at work in attempt 2, with checkpoints of both attempts."""
    made = Jobs(store, TRAIN_KIND)
    made.create(JOB, JobRecord(uid="u", name=JOB, spec={}, create_time=0.0, update_time=0.0, attempt=1))
    made.transition(JOB, lambda newest: begin_attempt(newest, 1.0), attempt=2)
    save(store, 2)
    CheckpointRegistry(store, JOB).fence(2)
    save(store, 4, attempt=2)
    return made


def garbage(store: ObjectStore, step: int, attempt: int) -> str:
    folder = f"{DATA}/step-{step:08d}-a{attempt:05d}-0123abcd"
    store.put(f"{folder}/model.safetensors", b"x")
    return folder


def collect(store: ObjectStore, now: float = 0.0) -> None:
    GarbageCollector(store, Deletions(store), lambda: now).collect()


def there(store: ObjectStore, folder: str) -> bool:
    return any(True for _ in store.list(folder))


def end(jobs: Jobs) -> None:
    jobs.transition(JOB, lambda newest: fail(newest, NotFound("x"), 2.0))


def whole(store: ObjectStore, left: list[CheckpointEntry]) -> bool:
    return all(there(store, one.folder) for one in left)


@pytest.mark.usefixtures("jobs")
def test_remains_of_earlier_attempts_are_removed_and_the_present_ones_stay(store: ObjectStore) -> None:
    old, writing = garbage(store, 3, 1), garbage(store, 6, 2)

    collect(store)

    assert not there(store, old)
    assert there(store, writing)
    assert whole(store, entries(store))
    assert [one.step for one in entries(store)] == [2, 4]


def test_once_the_job_is_over_its_last_attempt_can_commit_no_more_and_what_it_left_goes(
    store: ObjectStore, jobs: Jobs
) -> None:
    left = garbage(store, 6, 2)
    zombie = CheckpointRegistry(store, JOB)
    (_, newest) = zombie.entries()
    end(jobs)

    collect(store)

    assert not there(store, left)
    with pytest.raises(StaleAttempt):
        zombie.commit(newest)
    assert whole(store, entries(store))
    # It may be resumed: the next attempt opens the registry as ever.
    assert len(CheckpointRegistry(store, JOB).fence(3)) == 2


def test_a_collection_of_a_job_without_garbage_writes_nothing(store: ObjectStore, jobs: Jobs) -> None:
    end(jobs)
    before = sorted(info.key for info in store.list())

    collect(store)

    assert sorted(info.key for info in store.list()) == before


@pytest.mark.usefixtures("jobs")
def test_files_that_somebody_uses_stay_though_another_has_taken_their_name(store: ObjectStore) -> None:
    name = f"{JOB}/checkpoints/step-00000002"
    with using(store, "f", name, "deployment", "d1", "deployments/m", ends_in="GONE") as used:
        pass
    save(store, 2, attempt=2)

    collect(store)
    assert there(store, used.folder)
    collect(store, now=1e12)  # the deployment never came
    assert not there(store, used.folder)
    assert not [info for info in store.list(JOB) if "/users/" in info.key]
    assert whole(store, entries(store))


def dies(_: str) -> None:
    raise Unavailable("no answer")


def test_a_retirement_that_died_half_way_is_finished_once_the_job_is_over(
    store: ObjectStore, jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    (first, _) = entries(store)
    with monkeypatch.context() as dying:
        dying.setattr(store, "delete_folder", dies)
        with pytest.raises(Unavailable):
            CheckpointRegistry(store, JOB).retire([first], 2)
    assert there(store, first.folder)
    end(jobs)

    collect(store)

    assert not there(store, first.folder)


def test_the_garbage_collector_deletes_ray_state_of_finished_attempts(store: ObjectStore, jobs: Jobs) -> None:
    for attempt in (1, 2):
        store.put(f"{JOB}/ray/attempt-{attempt:05d}/state.json", b"x")

    collect(store)
    assert list(store.folders(f"{JOB}/ray")) == ["attempt-00002"]
    end(jobs)
    collect(store)
    assert list(store.folders(f"{JOB}/ray")) == []


def test_writes_of_a_fenced_process_after_the_end_of_its_job_are_removed(store: ObjectStore, jobs: Jobs) -> None:
    end(jobs)
    deletions = Deletions(store)
    deletions.begin(JOB)
    deletions.finish(JOB)
    store.put(f"{JOB}/logs/1.log", b"x")
    garbage(store, 8, 2)

    collect(store)

    assert not [info.key for info in store.list(JOB) if "/log/" not in info.key]


@pytest.mark.usefixtures("jobs")
def test_one_job_that_cannot_be_swept_leaves_the_others_be(
    store: ObjectStore, caplog: pytest.LogCaptureFixture
) -> None:
    store.put("trainingJobs/0/log/000000000001.json", b"no json")
    old = garbage(store, 3, 1)

    collect(store)

    assert not there(store, old)
    assert "trainingJobs/0 cannot be swept" in caplog.text


# --- Events ---


def write_events(store: ObjectStore, last: int, attempt: int = 2) -> None:
    log = EventLog(store, JOB)
    for number in range(log.last_sequence() + 1, last + 1):
        log.append(attempt, EventKind.WARNING, {"text": f"{attempt}-{number}"}, f"{attempt}-{number}")


def records_of_events(store: ObjectStore) -> int:
    return sum(info.key.endswith(".json") for info in store.list(f"{JOB}/events/log"))


def events_of(store: ObjectStore) -> list[str]:
    return [event.payload["text"] for event in EventLog(store, JOB).after(0)]


class ChangedOnce(CountingStore):
    """A store in which `change` is called before the first record of an event is listed, or deleted."""

    def __init__(self, store: ObjectStore, verb: str, change: Callable[[], object]) -> None:
        super().__init__(store)
        self._verb = verb
        self._change: Callable[[], object] | None = change

    def _asked(self, what: str, key: str, ask: Callable[[], T]) -> T:
        if self._change is not None and what == self._verb and key.startswith(f"{JOB}/events/"):
            change, self._change = self._change, None
            change()
        return super()._asked(what, key, ask)


def test_events_are_gathered_once_the_job_has_ended(
    store: ObjectStore, jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_log, "SEGMENT_RECORDS", 4)
    write_events(store, 11)
    before = events_of(store)
    collect(store)
    assert records_of_events(store) == 11

    end(jobs)
    collect(store)

    assert records_of_events(store) == 2 + 3
    assert events_of(store) == before


def test_events_of_a_job_that_is_resumed_before_they_are_deleted_stay_records(
    store: ObjectStore, jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_log, "SEGMENT_RECORDS", 4)
    write_events(store, 11)
    before = events_of(store)
    end(jobs)

    collect(ChangedOnce(store, "list", lambda: jobs.resume(JOB, JOB)))

    assert records_of_events(store) == 11
    assert events_of(store) == before


def test_events_of_a_job_that_takes_the_name_while_the_old_ones_are_gathered_stay(
    store: ObjectStore, jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_log, "SEGMENT_RECORDS", 4)
    write_events(store, 11)
    end(jobs)

    def take_name() -> None:
        deletions = Deletions(store)
        deletions.begin(JOB)
        deletions.finish(JOB)
        jobs.create(JOB, JobRecord(uid="new", name=JOB, spec={}, create_time=0.0, update_time=0.0))
        write_events(store, 9, attempt=3)

    # The records of the old job are listed, and its segments are about to be written.
    collect(ChangedOnce(store, "put", take_name))

    assert records_of_events(store) == 9
    assert events_of(store) == [f"3-{number}" for number in range(1, 10)]
