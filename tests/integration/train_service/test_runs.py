"""A run from its creation to its end, as its creator sees it."""

from __future__ import annotations

import hashlib
import itertools
import json

import numpy as np
import pytest
import safetensors.torch
import torch

from millrace.train.v1 import train_service_pb2 as pb
from shared.checkpoint import load_checkpoint, resolve
from shared.models import build_model
from tests.integration.train_service.conftest import EPOCHS, STEPS_PER_EPOCH, Finished
from tests.support.training import VALIDATION_ROWS, State, TrainStack, commit_digits, digits_spec
from tests.support.versions import striped_digits


@pytest.mark.timeout(600)
def test_a_run_succeeds_in_one_attempt_and_learns(finished: Finished) -> None:
    job, watch = finished.job, finished.watch

    assert job.state == State.STATE_SUCCEEDED, job
    # While workers of another test have not ended yet, further updates name what the job waits for.
    states = [state for state, _ in itertools.groupby((one.state, one.attempt) for one in watch.jobs)]
    assert states in (
        [(State.STATE_PENDING, 0), (State.STATE_RUNNING, 1), (State.STATE_SUCCEEDED, 1)],
        [(State.STATE_RUNNING, 1), (State.STATE_SUCCEEDED, 1)],  # begun before the watcher's first look
    )
    assert [(one.step, one.epoch, one.row_count) for one in watch.of("validated")] == [
        (STEPS_PER_EPOCH * (epoch + 1), epoch, VALIDATION_ROWS) for epoch in range(EPOCHS)
    ]
    assert watch.of("validated")[-1].accuracy > 0.8
    assert not watch.of("warning")


def test_progress_grows_to_the_last_step(finished: Finished) -> None:
    progress = finished.watch.of("progress")

    steps = [one.step for one in progress]
    assert steps == sorted(set(steps))
    assert steps[-1] == EPOCHS * STEPS_PER_EPOCH
    assert {one.total_steps for one in progress} == {EPOCHS * STEPS_PER_EPOCH}
    assert progress[-1].epoch == EPOCHS - 1
    assert progress[-1].seconds_left == 0
    assert all(0 <= one.accuracy <= 1 and one.rows_per_second > 0 and one.loss >= 0 for one in progress)
    assert finished.job.progress == progress[-1]


def test_events_are_numbered_from_one_without_gaps(finished: Finished) -> None:
    events = finished.watch.events

    assert [event.sequence for event in events] == list(range(1, len(events) + 1))
    assert events[0].attempt_started == pb.AttemptStarted(num_workers=2, step=0, checkpoint="")
    assert {event.attempt for event in events} == {1}


