"""Whatever is wrong with a request is refused with its documented status, by its name, and leaves nothing behind."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from google.protobuf.struct_pb2 import Struct

from millrace.common.v1 import transform_pb2
from millrace.train.v1 import resources_pb2 as res
from millrace.train.v1 import train_service_pb2 as pb
from tests.support.refusals import Refusal, refused
from tests.support.stores import S3_IN_CHAOS
from tests.support.training import TrainClient, TrainStack, digits_spec

# Requests are refused by what they say; a few tests below are enough to see that on S3 nothing is left either.
ON_S3_IN_CHAOS = pytest.mark.parametrize("stack", S3_IN_CHAOS, indirect=True)

INVALID, MISSING = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND
UUID1 = "a8a3462e-e5f7-11f1-ab15-02fc00000001"
LONG = "x" * 100_000


def refused_leaving_nothing(stack: TrainStack, call: Callable[[], Any]) -> Refusal:
    before = stack.all_keys()
    refusal = refused(call)
    assert set(stack.all_keys()) <= set(before)
    return refusal


def normalize(*mean: float, std: float = 1.0) -> list[transform_pb2.TransformStep]:
    steps = [transform_pb2.TransformStep(), transform_pb2.TransformStep()]
    steps[0].to_float.SetInParent()
    steps[1].normalize.mean.extend(mean)
    steps[1].normalize.std.extend([std] * len(mean))
    return steps


def struct(**values: Any) -> Struct:
    made = Struct()
    made.update(values)
    return made


def model(**changes: Any) -> Callable[[res.TrainingSpec], None]:
    return lambda spec: spec.model.MergeFrom(res.Model(**changes))


def optimizer(**changes: Any) -> Callable[[res.TrainingSpec], None]:
    return lambda spec: spec.optimizer.MergeFrom(res.Optimizer(**changes))


def placement(**changes: Any) -> Callable[[res.TrainingSpec], None]:
    return lambda spec: spec.placement.MergeFrom(res.Placement(**changes))


def put(name: str, value: Any) -> Callable[[res.TrainingSpec], None]:
    return lambda spec: setattr(spec, name, value)


def steps(*replacement: transform_pb2.TransformStep) -> Callable[[res.TrainingSpec], None]:
    def change(spec: res.TrainingSpec) -> None:
        del spec.transform.steps[:]
        spec.transform.steps.extend(replacement)

    return change


def of_model(name: str, value: Any) -> Callable[[res.TrainingSpec], None]:
    return lambda spec: setattr(spec.model, name, value)


def of_optimizer(name: str, value: Any) -> Callable[[res.TrainingSpec], None]:
    return lambda spec: setattr(spec.optimizer, name, value)


BAD_SPECS: list[tuple[str, Callable[[res.TrainingSpec], None]]] = [
    ("dataset_version", put("dataset_version", "")),
    ("dataset_version", put("dataset_version", "datasets/digits")),
    ("dataset_version", put("dataset_version", "datasets/Digits/versions/v1")),
    ("dataset_version", put("dataset_version", "datasets/../versions/v1")),
    ("dataset_version", put("dataset_version", LONG)),
    ("train_split", put("train_split", "absent")),
    ("train_split", put("train_split", LONG)),
    ("validation_split", put("validation_split", "../train")),
    ("input_column", put("input_column", "pixels")),
    ("transform.steps[0]", put("input_column", "label")),
    ("label_column", put("label_column", "image")),
    ("label_column", put("label_column", LONG)),
    ("epochs", put("epochs", 0)),
    ("epochs", put("epochs", -1)),
    ("global_batch_size", put("global_batch_size", 0)),
    ("global_batch_size", put("global_batch_size", 601)),
    ("global_batch_size", put("global_batch_size", 3)),
    ("num_workers", lambda spec: spec.MergeFrom(res.TrainingSpec(num_workers=65, lanes=100))),
    ("num_workers", put("num_workers", -2)),
    ("threads_per_worker", put("threads_per_worker", -1)),
    ("checkpoint_every_steps", put("checkpoint_every_steps", -1)),
    ("max_failures", put("max_failures", -1)),
    ("lanes", put("lanes", -1)),
    ("lanes", put("lanes", 100_000)),
    ("model", lambda spec: spec.ClearField("model")),
    ("model.builder", of_model("builder", "")),
    ("model.builder", of_model("builder", "os.system")),
    ("model.builder", of_model("builder", "torchvision.fasterrcnn_resnet50_fpn")),
    ("model.builder", of_model("builder", "torchvision.alexnet")),  # its images are larger
    ("model.builder", of_model("builder", "torchvision.inception_v3")),
    ("model.builder", of_model("builder", "torchvision.vit_b_16")),
    ("model.builder", of_model("builder", LONG)),
    ("model.in_channels", of_model("in_channels", 0)),
    ("model.num_classes", of_model("num_classes", 1)),
    ("model.kwargs", model(kwargs=struct(no_such_argument=1))),
    ("model.kwargs", model(kwargs=struct(num_classes=3))),
    ("model.kwargs", model(kwargs=struct(**{LONG: 1}))),
    ("model.kwargs", model(builder="torchvision.resnet50", kwargs=struct(groups=0))),
    ("model.kwargs", model(builder="torchvision.resnet50", kwargs=struct(width_per_group=-64))),
    ("model.kwargs", model(kwargs=struct(momentum=math.nan))),
    ("transform", steps()),  # uint8 is no input for a model
    ("transform", of_model("in_channels", 3)),
    ("transform.steps[0]", steps(transform_pb2.TransformStep())),
    ("transform.steps[0]", steps(*normalize(0.1)[1:])),
    ("transform.steps[0]", steps(transform_pb2.TransformStep(column="label", to_float={}))),
    ("transform.steps[0].column", steps(transform_pb2.TransformStep(column="absent", to_float={}))),
    ("transform.steps[1]", steps(*normalize(0.1)[:1], transform_pb2.TransformStep(filter={"expression": "label > 1"}))),
    ("transform.steps[1]", steps(*normalize())),
    ("transform.steps[1]", steps(*normalize(0.1, 0.2))),
    ("transform.steps[1]", steps(*normalize(math.nan))),
    ("transform.steps[1]", steps(*normalize(0.1, std=0.0))),
    *[(f"placement.{name}", placement(**{name: 0.00001})) for name in ("cpus_per_worker", "gpus_per_worker")],
    ("placement.gpus_per_worker", placement(gpus_per_worker=1.5)),
    ("placement.resources_per_worker[disk]", placement(resources_per_worker={"disk": 0.00001})),
    ("optimizer.name", of_optimizer("name", "")),
    ("optimizer.name", of_optimizer("name", "LBFGS")),
    ("optimizer.learning_rate", of_optimizer("learning_rate", 0.0)),
    ("optimizer.learning_rate", of_optimizer("learning_rate", math.nan)),
    ("optimizer.schedule", of_optimizer("schedule", 77)),
    ("optimizer.kwargs", optimizer(kwargs=struct(no_such_argument=1))),
    ("optimizer.kwargs", optimizer(kwargs=struct(lr=1))),
    ("optimizer.kwargs", optimizer(kwargs=struct(betas=[0.9]))),
    ("optimizer.kwargs", optimizer(kwargs=struct(weight_decay="much"))),
    ("optimizer.kwargs", optimizer(kwargs=struct(weight_decay=math.inf))),
    ("optimizer.kwargs", optimizer(kwargs=struct(capturable=True))),
    ("optimizer.kwargs", optimizer(kwargs=struct(fused=True, capturable=True, foreach=True))),
]


@ON_S3_IN_CHAOS
@pytest.mark.parametrize(
    ("path", "change"), BAD_SPECS, ids=[f"{number}-{path}" for number, (path, _) in enumerate(BAD_SPECS)]
)
def test_a_bad_field_of_a_specification_is_refused_by_its_path(
    stack: TrainStack, path: str, change: Callable[[res.TrainingSpec], None]
) -> None:
    spec = digits_spec()
    change(spec)

    refusal = refused_leaving_nothing(stack, lambda: stack.client.create(spec, "bad"))

    assert refusal.code == INVALID, refusal
    assert list(refusal.fields) == [f"spec.{path}"], refusal
    assert len(refusal.message) < 1200


@pytest.mark.parametrize("job_id", ["", "Digits", "1st", "a" * 64, "a/b", "../a", "ä", LONG])
def test_a_malformed_id_is_refused(stack: TrainStack, job_id: str) -> None:
    request = pb.CreateTrainingJobRequest(training_job_id=job_id, spec=digits_spec())

    refusal = refused_leaving_nothing(stack, lambda: stack.client.rpc.CreateTrainingJob(request, timeout=60))

    assert (refusal.code, list(refusal.fields)) == (INVALID, ["training_job_id"])


@pytest.mark.parametrize("request_id", ["1", "not-a-uuid", UUID1, LONG])
def test_a_request_id_that_is_no_uuid4_is_refused(stack: TrainStack, request_id: str) -> None:
    refusal = refused_leaving_nothing(stack, lambda: stack.client.create(digits_spec(), "bad", request_id=request_id))

    assert (refusal.code, list(refusal.fields)) == (INVALID, ["request_id"])


def test_a_version_that_does_not_exist_is_not_found_by_its_name(stack: TrainStack) -> None:
    spec = digits_spec(dataset_version="datasets/digits/versions/absent")

    refusal = refused_leaving_nothing(stack, lambda: stack.client.create(spec, "bad"))

    assert (refusal.code, refusal.metadata) == (MISSING, {"resource": "datasets/digits/versions/absent"})


def test_an_empty_request_is_refused(stack: TrainStack) -> None:
    refusal = refused_leaving_nothing(
        stack, lambda: stack.client.rpc.CreateTrainingJob(pb.CreateTrainingJobRequest(), timeout=60)
    )

    assert refusal.code == INVALID
    assert refusal.fields


def calls_with_name(client: TrainClient, name: str) -> dict[str, tuple[str, Callable[[], Any]]]:
    """For each RPC that takes a job's name: the field that holds it, and the call."""
    rpc = client.rpc
    return {
        "Get": ("name", lambda: rpc.GetTrainingJob(pb.GetTrainingJobRequest(name=name), timeout=60)),
        "Cancel": ("name", lambda: rpc.CancelTrainingJob(pb.CancelTrainingJobRequest(name=name), timeout=60)),
        "Watch": ("name", lambda: rpc.WatchTrainingJob(pb.WatchTrainingJobRequest(name=name), timeout=60)),
        "Checkpoints": ("parent", lambda: rpc.ListCheckpoints(pb.ListCheckpointsRequest(parent=name), timeout=60)),
        "Suspend": ("name", lambda: rpc.SuspendTrainingJob(pb.SuspendTrainingJobRequest(name=name), timeout=60)),
        "Resume": ("name", lambda: rpc.ResumeTrainingJob(pb.ResumeTrainingJobRequest(name=name), timeout=60)),
        "Delete": ("name", lambda: rpc.DeleteTrainingJob(pb.DeleteTrainingJobRequest(name=name), timeout=60)),
        "Metrics": ("name", lambda: rpc.ListMetrics(pb.ListMetricsRequest(name=name), timeout=60)),
        "Logs": ("name", lambda: rpc.StreamLogs(pb.StreamLogsRequest(name=name), timeout=60)),
        "Coverage": ("name", lambda: rpc.GetCoverage(pb.GetCoverageRequest(name=name), timeout=60)),
    }


