"""Triton's extensions, as its own client speaks them: blocking, asyncio and streaming."""

from __future__ import annotations

import urllib.request
from typing import Any

import numpy as np
import pytest

from millrace.inference.v1 import deployment_service_pb2 as pb
from tests.integration.inference_service.checkpoints import CLASS_NAMES
from tests.integration.inference_service.client import outputs
from tests.integration.inference_service.conftest import Stack
from tests.integration.inference_service.tritonclient_scripts import run_triton_script

IMAGES = np.random.default_rng(3).integers(0, 256, (6, 28, 28), dtype=np.uint8)


@pytest.fixture(scope="module")
def triton(stack: Stack, deployed: pb.Deployment, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the real tritonclient saw."""
    path = tmp_path_factory.mktemp("triton") / "images.npy"
    np.save(path, IMAGES)
    seen: dict[str, Any] = run_triton_script(
        "triton_extensions.py", stack.service.address, deployed.name.partition("/")[2], str(path)
    )
    return seen


@pytest.fixture(scope="module")
def expected(stack: Stack, deployed: pb.Deployment) -> dict[str, Any]:
    """The labels and probabilities of a plain ModelInfer."""
    answer = outputs(stack.client.infer(deployed.name.partition("/")[2], IMAGES))
    return {"labels": answer["label"].tolist(), "probabilities": answer["probabilities"]}


def test_a_stream_answers_in_order_and_outlives_a_request_that_fails(
    triton: dict[str, Any], expected: dict[str, Any]
) -> None:
    answers: list[Any] = [[f"r{number}", label, True] for number, label in enumerate(expected["labels"])]
    assert triton["streamed"] == [*answers[:2], "NOT_FOUND: model 'nobody' does not exist", *answers[2:]]


def test_the_asyncio_client_infers_and_streams(triton: dict[str, Any], expected: dict[str, Any]) -> None:
    seen = triton["asyncio"]
    assert seen["labels"] == expected["labels"]
    assert [label for _, label, _ in seen["streamed"]] == expected["labels"]
    assert seen["ready"]
    assert "statistics" in seen["metadata"]["extensions"]


def test_a_classification_has_the_most_probable_classes_first(triton: dict[str, Any], expected: dict[str, Any]) -> None:
    for row, probabilities in zip(triton["classes"], expected["probabilities"], strict=True):
        values, indices, names = zip(*(item.split(":") for item in row), strict=True)
        best = np.argsort(-probabilities)[:3]
        assert [int(index) for index in indices] == best.tolist()
        assert list(names) == [CLASS_NAMES[index] for index in best]
        np.testing.assert_allclose([float(value) for value in values], probabilities[best], atol=1e-5)


def test_the_names_of_the_labels_come_where_they_are_asked_for(
    triton: dict[str, Any], expected: dict[str, Any]
) -> None:
    seen = triton["names"]
    assert seen["labels"] == expected["labels"]
    assert seen["names"] == [CLASS_NAMES[label] for label in expected["labels"]]
    assert not seen["unasked"]
    assert seen["offered"] == [{"name": "label_name", "datatype": "BYTES", "shape": ["-1"]}]


def test_compression_priority_and_a_timeout_that_suffices_change_no_answer(
    triton: dict[str, Any], expected: dict[str, Any]
) -> None:
    assert triton["compressed"] == triton["urgent"] == expected["labels"]


def test_the_configuration_and_the_index_name_the_model(triton: dict[str, Any]) -> None:
    config = triton["config"]
    assert (config["name"], config["max_batch_size"]) == ("digits", 16)
    assert config["input"] == [{"name": "image", "data_type": "TYPE_UINT8", "dims": ["28", "28"]}]
    assert config["dynamic_batching"]["priority_levels"] == "10"
    assert config["version_policy"] == {"latest": {"num_versions": 1}}
    assert {"name": "digits", "version": "1", "state": "READY"} in triton["index"]
    assert triton["loaded"] == ["OK", ""]
    assert triton["ready"]


@pytest.mark.parametrize(
    ("case", "code"),
    [
        ("timeout", "DEADLINE_EXCEEDED"),
        ("load unknown", "NOT_FOUND"),
        ("load configured", "INVALID_ARGUMENT"),
        ("unload unknown", "NOT_FOUND"),
        ("system shared memory", "UNIMPLEMENTED"),
        ("cuda shared memory", "UNIMPLEMENTED"),
        ("trace", "UNIMPLEMENTED"),
        ("log", "UNIMPLEMENTED"),
    ],
)
def test_a_refused_triton_call_has_the_documented_status(triton: dict[str, Any], case: str, code: str) -> None:
    assert triton["errors"][case][0] == f"StatusCode.{code}", triton["errors"][case]


def test_a_model_is_unloaded_and_loaded_again(triton: dict[str, Any], expected: dict[str, Any]) -> None:
    seen = triton["unloaded"]
    assert not seen["ready"]
    assert seen["server ready"]
    assert seen["infer"][0] == "StatusCode.FAILED_PRECONDITION"
    assert {"name": "digits", "version": "1", "state": "UNAVAILABLE", "reason": "unloaded"} in seen["index"]
    assert seen["ready again"]
    assert seen["labels"] == expected["labels"]


def test_the_statistics_are_measured_in_the_replica_and_prometheus_reads_them(
    stack: Stack, triton: dict[str, Any]
) -> None:
    (found,) = triton["statistics"]
    seen = {
        name: {"count": int(one["count"]), "ns": int(one["ns"])}
        for name, one in found["inference_stats"].items()
        if one
    }
    # Four whole requests, and two streams of an image a request.
    assert seen["success"]["count"] >= 4 + 2 * len(IMAGES)
    assert seen["fail"]["count"] >= 1
    parts = [seen[name]["ns"] for name in ("queue", "compute_input", "compute_infer", "compute_output")]
    assert all(parts)
    assert sum(parts) <= seen["success"]["ns"]
    assert sum(int(one["batch_size"]) * int(one["compute_infer"]["count"]) for one in found["batch_stats"]) == int(
        found["inference_count"]
    )
    with urllib.request.urlopen(f"http://{stack.metrics}/metrics", timeout=60) as answer:
        metrics = answer.read().decode().splitlines()
    (line,) = [
        one for one in metrics if one.startswith('millrace_inference_compute_infer_seconds_count{model="digits"')
    ]
    assert float(line.split()[-1]) >= seen["compute_infer"]["count"]
