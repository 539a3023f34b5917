"""PredictVersion as a client sees it: what it is answered, what it is told meanwhile, and what it is refused."""

from __future__ import annotations

from typing import Any

import grpc
import numpy as np
import pytest

from millrace.data.v1 import data_service_pb2 as pb
from shared.dataset_version import load_version
from shared.model_spec import ModelSpec
from tests.integration.data_service.client import DataClient, imported
from tests.integration.data_service.conftest import TEST_ROWS, DataStack, Digits
from tests.support.predicting import write
from tests.support.refusals import refused
from tests.support.stores import FILES_IN_CHAOS, S3_IN_CHAOS
from tests.support.versions import SCHEMA

CHECKPOINT = "trainingJobs/flat/checkpoints/c1"
# What is refused is refused by what the request and the checkpoint say, whatever the store.
ON_S3_IN_CHAOS = pytest.mark.parametrize("stack", S3_IN_CHAOS, indirect=True)
STEPS = [{"concat": {"columns": ["image"], "into": "features"}}]
MODEL = ModelSpec(builder="mlp", in_channels=28 * 28, num_classes=10)


@pytest.fixture(scope="module")
def sha256(stack: DataStack) -> str:
    """The digest of a checkpoint for digits."""
    entry = write(
        stack.store,
        name=CHECKPOINT,
        ingested=SCHEMA,
        transforms=[{"steps": STEPS}],
        model=MODEL,
        class_names="abcdefghij",
    )
    return entry.manifest_sha256


def asking(digits: Digits, dataset: str, **fields: Any) -> pb.PredictVersionRequest:
    wanted: dict[str, Any] = {"parent": dataset, "source": digits.version.name, "checkpoint": CHECKPOINT, **fields}
    return pb.PredictVersionRequest(**wanted)


# On files: test_predicting.py.
@pytest.mark.parametrize("stack", FILES_IN_CHAOS, indirect=True)
def test_a_split_goes_along_with_predictions_and_the_version_names_their_checkpoint(
    client: DataClient, dataset: str, digits_version: Digits, sha256: str
) -> None:
    request = asking(digits_version, dataset, split="test", columns=["label"], checkpoint_sha256=sha256)
    started = client.data.PredictVersion(request, timeout=60)
    metadata = pb.PredictVersionMetadata()
    assert started.metadata.Unpack(metadata)
    assert (metadata.version, metadata.checkpoint) == (f"{dataset}/versions/v1", CHECKPOINT)

    done = client.wait(started)
    version = imported(done)

    assert done.metadata.Unpack(metadata)
    assert (metadata.phase, metadata.rows_done, metadata.rows_total) == (
        pb.PredictVersionMetadata.PHASE_PREDICTING,
        TEST_ROWS,
        TEST_ROWS,
    )
    assert [(one.name, one.row_count) for one in version.splits] == [("test", TEST_ROWS)]
    assert [one.version for one in version.parents] == [digits_version.version.name]
    added = ["prediction", "prediction_label", "score", "probabilities"]
    assert (version.prediction.checkpoint, version.prediction.checkpoint_sha256) == (CHECKPOINT, sha256)
    assert list(version.prediction.columns) == added
    assert [column.name for column in version.columns] == ["label", *added]
    table = client.read(version.name)
    given = client.read(digits_version.version.name, split="test", columns=["label"])
    assert table["label"].to_pylist() == given["label"].to_pylist()
    probabilities = table["probabilities"].combine_chunks().to_numpy_ndarray()
    np.testing.assert_allclose(probabilities.sum(axis=1), 1.0, atol=1e-5)
    assert table["prediction"].to_pylist() == probabilities.argmax(axis=1).tolist()
    assert table["prediction_label"].to_pylist() == ["abcdefghij"[one] for one in table["prediction"].to_pylist()]
    assert table["score"].to_pylist() == probabilities.max(axis=1).tolist()


@ON_S3_IN_CHAOS
@pytest.mark.parametrize(
    ("fields", "code", "expected"),
    [
        ({"checkpoint": "trainingJobs/none"}, grpc.StatusCode.NOT_FOUND, "trainingJobs/none does not exist"),
        ({"source": "datasets/d/versions/none"}, grpc.StatusCode.NOT_FOUND, "does not exist"),
        ({"checkpoint_sha256": "0" * 64}, grpc.StatusCode.FAILED_PRECONDITION, "checkpoint_sha256"),
        ({"checkpoint": ""}, grpc.StatusCode.INVALID_ARGUMENT, "checkpoint"),
        ({"column_prefix": "x" * 64}, grpc.StatusCode.INVALID_ARGUMENT, "column_prefix"),
        ({"split": "none"}, grpc.StatusCode.INVALID_ARGUMENT, "split"),
        ({"workers": pb.PredictionWorkers(cpus=-1)}, grpc.StatusCode.INVALID_ARGUMENT, "workers.cpus"),
    ],
)
@pytest.mark.usefixtures("sha256")
def test_an_impossible_prediction_is_refused_with_its_field_and_leaves_nothing(
    stack: DataStack,
    dataset: str,
    digits_version: Digits,
    fields: dict[str, object],
    code: grpc.StatusCode,
    expected: str,
) -> None:
    before = stack.stored_keys()
    request = asking(digits_version, dataset, **fields)
    refusal = refused(lambda: stack.client.data.PredictVersion(request, timeout=60))
    assert refusal.code is code, refusal
    assert expected in refusal.message
    assert stack.made_since(before) == []


@ON_S3_IN_CHAOS
def test_a_model_that_does_not_load_fails_the_operation_and_leaves_no_file(
    stack: DataStack, dataset: str, digits_version: Digits
) -> None:
    name = "trainingJobs/broken/checkpoints/c1"
    write(
        stack.store,
        name=name,
        ingested=SCHEMA,
        transforms=[{"steps": STEPS}],
        model=MODEL,
        class_names=(),
        weights=b"no weights",
    )
    done = stack.client.wait(
        stack.client.data.PredictVersion(asking(digits_version, dataset, checkpoint=name), timeout=60)
    )
    assert done.error.code == grpc.StatusCode.FAILED_PRECONDITION.value[0]
    assert "does not load" in done.error.message
    metadata = pb.PredictVersionMetadata()
    assert done.metadata.Unpack(metadata)
    assert list(stack.store.list(f"{metadata.version}/data")) == []


@ON_S3_IN_CHAOS
def test_the_source_cannot_be_deleted_while_it_is_predicted_on(
    stack: DataStack, dataset: str, digits_version: Digits, sha256: str
) -> None:
    assert sha256
    # Nobody has room for such a worker, so it waits.
    request = asking(digits_version, dataset, workers=pb.PredictionWorkers(cpus=512))
    started = stack.client.data.PredictVersion(request, timeout=60)
    refusal = refused(
        lambda: stack.client.data.DeleteVersion(pb.DeleteVersionRequest(name=digits_version.version.name), timeout=60)
    )
    assert (refusal.code, "is in use by" in refusal.message) == (grpc.StatusCode.FAILED_PRECONDITION, True)
    stack.client.cancel(started)
    assert stack.client.wait(started).error.code == grpc.StatusCode.CANCELLED.value[0]
    assert load_version(stack.store, digits_version.version.name)
