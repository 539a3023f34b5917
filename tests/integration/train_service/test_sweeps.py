"""A sweep on a real Ray: its trials are training jobs, the worse are stopped early, and the best is known by name."""

from __future__ import annotations

import functools
from typing import Any

import grpc
import pytest

from millrace.train.v1 import sweep_pb2 as sw
from millrace.train.v1 import train_service_pb2 as pb
from shared.checkpoint import resolve
from tests.support import sweeps
from tests.support.refusals import refused
from tests.support.sweeps import grid, sweep_spec
from tests.support.training import CREATED_TIMEOUT_S, State, TrainClient, TrainStack, digits_spec
from tests.support.waiting import wait_until

pytestmark = pytest.mark.timeout(600)


@pytest.mark.long
def test_asha_stops_the_worse_of_two_and_the_best_is_known_by_its_checkpoint(file_stack: TrainStack) -> None:
    client = file_stack.client
    # One at a time: so the better one has told what it can do when the worse one comes.
    spec = sweep_spec(
        digits_spec(num_workers=1, epochs=6),
        {"optimizer.learning_rate": grid(0.003, 1e-7)},
        max_concurrent_trials=1,
        asha=sw.Asha(grace_period=1, reduction_factor=2),
    )

    made = sweeps.create(client, spec)
    ended = sweeps.finished(client, made.name)

    assert ended.state == sweeps.State.STATE_SUCCEEDED, ended.error
    better, worse = ended.trials
    jobs = [client.get(trial.training_job) for trial in ended.trials]
    name = f"trainingJobs/{made.name.split('/')[1]}"
    assert [job.name for job in jobs] == [f"{name}-000", f"{name}-001"]
    assert [job.sweep_parameters["optimizer.learning_rate"].number_value for job in jobs] == [0.003, 1e-7]
    assert [job.spec.optimizer.learning_rate for job in jobs] == [0.003, 1e-7]
    assert [job.sweep for job in jobs] == [made.name] * 2
    assert (better.state, better.stopped_early, better.epochs_done) == (State.STATE_SUCCEEDED, False, 6)
    assert (worse.state, worse.stopped_early) == (State.STATE_CANCELLED, True)
    assert 1 <= worse.epochs_done < 6
    assert client.checkpoints(worse.training_job)
    assert better.best_value > 0.9 > worse.best_value
    assert (ended.best_training_job, ended.best_checkpoint) == (better.training_job, jobs[0].best_checkpoint)
    # As a deployment takes it.
    resolved = resolve(file_stack.store, "checkpoint", ended.best_checkpoint)
    assert resolved.metrics["validation_accuracy"] == better.best_value
    assert (ended.counts.total, ended.counts.succeeded, ended.counts.stopped_early) == (2, 1, 1)


@pytest.mark.chaos
def test_two_sweeps_side_by_side_each_follow_their_own_trials(file_stack: TrainStack) -> None:
    client = file_stack.client
    # The longer one's first trial is held until the shorter one is over. Whoever then followed the shorter one's second
    # trial in place of the longer one's would find it done after one epoch, and stop the longer one's.
    longer = sweeps.create(client, side_by_side(2, {"seed": grid(1, 2)}, at_a_time=1))
    wait_until(lambda: sweeps.get(client, longer.name).trials[0].state, "a trial", timeout_s=CREATED_TIMEOUT_S)
    client.suspend(longer.trials[0].training_job)
    shorter = sweeps.create(client, side_by_side(1, {"optimizer.learning_rate": grid(0.003, 0.001)}, at_a_time=2))

    short = sweeps.finished(client, shorter.name)
    client.cancel(longer.trials[0].training_job)
    long = sweeps.finished(client, longer.name)

    done = State.STATE_SUCCEEDED
    assert [(one.state, one.epochs_done) for one in short.trials] == [(done, 1), (done, 1)]
    assert [(one.state, one.epochs_done) for one in long.trials] == [(State.STATE_CANCELLED, 0), (done, 2)]
    for made, ended in ((shorter, short), (longer, long)):
        assert (ended.state, ended.attempt) == (sweeps.State.STATE_SUCCEEDED, 1), ended.error
        assert ended.counts.stopped_early == 0
        jobs = [client.get(one.training_job) for one in ended.trials]
        assert [job.sweep_parameters for job in jobs] == [one.parameters for one in made.trials]


def side_by_side(epochs: int, parameters: dict[str, Any], at_a_time: int) -> sw.SweepSpec:
    # Without Ray Train, whose processes would take most of the time.
    return sweep_spec(digits_spec(num_workers=0, epochs=epochs), parameters, max_concurrent_trials=at_a_time)


def test_a_cancelled_sweep_ends_its_trials_and_a_deleted_one_takes_them_away(file_stack: TrainStack) -> None:
    client = file_stack.client
    # For as many workers there is no room: the trials wait.
    base = digits_spec(num_workers=30, lanes=60, global_batch_size=300)
    made = sweeps.create(client, sweep_spec(base, {"seed": grid(1, 2, 3)}, max_concurrent_trials=2))
    wait_until(
        lambda: all(trial.state for trial in sweeps.get(client, made.name).trials[:2]),
        "two trials",
        timeout_s=CREATED_TIMEOUT_S,
        interval_s=0.2,
    )
    delete = pb.DeleteSweepRequest(name=made.name)
    at_work = refused(lambda: client.rpc.DeleteSweep(delete, timeout=60))

    client.rpc.CancelSweep(pb.CancelSweepRequest(name=made.name), timeout=60)
    ended = sweeps.finished(client, made.name)
    client.rpc.DeleteSweep(delete, timeout=60)

    assert (at_work.code, at_work.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "JOB_AT_WORK")
    assert ended.state == sweeps.State.STATE_CANCELLED
    # The third was never made.
    assert [trial.state for trial in ended.trials] == [State.STATE_CANCELLED] * 2 + [State.STATE_UNSPECIFIED]
    assert ended.counts.cancelled == 3
    wait_until(lambda: not _there(client, made.name), "the end of the sweep")
    for trial in ended.trials:
        gone = refused(functools.partial(client.get, trial.training_job))
        assert gone.code == grpc.StatusCode.NOT_FOUND


def _there(client: TrainClient, name: str) -> bool:
    listed = client.rpc.ListSweeps(pb.ListSweepsRequest(), timeout=60).sweeps
    return name in [sweep.name for sweep in listed]
