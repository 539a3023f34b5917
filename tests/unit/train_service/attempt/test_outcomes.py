"""Each attempt's end is told once, by whoever comes first, and never after a later attempt has begun to tell."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import NoReturn

import pytest

from shared.checkpoint.format import WEIGHTS
from shared.errors import FailedPrecondition, Internal, Unavailable
from shared.jobs import AttemptContext, JobRecord, Jobs, JobState, reconciler
from shared.jobs.reconciler import POLLS_BEFORE_LOST, JobKind, Reconciler
from shared.jobs.transitions import (
    INSUFFICIENT_RESOURCES,
    PREEMPTED,
    RESIZED,
    confirm_cancel,
    confirm_delete,
    request_delete,
)
from shared.resource_log import StaleAttempt
from shared.settings import ServiceSettings
from shared.storage import ObjectStore
from tests.support.versions import commit_version, striped_digits
from tests.unit.train_service.conftest import VERSION
from tests.unit.train_service.worker.test_loop import ALONE, SPEC, config_of, entries, lose_and_begin, new_job, run_of
from train_service.attempt import trainer
from train_service.attempt.outcomes import (
    FAILURE,
    HUNG,
    PREEMPTION,
    RESIZING,
    SUSPENDED,
    as_last_error,
    cause_of,
    report_device,
    report_lost,
    report_outcome,
    result_of,
    run_and_report_error,
)
from train_service.convert import event_to_proto
from train_service.records.event_log import LOOKED_BACK, RESIZE, TRAIN_KIND, EventKind, EventLog
from train_service.worker.heartbeat import HeartbeatSender
from train_service.worker.loop import Run, Stopped

JOB = "trainingJobs/a"


def job(attempt: int, state: JobState = JobState.RUNNING) -> JobRecord:
    now = time.time()
    return JobRecord(uid="u", name=JOB, spec={}, create_time=now, update_time=now, attempt=attempt, state=state)


def test_the_cause_comes_from_the_request_else_from_the_error() -> None:
    running = JobState.RUNNING
    assert cause_of(Unavailable("x", reason="RANK_HUNG"), running) == HUNG
    assert cause_of(Unavailable("x", reason=PREEMPTED), running) == PREEMPTION
    assert cause_of(Unavailable("x", reason=RESIZED), running) == RESIZING
    assert cause_of(Unavailable("x", reason=INSUFFICIENT_RESOURCES), running) == RESIZING
    assert cause_of(Internal("x"), running) == FAILURE
    assert cause_of(Internal("x"), JobState.SUSPENDING) == SUSPENDED


RAISED = {"exception": "KeyError", "line": "train.py:7", "report": "3", "ranks": "0"}


def test_the_same_error_in_the_code_at_the_same_line_in_two_attempts_is_the_last_one() -> None:
    error = Internal("KeyError on rank 0 at train.py:7", metadata=RAISED)
    last = as_last_error(error, Internal("the same", metadata={**RAISED, "ranks": "1"}).as_record())
    assert isinstance(last, FailedPrecondition)  # after which no attempt is made
    assert last.message.startswith("KeyError on rank 0 at train.py:7; the attempt before ended with the same error")
    assert (last.specific_reason, last.metadata) == ("ERROR_REPEATED", RAISED)


@pytest.mark.parametrize(
    ("before", "now"),
    [
        (None, {}),
        ({"line": "train.py:8"}, {}),
        ({"exception": "ValueError"}, {}),
        ({"report": "2"}, {}),
        # What passes by itself, or on another device.
        ({"exception": "ConnectionError"}, {"exception": "ConnectionError"}),
        ({"exception": "RuntimeError"}, {"exception": "RuntimeError"}),
        ({"line": ""}, {"line": ""}),
    ],
)
def test_another_error_or_one_that_may_pass_is_followed_by_another_attempt(
    before: dict[str, str] | None, now: dict[str, str]
) -> None:
    error = Internal("it raised", metadata={**RAISED, **now})
    record = None if before is None else Internal("before", metadata={**RAISED, **before}).as_record()
    assert as_last_error(error, record) is error


ON_CPUS = {"device": "GPU", "attempt_device": "CPU", "device_before": "GPU"}


def test_the_device_of_an_attempt_that_finds_no_room_is_reported(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attempt after it is on CPUs like this one, and has nothing to tell."""
    spec = replace(SPEC, num_workers=2)
    new_job(store, JOB, spec)
    jobs = Jobs(store, TRAIN_KIND)
    moved = jobs.transition(JOB, lambda job: replace(job, choices=ON_CPUS))

    def lacks_resources(*_: object) -> NoReturn:
        raise Unavailable("room was taken", reason=INSUFFICIENT_RESOURCES)

    monkeypatch.setattr(trainer, "size_of_attempt", lacks_resources)
    with pytest.raises(Unavailable, match="room was taken"):
        trainer.run(AttemptContext(store, jobs, JOB, moved))

    assert [one.kind for one in EventLog(store, JOB).after(0)] == [EventKind.DEVICE_CHANGED, EventKind.ATTEMPT_ENDED]


