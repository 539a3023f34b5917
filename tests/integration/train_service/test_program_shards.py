"""A training function reads `get_dataset_shard` on two real workers: every row of an epoch, before and after a kill."""

from __future__ import annotations

import os
import signal
import uuid
from pathlib import Path

import pytest

import millrace_client as mc
from millrace.train.v1 import train_service_pb2 as pb
from millrace_client.errors import OutOfRange
from tests.support.code_folders import write_files
from tests.support.training import VERSION, State, TrainStack

pytestmark = pytest.mark.timeout(400)

# The loop of Ray Train's tutorial, which saves and loads the position of its shard; rank 0 does so for all.
LOOP = """
import os
import tempfile
import time

import ray.train
import ray.train.torch
import torch


def train_loop_per_worker(config):
    rank = ray.train.get_context().get_world_rank()
    model = ray.train.torch.prepare_model(torch.nn.Linear(784, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first, state_dict = 0, None
    if checkpoint := ray.train.get_checkpoint():
        with checkpoint.as_directory() as folder:
            state = torch.load(os.path.join(folder, "state.pt"), weights_only=True)
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first, state_dict = state["epoch"], state["shard"]
    shard = ray.train.get_dataset_shard("train", state_dict=state_dict)
    batches = shard.iter_torch_batches(batch_size=16, dtypes={"image": torch.float32, "label": torch.int64})
    for epoch in range(first, config["epochs"]):
        for number, batch in enumerate(batches):
            loss = torch.nn.functional.cross_entropy(model(batch["image"].flatten(1) / 255), batch["label"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if number % 4 == 3:
                report(rank, model, optimizer, epoch, batches, loss)
                time.sleep(config["pause_s"])
        report(rank, model, optimizer, epoch + 1, batches, loss)


def report(rank, model, optimizer, epoch, batches, loss):
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = None
        if rank == 0:
            state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
            torch.save({**state, "shard": batches.state_dict()}, os.path.join(folder, "state.pt"))
            checkpoint = ray.train.Checkpoint.from_directory(folder)
        ray.train.report({"loss": loss.item(), "pid": os.getpid()}, checkpoint=checkpoint)
"""


def test_rows_are_given_exactly_once_an_epoch_over_the_kill_of_a_rank(stack: TrainStack, tmp_path: Path) -> None:
    with mc.connect(train=stack.service.address) as millrace:
        bundle = millrace.train.push_code(write_files(tmp_path / "code", {"train.py": LOOP}))
        spec = mc.program_spec(
            bundle,
            "train:train_loop_per_worker",
            config={"epochs": 2, "pause_s": 0.5},
            dataset_version=VERSION,
            num_workers=2,
        )
        job = millrace.train.create_training_job(f"j{uuid.uuid4().hex[:12]}", spec)
        watch = stack.client.watch(job.name, within_s=350)
        watch.until("checkpoint_committed", lambda event: event.checkpoint_committed.step >= 2)
        os.kill(int(stack.client.checkpoints(job.name)[0].metrics["pid"]), signal.SIGKILL)
        watch.rest()
        assert watch.jobs[-1].state == State.STATE_SUCCEEDED, watch.jobs[-1]
        assert watch.jobs[-1].failures == 1
        for epoch in range(2):
            found = millrace.train.get_coverage(job.name, epoch)
            assert (found.witness, found.shard) == (pb.Coverage.WITNESS_GIVEN, "train")
            left_out = found.row_count % 2
            assert (found.seen_once, found.repeated, found.missing) == (found.row_count - left_out, 0, left_out)
            assert found.epoch_done
        with pytest.raises(OutOfRange, match="use 0 to 1"):
            millrace.train.get_coverage(job.name, 2)
