"""What Ray Tune is told of a trial: each epoch once, from the job's own events, whenever it begins to listen."""

from __future__ import annotations

import math
import threading
from dataclasses import replace

import pytest

from shared.jobs import JobState
from tests.support.waiting import wait_until
from tests.unit.train_service.sweeps.conftest import Place, replace_by_hand
from train_service.records.event_log import EventKind, EventLog
from train_service.sweeps.tune_bridge import WORST, Followed, follow

JOB = "trainingJobs/s-000"


def tell(place: Place, attempt: int, *accuracies: float, first_epoch: int = 0) -> None:
    for epoch, accuracy in enumerate(accuracies, first_epoch):
        payload = {"step": 1, "epoch": epoch, "loss": 1 - accuracy, "accuracy": accuracy, "row_count": 9}
        log = EventLog(place.store, JOB)
        log.append(attempt, EventKind.PROGRESS, {"step": 1})
        log.append(attempt, EventKind.VALIDATED, {**payload, "metrics": {"f1": accuracy / 2}})


def followed(place: Place, metric: str = "validation_accuracy", *, maximize: bool = True) -> Followed:
    return Followed(place.store.settings, JOB, place.trials().uid(0), metric, maximize)


def all_reported(
    place: Place, metric: str = "validation_accuracy", *, maximize: bool = True
) -> list[tuple[int, float]]:
    reported: list[tuple[int, float]] = []
    follow(followed(place, metric, maximize=maximize), lambda epochs, value: reported.append((epochs, value)))
    return reported


@pytest.mark.parametrize("state", [JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED, JobState.DELETING])
def test_the_events_of_an_ended_trial_are_reported_at_once(place: Place, state: JobState) -> None:
    place.create()
    place.trials().make(0)
    tell(place, 1, 0.5, 0.75)
    place.put_in(state, JOB)
    assert all_reported(place) == [(1, 0.5), (2, 0.75)]
    assert all_reported(place, "validation_loss") == [(1, 0.5), (2, 0.25)]
    assert all_reported(place, "validation_f1") == [(1, 0.25), (2, 0.375)]


def test_of_a_trial_that_learns_numbers_its_metrics_are_reported(place: Place) -> None:
    place.create()
    place.trials().make(0)
    payload = {"step": 1, "epoch": 0, "loss": 0.5, "row_count": 9, "metrics": {"mae": 1.5}}
    EventLog(place.store, JOB).append(1, EventKind.VALIDATED, payload)
    place.put_in(JobState.SUCCEEDED, JOB)
    assert all_reported(place, "validation_mae", maximize=False) == [(1, 1.5)]
    assert all_reported(place, "validation_loss", maximize=False) == [(1, 0.5)]


def test_of_a_program_the_reports_with_a_checkpoint_and_the_metric_are_reported(place: Place) -> None:
    place.create()
    place.trials().make(0)
    log = EventLog(place.store, JOB)
    for step, metrics in ((1, {"eval_loss": 2}), (2, {"other": 1.0}), (3, {"eval_loss": 0.5})):
        log.append(1, EventKind.CHECKPOINT_COMMITTED, {"step": step, "metrics": metrics})
        log.append(1, EventKind.PROGRESS, {"step": step})
    place.put_in(JobState.SUCCEEDED, JOB)
    values: list[tuple[int, float]] = []
    trial = replace(followed(place, "eval_loss", maximize=False), by_reports=True)
    follow(trial, lambda reports, value: values.append((reports, value)))
    assert values == [(1, 2.0), (3, 0.5)]


def test_an_epoch_that_a_second_attempt_did_again_is_reported_once(place: Place) -> None:
    place.create()
    place.trials().make(0)
    tell(place, 1, 0.5, 0.75)
    tell(place, 2, 0.75, 0.875, first_epoch=1)
    place.put_in(JobState.SUCCEEDED, JOB)
    assert all_reported(place) == [(1, 0.5), (2, 0.75), (3, 0.875)]


@pytest.mark.parametrize(("maximize", "value"), [(True, -WORST), (False, WORST)])
def test_a_value_that_is_no_number_is_worse_than_all_others(place: Place, maximize: bool, value: float) -> None:
    place.create()
    place.trials().make(0)
    tell(place, 1, math.nan)
    place.put_in(JobState.SUCCEEDED, JOB)
    assert all_reported(place, maximize=maximize) == [(1, value)]


def test_a_job_that_has_taken_a_trials_name_is_not_followed(place: Place) -> None:
    place.create()
    place.trials().make(0)
    replace_by_hand(place, "s-000")
    tell(place, 1, 0.5)
    assert all_reported(place) == []


def test_a_follower_waits_for_its_job_and_for_one_that_is_suspended(place: Place) -> None:
    place.create()
    reported: list[tuple[int, float]] = []
    # Another's job of that name is not the trial's.
    listening = threading.Thread(target=follow, args=(followed(place), lambda *one: reported.append(one)), daemon=True)
    listening.start()
    place.trials().make(0)
    tell(place, 1, 0.5)
    wait_until(lambda: reported == [(1, 0.5)], "the first epoch")
    place.put_in(JobState.SUSPENDED, JOB)
    tell(place, 2, 0.75, first_epoch=1)
    wait_until(lambda: len(reported) == 2, "the second epoch")
    assert listening.is_alive()
    place.put_in(JobState.SUCCEEDED, JOB)
    listening.join(120)
    assert not listening.is_alive()