def test_the_device_of_an_attempt_whose_process_went_before_it_reported_anything_is_written_by_the_reconciler(
    store: ObjectStore,
) -> None:
    lost = replace(job(2), choices=ON_CPUS)

    for _ in range(2):
        report_lost(store, lost)

    added_event, ended = EventLog(store, JOB).after(0)
    assert (added_event.kind, added_event.attempt) == (EventKind.DEVICE_CHANGED, 2)
    assert event_to_proto(added_event).device_changed.text
    assert ended.kind == EventKind.ATTEMPT_ENDED


def test_the_device_of_an_attempt_that_reported_it_and_worked_long_is_not_reported_again(store: ObjectStore) -> None:
    lost = replace(job(2), choices=ON_CPUS)
    report_device(store, lost)
    log = EventLog(store, JOB)
    for _ in range(LOOKED_BACK + 1):
        log.append(2, EventKind.WARNING, {"text": "a step"})

    report_lost(store, lost)

    assert [one.kind for one in log.after(0)].count(EventKind.DEVICE_CHANGED) == 1


def test_an_end_is_reported_once(store: ObjectStore) -> None:
    log = EventLog(store, JOB)
    log.append(1, EventKind.ATTEMPT_STARTED, {"num_workers": 2})
    report_lost(store, job(1))
    report_lost(store, job(1))

    started, ended = log.after(0)
    assert (started.kind, ended.kind, ended.attempt) == (EventKind.ATTEMPT_STARTED, EventKind.ATTEMPT_ENDED, 1)
    assert event_to_proto(ended).attempt_ended.cause == 1  # CAUSE_FAILURE


def test_the_process_of_an_attempt_that_went_with_its_node_was_taken_away(store: ObjectStore) -> None:
    Jobs(store, TRAIN_KIND).note_leaving(JOB, 2)
    report_lost(store, job(1))
    report_lost(store, job(2))

    assert [one.payload["cause"] for one in EventLog(store, JOB).after(0)] == [FAILURE, PREEMPTION]


@pytest.mark.parametrize(("ended_as", "counted"), [(HUNG, (1, 0)), (FAILURE, (1, 0)), ("", (0, 1))])
def test_an_attempt_that_reported_another_outcome_was_not_taken_away(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch, ended_as: str, counted: tuple[int, int]
) -> None:
    """A node was about to be taken, but the attempt hung before and ended its own process."""
    monkeypatch.setattr(reconciler, "find_actor", lambda _: None)
    new_job(store, JOB)
    jobs = Jobs(store, TRAIN_KIND)
    context = AttemptContext(store, jobs, JOB, jobs.get(JOB, JOB))
    context.note_leaving()
    if ended_as:
        report_outcome(context, ended_as, "by itself")

    kind = JobKind(name=TRAIN_KIND, entry="no:entry", lost=report_lost, missing_capacity=lambda _: "all")
    one = Reconciler(ServiceSettings(listen="", store=store.settings), kind)
    for _ in range(POLLS_BEFORE_LOST):
        one.reconcile()

    after = jobs.get(JOB, JOB)
    assert after.state is JobState.RECOVERING
    assert (after.failures, after.preemptions) == counted


