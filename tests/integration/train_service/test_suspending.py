"""A run that is suspended keeps its last step and holds no worker; resumed, it goes on there."""

from __future__ import annotations

import grpc
import pytest

from millrace.train.v1 import train_service_pb2 as pb
from tests.integration.train_service.conftest import Finished
from tests.support.ray_head import RayHead
from tests.support.refusals import refused
from tests.support.training import State, TrainClient, TrainStack, commit_digits, digits_spec
from tests.support.waiting import wait_until

WORKER = "ray::RayTrainWorker"

pytestmark = pytest.mark.timeout(900)


def held_by(client: TrainClient, job: str) -> float:
    """How many CPUs of the cluster."""
    use = client.rpc.GetClusterUse(pb.GetClusterUseRequest(), timeout=60)
    return float(sum(one.cpus for one in use.holders if one.job == job))


@pytest.mark.long
def test_a_suspended_run_frees_its_workers_and_goes_on_at_the_very_next_step(
    file_stack: TrainStack, train_ray: RayHead
) -> None:
    client = file_stack.client
    job = client.create(digits_spec(epochs=30))
    watch = client.watch(job.name, timeout_s=800)
    watch.until("progress")
    wait_until(lambda: held_by(client, job.name) == 2.0, "its workers' CPUs to be told")

    client.suspend(job.name)
    suspended = watch.until_state(State.STATE_SUSPENDED)
    wait_until(lambda: not train_ray.processes(WORKER), "the workers to end")
    wait_until(lambda: held_by(client, job.name) == 0.0, "its CPUs to be free")
    kept = client.checkpoints(job.name)
    again = client.suspend(job.name)
    with_old_etag = refused(lambda: client.resume(job.name, etag=job.etag))
    client.resume(job.name, etag=suspended.etag)
    client.resume(job.name)  # it goes on already
    watch.rest()

    assert again.state == State.STATE_SUSPENDED
    assert with_old_etag.code == grpc.StatusCode.ABORTED
    ended, *_ = watch.of("attempt_ended")
    assert ended.cause == pb.AttemptEnded.CAUSE_SUSPENDED
    assert 0 < suspended.progress.step <= kept[-1].step < 30 * 20
    first, second = watch.of("attempt_started")
    assert (second.step, second.checkpoint) == (kept[-1].step, kept[-1].name)
    assert [one.step for one in watch.of("validated")] == [20 * (epoch + 1) for epoch in range(30)]
    # The same stream told it all.
    assert watch.jobs[-1].state == State.STATE_SUCCEEDED
    assert (watch.jobs[-1].attempt, watch.jobs[-1].failures, watch.jobs[-1].preemptions) == (2, 0, 0), watch.ends()
    assert first.step == 0


def test_a_job_that_waits_says_for_what_and_can_be_suspended_cancelled_and_resumed(file_stack: TrainStack) -> None:
    client = file_stack.client
    job = client.create(digits_spec(num_workers=8, global_batch_size=120))
    watch = client.watch(job.name)

    wait_until(lambda: client.get(job.name).waiting_for != "", "the job to say what it waits for")
    waiting = client.get(job.name)
    assert (waiting.state, waiting.attempt) == (State.STATE_PENDING, 0)
    assert waiting.waiting_for.startswith("8 workers of 1 CPU: the cluster has ")
    assert waiting.waiting_for.endswith("and 4 CPU in all")

    client.suspend(job.name)
    assert watch.until_state(State.STATE_SUSPENDED).waiting_for == ""
    client.resume(job.name)
    watch.until_state(State.STATE_RECOVERING)
    client.cancel(job.name)
    watch.rest()

    assert watch.jobs[-1].state == State.STATE_CANCELLED
    assert watch.jobs[-1].attempt == 0
    assert not watch.events


def test_a_job_whose_version_is_gone_cannot_be_resumed(file_stack: TrainStack) -> None:
    client, store = file_stack.client, file_stack.store
    version = "datasets/passing/versions/v1"
    commit_digits(store, version)
    job = client.create(digits_spec(dataset_version=version, num_workers=8, global_batch_size=120))
    client.cancel(job.name)
    client.finished(job.name)
    store.delete_folder(version)

    gone = refused(lambda: client.resume(job.name))

    assert (gone.code, gone.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "VERSION_GONE")
    assert client.get(job.name).state == State.STATE_CANCELLED


def test_a_run_that_succeeded_can_be_neither_suspended_nor_resumed(finished: Finished) -> None:
    assert finished.job.state == State.STATE_SUCCEEDED
    for call in (finished.stack.client.suspend, finished.stack.client.resume):
        answer = refused(lambda call=call: call(finished.job.name))  # type: ignore[misc]
        assert (answer.code, answer.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "WRONG_STATE")
    assert finished.stack.client.get(finished.job.name) == finished.job
