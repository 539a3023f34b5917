"""What the reconciler does with the markers of live jobs. (What it does with actors: tests/contract/jobs.)"""

from __future__ import annotations

import json

import pytest

from shared.errors import Unavailable
from shared.jobs import JobRecord, Jobs, JobState, reconciler
from shared.jobs.reconciler import JobKind, Reconciler
from shared.jobs.transitions import confirm_cancel, request_cancel
from shared.resource_log import ResourceLog
from shared.settings import ServiceSettings
from shared.storage import ObjectStore

FOLDER = "things/one"


@pytest.fixture
def jobs(store: ObjectStore) -> Jobs:
    return Jobs(store, "toy")


@pytest.fixture
def reconciling(store: ObjectStore) -> Reconciler:
    kind = JobKind(name="toy", entry="no.such:entry")
    return Reconciler(ServiceSettings(listen="127.0.0.1:0", store=store.settings), kind)


def mark(store: ObjectStore, uid: str, marked_at: float = 0.0) -> None:
    """As a creator does that dies, or is overtaken, before it writes the log."""
    store.put(f"live/toy/{uid}.1.json", json.dumps({"folder": FOLDER, "marked_at": marked_at}).encode())


def a_job(uid: str) -> JobRecord:
    return JobRecord(uid=uid, name=FOLDER, spec={}, create_time=1.0, update_time=1.0)


def test_a_marker_is_kept_while_its_creator_may_still_be_at_it_whatever_its_clock_says(
    store: ObjectStore, jobs: Jobs, reconciling: Reconciler
) -> None:
    mark(store, "u1", marked_at=0.0)

    for _ in range(3):
        reconciling.reconcile()

    assert [live.uid for live in jobs.live()] == ["u1"]


def test_a_marker_without_a_job_is_swept_in_the_end(
    store: ObjectStore, jobs: Jobs, reconciling: Reconciler, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark(store, "u1")
    monkeypatch.setattr(reconciler, "ORPHAN_AFTER_S", 0.0)

    reconciling.reconcile()
    reconciling.reconcile()

    assert jobs.live() == []


def test_the_marker_of_a_creator_that_lost_the_race_is_swept_and_the_winners_job_is_not(
    store: ObjectStore, jobs: Jobs, reconciling: Reconciler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reconciler, "ORPHAN_AFTER_S", 0.0)
    # The winner is made by hand, without a marker of its own: so no actor is looked for.
    ResourceLog(store, f"{FOLDER}/log").append(None, a_job("winner").as_state())
    mark(store, "loser")

    reconciling.reconcile()
    reconciling.reconcile()

    assert jobs.live() == []
    assert jobs.get(FOLDER, FOLDER).uid == "winner"


def test_the_marker_of_a_final_job_goes_at_once(jobs: Jobs, reconciling: Reconciler) -> None:
    jobs.create(FOLDER, a_job("u1"))
    jobs.transition(FOLDER, lambda job: confirm_cancel(request_cancel(job, 2.0), 3.0))

    reconciling.reconcile()

    assert jobs.live() == []


def test_the_end_of_a_job_is_reported_before_its_marker_goes_and_again_after_an_outage(
    store: ObjectStore, jobs: Jobs
) -> None:
    reported: list[tuple[JobState, list[str]]] = []

    def ended(_: ObjectStore, job: JobRecord) -> None:
        reported.append((job.state, [live.uid for live in jobs.live()]))
        if len(reported) == 1:
            raise Unavailable("no answer")

    kind = JobKind(name="toy", entry="no.such:entry", ended=ended)
    reconciling = Reconciler(ServiceSettings(listen="127.0.0.1:0", store=store.settings), kind)
    jobs.create(FOLDER, a_job("u1"))
    jobs.transition(FOLDER, lambda job: confirm_cancel(request_cancel(job, 2.0), 3.0))

    with pytest.raises(Unavailable):
        reconciling.reconcile()
    reconciling.reconcile()
    reconciling.reconcile()

    assert reported == [(JobState.CANCELLED, ["u1"])] * 2
    assert jobs.live() == []


def test_a_job_that_cannot_be_read_keeps_its_marker_and_is_reported(
    store: ObjectStore, jobs: Jobs, reconciling: Reconciler, caplog: pytest.LogCaptureFixture
) -> None:
    mark(store, "u1")
    store.put(f"{FOLDER}/log/{1:012d}.json", b'{"from": "another release"}')

    reconciling.reconcile()

    assert [live.uid for live in jobs.live()] == ["u1"]
    assert FOLDER in caplog.text
