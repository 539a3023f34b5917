"""What a later release added to a record stays in it, though this one neither knows nor needs it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from data_service.domain.dataset import Dataset
from data_service.uploads.upload import UploadRecord
from data_service.uploads.uploads import LiveUploads
from shared.checkpoint import Ranking
from shared.checkpoint.registry import CheckpointEntry, CheckpointRegistry
from shared.durable import Durable, as_state, fields_of, stored_as
from shared.jobs import AttemptContext, JobRecord, Jobs, JobState
from shared.settings import StoreSettings
from shared.storage import ObjectStore, open_store
from tests.support.waiting import wait_until
from train_service.records.event_log import CANCEL, TRAIN_KIND, Reporter

JOB = "trainingJobs/j"


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    return open_store(StoreSettings(url=tmp_path.as_uri()))


def a_job(**changes: Any) -> JobRecord:
    return JobRecord(uid="u", name=JOB, spec={"x": 1}, create_time=1.0, update_time=1.0, **changes)


@pytest.mark.parametrize(
    ("record", "read"),
    [
        (a_job(), JobRecord.from_state),
        (Dataset(name="datasets/d", uid="u", display_name="", description="", create_time=1.0), Dataset.from_state),
        (UploadRecord(name="datasets/d/uploads/u", uid="u", create_time=1.0, update_time=1.0), UploadRecord.from_state),
    ],
)
def test_a_field_of_a_later_release_is_read_over_and_written_back_unchanged(
    record: Any, read: Callable[[dict[str, Any]], Any]
) -> None:
    state = json.loads(json.dumps({**record.as_state(), "colour": {"of": ["a", "later", "release"]}}))

    written = replace(read(state), uid="v").as_state()

    assert json.loads(json.dumps(written)) == {**state, "uid": "v"}
    assert "unknown" not in written


@dataclass(frozen=True)
class Renamed(Durable):
    rollout: int = field(default=0, metadata=stored_as("roll_out"))


def test_a_renamed_field_is_read_and_written_under_the_name_that_records_have() -> None:
    read = Renamed(**fields_of(Renamed, {"roll_out": 7, "rollout": 8, "colour": 9}))

    assert read.rollout == 7
    assert as_state(read) == {"roll_out": 7, "rollout": 8, "colour": 9}


def test_fields_of_a_later_release_in_a_datasets_retention_are_written_back() -> None:
    made = Dataset(name="datasets/d", uid="u", display_name="", description="", create_time=1.0)
    state = json.loads(json.dumps(made.as_state()))
    state["retention"] |= {"keep_newest": 3, "keep_labelled": ["gold"]}

    written = replace(Dataset.from_state(state), display_name="d").as_state()

    assert json.loads(json.dumps(written)) == {**state, "display_name": "d"}


def test_the_marker_of_an_upload_keeps_what_a_later_release_wrote_when_it_is_marked_as_gone(
    store: ObjectStore,
) -> None:
    name = "datasets/d/uploads/u"
    live = LiveUploads(store)
    live.mark("uid", name)
    (key,) = live.markers()
    store.put(key, json.dumps({**json.loads(store.get(key)), "colour": "red"}).encode())

    found = live.read(key)
    assert found is not None
    live.set_gone(found, 5.0)

    marker = json.loads(store.get(key))
    assert (marker["colour"], marker["gone_at"]) == ("red", 5.0)


def later(store: ObjectStore, prefix: str, change: Callable[[dict[str, Any]], None]) -> None:
    """Have the newest record of a log as a later release would write it."""
    key = max(info.key for info in store.list(prefix))
    record = json.loads(store.get(key))
    record["colour"] = "red"
    change(record["state"])
    store.put(key, json.dumps(record).encode())


def test_entries_of_checkpoints_keep_what_a_later_release_wrote_when_another_is_added(store: ObjectStore) -> None:
    def entry(step: int) -> CheckpointEntry:
        name = f"{JOB}/checkpoints/step-{step}"
        return CheckpointEntry(
            name=name, folder=name, manifest_sha256="", step=step, epoch=0, attempt=1, size_bytes=1, create_time=1.0
        )

    registry = CheckpointRegistry(store, JOB)
    registry.fence(1)
    registry.commit(entry(1))
    prefix = f"{JOB}/checkpoints/log"
    later(store, prefix, lambda state: state.update(shape="round"))
    later(store, prefix, lambda state: state["checkpoints"][0].update(colour="red"))
    later(store, prefix, lambda state: state["ranking"].update(ties="newest"))

    CheckpointRegistry(store, JOB).fence(1, Ranking("validation_loss", maximize=False))
    CheckpointRegistry(store, JOB).commit(entry(2))

    state = json.loads(store.get(max(info.key for info in store.list(prefix))))["state"]
    assert state["shape"] == "round"
    assert state["ranking"] == {"metric": "validation_loss", "maximize": False, "ties": "newest"}
    assert [one.get("colour") for one in state["checkpoints"]] == ["red", None]


def test_requests_in_a_later_releases_record_still_reach_attempts_at_work(store: ObjectStore) -> None:
    jobs = Jobs(store, TRAIN_KIND)
    job = jobs.create(JOB, a_job(state=JobState.RUNNING, attempt=1))
    context = AttemptContext(store, jobs, JOB, job)
    with Reporter(store, JOB, 1) as reporter, context.watching_requests():
        jobs.cancel(JOB, JOB)
        later(store, f"{JOB}/log", lambda state: state.update(colour="red"))
        wait_until(lambda: reporter.stop_reason == CANCEL, "the rank to hear it")
        wait_until(lambda: context._newest.state is JobState.CANCELLING, "the attempt to hear it")


def test_a_record_that_cannot_be_read_for_a_while_does_not_end_the_threads_that_watch(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = Jobs(store, TRAIN_KIND)
    job = jobs.create(JOB, a_job(state=JobState.RUNNING, attempt=1))
    context = AttemptContext(store, jobs, JOB, job)
    find, failed = Jobs.find, list[str]()

    def fails(_: Jobs, folder: str) -> JobRecord | None:
        failed.append(folder)
        raise TypeError("another form")

    monkeypatch.setattr(Jobs, "find", fails)
    with Reporter(store, JOB, 1) as reporter, context.watching_requests():
        wait_until(lambda: len(failed) >= 4, "both threads to look twice")
        monkeypatch.setattr(Jobs, "find", find)
        jobs.cancel(JOB, JOB)
        wait_until(lambda: reporter.stop_reason == CANCEL, "the rank to hear it")
        wait_until(lambda: context._newest.state is JobState.CANCELLING, "the attempt to hear it")
