"""What a kind of job does at each look of its reconciler, and what happens when that fails."""

from __future__ import annotations

import logging
from typing import NoReturn

import pytest

from shared.errors import Unavailable
from shared.jobs import JobRecord, Jobs
from shared.jobs.reconciler import JobKind, Reconciler
from shared.settings import ServiceSettings
from shared.storage import ObjectStore

KIND, JOB = "toy", "toys/a"


@pytest.mark.parametrize("error", [Unavailable("the store is away"), RuntimeError("a defect")])
def test_jobs_are_looked_at_though_what_is_done_at_each_look_fails(
    store: ObjectStore, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    def looks(_: ObjectStore) -> NoReturn:
        raise error

    job = JobRecord(uid="u", name=JOB, spec={}, create_time=0, update_time=0, runner="by hand")
    Jobs(store, KIND).create(JOB, job)
    # Nobody runs it here, so the only thing to do about it is to take its mark away.
    Jobs(store, KIND).transition(JOB, lambda job: job, attempt=0)
    Jobs(store, KIND)._mark(JOB, job, 1)
    kind = JobKind(name=KIND, entry="no:entry", looks=looks)

    with caplog.at_level(logging.WARNING):
        Reconciler(ServiceSettings(listen="", store=store.settings), kind).reconcile()

    assert Jobs(store, KIND).live() == []
    assert str(error) in caplog.text
