"""Creating a job: idempotent by `request_id`, checked without a trace by `validate_only`, and with every default told.

No job of this file is ever run: each is cancelled as soon as it is there.
"""

from __future__ import annotations

import functools
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from millrace.train.v1 import resources_pb2 as res
from millrace.train.v1 import train_service_pb2 as pb
from tests.support.refusals import refused
from tests.support.training import State, TrainStack, digits_spec
from tests.support.waiting import wait_until
from train_service.jobs.training_jobs import ClusterMemory


@pytest.fixture
def idle_spec(stack: TrainStack) -> Iterator[res.TrainingSpec]:
    """Want more workers than there are CPUs; whatever is made of it is cancelled in the end."""
    spec = digits_spec(num_workers=30, lanes=60, global_batch_size=300)
    yield spec
    for job in stack.client.rpc.ListTrainingJobs(pb.ListTrainingJobsRequest(), timeout=60).training_jobs:
        if job.spec.num_workers == 30:
            stack.client.cancel(job.name)


def test_the_same_request_id_and_body_give_the_first_answer(stack: TrainStack, idle_spec: res.TrainingSpec) -> None:
    request_id, job_id = str(uuid.uuid4()), f"j{uuid.uuid4().hex[:12]}"

    first = stack.client.create(idle_spec, job_id, request_id=request_id)
    before = stack.all_keys()
    again = stack.client.create(idle_spec, job_id, request_id=request_id.upper())

    assert (again.name, again.uid, again.create_time) == (first.name, first.uid, first.create_time)
    assert not [key for key in set(stack.all_keys()) - set(before) if first.uid not in key and job_id not in key]


def test_racing_calls_with_one_request_id_make_one_job_and_all_get_it(
    stack: TrainStack, idle_spec: res.TrainingSpec
) -> None:
    request_id, job_id = str(uuid.uuid4()), f"j{uuid.uuid4().hex[:12]}"

    with ThreadPoolExecutor(6) as pool:
        jobs = list(pool.map(lambda _: stack.client.create(idle_spec, job_id, request_id=request_id), range(6)))

    assert len({job.uid for job in jobs}) == 1
    references = [key for key in stack.all_keys() if "/users/" in key and jobs[0].uid in key]
    assert len(references) == 1


def test_the_same_request_id_with_another_body_is_refused(stack: TrainStack, idle_spec: res.TrainingSpec) -> None:
    request_id = str(uuid.uuid4())
    first = stack.client.create(idle_spec, request_id=request_id)
    idle_spec.seed += 1

    refusal = refused(lambda: stack.client.create(idle_spec, "another", request_id=request_id))

    assert refusal.code == grpc.StatusCode.ALREADY_EXISTS
    assert refusal.reason == "REQUEST_ID_REUSED"
    assert refusal.metadata["resource"] == first.name
    assert refused(lambda: stack.client.get("trainingJobs/another")).code == grpc.StatusCode.NOT_FOUND


def test_a_taken_id_is_refused_and_its_job_left_alone(stack: TrainStack, idle_spec: res.TrainingSpec) -> None:
    first = stack.client.create(idle_spec)
    references = {key for key in stack.all_keys() if "/users/" in key}

    refusal = refused(lambda: stack.client.create(idle_spec, first.name.split("/")[1], request_id=str(uuid.uuid4())))

    assert refusal.code == grpc.StatusCode.ALREADY_EXISTS
    assert refusal.metadata == {"resource": first.name}
    left = {key for key in stack.all_keys() if "/users/" in key}
    assert left <= references  # what other tests left may go meanwhile
    assert [key for key in left if first.uid in key]
    assert stack.client.get(first.name).uid == first.uid


def test_validate_only_answers_as_a_creation_would_and_leaves_nothing(stack: TrainStack) -> None:
    before = stack.all_keys()

    job = stack.client.create(digits_spec(), "checked", request_id=str(uuid.uuid4()), validate_only=True)

    assert job.name == "trainingJobs/checked"
    assert job.state == State.STATE_PENDING
    assert set(stack.all_keys()) <= set(before)
    assert refused(lambda: stack.client.get(job.name)).code == grpc.StatusCode.NOT_FOUND


def test_the_answer_reports_every_default(stack: TrainStack) -> None:
    spec = digits_spec()
    spec.ClearField("optimizer")
    spec.ClearField("num_workers")

    reported = stack.client.create(spec, "checked", validate_only=True).spec

    assert (reported.train_split, reported.validation_split) == ("train", "validation")
    assert (reported.input_column, reported.label_column) == ("image", "label")
    assert (reported.num_workers, reported.threads_per_worker, reported.max_failures, reported.lanes) == (1, 1, 3, 24)
    assert (reported.optimizer.name, reported.optimizer.learning_rate) == ("AdamW", 0.001)
    assert [step.column for step in reported.transform.steps] == ["image", "image"]
    assert [step.WhichOneof("op") for step in reported.transform.steps] == ["to_float", "normalize"]


def test_after_sequence_beyond_the_last_event_is_out_of_range(stack: TrainStack, idle_spec: res.TrainingSpec) -> None:
    job = stack.client.create(idle_spec)

    for sequence in (1, 2**62, -1):
        request = pb.WatchTrainingJobRequest(name=job.name, after_sequence=sequence)
        refusal = refused(functools.partial(stack.client.rpc.WatchTrainingJob, request, timeout=60))
        assert refusal.code == grpc.StatusCode.OUT_OF_RANGE
        assert list(refusal.fields) == ["after_sequence"]


def test_a_job_that_the_cluster_can_never_hold_is_refused_by_its_field_and_leaves_nothing(stack: TrainStack) -> None:
    wait_until(lambda: bool(ClusterMemory(stack.store).clusters()), "the cluster to be noted")
    before = stack.all_keys()
    spec = digits_spec(num_workers=1)
    spec.placement.cpus_per_worker = 1001

    answer = refused(lambda: stack.client.create(spec))

    assert (answer.code, answer.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "NEVER_SCHEDULABLE")
    assert list(answer.fields) == ["spec.placement.cpus_per_worker"]
    # Nothing new; what other tests left may go meanwhile.
    assert set(stack.all_keys()) <= set(before)
    # What the reconciler saw, which counts where no operator has set a bound.
    (nodes,) = ClusterMemory(stack.store).clusters()
    assert [node["CPU"] for node in nodes] == [4.0]
