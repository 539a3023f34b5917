"""A resumption that a reconciler looks at in its very middle is not lost."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from shared.jobs import Jobs, JobState
from shared.jobs import reconciler as reconcilers
from shared.jobs.reconciler import JobKind, Reconciler
from shared.jobs.transitions import confirm_suspend
from shared.settings import ServiceSettings, StoreSettings
from tests.support import toy_jobs
from tests.support.toy_processes import new_job


def test_a_poll_between_the_marker_and_the_request_leaves_the_marker(
    jobs: Jobs, file_store: StoreSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = new_job(jobs)
    jobs.suspend(job.name, job.name)
    jobs.transition(job.name, lambda newest: confirm_suspend(newest, 3.0))
    kind = JobKind(name=toy_jobs.KIND, entry=toy_jobs.ENTRY)
    looking = Reconciler(ServiceSettings(listen="127.0.0.1:0", store=file_store), kind)
    looking.reconcile()
    assert jobs.live() == []
    request = jobs.transition

    def look_first(*arguments: Any, **values: Any) -> Any:
        looking.reconcile()
        return request(*arguments, **values)

    monkeypatch.setattr(jobs, "transition", look_first)
    monkeypatch.setattr(reconcilers, "ray", SimpleNamespace(kill=pytest.fail))

    assert jobs.resume(job.name, job.name).state is JobState.RECOVERING
    assert [live.uid for live in jobs.live()] == [job.uid]
