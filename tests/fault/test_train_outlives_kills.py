"""One run whose service, then a worker, then Ray itself is killed: what a client sees. `make chaos` strikes harder."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from millrace.train.v1 import resources_pb2 as res
from millrace.train.v1 import train_service_pb2 as pb
from shared.settings import StoreSettings
from tests.support.faults import Faults
from tests.support.ray_head import ray_head
from tests.support.training import State, TrainClient, Watch, digits_spec, train_stack

# So long that it is at work still when its service is back, whose start takes seconds.
EPOCHS, STEPS_PER_EPOCH = 40, 20

pytestmark = [pytest.mark.timeout(900), pytest.mark.long]


@dataclass
class Run:
    client: TrainClient
    job: res.TrainingJob
    watch: Watch
    newest_when_struck: res.Checkpoint


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    folder: Path = tmp_path_factory.mktemp("train-outlives")
    settings = StoreSettings(url=(folder / "store").as_uri())
    with ray_head(num_cpus=4) as head, train_stack(settings, head.address, folder) as stack:
        job = stack.client.create(digits_spec(epochs=EPOCHS, checkpoint_every_steps=7))
        before = stack.client.watch(job.name, timeout_s=800)
        before.until("progress")
        stack.service.kill()
        stack.service.start()

        watch = stack.client.watch(job.name, timeout_s=800)
        watch.until("checkpoint_committed")
        watch.until("checkpoint_committed")
        os.kill(max(head.processes("ray::RayTrainWorker")), signal.SIGKILL)
        watch.until_state(State.STATE_RECOVERING)
        newest = max(stack.client.checkpoints(job.name), key=lambda one: one.step)
        watch.rest()

        head.kill()
        yield Run(stack.client, stack.client.get(job.name), watch, newest)


def test_a_run_whose_service_and_worker_were_killed_succeeds_once(run: Run, faults: Faults) -> None:
    for victim in ("service", "worker", "Ray head, after the end"):
        faults.add(f"SIGKILL {victim}", "training", "file")
    assert run.job.state == State.STATE_SUCCEEDED
    assert run.job.attempt == 2  # the service's death is no business of the attempt
    assert [job.state for job in run.watch.jobs].count(State.STATE_SUCCEEDED) == 1
    assert run.job.progress.step == run.job.progress.total_steps == EPOCHS * STEPS_PER_EPOCH


def test_the_next_attempt_begins_at_the_step_of_the_newest_checkpoint(run: Run) -> None:
    first, second = run.watch.of("attempt_started")
    assert (first.step, first.checkpoint) == (0, "")
    assert (second.step, second.checkpoint) == (run.newest_when_struck.step, run.newest_when_struck.name)
    assert run.newest_when_struck.step > 0


def test_without_ray_the_api_answers_get_list_and_watch(run: Run) -> None:
    assert run.client.get(run.job.name) == run.job
    listed = run.client.rpc.ListTrainingJobs(pb.ListTrainingJobsRequest(), timeout=60).training_jobs
    assert [job.name for job in listed] == [run.job.name]
    again = run.client.watch(run.job.name)
    again.rest()
    assert [event.sequence for event in again.events] == list(range(1, len(again.events) + 1))
    assert again.events == run.watch.events
