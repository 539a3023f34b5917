"""Watching a job: a real server on a real store, asked by foreign clients and by our own."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

import pytest

from millrace.train.v1 import resources_pb2
from millrace.train.v1 import train_service_pb2 as pb
from millrace_client import connect
from millrace_client.train import TrainClient, Update
from shared.errors import NotFound
from shared.jobs import JobRecord, Jobs
from shared.jobs.transitions import confirm_cancel, confirm_delete, confirm_suspend, request_delete
from shared.storage import ObjectStore
from tests.support.grpc_kit import running
from tests.support.train_server import registered, train_stub
from tests.support.training_records import JOB, begin, finish, make_job
from tests.unit.train_service.checkpoints.test_coverage_records import VERSION
from train_service.attempt.outcomes import report_lost
from train_service.jobs.run_records import FollowedJob, JobReading
from train_service.jobs.training_jobs import JobView, TrainingJobs
from train_service.records.event_log import EventKind, EventLog

T = TypeVar("T")
Job = resources_pb2.TrainingJob


class SlowStore(ObjectStore):
    """The same objects as `store`, each of them read in 10 ms."""

    def __init__(self, store: ObjectStore) -> None:
        self.__dict__.update(vars(store))

    def get(self, key: str) -> bytes:
        time.sleep(0.01)
        return super().get(key)


@pytest.fixture
def jobs(store: ObjectStore) -> Jobs:
    """With `JOB`, at work."""
    jobs = make_job(store, VERSION)
    begin(jobs)
    return jobs


def warn(store: ObjectStore, text: str, attempt: int = 1) -> None:
    EventLog(store, JOB).append(attempt, EventKind.WARNING, {"text": text})


def suspend(store: ObjectStore, jobs: Jobs) -> None:
    """As an attempt is suspended: its end is an event before the job is SUSPENDED."""
    jobs.suspend(JOB, JOB)
    warn(store, "one")
    report_lost(store, jobs.get(JOB, JOB))
    jobs.transition(JOB, lambda job: confirm_suspend(job, time.time()))


def reported(update: Update | pb.WatchTrainingJobResponse) -> str:
    """A job's state or an event's kind."""
    if isinstance(update, pb.WatchTrainingJobResponse):
        update = update.event if update.HasField("event") else update.job
    if isinstance(update, Job):
        return Job.State.Name(update.state).removeprefix("STATE_")
    return str(update.WhichOneof("event"))


def by_the_sdk(store: ObjectStore, ask: Callable[[TrainClient], T]) -> T:
    async def main() -> T:
        async with running(registered(store)) as kit:

            def call() -> T:
                with connect(train=kit.address) as client:
                    return ask(client.train)

            return await asyncio.to_thread(call)

    return asyncio.run(main())


async def test_events_before_a_transition_are_sent_before_it(store: ObjectStore, jobs: Jobs) -> None:
    async with train_stub(store) as stub:
        stream = aiter(stub.WatchTrainingJob(pb.WatchTrainingJobRequest(name=JOB), timeout=60))
        assert reported(await anext(stream)) == "RUNNING"
        suspend(store, jobs)
        seen: list[str] = []
        while not seen or seen[-1] != "SUSPENDED":
            seen.append(reported(await anext(stream)))
        assert [one for one in seen if one != "SUSPENDING"] == ["warning", "attempt_ended", "SUSPENDED"]
        assert seen.count("SUSPENDING") == 1
        jobs.resume(JOB, JOB)
        assert reported(await anext(stream)) == "RECOVERING"
        begin(jobs)
        assert reported(await anext(stream)) == "RUNNING"
        warn(store, "two", attempt=2)
        finish(jobs)
        assert [reported(one) async for one in stream] == ["warning", "SUCCEEDED"]


async def test_each_transition_between_two_readings_is_sent_in_its_order(
    store: ObjectStore, jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    readings: list[JobReading[JobView]] = []
    read = FollowedJob.read

    def after_all(followed: FollowedJob[JobView]) -> JobReading[JobView]:
        if len(readings) == 1:
            suspend(store, jobs)
            jobs.resume(JOB, JOB)
            begin(jobs)
            jobs.cancel(JOB, JOB)
            jobs.transition(JOB, lambda job: confirm_cancel(job, time.time()))
        readings.append(read(followed))
        return readings[-1]

    monkeypatch.setattr(FollowedJob, "read", after_all)
    async with train_stub(store) as stub:
        stream = stub.WatchTrainingJob(pb.WatchTrainingJobRequest(name=JOB), timeout=60)
        states = ["SUSPENDING", "SUSPENDED", "RECOVERING", "RUNNING", "CANCELLING", "CANCELLED"]
        assert [reported(one) async for one in stream] == ["RUNNING", "warning", "attempt_ended", *states]


def test_a_job_that_was_made_anew_is_sent_without_the_states_of_the_one_before(store: ObjectStore, jobs: Jobs) -> None:
    seen = jobs.get(JOB, JOB)
    followed = TrainingJobs(store).follow(JOB)
    assert followed.read().states == (seen,)
    finish(jobs)
    jobs.transition(JOB, lambda job: request_delete(job, time.time()))
    jobs.transition(JOB, lambda job: confirm_delete(job, time.time()))
    with pytest.raises(NotFound, match=JOB):
        followed.read()
    jobs.create(JOB, JobRecord(uid="another", name=JOB, spec=seen.spec, create_time=0, update_time=0))
    begin(jobs)
    reading = followed.read()
    assert [one.state.name for one in reading.states_after(seen)] == ["RUNNING"]
    assert reading.states_after(jobs.get(JOB, JOB)) == ()


async def test_a_job_that_is_suspended_already_is_sent_again_behind_its_events(store: ObjectStore, jobs: Jobs) -> None:
    suspend(store, jobs)

    async with train_stub(store) as stub:
        for after, events in ((0, ["warning", "attempt_ended"]), (1, ["attempt_ended"]), (2, [])):
            request = pb.WatchTrainingJobRequest(name=JOB, after_sequence=after)
            stream = stub.WatchTrainingJob(request, timeout=60)
            updates = aiter(stream)
            expected = ["SUSPENDED", *events, "SUSPENDED"]
            assert [reported(await anext(updates)) for _ in expected] == expected
            stream.cancel()


async def test_a_job_that_is_over_is_sent_once_and_then_its_events(store: ObjectStore, jobs: Jobs) -> None:
    warn(store, "one")
    finish(jobs)

    async with train_stub(store) as stub:
        stream = stub.WatchTrainingJob(pb.WatchTrainingJobRequest(name=JOB), timeout=60)
        assert [reported(one) async for one in stream] == ["SUCCEEDED", "warning"]


def test_our_client_has_every_event_of_a_job_that_is_suspended_under_its_eyes(store: ObjectStore, jobs: Jobs) -> None:
    def watched(train: TrainClient) -> list[str]:
        seen: list[str] = []
        for update in train.watch_training_job(JOB):
            if not seen:
                suspend(store, jobs)
            seen.append(reported(update))
        return seen

    seen = by_the_sdk(store, watched)
    assert [one for one in seen if one != "SUSPENDING"] == ["RUNNING", "warning", "attempt_ended", "SUSPENDED"]
    assert seen.count("SUSPENDING") == 1


def test_our_client_has_every_event_of_a_job_that_is_suspended_already(store: ObjectStore, jobs: Jobs) -> None:
    suspend(store, jobs)

    seen = by_the_sdk(store, lambda train: [reported(one) for one in train.watch_training_job(JOB)])
    listed = by_the_sdk(store, lambda train: train.list_events(JOB))

    assert seen == ["SUSPENDED", "warning", "attempt_ended", "SUSPENDED"]
    assert [reported(one) for one in listed] == ["warning", "attempt_ended"]


@pytest.mark.usefixtures("jobs")
def test_the_events_of_a_job_at_work_come_bit_by_bit_however_slow_the_store_is(store: ObjectStore) -> None:
    for number in range(150):
        warn(store, str(number))

    found = by_the_sdk(SlowStore(store), lambda train: train.list_events(JOB))

    assert [one.warning for one in found] == [str(number) for number in range(150)]


@pytest.mark.usefixtures("jobs")
def test_a_job_to_which_nothing_has_happened_yet_has_no_events(store: ObjectStore) -> None:
    assert by_the_sdk(store, lambda train: train.list_events(JOB)) == []
