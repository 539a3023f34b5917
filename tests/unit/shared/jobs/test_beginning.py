"""An attempt that the log has begun is started, whatever became of the log's answer. (Without Ray: what would start an
actor is noted. With actors: tests/contract/jobs.)"""

from __future__ import annotations

from typing import Any

import pytest

from shared.errors import Unavailable
from shared.jobs import JobRecord, Jobs, JobState, reconciler
from shared.jobs.reconciler import JobKind, Reconciler
from shared.settings import ServiceSettings
from shared.storage import ObjectStore

KIND, JOB = "toy", "toys/a"


class Cluster:
    """The actors there are, and what they were told to run."""

    def __init__(self) -> None:
        self.alive: set[str] = set()
        self.ran: list[int] = []
        self.failing = 0
        self.memory_kill = ""

    def find(self, name: str) -> Any:
        return self._handle() if name in self.alive else None

    def start(self, name: str) -> Any:
        if self.failing:
            self.failing -= 1
            raise RuntimeError("it cannot be started just now")
        self.alive.add(name)
        return self._handle()

    def memory_kill_of(self, actor: Any) -> str:
        assert actor is not None
        return self.memory_kill

    def _handle(self) -> Any:
        cluster = self

        class Handle:
            class run:  # noqa: N801
                @staticmethod
                def remote(*arguments: Any) -> None:
                    cluster.ran.append(arguments[-1])

        return Handle


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    cluster = Cluster()
    monkeypatch.setattr(reconciler, "find_actor", cluster.find)
    monkeypatch.setattr(reconciler, "start_actor", cluster.start)
    monkeypatch.setattr(reconciler, "memory_kill", cluster.memory_kill_of)
    return cluster


@pytest.fixture
def jobs(store: ObjectStore) -> Jobs:
    jobs = Jobs(store, KIND)
    jobs.create(JOB, JobRecord(uid="u", name=JOB, spec={}, create_time=0, update_time=0))
    return jobs


def reconciling(store: ObjectStore) -> Reconciler:
    return Reconciler(ServiceSettings(listen="", store=store.settings), JobKind(name=KIND, entry="no:entry"))


def lose_next_answer(one: Reconciler, monkeypatch: pytest.MonkeyPatch) -> None:
    put, lost = one._store.put_if_absent, [True]

    def unanswered(key: str, data: bytes) -> None:
        put(key, data)
        if lost and "/log/" in key:
            lost.clear()
            raise Unavailable("the answer was lost")

    monkeypatch.setattr(one._store, "put_if_absent", unanswered)


def test_an_attempt_begun_without_an_answer_is_started_at_the_next_look(
    store: ObjectStore, jobs: Jobs, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = reconciling(store)
    lose_next_answer(one, monkeypatch)

    with pytest.raises(Unavailable):
        one.reconcile()
    assert jobs.get(JOB, JOB).state is JobState.RUNNING
    for _ in range(5):
        one.reconcile()

    job = jobs.get(JOB, JOB)
    assert (job.state, job.attempt, job.failures, cluster.ran) == (JobState.RUNNING, 1, 0, [1])
    # From then on it is an attempt like any other.
    cluster.alive.clear()
    for _ in range(3):
        one.reconcile()
    assert jobs.get(JOB, JOB).failures == 1


def test_an_actor_that_cannot_be_started_is_tried_a_few_times_and_is_a_failure_then(
    store: ObjectStore, jobs: Jobs, cluster: Cluster
) -> None:
    one = reconciling(store)
    cluster.failing = 2
    for _ in range(3):
        one.reconcile()
    job = jobs.get(JOB, JOB)
    assert (job.attempt, job.failures, cluster.ran) == (1, 0, [1])

    cluster.failing = 1000
    cluster.alive.clear()
    for _ in range(100):
        one.reconcile()
    assert jobs.get(JOB, JOB).state is JobState.FAILED


def test_another_reconciler_waits_for_the_one_that_is_about_to_start_an_attempt(
    store: ObjectStore, jobs: Jobs, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = reconciling(store), reconciling(store)
    lose_next_answer(one, monkeypatch)
    with pytest.raises(Unavailable):
        one.reconcile()

    other.reconcile()
    one.reconcile()
    other.reconcile()

    job = jobs.get(JOB, JOB)
    assert (job.attempt, job.failures, cluster.ran) == (1, 0, [1])


def test_a_job_that_is_cancelled_before_it_begins_is_cancelled_without_an_attempt(
    store: ObjectStore, jobs: Jobs, cluster: Cluster
) -> None:
    one = reconciling(store)
    jobs.cancel(JOB, JOB)
    for _ in range(reconciler.POLLS_BEFORE_LOST):
        one.reconcile()

    job = jobs.get(JOB, JOB)
    assert (job.state, job.attempt, cluster.ran) == (JobState.CANCELLED, 0, [])


@pytest.mark.parametrize("leaving", [True, False])
def test_an_attempt_whose_process_went_with_its_node_is_no_failure(
    store: ObjectStore, jobs: Jobs, cluster: Cluster, leaving: bool
) -> None:
    one = reconciling(store)
    one.reconcile()
    cluster.alive.clear()
    jobs.note_leaving(JOB, 1 if leaving else 0)  # of an attempt before, it says nothing
    for _ in range(reconciler.POLLS_BEFORE_LOST):
        one.reconcile()

    job = jobs.get(JOB, JOB)
    assert job.state is JobState.RECOVERING
    assert (job.preemptions, job.failures) == ((1, 0) if leaving else (0, 1))


@pytest.mark.parametrize("is_seen", [True, False])
def test_the_error_of_an_attempt_that_ray_killed_for_memory_says_so(
    store: ObjectStore, jobs: Jobs, cluster: Cluster, is_seen: bool
) -> None:
    one = reconciling(store)
    one.reconcile()
    if is_seen:
        one = reconciling(store)  # which has not started the attempt, but found its actor
        one.reconcile()
    cluster.alive.clear()
    cluster.memory_kill = "the node ran low on memory"
    for _ in range(reconciler.POLLS_BEFORE_LOST):
        one.reconcile()

    job = jobs.get(JOB, JOB)
    assert (job.state, job.failures) == (JobState.RECOVERING, 1)
    assert job.error is not None
    assert "attempt 1 ended, as the node ran low on memory" in job.error["message"]
