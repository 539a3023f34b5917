"""`Jobs`: what is durable about a job, and what its marker is for."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from shared.errors import AlreadyExists, Conflict, FailedPrecondition, NotFound, Unavailable
from shared.jobs import JobRecord, Jobs, JobState
from shared.jobs.registry import KEYS_BETWEEN_POLLS, remove_objects
from shared.jobs.transitions import (
    begin_attempt,
    confirm_delete,
    confirm_suspend,
    fail,
    lose_attempt,
    request_delete,
    succeed,
    take_up,
)
from shared.storage import ObjectStore

FOLDER = "things/one"


def a_job(uid: str = "u1", **values: Any) -> JobRecord:
    return JobRecord(**{"uid": uid, "name": FOLDER, "spec": {}, "create_time": 1.0, "update_time": 1.0, **values})


class Failing(ObjectStore):
    """A real store whose conditional writes below `failing` end in an outage, before or after they are done."""

    def __init__(self, store: ObjectStore, failing: str, *, written: bool) -> None:
        self.__dict__.update(vars(store))
        self._failing = failing
        self._written = written

    def put_if_absent(self, key: str, data: bytes | bytearray | memoryview) -> None:
        if not key.startswith(self._failing):
            return super().put_if_absent(key, data)
        if self._written:
            super().put_if_absent(key, data)
        raise Unavailable("the object store does not answer")


@pytest.fixture
def jobs(store: ObjectStore) -> Jobs:
    return Jobs(store, "toy")


def test_a_created_job_can_be_read_and_is_live(jobs: Jobs) -> None:
    before = time.time()

    created = jobs.create(FOLDER, a_job(spec={"rows": [1, 2]}))

    assert jobs.get(FOLDER, FOLDER) == created
    assert jobs.find(FOLDER) == created
    (live,) = jobs.live()
    assert (live.uid, live.folder) == ("u1", FOLDER)
    assert before <= live.marked_at <= time.time()


def test_a_job_that_never_was_is_not_found_by_name(jobs: Jobs) -> None:
    assert jobs.find(FOLDER) is None
    with pytest.raises(NotFound, match="things/one"):
        jobs.get(FOLDER, FOLDER)
    with pytest.raises(NotFound, match="things/one"):
        jobs.cancel(FOLDER, FOLDER)


def test_kinds_do_not_see_each_others_live_jobs(store: ObjectStore, jobs: Jobs) -> None:
    jobs.create(FOLDER, a_job())

    assert Jobs(store, "other").live() == []
    assert Jobs(store, "to").live() == []


def test_a_taken_folder_is_refused_and_leaves_the_first_job_live(jobs: Jobs) -> None:
    first = jobs.create(FOLDER, a_job("u1"))

    with pytest.raises(AlreadyExists, match="things/one"):
        jobs.create(FOLDER, a_job("u2"))

    assert jobs.get(FOLDER, FOLDER) == first
    assert [live.uid for live in jobs.live()] == ["u1"]


def test_of_racing_creators_one_wins_and_only_its_marker_stays(store: ObjectStore) -> None:
    def create(number: int) -> str | None:
        try:
            return Jobs(store, "toy").create(FOLDER, a_job(f"u{number}")).uid
        except AlreadyExists:
            return None

    with ThreadPoolExecutor(8) as pool:
        won = [uid for uid in pool.map(create, range(8)) if uid]

    assert len(won) == 1
    assert Jobs(store, "toy").get(FOLDER, FOLDER).uid == won[0]
    assert [live.uid for live in Jobs(store, "toy").live()] == won


def test_a_creation_whose_answer_was_lost_is_still_live(store: ObjectStore) -> None:
    with pytest.raises(Unavailable):
        Jobs(Failing(store, FOLDER, written=True), "toy").create(FOLDER, a_job())

    jobs = Jobs(store, "toy")
    assert jobs.get(FOLDER, FOLDER).state is JobState.PENDING
    assert [live.uid for live in jobs.live()] == ["u1"]


def test_creating_the_very_same_job_again_after_its_answer_was_lost_keeps_it_live(store: ObjectStore) -> None:
    job = a_job()
    with pytest.raises(Unavailable):
        Jobs(Failing(store, FOLDER, written=True), "toy").create(FOLDER, job)
    jobs = Jobs(store, "toy")

    assert jobs.create(FOLDER, job) == job
    assert [live.uid for live in jobs.live()] == ["u1"]


def test_a_creation_that_an_outage_stopped_can_be_made_anew(store: ObjectStore) -> None:
    with pytest.raises(Unavailable):
        Jobs(Failing(store, FOLDER, written=False), "toy").create(FOLDER, a_job("u1"))
    jobs = Jobs(store, "toy")
    assert jobs.find(FOLDER) is None

    jobs.create(FOLDER, a_job("u2"))

    assert "u2" in [live.uid for live in jobs.live()]


def test_cancelling_writes_the_request_once(jobs: Jobs) -> None:
    jobs.create(FOLDER, a_job())

    requested = jobs.cancel(FOLDER, FOLDER)

    assert (requested.state, requested.generation) == (JobState.CANCELLING, 2)
    assert jobs.cancel(FOLDER, FOLDER) == requested
    assert jobs.get(FOLDER, FOLDER) == requested


def test_cancelling_a_job_that_is_done_changes_nothing(jobs: Jobs) -> None:
    jobs.create(FOLDER, a_job())
    jobs.transition(FOLDER, lambda job: succeed(begin_attempt(job, 2.0), {"x": 1}, 3.0))

    assert jobs.cancel(FOLDER, FOLDER).state is JobState.SUCCEEDED


def test_the_present_etag_is_accepted_whatever_progress_there_was(jobs: Jobs) -> None:
    jobs.create(FOLDER, a_job())
    jobs.transition(FOLDER, lambda job: begin_attempt(job, 2.0))

    assert jobs.cancel(FOLDER, FOLDER, etag="1").state is JobState.CANCELLING


def test_another_etag_is_a_conflict_that_names_the_present_one(jobs: Jobs) -> None:
    jobs.create(FOLDER, a_job())

    with pytest.raises(Conflict, match="etag 1, not 7") as raised:
        jobs.cancel(FOLDER, FOLDER, etag="7")

    assert raised.value.specific_reason == "STALE_ETAG"
    assert jobs.get(FOLDER, FOLDER).state is JobState.PENDING


def test_a_request_does_not_fence_the_attempt_at_work(jobs: Jobs) -> None:
    jobs.create(FOLDER, a_job())
    jobs.transition(FOLDER, lambda job: begin_attempt(job, 2.0), attempt=1)
    jobs.cancel(FOLDER, FOLDER)

    done = jobs.transition(FOLDER, lambda job: succeed(job, {"x": 1}, 3.0), attempt=1)

    assert (done.state, done.result) == (JobState.SUCCEEDED, {"x": 1})


def test_live_jobs_come_in_the_order_of_their_creation(jobs: Jobs) -> None:
    for number in (3, 1, 2):
        jobs.create(f"things/{number}", a_job(f"u{number}", name=f"things/{number}"))

    assert [live.uid for live in jobs.live()] == ["u3", "u1", "u2"]


def test_a_forgotten_job_is_still_there_but_no_longer_live(jobs: Jobs) -> None:
    jobs.create(FOLDER, a_job())

    (live,) = jobs.live()
    jobs.forget(live)
    jobs.forget(live)

    assert jobs.live() == []
    assert jobs.find(FOLDER) is not None


def test_a_resumed_job_is_live_even_if_its_old_marker_is_taken_away_late(jobs: Jobs) -> None:
    jobs.create(FOLDER, a_job())
    (before,) = jobs.live()
    jobs.suspend(FOLDER, FOLDER)
    jobs.transition(FOLDER, lambda job: confirm_suspend(job, 3.0))

    resumed = jobs.resume(FOLDER, FOLDER)
    jobs.forget(before)

    assert (resumed.state, resumed.generation) == (JobState.RECOVERING, 3)
    assert [live.uid for live in jobs.live()] == ["u1"]


def test_a_job_that_succeeded_can_neither_be_suspended_nor_resumed(jobs: Jobs) -> None:
    jobs.create(FOLDER, a_job())
    jobs.transition(FOLDER, lambda job: succeed(begin_attempt(job, 2.0), {}, 3.0))

    for request in (jobs.suspend, jobs.resume):
        with pytest.raises(FailedPrecondition, match="is SUCCEEDED"):
            request(FOLDER, FOLDER)


def test_clients_learn_what_a_job_waits_for_until_it_does_not(jobs: Jobs) -> None:
    jobs.create(FOLDER, a_job())
    assert jobs.waiting_for(FOLDER) == ""
    jobs.wait_for(FOLDER, "2 CPUs")
    assert jobs.waiting_for(FOLDER) == "2 CPUs"
    jobs.wait_for(FOLDER, "")
    assert jobs.waiting_for(FOLDER) == ""


def test_progress_is_empty_before_the_first_report(jobs: Jobs) -> None:
    jobs.create(FOLDER, a_job())

    assert jobs.progress(FOLDER) == {}


def test_a_deleted_job_is_gone_and_its_place_is_free_for_another(jobs: Jobs) -> None:
    jobs.create(FOLDER, a_job())
    jobs.transition(FOLDER, lambda job: begin_attempt(job, 2.0), attempt=1)
    jobs.transition(FOLDER, lambda job: fail(job, NotFound("gone"), 3.0), attempt=1)
    jobs.transition(FOLDER, lambda job: request_delete(job, 4.0))
    jobs.transition(FOLDER, lambda job: confirm_delete(job, 5.0))
    assert jobs.find(FOLDER) is None

    second = jobs.create(FOLDER, a_job("u2"))

    assert jobs.get(FOLDER, FOLDER) == second
    assert (second.uid, second.attempts_made) == ("u2", 0)
    begun = jobs.transition(FOLDER, lambda job: begin_attempt(job, 6.0), attempt=second.attempt + 1)
    assert begun.attempts_made == 1
    with pytest.raises(AlreadyExists):
        jobs.create(FOLDER, a_job("u3"))


def made_anew(jobs: Jobs, uid: str) -> JobRecord:
    """Another job in the folder of one that is deleted."""
    jobs.transition(FOLDER, lambda job: begin_attempt(job, 2.0), attempt=1)
    jobs.transition(FOLDER, lambda job: succeed(job, {}, 3.0), attempt=1)
    jobs.transition(FOLDER, lambda job: request_delete(job, 4.0))
    jobs.transition(FOLDER, lambda job: confirm_delete(job, 5.0))
    return jobs.create(FOLDER, a_job(uid))


def test_a_cancellation_of_one_job_does_not_reach_the_next_one_of_its_name(jobs: Jobs) -> None:
    jobs.create(FOLDER, a_job("old"))
    made_anew(jobs, "new")
    with pytest.raises(NotFound):
        jobs.cancel(FOLDER, FOLDER, uid="old")
    assert jobs.get(FOLDER, FOLDER).state is JobState.PENDING
    assert jobs.cancel(FOLDER, FOLDER, uid="new").state is not JobState.PENDING


def test_of_two_that_take_a_job_away_the_slower_one_stops_once_another_job_has_its_name(
    store: ObjectStore, jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = [f"{FOLDER}/metrics/{number:06d}" for number in range(3 * KEYS_BETWEEN_POLLS)]
    jobs.create(FOLDER, a_job("old"))
    jobs.transition(FOLDER, lambda job: begin_attempt(job, 2.0), attempt=1)
    jobs.transition(FOLDER, lambda job: succeed(job, {}, 3.0), attempt=1)
    deleting = jobs.transition(FOLDER, lambda job: request_delete(job, 4.0))
    deleted: list[str] = []

    def overtaken(key: str) -> None:
        deleted.append(key)
        if len(deleted) == 10:
            jobs.transition(FOLDER, lambda job: confirm_delete(job, 5.0))
            jobs.create(FOLDER, a_job("new"))

    monkeypatch.setattr(store, "delete", overtaken)
    assert not remove_objects(store, jobs, deleting, keys)
    assert len(deleted) <= 32  # a local directory deletes one by one


def test_a_marker_of_a_resumption_that_is_under_way_is_known_as_such(jobs: Jobs) -> None:
    """It is there before the job reads as resumed, and must not be taken for that of a job that is over."""
    jobs.create(FOLDER, a_job())
    jobs.suspend(FOLDER, FOLDER)
    suspended = jobs.transition(FOLDER, lambda job: confirm_suspend(job, 3.0))
    (before,) = jobs.live()
    assert before.generation <= suspended.generation

    resumed = jobs.resume(FOLDER, FOLDER)

    (live,) = jobs.live()
    assert live.generation == suspended.generation + 1 == resumed.generation


def test_a_resumption_that_comes_between_another_that_failed_again_is_live(
    jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both read the job in the same state; the marker of the slower one must be that of what it makes."""
    jobs.create(FOLDER, a_job())
    jobs.transition(FOLDER, lambda job: fail(job, NotFound("gone"), 2.0))
    request, other = jobs._request, Jobs(jobs._store, jobs.kind)

    def after_another(*arguments: Any) -> JobRecord:
        monkeypatch.undo()
        other.resume(FOLDER, FOLDER)
        other.transition(FOLDER, lambda job: fail(job, NotFound("gone"), 3.0))
        for live in other.live():
            other.forget(live)
        return request(*arguments)

    monkeypatch.setattr(jobs, "_request", after_another)
    resumed = jobs.resume(FOLDER, FOLDER)

    assert resumed.state is JobState.RECOVERING
    (live,) = jobs.live()
    assert live.generation == resumed.generation


def test_resumptions_at_once_are_one_request_and_all_get_the_same_job(store: ObjectStore, jobs: Jobs) -> None:
    jobs.create(FOLDER, a_job())
    failed = jobs.transition(FOLDER, lambda job: fail(job, NotFound("gone"), 2.0))

    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda _: Jobs(store, "toy").resume(FOLDER, FOLDER), range(6)))

    assert {(one.state, one.generation, one.update_time) for one in answers} == {
        (JobState.RECOVERING, failed.generation + 1, answers[0].update_time)
    }
    (live,) = jobs.live()
    assert live.generation == failed.generation + 1


def test_a_job_that_somebody_ran_by_hand_and_left_has_a_marker_once_it_is_handed_over(jobs: Jobs) -> None:
    jobs.create(FOLDER, a_job(runner="by hand"))
    jobs.transition(FOLDER, lambda job: lose_attempt(take_up(job, 2.0), Unavailable("interrupted"), 3.0), attempt=1)
    assert not list(jobs.live())

    assert jobs.resume(FOLDER, FOLDER).state is JobState.RECOVERING

    (live,) = jobs.live()
    assert (live.folder, live.generation) == (FOLDER, jobs.get(FOLDER, FOLDER).generation)
