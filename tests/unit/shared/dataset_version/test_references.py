from __future__ import annotations

import json
import time
from typing import Any

import pytest

from shared.dataset_version.version import IMPORT_KIND, live_references, mark_used, markers, unmark, using
from shared.errors import AlreadyExists, FailedPrecondition, NotFound, Unavailable
from shared.jobs import JobRecord, Jobs
from shared.jobs.transitions import begin_attempt, fail, request_delete, succeed
from shared.storage import ObjectStore

HOLDER = "trainingJobs/j"


def keys(store: ObjectStore) -> list[str]:
    return [info.key for info in store.list() if "/users/" in info.key]


def job(store: ObjectStore, uid: str) -> JobRecord:
    return Jobs(store, "train").create(
        HOLDER, JobRecord(uid=uid, name=HOLDER, spec={}, create_time=0.0, update_time=0.0)
    )


def test_a_marker_names_its_user(store: ObjectStore, committed: str) -> None:
    mark_used(store, committed, "train", "u1", HOLDER)
    job(store, "u1")
    assert keys(store) == [f"{committed}/users/train-u1.json"]
    assert json.loads(store.get(keys(store)[0]))["user"] == HOLDER
    assert live_references(store, committed, time.time()) == [HOLDER]
    unmark(store, committed, "train", "u1")
    assert live_references(store, committed, time.time()) == []


def test_a_version_that_is_not_there_is_not_marked(store: ObjectStore) -> None:
    with pytest.raises(NotFound):
        mark_used(store, "datasets/d/versions/none", "train", "u1", HOLDER)
    assert keys(store) == []


def test_a_version_that_is_being_deleted_is_not_marked(store: ObjectStore, committed: str) -> None:
    Jobs(store, IMPORT_KIND).transition(committed, lambda newest: request_delete(newest, 1.0))
    with pytest.raises(FailedPrecondition):
        mark_used(store, committed, "train", "u1", HOLDER)
    assert keys(store) == []


def test_a_refused_user_leaves_no_marker(store: ObjectStore, committed: str) -> None:
    with pytest.raises(AlreadyExists), using(store, committed, "train", "u1", HOLDER):
        raise AlreadyExists("taken")
    assert keys(store) == []


def test_a_refused_call_leaves_the_marker_of_the_job_that_an_equal_call_made(
    store: ObjectStore, committed: str
) -> None:
    with using(store, committed, "train", "u1", HOLDER):
        job(store, "u1")
    Jobs(store, IMPORT_KIND).transition(committed, lambda newest: request_delete(newest, 1.0))

    with pytest.raises(FailedPrecondition), using(store, committed, "train", "u1", HOLDER):
        pass
    assert live_references(store, committed, time.time()) == [HOLDER]


def test_a_refused_call_gives_the_marker_back_where_an_equal_call_makes_the_job_just_then(
    store: ObjectStore, committed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    delete = store.delete

    def after_the_other(key: str) -> None:
        monkeypatch.undo()
        job(store, "u1")
        delete(key)

    def refused() -> None:
        with using(store, committed, "train", "u1", HOLDER):
            monkeypatch.setattr(store, "delete", after_the_other)
            raise FailedPrecondition("refused")

    with pytest.raises(FailedPrecondition):
        refused()
    assert live_references(store, committed, time.time()) == [HOLDER]


def test_a_job_is_marked_though_an_equal_call_was_refused_while_it_was_made(store: ObjectStore, committed: str) -> None:
    with using(store, committed, "train", "u1", HOLDER):
        with pytest.raises(AlreadyExists), using(store, committed, "train", "u1", HOLDER):
            raise AlreadyExists("taken")
        job(store, "u1")
    assert live_references(store, committed, time.time()) == [HOLDER]


def test_after_an_outage_the_marker_stays_for_the_user_may_have_been_made(store: ObjectStore, committed: str) -> None:
    def make_and_lose_the_answer() -> None:
        with using(store, committed, "train", "u1", HOLDER):
            job(store, "u1")
            raise Unavailable("the answer was lost")

    with pytest.raises(Unavailable):
        make_and_lose_the_answer()
    assert live_references(store, committed, time.time()) == [HOLDER]


def test_an_outage_while_looking_whether_it_is_active_keeps_the_marker(
    store: ObjectStore, committed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> bytes:
        raise Unavailable("no answer")

    monkeypatch.setattr(store, "get", fails)
    with pytest.raises(Unavailable):
        mark_used(store, committed, "train", "u1", HOLDER)
    assert keys(store) == [f"{committed}/users/train-u1.json"]


def test_a_job_that_has_ended_uses_nothing(store: ObjectStore, committed: str) -> None:
    mark_used(store, committed, "train", "u1", HOLDER)
    job(store, "u1")
    Jobs(store, "train").transition(HOLDER, lambda newest: fail(newest, NotFound("x"), time.time()))
    assert live_references(store, committed, time.time()) == []


def test_a_mark_that_is_newer_than_its_jobs_end_counts_for_ten_minutes_as_the_job_may_go_on(
    store: ObjectStore, committed: str
) -> None:
    mark_used(store, committed, "train", "u1", HOLDER, now=1000.0)
    job(store, "u1")
    Jobs(store, "train").transition(HOLDER, lambda newest: fail(newest, NotFound("x"), 1500.0))
    assert live_references(store, committed, 1501.0) == []
    mark_used(store, committed, "train", "u1", HOLDER, now=2000.0)
    assert live_references(store, committed, 2599.0) == [HOLDER]
    assert live_references(store, committed, 2601.0) == []


def test_a_job_that_succeeded_does_not_go_on_whenever_it_was_marked(store: ObjectStore, committed: str) -> None:
    job(store, "u1")
    Jobs(store, "train").transition(HOLDER, lambda newest: begin_attempt(newest, 1.0), attempt=1)
    Jobs(store, "train").transition(HOLDER, lambda newest: succeed(newest, {}, 2.0), attempt=1)
    mark_used(store, committed, "train", "u1", HOLDER)
    assert live_references(store, committed, time.time()) == []


def test_a_marker_whose_job_never_came_counts_for_ten_minutes(store: ObjectStore, committed: str) -> None:
    mark_used(store, committed, "train", "u1", HOLDER, now=1000.0)
    job(store, "another")  # of the same name, but not this user
    assert live_references(store, committed, 1599.0) == [HOLDER]
    assert live_references(store, committed, 1601.0) == []


def test_a_user_that_is_no_job_is_believed_until_it_unmarks(store: ObjectStore, committed: str) -> None:
    mark_used(store, committed, "deploy", "u1", "deployments/m", is_job=False, now=1.0)
    assert live_references(store, committed, 1e9) == ["deployments/m"]
    assert [marker.kind for marker in markers(store, committed)] == ["deploy"]


def test_a_marker_of_before_there_were_folders_in_them_is_believed(store: ObjectStore, committed: str) -> None:
    store.put(f"{committed}/users/train-u0.json", json.dumps({"user": HOLDER}).encode())
    assert live_references(store, committed, 1e9) == [HOLDER]
