"""Deleting jobs over the wire, on a running service."""

from __future__ import annotations

import contextlib
import uuid

import grpc
import pytest

from millrace.train.v1 import resources_pb2 as res
from millrace.train.v1 import train_service_pb2 as pb
from tests.support.refusals import refused
from tests.support.training import State, TrainStack, digits_spec
from tests.support.waiting import wait_until


def is_gone(stack: TrainStack, name: str) -> bool:
    with contextlib.suppress(grpc.RpcError):
        stack.client.rpc.GetTrainingJob(pb.GetTrainingJobRequest(name=name), timeout=30)
        return False
    return True


def test_a_job_is_deleted_once_it_is_over_and_its_id_is_free(stack: TrainStack) -> None:
    # More workers than there are CPUs: it never begins.
    spec = digits_spec(num_workers=30, lanes=60, global_batch_size=300)
    job = stack.client.create(spec, f"j{uuid.uuid4().hex[:12]}")
    rpc = stack.client.rpc
    with pytest.raises(grpc.RpcError) as caught:
        rpc.DeleteTrainingJob(pb.DeleteTrainingJobRequest(name=job.name), timeout=30)
    assert refused(caught.value)[0] is grpc.StatusCode.FAILED_PRECONDITION

    stack.client.cancel(job.name)
    wait_until(lambda: state_of(stack, job.name) == State.STATE_CANCELLED, "the end of the job")
    with pytest.raises(grpc.RpcError) as caught:
        rpc.DeleteTrainingJob(pb.DeleteTrainingJobRequest(name=job.name, etag="99"), timeout=30)
    assert refused(caught.value)[0] is grpc.StatusCode.ABORTED
    deleting = rpc.DeleteTrainingJob(pb.DeleteTrainingJobRequest(name=job.name), timeout=30)
    assert deleting.state == State.STATE_DELETING

    wait_until(lambda: is_gone(stack, job.name), "the deletion")
    for call in (
        lambda: rpc.GetTrainingJob(pb.GetTrainingJobRequest(name=job.name), timeout=30),
        lambda: rpc.ListCheckpoints(pb.ListCheckpointsRequest(parent=job.name), timeout=30),
        lambda: next(rpc.WatchTrainingJob(pb.WatchTrainingJobRequest(name=job.name), timeout=30)),
        lambda: rpc.DeleteTrainingJob(pb.DeleteTrainingJobRequest(name=job.name), timeout=30),
    ):
        with pytest.raises(grpc.RpcError) as caught:
            call()
        assert refused(caught.value)[0] is grpc.StatusCode.NOT_FOUND
    listed = rpc.ListTrainingJobs(pb.ListTrainingJobsRequest(), timeout=30).training_jobs
    assert job.name not in [one.name for one in listed]
    assert not [key for key in stack.all_keys() if key.startswith(f"{job.name}/") and "/log/" not in key]

    again = stack.client.create(spec, job.name.removeprefix("trainingJobs/"))
    assert again.uid != job.uid
    stack.client.cancel(again.name)


def state_of(stack: TrainStack, name: str) -> res.TrainingJob.State.ValueType:
    return stack.client.rpc.GetTrainingJob(pb.GetTrainingJobRequest(name=name), timeout=30).state