def test_attempts_that_never_began_to_report_have_an_end_too(store: ObjectStore) -> None:
    report_lost(store, job(1))
    report_lost(store, job(2, JobState.SUSPENDING))

    first, second = EventLog(store, JOB).after(0)
    assert [(one.attempt, one.payload["cause"]) for one in (first, second)] == [(1, FAILURE), (2, SUSPENDED)]


def test_an_overtaken_attempt_reports_nothing(store: ObjectStore) -> None:
    EventLog(store, JOB).append(2, EventKind.ATTEMPT_STARTED, {"num_workers": 2})
    report_lost(store, job(1))

    assert len(list(EventLog(store, JOB).after(0))) == 1


def test_a_job_that_never_had_an_attempt_has_no_end_of_one(store: ObjectStore) -> None:
    report_lost(store, job(0, JobState.CANCELLING))

    assert not list(EventLog(store, JOB).after(0))


@pytest.mark.parametrize("damaged", [True, False])
def test_a_damaged_last_checkpoint_of_an_earlier_attempt_does_not_end_the_run(
    store: ObjectStore, damaged: bool
) -> None:
    """The attempt that wrote it was lost before it said so; the next one trains again from before, and is paused."""
    commit_version(store, VERSION, {"train": striped_digits(100), "validation": striped_digits(20, 1)})
    new_job(store, JOB)
    spec = replace(SPEC, epochs=1)
    run_of(store, JOB, spec=spec).run()
    final = entries(store, JOB)[5]
    lose_and_begin(store, JOB)
    jobs = Jobs(store, TRAIN_KIND)
    context = AttemptContext(store, jobs, JOB, jobs.get(JOB, JOB))
    key, cause = f"{final.folder}/{WEIGHTS}", Unavailable("a node goes", reason=PREEMPTED)
    if not damaged:
        assert result_of(context, spec, cause)["checkpoint"] == final.name
        return
    store.put(key, store.get(key)[:-1] + b"x")

    with pytest.raises(Unavailable, match="a node goes"):
        result_of(context, spec, cause)


def test_a_change_of_size_is_free_only_where_the_attempt_got_on(store: ObjectStore) -> None:
    """Else a run could change its size for ever."""
    commit_version(store, VERSION, {"train": striped_digits(100), "validation": striped_digits(20, 1)})
    new_job(store, JOB)
    jobs = Jobs(store, TRAIN_KIND)
    resized = Unavailable("there is room", reason=RESIZED)

    with pytest.raises(Internal) as in_vain:
        result_of(AttemptContext(store, jobs, JOB, jobs.get(JOB, JOB)), SPEC, resized)
    assert in_vain.value.specific_reason == "RESIZE_WITHOUT_CHECKPOINT"
    assert "there is room" in in_vain.value.message

    new_job(store, "trainingJobs/b")
    heartbeat = HeartbeatSender(0)
    heartbeat.request = RESIZE
    with pytest.raises(Stopped):
        Run(config_of(store, "trainingJobs/b"), ALONE, heartbeat).run()
    with pytest.raises(Unavailable, match="there is room"):
        result_of(AttemptContext(store, jobs, "trainingJobs/b", jobs.get("trainingJobs/b", "b")), SPEC, resized)


@pytest.mark.parametrize("error", [Internal("lost"), RuntimeError("a defect")])
def test_the_end_of_an_attempt_at_a_job_that_was_deleted_is_reported_nowhere(
    store: ObjectStore, error: Exception
) -> None:
    new_job(store, JOB)
    jobs = Jobs(store, TRAIN_KIND)
    context = AttemptContext(store, jobs, JOB, jobs.get(JOB, JOB))
    jobs.cancel(JOB, JOB)
    for decide in (confirm_cancel, request_delete, confirm_delete):
        jobs.transition(JOB, lambda job, decide=decide: decide(job, time.time()))  # type: ignore[misc]

    def work() -> NoReturn:
        raise error

    with pytest.raises(StaleAttempt):
        run_and_report_error(context, work)
    assert not list(EventLog(store, JOB).after(0))
