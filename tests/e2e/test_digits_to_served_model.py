"""All three services and Ray, started by `millrace up`: what the tutorial made, up to a served model."""

from __future__ import annotations

import json
import math
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from millrace.data.v1.resources_pb2 import DatasetVersion
from millrace.inference.v1.deployment_service_pb2 import Deployment
from millrace.train.v1 import resources_pb2, train_service_pb2
from millrace_client import Millrace, connect
from millrace_client.data import image_rows
from millrace_client.stack.record import read_record
from tests.support.command import run_millrace
from tests.support.patterns import TEST_ROWS, TRAIN_ROWS, patterns

# Under a minute on an idle machine of two cores; the limit is for a busy one.
pytestmark = pytest.mark.timeout(1800)

HELD_OUT = TRAIN_ROWS // 7
STEPS = math.ceil((TRAIN_ROWS - HELD_OUT) / 64)


@dataclass(frozen=True)
class Run:
    """What the tutorial, one pass through all services, made."""

    millrace: Millrace
    version: DatasetVersion
    job: resources_pb2.TrainingJob
    events: list[train_service_pb2.TrainingEvent]
    deployment: Deployment
    test_images: npt.NDArray[np.uint8]
    test_labels: npt.NDArray[np.uint8]


@pytest.fixture(scope="module")
def run(home: Path, tour: subprocess.CompletedProcess[str]) -> Iterator[Run]:
    assert tour.returncode == 0, tour.stderr
    record = read_record(home)
    assert record is not None
    addresses = record.addresses
    with connect(data=addresses["data"], train=addresses["train"], inference=addresses["inference"]) as millrace:
        updates = list(millrace.train.watch_training_job("trainingJobs/tour"))
        job = millrace.train.get_training_job("trainingJobs/tour")
        assert job.state == resources_pb2.TrainingJob.STATE_SUCCEEDED, job.error
        test_images, test_labels = patterns(TEST_ROWS, seed=TEST_ROWS)
        yield Run(
            millrace=millrace,
            version=millrace.data.get_version("datasets/tour/versions/v1"),
            job=job,
            events=[one for one in updates if isinstance(one, train_service_pb2.TrainingEvent)],
            deployment=millrace.deployments.get_deployment("deployments/tour"),
            test_images=test_images,
            test_labels=test_labels,
        )


def test_the_version_holds_the_rows_that_the_files_held(run: Run) -> None:
    assert {split.name: split.row_count for split in run.version.splits} == {
        "train": TRAIN_ROWS - HELD_OUT,
        "validation": HELD_OUT,
        "test": TEST_ROWS,
    }
    images, labels = image_rows(run.millrace.data.read_table(run.version.name, split="test"))
    assert labels is not None
    np.testing.assert_array_equal(images, run.test_images)
    np.testing.assert_array_equal(labels, run.test_labels)


def test_the_events_are_numbered_without_gaps_and_report_the_run(run: Run) -> None:
    assert [event.sequence for event in run.events] == list(range(1, len(run.events) + 1))
    kinds = {event.WhichOneof("event") for event in run.events}
    assert {"attempt_started", "progress", "validated", "checkpoint_committed"} <= kinds
    assert run.job.progress.step == run.job.progress.total_steps == STEPS


def test_raw_images_are_classified_far_better_than_by_chance(run: Run) -> None:
    answers = list(run.millrace.inference.infer_many("tour", ({"image": image[None]} for image in run.test_images)))
    labels = np.array([answer.outputs["label"][0] for answer in answers])
    assert (labels == run.test_labels).mean() > 0.5
    probabilities = np.concatenate([answer.outputs["probabilities"] for answer in answers])
    np.testing.assert_allclose(probabilities.sum(axis=1), 1.0, atol=1e-4)
    np.testing.assert_array_equal(probabilities.argmax(axis=1), labels)


def test_predictions_over_a_split_are_what_the_deployment_answers_for_its_rows(run: Run, home: Path) -> None:
    run.millrace.data.create_dataset("scores")
    made = run_millrace(
        home,
        *("data", "predict", run.version.name, "--deployment", "tour", "--split", "test"),
        *("--to", "scores", "--column", "label", "--batch-size", "50", "--workers", "1", "--json"),
    )
    assert made.returncode == 0, made.stderr
    version = json.loads(made.stdout)
    assert version["prediction"]["checkpoint"] == run.job.best_checkpoint
    assert version["prediction"]["checkpoint_sha256"] == run.deployment.lineage.checkpoint_sha256
    assert [parent["version"] for parent in version["parents"]] == [run.version.name]
    table = run.millrace.data.read_table(version["name"])
    answer = run.millrace.inference.infer("tour", {"image": run.test_images})
    np.testing.assert_array_equal(table["label"].to_numpy(), run.test_labels)
    np.testing.assert_array_equal(table["prediction"].to_numpy(), answer.outputs["label"])
    probabilities = table["probabilities"].combine_chunks().to_numpy_ndarray()
    # The model's kernels differ in the last bits between batch sizes.
    np.testing.assert_allclose(probabilities, answer.outputs["probabilities"], atol=1e-5)
    np.testing.assert_allclose(table["score"].to_numpy(), answer.outputs["probabilities"].max(axis=1), atol=1e-5)


def test_every_answer_carries_the_lineage_that_the_services_report(run: Run) -> None:
    checkpoints = {one.name: one for one in run.millrace.train.list_checkpoints(run.job.name)}
    answer = run.millrace.inference.infer("tour", {"image": run.test_images[:3]})
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
    predicted = run_millrace(home, "predict", "tour", "--dataset", run.version.name, "--limit", "5", "--json")
    document = json.loads(predicted.stdout)
    assert [one["truth"] for one in document["predictions"]] == run.test_labels[:5].tolist()
    assert document["lineage"]["checkpoint"] == run.job.best_checkpoint
    again = run_millrace(home, "up", "--json")
    assert json.loads(again.stdout)["already_running"] is True