RPCS = ["Get", "Cancel", "Watch", "Checkpoints", "Suspend", "Resume", "Delete", "Metrics", "Logs", "Coverage"]


@ON_S3_IN_CHAOS
@pytest.mark.parametrize("rpc", RPCS)
@pytest.mark.parametrize(
    "name", ["", "digits", "trainingJobs/", "trainingJobs/A", "trainingJobs/a/b", "datasets/a", "trainingJobs/..", LONG]
)
def test_a_malformed_name_is_refused(stack: TrainStack, rpc: str, name: str) -> None:
    field, call = calls_with_name(stack.client, name)[rpc]

    refusal = refused_leaving_nothing(stack, call)

    assert (refusal.code, list(refusal.fields)) == (INVALID, [field])


@pytest.mark.parametrize("rpc", RPCS)
def test_a_job_that_does_not_exist_is_not_found_by_its_name(stack: TrainStack, rpc: str) -> None:
    _, call = calls_with_name(stack.client, "trainingJobs/absent")[rpc]

    refusal = refused_leaving_nothing(stack, call)

    assert (refusal.code, refusal.metadata) == (MISSING, {"resource": "trainingJobs/absent"})


@pytest.mark.parametrize(
    ("field", "value"), [("page_size", -1), ("page_size", 1001), ("page_token", "*"), ("page_token", LONG + "=")]
)
def test_a_bad_page_of_jobs_is_refused(stack: TrainStack, field: str, value: Any) -> None:
    request = pb.ListTrainingJobsRequest(**{field: value})

    refusal = refused_leaving_nothing(stack, lambda: stack.client.rpc.ListTrainingJobs(request, timeout=60))

    assert (refusal.code, list(refusal.fields)) == (INVALID, [field])


@pytest.mark.parametrize(
    "method",
    ["CreateTrainingJob", "GetTrainingJob", "ListTrainingJobs", "CancelTrainingJob", "ListCheckpoints"],
)
@pytest.mark.parametrize("data", [b"\xff" * 40, b"\x0a\xff\xff\xff\xff\x0f"])
def test_bytes_that_are_no_message_are_refused(stack: TrainStack, method: str, data: bytes) -> None:
    refusal = refused_leaving_nothing(stack, lambda: stack.client.send_raw(method, data))

    assert (refusal.code, refusal.reason) == (INVALID, "MALFORMED_MESSAGE")
