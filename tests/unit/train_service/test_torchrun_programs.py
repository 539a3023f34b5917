"""A user's own training function under torchrun and as a plain process: no Ray cluster and no service."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import json_format

import millrace_client as mc
from millrace.train.v1 import resources_pb2 as res
from shared.checkpoint.format import verify_program_checkpoint
from shared.jobs import Jobs, JobState
from shared.storage import ObjectStore
from tests.support.code_folders import store_bundle
from tests.support.waiting import wait_until
from tests.unit.train_service.test_torchrun_main import JOB, PLAIN, TORCHRUN, environ, ran
from tests.unit.train_service.worker.test_loop import entries, events
from train_service.records.event_log import TRAIN_KIND, EventKind

pytestmark = pytest.mark.timeout(900)

# After the skill page's script for torchrun; its rank and world size are the context's.
TRAIN = """
import os
import tempfile
import time

import ray.train
import ray.train.torch
import torch
from ray.train import Checkpoint, get_context
from torch.utils.data import DataLoader, TensorDataset


def train_func(config):
    model = torch.nn.Linear(10, 1)
    dataset = TensorDataset(torch.randn(100, 10), torch.randn(100, 1))
    loader = DataLoader(dataset, batch_size=16)
    model = ray.train.torch.prepare_model(model)
    loader = ray.train.torch.prepare_data_loader(loader)
    bare = getattr(model, "module", model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    device = ray.train.torch.get_device()
    print(f"Rank {get_context().get_world_rank()} of {get_context().get_world_size()} on {device}")
    begin = 0
    if checkpoint := ray.train.get_checkpoint():
        with checkpoint.as_directory() as folder:
            state = torch.load(os.path.join(folder, "state.pt"))
        bare.load_state_dict(state["model"])
        begin = state["epoch"] + 1
    for epoch in range(begin, config["epochs"]):
        for inputs, labels in loader:
            loss = torch.nn.functional.mse_loss(model(inputs), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        everywhere = ray.train.collective.broadcast_from_rank_zero(bare.weight.sum().item())
        ray.train.collective.barrier()
        assert everywhere == bare.weight.sum().item()
        with tempfile.TemporaryDirectory() as folder:
            kept = None
            if get_context().get_world_rank() == 0:
                torch.save({"model": bare.state_dict(), "epoch": epoch}, os.path.join(folder, "state.pt"))
                kept = Checkpoint.from_directory(folder)
            ray.train.report({"loss": loss.item(), "epoch": epoch}, checkpoint=kept)
        time.sleep(config["pause_s"])
    if config.get("wrong") == get_context().get_world_rank():
        raise ValueError("as asked")
"""


def command(
    store: ObjectStore, launcher: list[str], folder: Path, more: Mapping[str, Any] | None = None, **config: object
) -> list[str]:
    bundle = store_bundle(store, {"train_script.py": "import ray.train.collective\n" + TRAIN})
    fields = {"num_workers": 2 if launcher is TORCHRUN else 0, **(more or {})}
    spec = mc.program_spec(bundle.name, "train_script:train_func", config=config, **fields)
    file = folder / "program.json"
    file.write_text(json_format.MessageToJson(spec))
    options = ["--local-addr=127.0.0.1"] if launcher is TORCHRUN else []
    return [launcher[0], *options, *launcher[1:], "train_service.torchrun_main", str(file), "--job", "debug"]


@pytest.mark.long
@pytest.mark.parametrize("launcher", [TORCHRUN, PLAIN], ids=["torchrun", "plain"])
def test_a_function_that_was_interrupted_goes_on_with_the_same_command(
    store: ObjectStore, tmp_path: Path, launcher: list[str]
) -> None:
    arguments = command(store, launcher, tmp_path, epochs=4, pause_s=0.5)
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(arguments, env=environ(store), stdout=log, stderr=log)
    wait_until(lambda: len(entries(store, JOB)) >= 2, "two checkpoints", timeout_s=120)
    process.send_signal(signal.SIGINT)
    process.wait()
    interrupted = Jobs(store, TRAIN_KIND).get(JOB, JOB)
    done = ran(store, arguments)
    again = ran(store, arguments)

    assert interrupted.state is JobState.RECOVERING, (tmp_path / "log").read_text()
    assert done.returncode == 0, done.stdout + done.stderr
    world = 2 if launcher is TORCHRUN else 1
    for rank in range(world):
        assert f"Rank {rank} of {world} on cpu" in done.stdout
    found = sorted(entries(store, JOB).values(), key=lambda one: one.step)
    assert [(one.step, one.metrics["epoch"]) for one in found] == [(1, 0), (2, 1), (3, 2), (4, 3)]
    content = verify_program_checkpoint(store, found[-1].folder, found[-1].manifest_sha256)
    assert content.world_size == world
    _, second = events(store, JOB, EventKind.ATTEMPT_STARTED)
    assert second.payload["step"] >= 2
    job = Jobs(store, TRAIN_KIND).get(JOB, JOB)
    assert (job.state, job.result) == (
        JobState.SUCCEEDED,
        {"checkpoint": found[-1].name, "best_checkpoint": found[-1].name},
    )
    assert again.returncode == 0
    assert "debug is SUCCEEDED" in again.stdout


@pytest.mark.long
def test_an_error_of_a_rank_under_torchrun_is_reported_by_its_line(store: ObjectStore, tmp_path: Path) -> None:
    arguments = command(store, TORCHRUN, tmp_path, epochs=1, pause_s=0.0, wrong=1)
    failed = ran(store, arguments)

    assert failed.returncode == 1
    (ended,) = events(store, JOB, EventKind.ATTEMPT_ENDED)
    line = TRAIN.count("\n", 0, TRAIN.index("raise ValueError")) + 2
    assert f"ValueError on rank 1 at train_script.py:{line} after report 1: as asked" in ended.payload["text"]


@pytest.mark.long
@pytest.mark.parametrize("launcher", [TORCHRUN, PLAIN], ids=["torchrun", "plain"])
def test_a_function_that_fills_the_memory_ends_the_attempt_with_its_reason(
    store: ObjectStore, tmp_path: Path, launcher: list[str]
) -> None:
    # A limit that each process is over from its first moment.
    placement = res.Placement(resources_per_worker={"memory": 1})
    more = {"placement": placement, "max_failures": 0, "num_workers": 2 if launcher is TORCHRUN else 1}
    ended = ran(store, command(store, launcher, tmp_path, more, epochs=1000, pause_s=0.0))

    assert ended.returncode != 0
    job = Jobs(store, TRAIN_KIND).get(JOB, JOB)
    assert job.state is JobState.FAILED, ended.stdout + ended.stderr
    assert job.error is not None
    assert "the limit of 0 MiB that placement.resources_per_worker[memory] sets" in job.error["message"]


def test_a_script_is_refused_for_its_function(store: ObjectStore, tmp_path: Path) -> None:
    bundle = store_bundle(store, {"cells.py": ""})
    file = tmp_path / "program.json"
    file.write_text(json.dumps({"program": {"codeBundle": bundle.name, "entry": "cells.py"}}))
    refused = ran(store, [sys.executable, "-m", "train_service.torchrun_main", str(file), "--job", "debug"])

    assert refused.returncode == 2
    assert "name its training function, module:function" in refused.stderr
