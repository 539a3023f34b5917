"""All three services and Ray, started by `millrace up`: from IDX files to a served model, through the SDK."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from millrace.data.v1.resources_pb2 import DatasetVersion
from millrace.inference.v1.deployment_service_pb2 import Deployment
from millrace.train.v1 import resources_pb2, train_service_pb2
from millrace_client import Millrace, connect, hold_out, idx_source, normalize, optimizer, to_float, training_spec
from millrace_client.images import image_rows
from millrace_client.stack.record import read_record
from tests.support.command import run_millrace
from tests.support.idx import write_idx
from tests.support.patterns import patterns

# Under a minute on an idle machine of two cores; the limit is for a busy one.
pytestmark = pytest.mark.timeout(900)

TRAIN_ROWS, TEST_ROWS = 1280, 200


@dataclass(frozen=True)
class Run:
    """What one pass through all services made."""

    millrace: Millrace
    version: DatasetVersion
    job: resources_pb2.TrainingJob
    events: list[train_service_pb2.TrainingEvent]
    deployment: Deployment
    test_images: npt.NDArray[np.uint8]
    test_labels: npt.NDArray[np.uint8]


@pytest.fixture(scope="module")
def run(home: Path) -> Iterator[Run]:
    record = read_record(home)
    assert record is not None
    addresses = record.addresses
    with connect(data=addresses["data"], train=addresses["train"], inference=addresses["inference"]) as millrace:
        yield from_digits_to_model(millrace, home / "import")


def from_digits_to_model(millrace: Millrace, folder: Path) -> Run:
    train_images, train_labels = patterns(TRAIN_ROWS, seed=1)
    test_images, test_labels = patterns(TEST_ROWS, seed=2)
    uris = {
        name: write_idx(folder / name, values)
        for name, values in (
            ("train-images.gz", train_images),
            ("train-labels.gz", train_labels),
            ("test-images", test_images),
            ("test-labels", test_labels),
        )
    }
    millrace.data.create_dataset("patterns")
    version = millrace.data.import_version(
        "datasets/patterns",
        [
            idx_source("train", uris["train-images.gz"], uris["train-labels.gz"]),
            idx_source("test", uris["test-images"], uris["test-labels"]),
        ],
        hold_outs=[hold_out("train", "validation", 0.2, seed=3)],
    ).wait(timeout_s=300)
    spec = training_spec(
        version.name,
        model="torchvision.resnet18",
        in_channels=1,
        num_classes=10,
        transform=[to_float(), normalize(0.2, 0.25)],
        optimizer=optimizer("AdamW", 0.002),
        epochs=1,
        global_batch_size=64,
        num_workers=2,
        seed=4,
    )
    created = millrace.train.create_training_job("patterns", spec)
    updates = list(millrace.train.watch_training_job(created.name))
    job = millrace.train.get_training_job(created.name)
    assert job.state == resources_pb2.TrainingJob.STATE_SUCCEEDED, job.error
    deployment = millrace.deployments.create_deployment("patterns", job.name).wait(timeout_s=300)
    return Run(
        millrace=millrace,
        version=version,
        job=job,
        events=[one for one in updates if isinstance(one, train_service_pb2.TrainingEvent)],
        deployment=deployment,
        test_images=test_images,
        test_labels=test_labels,
    )


def test_the_version_holds_the_rows_that_the_files_held(run: Run) -> None:
    assert {split.name: split.row_count for split in run.version.splits} == {
        "train": 1024,
        "validation": 256,
        "test": TEST_ROWS,
    }
    images, labels = image_rows(run.millrace.data.read_table(run.version.name, split="test"))
    assert labels is not None
    np.testing.assert_array_equal(images, run.test_images)
    np.testing.assert_array_equal(labels, run.test_labels)


def test_the_events_are_numbered_without_gaps_and_tell_of_the_run(run: Run) -> None:
    assert [event.sequence for event in run.events] == list(range(1, len(run.events) + 1))
    kinds = {event.WhichOneof("event") for event in run.events}
    assert {"attempt_started", "progress", "validated", "checkpoint_committed"} <= kinds
    assert run.job.progress.step == run.job.progress.total_steps == 16


def test_raw_images_are_classified_far_better_than_by_chance(run: Run) -> None:
    answers = list(run.millrace.inference.infer_many("patterns", ({"image": image[None]} for image in run.test_images)))
    labels = np.array([answer.outputs["label"][0] for answer in answers])
    assert (labels == run.test_labels).mean() > 0.5
    probabilities = np.concatenate([answer.outputs["probabilities"] for answer in answers])
    np.testing.assert_allclose(probabilities.sum(axis=1), 1.0, atol=1e-4)
    np.testing.assert_array_equal(probabilities.argmax(axis=1), labels)


def test_predictions_over_a_split_are_what_the_deployment_answers_for_its_rows(run: Run, home: Path) -> None:
    run.millrace.data.create_dataset("scores")
    made = run_millrace(
        home,
        *("data", "predict", run.version.name, "--deployment", "patterns", "--split", "test"),
        *("--to", "scores", "--column", "label", "--batch-size", "50", "--workers", "2", "--json"),
    )
    assert made.returncode == 0, made.stderr
    version = json.loads(made.stdout)
    assert version["prediction"]["checkpoint"] == run.job.best_checkpoint
    assert version["prediction"]["checkpoint_sha256"] == run.deployment.lineage.checkpoint_sha256
    assert [parent["version"] for parent in version["parents"]] == [run.version.name]
    table = run.millrace.data.read_table(version["name"])
    answer = run.millrace.inference.infer("patterns", {"image": run.test_images})
    np.testing.assert_array_equal(table["label"].to_numpy(), run.test_labels)
    np.testing.assert_array_equal(table["prediction"].to_numpy(), answer.outputs["label"])
    probabilities = table["probabilities"].combine_chunks().to_numpy_ndarray()
    # The model's kernels differ in the last bits between batch sizes.
    np.testing.assert_allclose(probabilities, answer.outputs["probabilities"], atol=1e-5)
    np.testing.assert_allclose(table["score"].to_numpy(), answer.outputs["probabilities"].max(axis=1), atol=1e-5)


def test_every_answer_carries_the_lineage_that_the_services_tell(run: Run) -> None:
    checkpoints = {one.name: one for one in run.millrace.train.list_checkpoints(run.job.name)}
    answer = run.millrace.inference.infer("patterns", {"image": run.test_images[:3]})
    lineage = answer.lineage
    assert lineage.dataset_version == run.version.name == run.job.spec.dataset_version
    assert lineage.training_job == run.job.name
    assert lineage.checkpoint == run.job.best_checkpoint
    assert lineage.checkpoint_sha256 == checkpoints[run.job.best_checkpoint].manifest_sha256
    assert lineage.deployment == run.deployment.name
    assert lineage.model_version == answer.version
    assert lineage == run.deployment.lineage


def test_the_command_sees_the_same_stack(run: Run, home: Path) -> None:
    status = run_millrace(home, "status", "--json")
    assert status.returncode == 0, status.stdout
    assert json.loads(status.stdout)["healthy"]
    predicted = run_millrace(home, "predict", "patterns", "--dataset", run.version.name, "--limit", "5", "--json")
    document = json.loads(predicted.stdout)
    assert [one["truth"] for one in document["predictions"]] == run.test_labels[:5].tolist()
    assert document["lineage"]["checkpoint"] == run.job.best_checkpoint
    again = run_millrace(home, "up", "--json")
    assert json.loads(again.stdout)["already_running"] is True
