"""A user's own training function on two real Ray Train workers: reported, killed, resumed, SUCCEEDED."""

from __future__ import annotations

import os
import signal
import uuid
from pathlib import Path

import pytest

import millrace_client as mc
from shared.checkpoint.program import verify_program_checkpoint
from shared.checkpoint.registry import CheckpointRegistry
from tests.support.code_folders import write_files
from tests.support.training import State, TrainStack

pytestmark = pytest.mark.timeout(400)

LOOP = """
import os
import tempfile
import time

import ray.train
import ray.train.torch
import torch


def train_loop_per_worker(config):
    rank = ray.train.get_context().get_world_rank()
    model = ray.train.torch.prepare_model(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"])
    first = 0
    if checkpoint := ray.train.get_checkpoint():
        with checkpoint.as_directory() as folder:
            state = torch.load(os.path.join(folder, "model.pt"), weights_only=True)
        model.module.load_state_dict(state["model"])
        first = state["epoch"] + 1
    print(f"begins at epoch {first}", flush=True)
    os.write(1, b"from a descriptor\\n")
    for epoch in range(first, config["epochs"]):
        inputs = torch.randn(8, 4)
        loss = torch.nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = None
            if rank == 0:
                torch.save({"model": model.module.state_dict(), "epoch": epoch}, os.path.join(folder, "model.pt"))
                checkpoint = ray.train.Checkpoint.from_directory(folder)
            ray.train.report({"loss": loss.item(), "epoch": epoch, "pid": os.getpid()}, checkpoint=checkpoint)
        time.sleep(config["pause_s"])
"""


def test_a_training_function_outlives_the_kill_of_a_rank(file_stack: TrainStack, tmp_path: Path) -> None:
    stack = file_stack
    epochs = 8
    with mc.connect(train=stack.service.address) as millrace:
        bundle = millrace.train.push_code(write_files(tmp_path / "code", {"train.py": LOOP}))
        config = {"lr": 0.05, "epochs": epochs, "pause_s": 0.7}
        spec = mc.program_spec(bundle, "train:train_loop_per_worker", config=config, num_workers=2)
        job = millrace.train.create_training_job(f"j{uuid.uuid4().hex[:12]}", spec)
    watch = stack.client.watch(job.name, within_s=350)
    second = watch.until("checkpoint_committed", lambda event: event.checkpoint_committed.step >= 2)
    pid = int(stack.client.checkpoints(job.name)[0].metrics["pid"])
    os.kill(pid, signal.SIGKILL)
    watch.rest()

    assert watch.jobs[-1].state == State.STATE_SUCCEEDED, watch.jobs[-1]
    assert watch.jobs[-1].failures == 1
    assert second.checkpoint_committed.code_bundle == bundle.name
    _, resumed = watch.of("attempt_started")
    assert resumed.step >= 2
    # Each epoch was reported once, over both attempts.
    committed = [one.step for one in watch.of("checkpoint_committed")]
    assert committed == list(range(1, epochs + 1))
    entries = CheckpointRegistry(stack.store, job.name).entries()
    assert [one.metrics["epoch"] for one in entries] == list(range(epochs))
    assert [one.final for one in entries] == [False] * (epochs - 1) + [True]
    content = verify_program_checkpoint(stack.store, entries[-1].folder, entries[-1].manifest_sha256)
    assert content.optimizer_steps == epochs
    assert [file.path for file in content.files] == ["model.pt"]
    said = stack.store.get(f"{job.name}/logs/a00002/r0000/00000000.txt").decode()
    assert f"begins at epoch {resumed.step}" in said
    assert "from a descriptor" in said
