"""The end of an attempt at a sweep that a client cancelled: its trials' ends are waited for."""

from __future__ import annotations

import importlib
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from shared.errors import Cancelled, FailedPrecondition, Unavailable
from shared.jobs import AttemptContext, Jobs, JobState
from shared.storage import ObjectStore
from tests.support.waiting import wait_until
from tests.unit.train_service.sweeps.conftest import NAME, Place
from train_service import store_retry
from train_service.sweeps import attempt
from train_service.sweeps.sweeps import SWEEP_KIND

TRIAL = "trainingJobs/s-000"


class AwayAfterARequest(ObjectStore):
    """The same objects as `store`. Does not answer the first two reads of the trial once it was told to end."""

    def __init__(self, store: ObjectStore) -> None:
        self.__dict__.update(vars(store))
        self.to_refuse = 0
        self.refused = 0

    def put_if_absent(self, key: str, data: bytes | bytearray | memoryview) -> None:
        super().put_if_absent(key, data)
        if key.startswith(TRIAL):
            self.to_refuse = 2

    def get(self, key: str) -> bytes:
        if key.startswith(TRIAL) and self.refused < self.to_refuse:
            self.refused += 1
            raise Unavailable("the object store does not answer; try again")
        return super().get(key)


def test_the_ends_of_the_trials_are_waited_for_through_an_outage(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_retry, "RETRY_DELAY_S", 0.0)
    monkeypatch.setattr(attempt, "POLL_INTERVAL_S", 0.01)
    place.create()
    trials = place.trials()
    trials.make(0)
    place.put_in(JobState.RUNNING, TRIAL)
    store = AwayAfterARequest(place.store)
    context = AttemptContext(store, Jobs(store, SWEEP_KIND), NAME, place.put_in(JobState.CANCELLING))

    def stopped(*_: Any) -> None:
        raise Cancelled(f"{NAME} is CANCELLING")

    # Between two steps of Tune, which needs no Ray to be cancelled.
    monkeypatch.setattr(attempt, "_search", stopped)

    def end() -> None:
        wait_until(lambda: store.refused == 2, "the outage")
        place.put_in(JobState.CANCELLED, TRIAL)

    ending = threading.Thread(target=end)
    ending.start()
    with pytest.raises(Cancelled):
        attempt.run(context)

    assert trials.is_over(0)
    assert store.refused == 2
    ending.join()


@pytest.mark.parametrize(
    ("state", "metrics", "reason", "message"),
    [
        (JobState.SUCCEEDED, {"loss": 0.5}, "METRIC_NOT_MEASURED", "has the metric 'validation_accuracy'"),
        (JobState.FAILED, {"validation_accuracy": 0.5}, "ALL_TRIALS_FAILED", "none of the 2 trials ended well"),
    ],
)
def test_a_sweep_without_a_best_trial_says_why(
    place: Place, state: JobState, metrics: dict[str, float], reason: str, message: str
) -> None:
    place.create()
    for number in range(2):
        place.measure(number, 0.5, metrics=metrics)
        place.put_in(state, place.trials().name(number))
    with pytest.raises(FailedPrecondition, match=message) as refused:
        attempt._result(place.trials())
    assert refused.value.specific_reason == reason


def test_a_module_that_is_kept_out_is_there_again_afterwards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kept_out_of_a_sweep.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    with attempt._kept_out("kept_out_of_a_sweep"), pytest.raises(ImportError):
        importlib.import_module("kept_out_of_a_sweep")
    module = importlib.import_module("kept_out_of_a_sweep")
    with attempt._kept_out("kept_out_of_a_sweep"):
        assert importlib.import_module("kept_out_of_a_sweep") is module
    monkeypatch.delitem(sys.modules, "kept_out_of_a_sweep")
