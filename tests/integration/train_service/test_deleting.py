"""Deleting jobs over the wire, on a running service."""

from __future__ import annotations

import uuid

import grpc

from millrace.train.v1 import train_service_pb2 as pb
from tests.support.refusals import refused
from tests.support.training import State, TrainStack, digits_spec
from tests.support.waiting import wait_until


def test_a_job_is_deleted_once_it_is_over_and_its_id_is_free(stack: TrainStack) -> None:
    # More workers than there are CPUs: it never begins.
    spec = digits_spec(num_workers=30, lanes=60, global_batch_size=300)
    client, rpc = stack.client, stack.client.rpc
    job = client.create(spec, f"j{uuid.uuid4().hex[:12]}")
    delete = pb.DeleteTrainingJobRequest(name=job.name)
    assert refused(lambda: rpc.DeleteTrainingJob(delete, timeout=60)).reason == "JOB_AT_WORK"

    client.cancel(job.name)
    wait_until(lambda: client.get(job.name).state == State.STATE_CANCELLED, "the end of the job")
    stale = pb.DeleteTrainingJobRequest(name=job.name, etag="99")
    assert refused(lambda: rpc.DeleteTrainingJob(stale, timeout=60)).code is grpc.StatusCode.ABORTED
    assert rpc.DeleteTrainingJob(delete, timeout=60).state == State.STATE_DELETING

    wait_until(lambda: job.name not in listed(stack), "the deletion")
    for call in (
        lambda: client.get(job.name),
        lambda: client.checkpoints(job.name),
        lambda: rpc.WatchTrainingJob(pb.WatchTrainingJobRequest(name=job.name), timeout=60),
        lambda: rpc.DeleteTrainingJob(delete, timeout=60),
    ):
        assert refused(call).code is grpc.StatusCode.NOT_FOUND
    assert not [info.key for info in stack.store.list(f"{job.name}/") if "/log/" not in info.key]

    again = client.create(spec, job.name.removeprefix("trainingJobs/"))
    assert again.uid != job.uid
    client.cancel(again.name)


def listed(stack: TrainStack) -> list[str]:
    answer = stack.client.rpc.ListTrainingJobs(pb.ListTrainingJobsRequest(page_size=1000), timeout=60)
    return [job.name for job in answer.training_jobs]