def test_a_watcher_that_was_cut_off_goes_on_without_gap_or_repeat(finished: Finished) -> None:
    events = finished.watch.events

    for seen in (1, len(events) // 2, len(events) - 1, len(events)):
        again = finished.stack.client.watch(finished.job.name, after_sequence=seen, timeout_s=120)
        again.rest()
        assert again.events == events[seen:]
        assert again.jobs == [finished.job]


def test_checkpoints_are_listed_oldest_first_with_the_digests_of_the_bytes_stored(finished: Finished) -> None:
    listed = finished.stack.client.checkpoints(finished.job.name)

    assert [one.step for one in listed] == [15, 20, 30, 40, 45, 60, 75, 80]
    assert [one.epoch for one in listed] == [0, 1, 1, 2, 2, 3, 3, 4]
    assert listed == finished.watch.of("checkpoint_committed")
    assert finished.job.latest_checkpoint == listed[-1].name
    for one in listed:
        entry = resolve(finished.stack.store, "name", one.name)
        encoded = finished.stack.store.get(f"{entry.folder}/manifest.json")
        assert hashlib.sha256(encoded).hexdigest() == one.manifest_sha256
        manifest = json.loads(encoded)
        size_bytes = len(encoded)
        for file in manifest["files"]:
            data = finished.stack.store.get(f"{entry.folder}/{file['path']}")
            assert (len(data), hashlib.sha256(data).hexdigest()) == (file["size_bytes"], file["sha256"])
            size_bytes += len(data)
        assert size_bytes == one.size_bytes
        assert (manifest["step"], manifest["epoch"], manifest["seed"]) == (one.step, one.epoch, 7)
        assert manifest["training_job"] == finished.job.name
        assert manifest["dataset_version"] == finished.job.spec.dataset_version


def test_the_best_checkpoint_is_the_one_that_measured_best(finished: Finished) -> None:
    listed = finished.stack.client.checkpoints(finished.job.name)
    measured = {one.step: one.metrics["validation_accuracy"] for one in listed if one.metrics}

    assert measured == {one.step: one.accuracy for one in finished.watch.of("validated")}
    best = max(measured, key=lambda step: (measured[step], step))
    assert finished.job.best_checkpoint.endswith(f"step-{best:08d}")


def test_a_checkpoints_metrics_are_those_of_the_weights_in_it(finished: Finished) -> None:
    """Not of another rank's BatchNorm statistics, which differ from those that are saved."""
    torch.set_num_threads(1)
    images, labels = striped_digits(VALIDATION_ROWS, 1)
    for listed in finished.stack.client.checkpoints(finished.job.name):
        if not listed.metrics:
            continue
        entry = resolve(finished.stack.store, "name", listed.name)
        checkpoint = load_checkpoint(finished.stack.store, entry.folder, entry.manifest_sha256)
        model = build_model(checkpoint.content.model)
        model.load_state_dict(safetensors.torch.load(checkpoint.read("model.safetensors")))
        model.eval()
        with torch.no_grad():
            logits = model(torch.from_numpy(checkpoint.content.serving()({"image": images})["image"]))
        truth = torch.from_numpy(labels.astype(np.int64))
        loss = torch.nn.functional.cross_entropy(logits, truth).item()
        accuracy = (logits.argmax(1) == truth).double().mean().item()

        assert listed.metrics["validation_loss"] == pytest.approx(loss, rel=1e-4)
        assert listed.metrics["validation_accuracy"] == pytest.approx(accuracy, abs=1.5 / VALIDATION_ROWS)


def test_checkpoints_and_jobs_come_in_pages(finished: Finished) -> None:
    rpc, token = finished.stack.client.rpc, ""
    pages: list[list[str]] = []
    while True:
        request = pb.ListCheckpointsRequest(parent=finished.job.name, page_size=3, page_token=token)
        page = rpc.ListCheckpoints(request, timeout=60)
        pages.append([one.name for one in page.checkpoints])
        token = page.next_page_token
        if not token:
            break

    assert [len(page) for page in pages] == [3, 3, 2]
    assert list(itertools.chain(*pages)) == [one.name for one in finished.stack.client.checkpoints(finished.job.name)]
    jobs = rpc.ListTrainingJobs(pb.ListTrainingJobsRequest(page_size=1000), timeout=60).training_jobs
    assert finished.job in jobs
    assert [job.name for job in jobs] == sorted(job.name for job in jobs)


def test_a_finished_job_is_no_longer_live_and_cancelling_it_changes_nothing(finished: Finished) -> None:
    assert finished.stack.client.cancel(finished.job.name) == finished.job
    assert finished.stack.client.get(finished.job.name) == finished.job


@pytest.mark.timeout(600)
def test_a_label_that_the_model_has_no_class_for_fails_the_job_at_once_by_its_name(file_stack: TrainStack) -> None:
    commit_digits(file_stack.store, "datasets/digits/versions/labels", first_label=7)
    spec = digits_spec(dataset_version="datasets/digits/versions/labels", epochs=1, num_workers=1)

    job = file_stack.client.finished(file_stack.client.create(spec).name)

    assert job.state == State.STATE_FAILED
    assert job.attempt == 1
    assert "label" in job.error.message
    assert "num_classes is 10" in job.error.message
