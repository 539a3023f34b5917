"""A sweep of whose processes one is killed in the middle: the same trials, none made twice, none begun anew."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from millrace.train.v1 import sweep_pb2 as sw
from shared.settings import StoreSettings
from tests.support import sweeps
from tests.support.faults import Faults
from tests.support.ray_head import ray_head
from tests.support.sweeps import grid, sweep_spec
from tests.support.training import State, TrainClient, digits_spec, train_stack
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(900)]

ATTEMPT, FOLLOWER = "ray::AttemptActor.run", "ray::ImplicitFunc"


def test_a_sweep_whose_process_is_killed_goes_on_with_the_trials_that_there_are(tmp_path: Path, faults: Faults) -> None:
    settings = StoreSettings(url=(tmp_path / "store").as_uri())
    with ray_head(num_cpus=2) as head, train_stack(settings, head.address, tmp_path) as stack:
        client = stack.client
        spec = sweep_spec(
            digits_spec(num_workers=1, epochs=3),
            {"optimizer.learning_rate": {"log_uniform": {"low": 1e-4, "high": 1e-2}}},
            num_samples=3,
            max_concurrent_trials=2,
        )
        made = sweeps.create(client, spec)
        # The trials' own processes come later.
        wait_until(lambda: head.processes(ATTEMPT), "the sweep's process", timeout_s=120)
        (attempt,) = head.processes(ATTEMPT)
        client.watch(_made_trial(client, made.name)).until("validated")
        before = sweeps.get(client, made.name)
        uids = {trial.training_job: client.get(trial.training_job).uid for trial in before.trials if trial.state}

        os.kill(attempt, signal.SIGKILL)
        faults.add("SIGKILL attempt", "sweep", "file")
        ended = sweeps.finished(client, made.name)

        assert uids
        assert ended.state == sweeps.State.STATE_SUCCEEDED, ended.error
        assert ended.attempt == 2
        jobs = [client.get(trial.training_job) for trial in ended.trials]
        assert [trial.parameters for trial in ended.trials] == [trial.parameters for trial in made.trials]
        assert [job.sweep_parameters for job in jobs] == [trial.parameters for trial in made.trials]
        assert {job.name: job.uid for job in jobs if job.name in uids} == uids
        # The sweep's death is no business of its trials.
        assert [(job.state, job.attempt, job.failures) for job in jobs] == [(State.STATE_SUCCEEDED, 1, 0)] * 3
        assert len(list(stack.store.folders("trainingJobs"))) == 3
        best = max(ended.trials, key=lambda trial: trial.best_value)
        assert ended.best_training_job == best.training_job
        wait_until(lambda: not head.processes(FOLLOWER), "the end of the followers")


def _made_trial(client: TrainClient, name: str) -> str:
    """The first trial that has a job."""
    wait_until(lambda: sweeps.get(client, name).trials[0].state, "a trial", timeout_s=120, interval_s=0.2)
    return sweeps.get(client, name).trials[0].training_job


def test_a_sweep_whose_follower_is_killed_goes_on_in_the_same_attempt(tmp_path: Path, faults: Faults) -> None:
    settings = StoreSettings(url=(tmp_path / "store").as_uri())
    with ray_head(num_cpus=2) as head, train_stack(settings, head.address, tmp_path) as stack:
        client = stack.client
        spec = sweep_spec(
            digits_spec(num_workers=1, epochs=3),
            {"optimizer.learning_rate": grid(0.003, 1e-7)},
            max_concurrent_trials=1,
            asha=sw.Asha(grace_period=1, reduction_factor=2),
        )
        made = sweeps.create(client, spec)
        client.watch(_made_trial(client, made.name)).until("validated")
        wait_until(lambda: head.processes(FOLLOWER), "a follower", timeout_s=120)

        for follower in head.processes(FOLLOWER):
            os.kill(follower, signal.SIGKILL)
            faults.add("SIGKILL follower", "sweep", "file")
        ended = sweeps.finished(client, made.name)

        assert (ended.state, ended.attempt) == (sweeps.State.STATE_SUCCEEDED, 1), ended.error
        # What was told again is judged once: the better one is not held against itself.
        assert [trial.stopped_early for trial in ended.trials] == [False, True]
        assert ended.counts.succeeded == 1
