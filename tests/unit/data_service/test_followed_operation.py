"""The requests of one who waits for an operation: two a second at most, whatever the operation does."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from google.rpc import code_pb2

from data_service import parallel
from data_service.datasets import Datasets, Versions, operation_id, record_operation
from data_service.parallel import TASK, CapacityWatch
from data_service.servicer import FollowedOperation, VersionOperations
from millrace.data.v1 import data_service_pb2
from shared.dataset_version.version import IMPORT_KIND
from shared.errors import NotFound
from shared.jobs import AttemptContext, JobRecord, Jobs
from shared.jobs.registry import progress_key
from shared.jobs.transitions import (
    begin_attempt,
    confirm_cancel,
    confirm_delete,
    lose_attempt,
    request_cancel,
    request_delete,
)
from shared.storage import ObjectStore
from tests.support.counting_store import CountingStore

VERSION = "datasets/d/versions/v1"
JOB = JobRecord(uid="u", name=VERSION, spec={"import": {}}, create_time=1.0, update_time=1.0)


@pytest.fixture
def jobs(store: ObjectStore) -> Jobs:
    record_operation(store, JOB)
    jobs = Jobs(store, IMPORT_KIND)
    jobs.create(VERSION, JOB)
    return jobs


class Followed:
    """An operation that is followed on a store that counts, by a clock that the test sets."""

    def __init__(self, store: ObjectStore, job: JobRecord = JOB) -> None:
        self.counted = CountingStore(store)
        self.now = 0.0
        jobs = Jobs(self.counted, IMPORT_KIND)
        operations = VersionOperations(self.counted, jobs, Versions(self.counted, jobs, Datasets(self.counted)))
        name = f"operations/{operation_id(job)}"
        self._followed = FollowedOperation(self.counted, jobs, operations, name, lambda: self.now)
        self.operation = self._followed.read()

    def requests_after(self, seconds: float) -> int:
        """Read again so much later, and return the number of requests."""
        self.now += seconds
        self.counted.forget()
        self.operation = self._followed.read()
        return len(self.counted.requests)


def begin(jobs: Jobs) -> None:
    attempt = jobs.get(VERSION, VERSION).attempt + 1
    jobs.transition(VERSION, lambda job: begin_attempt(job, time.time()), attempt=attempt)


def test_an_operation_costs_at_most_two_requests_a_second_in_each_state(store: ObjectStore, jobs: Jobs) -> None:
    followed = Followed(store)

    def requests() -> list[int]:
        return [followed.requests_after(seconds) for seconds in (1.0, 0.1, 0.1, 1.0, 1.0)]

    assert requests() == [2, 1, 1, 2, 2]
    begin(jobs)
    followed.requests_after(0.1)
    assert requests() == [2, 1, 1, 2, 2]
    jobs.transition(VERSION, lambda job: lose_attempt(job, NotFound("gone"), time.time()), attempt=1)
    followed.requests_after(0.1)
    assert requests() == [2, 1, 1, 2, 2]


def test_an_operations_waiting_progress_and_end_are_seen(store: ObjectStore, jobs: Jobs) -> None:
    def metadata() -> data_service_pb2.ImportVersionMetadata:
        read = data_service_pb2.ImportVersionMetadata()
        followed.operation.metadata.Unpack(read)
        return read

    followed = Followed(store)
    begin(jobs)
    followed.requests_after(0.1)
    assert (metadata().attempt, metadata().rows_read) == (1, 0)
    store.put(progress_key(VERSION), b'{"rows_read": 7}')
    followed.requests_after(1.0)
    assert metadata().rows_read == 7
    jobs.transition(VERSION, lambda job: confirm_cancel(request_cancel(job, time.time()), time.time()))
    followed.requests_after(0.1)
    assert followed.operation.done
    assert followed.operation.error.code == code_pb2.CANCELLED


def test_the_end_of_the_version_is_the_end_of_its_operation(store: ObjectStore, jobs: Jobs) -> None:
    followed = Followed(store)
    jobs.transition(VERSION, lambda job: confirm_cancel(request_cancel(job, time.time()), time.time()))
    jobs.transition(VERSION, lambda job: request_delete(job, time.time()))
    jobs.transition(VERSION, lambda job: confirm_delete(job, time.time()))
    with pytest.raises(NotFound, match=operation_id(JOB)):
        followed.requests_after(0.1)


@pytest.mark.parametrize("kind", ["import", "transform"])
def test_an_attempt_that_waits_for_a_processor_says_so(store: ObjectStore, kind: str) -> None:
    job = replace(JOB, spec={kind: {}})
    record_operation(store, job)
    jobs = Jobs(store, IMPORT_KIND)
    jobs.create(VERSION, job)
    followed = Followed(store, job)
    begin(jobs)
    context = AttemptContext(store, jobs, VERSION, jobs.get(VERSION, VERSION))

    def metadata() -> Any:
        followed.requests_after(1.0)
        answer = (
            data_service_pb2.ImportVersionMetadata()
            if kind == "import"
            else data_service_pb2.TransformVersionMetadata()
        )
        assert followed.operation.metadata.Unpack(answer)
        return answer

    context.report(rows_read=3, rows_done=3)
    assert metadata().waiting_for == ""
    context.report_waiting("a node with 1 CPU for a task")
    assert metadata().waiting_for == "a node with 1 CPU for a task"
    assert (metadata().rows_read if kind == "import" else metadata().rows_done) == 3
    context.report_waiting("")
    assert metadata().waiting_for == ""
    context.report_waiting("a node with 1 CPU for a task")
    jobs.transition(VERSION, lambda job: lose_attempt(job, NotFound("gone"), time.time()), attempt=1)
    assert metadata().waiting_for == "", "a later attempt may find one"
    begin(jobs)
    assert metadata().waiting_for == "", "it has reported nothing"
    AttemptContext(store, jobs, VERSION, jobs.get(VERSION, VERSION)).report_waiting("a node with 2 CPU for a worker")
    assert metadata().waiting_for == "a node with 2 CPU for a worker"


@pytest.mark.parametrize("is_done", [False, True])
def test_a_lost_report_of_waiting_is_made_up_for(
    store: ObjectStore, jobs: Jobs, monkeypatch: pytest.MonkeyPatch, is_done: bool
) -> None:
    """The store loses a report, or takes it and its answer is lost."""
    begin(jobs)
    counted = CountingStore(store)
    counted.is_done = is_done
    watch = CapacityWatch(AttemptContext(counted, jobs, VERSION, jobs.get(VERSION, VERSION)), TASK)
    monkeypatch.setattr(parallel, "CAPACITY_POLL_S", 0.0)

    def waiting_for_after(do: Callable[[], None], *, fails: bool) -> str:
        counted.forget()
        counted.fails_at = int(fails)
        do()
        return str(jobs.progress(VERSION).get("waiting_for", ""))

    monkeypatch.setattr(parallel, "lacking", lambda _: "a node")
    assert waiting_for_after(watch.poll, fails=True) == ("a node" if is_done else "")
    assert waiting_for_after(watch.note_record, fails=False) == ""
    assert waiting_for_after(watch.poll, fails=False) == "a node"
    assert waiting_for_after(watch.note_record, fails=True) == ("" if is_done else "a node")
    assert waiting_for_after(watch.note_record, fails=False) == ""
    assert waiting_for_after(watch.note_record, fails=False) == ""
    assert counted.requests == [], "there is nothing to take back"
