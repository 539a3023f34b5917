"""What a kind of job does at each look of its reconciler, and what happens when that fails."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import NoReturn

import pytest

from shared.errors import Unavailable
from shared.jobs import JobRecord, Jobs, JobState, reconciler
from shared.jobs.reconciler import JobKind, Reconciler
from shared.settings import ServiceSettings
from shared.storage import ObjectStore

KIND, JOB = "toy", "toys/a"


@pytest.mark.parametrize("error", [Unavailable("the store is away"), RuntimeError("a defect")])
def test_jobs_are_looked_at_though_what_is_done_at_each_look_fails(
    store: ObjectStore, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    def polls(_: ObjectStore) -> NoReturn:
        raise error

    job = JobRecord(uid="u", name=JOB, spec={}, create_time=0, update_time=0, runner="by hand")
    Jobs(store, KIND).create(JOB, job)
    # Nobody runs it here, so the only thing to do about it is to take its mark away.
    Jobs(store, KIND).transition(JOB, lambda job: job, attempt=0)
    Jobs(store, KIND)._mark(JOB, job, 1)
    kind = JobKind(name=KIND, entry="no:entry", polls=polls)

    with caplog.at_level(logging.WARNING):
        Reconciler(ServiceSettings(listen="", store=store.settings), kind).reconcile()

    assert Jobs(store, KIND).live() == []
    assert str(error) in caplog.text


def test_an_attempt_whose_actor_is_missed_now_and_then_but_never_twice_in_a_row_is_not_lost(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray's word is given here."""
    jobs, there = Jobs(store, KIND), {"a"}
    job = JobRecord(uid="u", name=JOB, spec={}, create_time=0, update_time=0)
    jobs.create(JOB, replace(job, state=JobState.RUNNING, attempt=1, actor="a"))
    monkeypatch.setattr(reconciler, "find_actor", lambda name: name if name in there else None)
    monkeypatch.setattr(reconciler, "memory_kill", lambda _: "")
    looking = Reconciler(ServiceSettings(listen="", store=store.settings), JobKind(name=KIND, entry="no:entry"))

    for _ in range(2 * reconciler.POLLS_BEFORE_LOST):
        there ^= {"a"}  # gone, there, gone, there
        looking.reconcile()
        assert jobs.get(JOB, JOB).state is JobState.RUNNING

    there.clear()
    for _ in range(reconciler.POLLS_BEFORE_LOST):
        looking.reconcile()
    assert jobs.get(JOB, JOB).state is JobState.RECOVERING
