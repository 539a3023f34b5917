"""Of several writers that follow one version, one wins."""

from __future__ import annotations

import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from data_service import datasets
from data_service.datasets import confirm_follows, following
from shared.dataset_version.version import IMPORT_KIND
from shared.errors import AlreadyExists, Conflict, NotFound, Unavailable
from shared.jobs import JobRecord, Jobs
from shared.jobs.transitions import begin_attempt, confirm_delete, fail, request_delete, succeed
from shared.resource_log import Record, ResourceLog
from shared.settings import StoreSettings
from shared.storage import ObjectStore, open_store

BASE = JobRecord(uid="base", name="datasets/d/versions/v1", spec={}, create_time=1.0, update_time=1.0)


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    return open_store(StoreSettings(url=tmp_path.as_uri()))


def a_job(version: str) -> JobRecord:
    return JobRecord(
        uid=uuid.uuid4().hex, name=f"datasets/d/versions/{version}", spec={}, create_time=1.0, update_time=1.0
    )


def made(store: ObjectStore, job: JobRecord) -> Jobs:
    """`job`, running."""
    jobs = Jobs(store, IMPORT_KIND)
    jobs.create(job.name, job)
    jobs.transition(job.name, lambda job: begin_attempt(job, 1.0), attempt=1)
    return jobs


def claim_successor(store: ObjectStore, base: JobRecord, job: JobRecord) -> None:
    """A claim that stays."""
    with following(store, base, job):
        pass


def test_of_writers_at_the_same_time_one_wins_and_the_others_learn_which(store: ObjectStore) -> None:
    writers = [a_job(f"v{number}") for number in range(2, 10)]

    def claim(job: JobRecord) -> str:
        try:
            claim_successor(store, BASE, job)
        except Conflict as conflict:
            return conflict.metadata["successor"]
        return ""

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(claim, writers))

    (winner,) = [job.name for job, answer in zip(writers, answers, strict=True) if not answer]
    assert set(answers) == {"", winner}


def test_the_same_job_may_claim_again(store: ObjectStore) -> None:
    job = a_job("v2")
    claim_successor(store, BASE, job)
    claim_successor(store, BASE, job)


@pytest.mark.parametrize("end", ["live", "succeeded"])
def test_a_claim_holds_while_its_job_lives_and_once_it_succeeded(store: ObjectStore, end: str) -> None:
    first = a_job("v2")
    claim_successor(store, BASE, first)
    jobs = made(store, first)
    if end == "succeeded":
        jobs.transition(first.name, lambda job: succeed(job, {"manifest": "m"}, 2.0), attempt=1)

    with pytest.raises(Conflict, match="v2 already follows"):
        claim_successor(store, BASE, a_job("v3"))


@pytest.mark.parametrize("end", ["failed", "deleted", "its name taken again"])
def test_a_job_that_made_nothing_gives_its_place_free(store: ObjectStore, end: str) -> None:
    first = a_job("v2")
    claim_successor(store, BASE, first)
    jobs = made(store, first)
    jobs.transition(first.name, lambda job: fail(job, NotFound("gone"), 2.0), attempt=1)
    if end != "failed":
        jobs.transition(first.name, lambda job: request_delete(job, 3.0))
        jobs.transition(first.name, lambda job: confirm_delete(job, 4.0))
    if end == "its name taken again":
        jobs.create(first.name, a_job("v2"))
    claim_successor(store, BASE, a_job("v3"))


def test_a_claim_whose_job_was_never_made_holds_for_a_minute(store: ObjectStore) -> None:
    claim_successor(store, BASE, a_job("v2"))

    with pytest.raises(Conflict):
        claim_successor(store, BASE, a_job("v3"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets, "JOB_APPEARS_TIMEOUT_S", -1.0)
        claim_successor(store, BASE, a_job("v3"))


def test_a_claimant_that_makes_its_job_after_another_took_its_place_fails(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow, quick = a_job("v2"), a_job("v3")
    with following(store, BASE, slow):
        monkeypatch.setattr(datasets, "JOB_APPEARS_TIMEOUT_S", -1.0)
        claim_successor(store, BASE, quick)
        made(store, quick)
        made(store, slow)
    confirm_follows(store, BASE, quick)
    with pytest.raises(Conflict, match="v3 already follows"):
        confirm_follows(store, BASE, slow)


def test_a_taker_of_a_claim_is_refused_while_the_claim_s_job_is_made_and_confirmed(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It looked for the job before that was made, and appends after."""
    slow, quick = a_job("v2"), a_job("v3")
    claim_successor(store, BASE, slow)
    monkeypatch.setattr(datasets, "JOB_APPEARS_TIMEOUT_S", -1.0)
    holds = datasets._holds

    def then_it_is_made(jobs: Jobs, claim: Record) -> bool:
        answer = holds(jobs, claim)
        if jobs.find(slow.name) is None:
            made(store, slow)
            confirm_follows(store, BASE, slow)
        return answer

    monkeypatch.setattr(datasets, "_holds", then_it_is_made)
    with pytest.raises(Conflict, match="v2 already follows"):
        claim_successor(store, BASE, quick)


def test_a_claim_of_an_earlier_release_is_confirmed(store: ObjectStore) -> None:
    job = a_job("v2")
    ResourceLog(store, f"{BASE.name}/successors/{BASE.uid}/log").update(lambda _: {"version": job.name, "uid": job.uid})
    made(store, job)
    for _ in range(2):
        confirm_follows(store, BASE, job)
    with pytest.raises(Conflict):
        claim_successor(store, BASE, a_job("v3"))


def test_a_refused_creation_gives_its_place_free_at_once(store: ObjectStore) -> None:
    def refused() -> None:
        with following(store, BASE, a_job("v2")):
            raise AlreadyExists("v2 exists already")

    with pytest.raises(AlreadyExists):
        refused()

    claim_successor(store, BASE, a_job("v3"))


def test_a_creation_of_unknown_outcome_keeps_its_place(store: ObjectStore) -> None:
    def lost() -> None:
        with following(store, BASE, a_job("v2")):
            raise Unavailable("the answer was lost")

    with pytest.raises(Unavailable):
        lost()

    with pytest.raises(Conflict):
        claim_successor(store, BASE, a_job("v3"))
