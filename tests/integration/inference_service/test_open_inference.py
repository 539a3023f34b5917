"""The Open Inference Protocol as foreign clients speak it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc
import numpy as np
import pytest
import torch
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from inference import grpc_service_pb2 as oip
from millrace.inference.v1 import deployment_service_pb2 as pb
from tests.integration.inference_service.checkpoints import make_module
from tests.integration.inference_service.client import Array, eventually, infer_request, outputs
from tests.integration.inference_service.conftest import Stack
from tests.integration.inference_service.paused import REPLICA, paused
from tests.integration.inference_service.tritonclient_scripts import run_triton_script
from tests.support.refusals import refused

IMAGES = np.random.default_rng(0).integers(0, 256, (5, 28, 28), dtype=np.uint8)


def eager_logits(stack: Stack, images: Array) -> Array:
    """The checkpoint's own forward pass, in this process."""
    prepared = stack.checkpoint.content.serving()({"image": images})["image"]
    with torch.inference_mode():
        logits: Array = make_module()(torch.from_numpy(prepared)).numpy()
    return logits


@pytest.fixture(scope="module")
def triton(stack: Stack, deployed: pb.Deployment, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the real tritonclient saw."""
    path = tmp_path_factory.mktemp("triton") / "images.npy"
    np.save(path, IMAGES)
    seen: dict[str, Any] = run_triton_script(
        "triton_session.py", stack.service.address, deployed.name.partition("/")[2], str(path)
    )
    return seen


def test_tritonclient_sees_a_ready_server_and_model(triton: dict[str, Any]) -> None:
    assert [triton[what] for what in ("live", "ready", "model_ready", "version_ready")] == [True] * 4
    assert [triton[what] for what in ("unknown_ready", "unknown_version_ready")] == [False] * 2


def test_tritonclient_reads_server_and_model_metadata(triton: dict[str, Any]) -> None:
    assert triton["server"]["name"] == "millrace"
    assert triton["server"]["extensions"] == [
        "classification",
        "model_configuration",
        "model_repository",
        "schedule_policy",
        "statistics",
    ]
    assert triton["model"]["name"] == "digits"
    assert triton["model"]["versions"] == ["1"]
    assert triton["model"]["inputs"] == [{"name": "image", "datatype": "UINT8", "shape": ["-1", "28", "28"]}]
    assert triton["model"]["outputs"] == [
        {"name": "logits", "datatype": "FP32", "shape": ["-1", "10"]},
        {"name": "probabilities", "datatype": "FP32", "shape": ["-1", "10"]},
        {"name": "label", "datatype": "INT64", "shape": ["-1"]},
        {"name": "label_name", "datatype": "BYTES", "shape": ["-1"]},
    ]


def test_tritonclient_gets_the_logits_of_a_local_eager_forward(stack: Stack, triton: dict[str, Any]) -> None:
    expected = eager_logits(stack, IMAGES)
    np.testing.assert_allclose(triton["logits"], expected, atol=1e-5, rtol=0)
    assert triton["label"] == expected.argmax(axis=1).tolist() == triton["asynchronous"]
    np.testing.assert_allclose(np.sum(triton["probabilities"], axis=1), 1, atol=1e-5)


def test_tritonclient_gets_its_id_the_resolved_version_and_the_outputs_it_asked_for(triton: dict[str, Any]) -> None:
    assert (triton["id"], triton["model_name"], triton["model_version"]) == ("call-1", "digits", "1")
    assert triton["requested"] == ["label"]


def test_every_response_carries_the_lineage(stack: Stack, triton: dict[str, Any]) -> None:
    entry = stack.checkpoint.entry
    assert triton["parameters"] == {
        "dataset_version": "datasets/digits/versions/v1",
        "training_job": "trainingJobs/digits",
        "checkpoint": entry.name,
        "checkpoint_sha256": entry.manifest_sha256,
        "deployment": "deployments/digits",
        "model_version": "1",
    }


@pytest.mark.parametrize(
    ("case", "code", "named"),
    [
        ("unknown model", "NOT_FOUND", "nobody"),
        ("unknown version", "NOT_FOUND", "'9'"),
        ("unknown model's metadata", "NOT_FOUND", "nobody"),
        ("unknown output", "INVALID_ARGUMENT", "'score'"),
        ("wrong name", "INVALID_ARGUMENT", "'picture'"),
        ("wrong shape", "INVALID_ARGUMENT", "'image'"),
        ("wrong type", "INVALID_ARGUMENT", "'image'"),
        ("no name", "INVALID_ARGUMENT", "name: ''"),
    ],
)
def test_tritonclient_is_refused_with_the_documented_status(
    triton: dict[str, Any], case: str, code: str, named: str
) -> None:
    status, message = triton["errors"][case]
    assert status == f"StatusCode.{code}"
    assert named in message


@pytest.mark.usefixtures("deployed")
def test_raw_rows_and_the_tensor_that_training_makes_of_them_give_the_same_bits(stack: Stack) -> None:
    prepared = stack.checkpoint.content.serving()({"image": IMAGES})["image"]
    raw, own = (outputs(stack.client.infer("digits", image)) for image in (IMAGES, prepared))
    assert raw["logits"].tobytes() == own["logits"].tobytes()


@pytest.mark.usefixtures("deployed")
def test_a_request_of_more_rows_than_a_batch_comes_back_whole(stack: Stack) -> None:
    images = np.random.default_rng(1).integers(0, 256, (50, 28, 28), dtype=np.uint8)
    logits = outputs(stack.client.infer("digits", images))["logits"]
    np.testing.assert_allclose(logits, eager_logits(stack, images), atol=1e-5, rtol=0)


@pytest.mark.usefixtures("deployed")
def test_requests_at_the_same_time_get_their_own_answers(stack: Stack) -> None:
    images = np.random.default_rng(2).integers(0, 256, (40, 28, 28), dtype=np.uint8)
    calls = [
        stack.client.inference.ModelInfer.future(infer_request("digits", images[i : i + 1]), timeout=60)
        for i in range(len(images))
    ]
    logits = np.concatenate([outputs(call.result())["logits"] for call in calls])
    np.testing.assert_allclose(logits, eager_logits(stack, images), atol=1e-5, rtol=0)


@pytest.mark.usefixtures("deployed")
def test_typed_contents_are_answered_with_typed_contents(stack: Stack) -> None:
    request = infer_request("digits", IMAGES)
    del request.raw_input_contents[:]
    request.inputs[0].contents.uint_contents.extend(IMAGES.ravel().tolist())
    answer = stack.client.inference.ModelInfer(request, timeout=60)
    assert not answer.raw_output_contents
    logits = np.array(answer.outputs[0].contents.fp32_contents, "<f4").reshape(5, 10)
    np.testing.assert_allclose(logits, eager_logits(stack, IMAGES), atol=1e-5, rtol=0)
    assert list(answer.outputs[2].contents.int64_contents) == logits.argmax(axis=1).tolist()


def both_contents() -> oip.ModelInferRequest:
    request = infer_request("digits", IMAGES)
    request.inputs[0].contents.uint_contents.extend([1, 2, 3])
    return request


def changed(**fields: Any) -> oip.ModelInferRequest:
    """The request with one field of its tensor replaced."""
    request = infer_request("digits", IMAGES)
    tensor = oip.ModelInferRequest.InferInputTensor(name="image", datatype="UINT8", shape=IMAGES.shape)
    if "shape" in fields:
        del tensor.shape[:]
    tensor.MergeFrom(oip.ModelInferRequest.InferInputTensor(**fields))
    request.inputs[0].CopyFrom(tensor)
    return request


def doubled(raw: int) -> oip.ModelInferRequest:
    request = infer_request("digits", IMAGES)
    request.inputs.append(request.inputs[0])
    del request.raw_input_contents[:]
    request.raw_input_contents.extend([IMAGES.tobytes()] * raw)
    return request


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (changed(shape=[4, 28, 28]), "inputs[0].raw_input_contents"),
        (changed(shape=[-5, 28, 28]), "inputs[0].shape"),
        (changed(shape=[2**40, 2**40, 28]), "inputs[0].shape"),
        (changed(shape=[5, 28]), "inputs[0].shape"),
        (changed(shape=[5, 784]), "inputs[0].shape"),
        (changed(datatype="UINT7"), "inputs[0].datatype"),
        (changed(datatype="INT8"), "inputs[0].datatype"),
        (changed(datatype="FP32"), "inputs[0].shape"),
        (changed(name="picture"), "inputs[0].name"),
        (both_contents(), "inputs[0].contents"),
        (doubled(raw=2), "inputs[1].name"),
        (doubled(raw=1), "raw_input_contents"),
        (oip.ModelInferRequest(model_name="digits"), "inputs"),
        (oip.ModelInferRequest(), "model_name"),
        (infer_request("digits", IMAGES[:0]), "inputs[0].shape"),
        (infer_request("digits", IMAGES, outputs=[{"name": "score"}]), "outputs[0].name"),
    ],
)
@pytest.mark.usefixtures("deployed")
def test_a_bad_request_is_refused_naming_what_is_wrong(
    stack: Stack, request_: oip.ModelInferRequest, field: str
) -> None:
    refusal = refused(lambda: stack.client.inference.ModelInfer(request_, timeout=60))
    assert refusal.code is grpc.StatusCode.INVALID_ARGUMENT
    assert list(refusal.fields) == [field]


def test_bytes_that_are_no_message_are_refused(stack: Stack) -> None:
    call: Callable[..., object] = stack.client.channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
    assert refused(lambda: call(b"\xff\xff\xff", timeout=60)).code is grpc.StatusCode.INVALID_ARGUMENT


def test_more_rows_than_may_wait_are_refused_and_those_that_may_are_served(stack: Stack) -> None:
    others = set(stack.head.processes(REPLICA))
    stack.client.deploy("narrow", "trainingJobs/digits", max_queued_rows=4, max_batch_size=1)
    try:
        with paused(set(stack.head.processes(REPLICA)) - others):
            calls: list[Any] = [
                stack.client.inference.ModelInfer.future(infer_request("narrow", IMAGES[:4]), timeout=240)
                for _ in range(10)
            ]
            full = eventually(lambda: next((call for call in calls if call.done()), None), 240, "a call to be refused")
        assert {call.code() for call in calls} == {grpc.StatusCode.OK, grpc.StatusCode.RESOURCE_EXHAUSTED}
        assert refused(full.result).reason == "QUEUE_FULL"
        status = rpc_status.from_call(full)
        assert status is not None
        assert any(detail.Is(error_details_pb2.RetryInfo.DESCRIPTOR) for detail in status.details)
    finally:
        stack.client.delete("deployments/narrow")
