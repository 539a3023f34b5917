"""Programs on real workers are suspended, cancelled and resumed, and an elastic one goes on with more of them."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

import millrace_client as mc
from millrace.train.v1 import code_bundle_pb2
from millrace.train.v1 import train_service_pb2 as pb
from tests.support.code_folders import write_files
from tests.support.training import VERSION, State, TrainStack

pytestmark = pytest.mark.timeout(900)

# `pace` goes on without a pause once the file `fast` is there, so that a test need not wait for the end.
CODE = """
import os
import tempfile
import time
from pathlib import Path

import ray.train
from ray.train import Checkpoint


def report(config, epoch):
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = None
        if ray.train.get_context().get_world_rank() == 0:
            Path(folder, "epoch").write_text(str(epoch))
            checkpoint = Checkpoint.from_directory(folder)
        ray.train.report({"epoch": epoch}, checkpoint=checkpoint)
    if not os.path.exists(config["fast"]):
        time.sleep(0.3)


def begin():
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is None:
        return 0
    with checkpoint.as_directory() as folder:
        return int(Path(folder, "epoch").read_text()) + 1


def careless(config):
    for epoch in range(begin(), config["epochs"]):
        try:
            report(config, epoch)
        except:
            print("caught a stop")
            return


def endless(config):
    epoch = begin()
    while True:
        report(config, epoch)
        epoch += 1


def faulty(config):
    return config["not there"]


def on_a_shard(config):
    batches = ray.train.get_dataset_shard("train").iter_batches(batch_size=config["rows"])
    while (epoch := batches.state_dict()["epoch"]) < config["epochs"]:
        for batch in batches:
            report(config, epoch)
"""


@pytest.fixture(scope="module")
def millrace(file_stack: TrainStack) -> Iterator[mc.Millrace]:
    with mc.connect(train=file_stack.service.address) as connected:
        yield connected


@pytest.fixture(scope="module")
def bundle(millrace: mc.Millrace, tmp_path_factory: pytest.TempPathFactory) -> code_bundle_pb2.CodeBundle:
    return millrace.train.push_code(write_files(tmp_path_factory.mktemp("code"), {"train.py": CODE}))


def new_id() -> str:
    return f"j{uuid.uuid4().hex[:12]}"


@pytest.mark.long
def test_a_suspension_that_the_function_swallows_is_one_and_the_run_goes_on_behind_its_last_report(
    file_stack: TrainStack, millrace: mc.Millrace, bundle: code_bundle_pb2.CodeBundle, tmp_path: Path
) -> None:
    client, epochs = file_stack.client, 100
    config = {"epochs": epochs, "fast": str(tmp_path / "fast")}
    spec = mc.program_spec(bundle, "train:careless", config=config, num_workers=2)
    job = millrace.train.create_training_job(new_id(), spec)
    watch = client.watch(job.name, timeout_s=600)
    watch.until("checkpoint_committed")

    client.suspend(job.name)
    watch.until_state(State.STATE_SUSPENDED)
    kept = client.checkpoints(job.name)
    assert 0 < len(kept) < epochs
    (tmp_path / "fast").touch()
    client.resume(job.name)
    watch.rest()

    assert watch.jobs[-1].state == State.STATE_SUCCEEDED
    assert (watch.jobs[-1].attempt, watch.jobs[-1].failures) == (2, 0), watch.ends()
    (ended,) = watch.of("attempt_ended")
    assert ended.cause == pb.AttemptEnded.CAUSE_SUSPENDED
    first, second = watch.of("attempt_started")
    assert (first.step, second.step, second.checkpoint) == (0, kept[-1].step, kept[-1].name)
    assert [one.step for one in watch.of("checkpoint_committed")] == list(range(1, epochs + 1))
    assert "caught a stop" in file_stack.store.get(f"{job.name}/logs/a00001/r0000/00000000.txt").decode()


@pytest.mark.long
def test_an_elastic_program_takes_the_workers_that_there_are_and_reads_each_row_once(
    file_stack: TrainStack, millrace: mc.Millrace, bundle: code_bundle_pb2.CodeBundle, tmp_path: Path
) -> None:
    """Another program holds three of the four CPUs until it is cancelled."""
    client = file_stack.client
    config = {"epochs": 2, "rows": 24, "fast": str(tmp_path / "fast")}
    other = millrace.train.create_training_job(
        new_id(), mc.program_spec(bundle, "train:endless", config=config, num_workers=3)
    )
    other_watch = client.watch(other.name, timeout_s=600)
    other_watch.until("checkpoint_committed")
    spec = mc.program_spec(
        bundle,
        "train:on_a_shard",
        config=config,
        dataset_version=VERSION,
        data_resume="CONTINUE",
        num_workers=2,
        min_workers=1,
    )
    job = millrace.train.create_training_job(new_id(), spec)
    watch = client.watch(job.name, timeout_s=600)
    watch.until("checkpoint_committed")
    client.suspend(job.name)
    watch.until_state(State.STATE_SUSPENDED)

    client.cancel(other.name)
    other_watch.rest()
    assert other_watch.jobs[-1].state == State.STATE_CANCELLED
    steps = [one.step for one in client.checkpoints(other.name)]
    assert steps == list(range(1, len(steps) + 1))

    (tmp_path / "fast").touch()
    client.resume(job.name)
    watch.rest()
    assert watch.jobs[-1].state == State.STATE_SUCCEEDED
    assert [one.num_workers for one in watch.of("attempt_started")] == [1, 2]
    for epoch in range(2):
        found = millrace.train.get_coverage(job.name, epoch)
        assert (found.repeated, found.epoch_done) == (0, True)
        assert found.missing <= 1  # which two workers cannot share
        assert found.seen_once + found.missing == found.row_count


@pytest.mark.long
def test_an_error_in_the_code_that_a_second_attempt_repeats_is_the_last(
    file_stack: TrainStack, millrace: mc.Millrace, bundle: code_bundle_pb2.CodeBundle
) -> None:
    spec = mc.program_spec(bundle, "train:faulty", num_workers=1, max_failures=5)
    job = millrace.train.create_training_job(new_id(), spec)
    watch = file_stack.client.watch(job.name, timeout_s=600)
    watch.rest()

    assert (watch.jobs[-1].state, watch.jobs[-1].attempt) == (State.STATE_FAILED, 2)
    first, second = watch.of("attempt_ended")
    line = CODE.splitlines().index('    return config["not there"]') + 1
    assert f"KeyError on rank 0 at train.py:{line} after report 0" in first.text
    assert "the attempt before ended with the same error at the same line" in second.text
