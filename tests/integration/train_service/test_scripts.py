"""A script that makes a TorchTrainer and calls fit(), as a job on real Ray Train workers."""

from __future__ import annotations

import json
import re
import uuid
from pathlib import Path

import pytest

import millrace_client as mc
from millrace.train.v1 import resources_pb2 as res
from shared.checkpoint.registry import CheckpointRegistry
from tests.support.code_folders import write_files
from tests.support.training import State, TrainStack

pytestmark = pytest.mark.timeout(400)

# A module of the folder, an override, a second run, and what a script does with results.
CELLS = """
import json
import os
import tempfile

import ray
import ray.train
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from steps import double

ray.init(ignore_reinit_error=True)


@ray.remote(num_cpus=0)
def task(value):
    return value + 1


def loop(config):
    rank = ray.train.get_context().get_world_rank()
    checkpoint = ray.train.get_checkpoint()
    begin = 0
    if checkpoint:
        with checkpoint.as_directory() as folder:
            begin = json.load(open(os.path.join(folder, "state.json")))["epoch"] + 1
    print(f"rank {rank} of {ray.train.get_context().get_world_size()} begins at epoch {begin}")
    for epoch in range(begin, config["epochs"]):
        with tempfile.TemporaryDirectory() as folder:
            with open(os.path.join(folder, "state.json"), "w") as file:
                json.dump({"epoch": epoch, "scale": config["scale"]}, file)
            ray.train.report(
                {"loss": double(1.0) / (epoch + 1), "epoch": epoch},
                checkpoint=ray.train.Checkpoint.from_directory(folder) if rank == 0 else None,
            )


def trainer(name, **config):
    return TorchTrainer(
        loop,
        train_loop_config=config,
        scaling_config=ScalingConfig(num_workers=8, use_gpu=True),
        run_config=RunConfig(name=name, storage_path="/mnt/cluster_storage/training/"),
    )


if __name__ == "__main__":
    result = trainer("Digits_1", epochs=1, scale=3).fit()
    print("task", ray.get(task.remote(41)))
    with result.checkpoint.as_directory() as folder:
        print("state", open(os.path.join(folder, "state.json")).read())
    again = trainer("Digits_1", epochs=1, scale=3).fit()
    print("same", again.checkpoint == result.checkpoint, result.metrics, len(result.metrics_dataframe))
    further = trainer("Digits_1", epochs=3, scale=3).fit()
    print("further", list(further.metrics_dataframe["epoch"]), [one.name[-2:] for one, _ in further.best_checkpoints])
    print("key" in os.environ, [name for name in os.environ if name.startswith("MILLRACE_")])
"""
STEPS = "def double(value):\n    return 2 * value\n"


def test_a_script_trains_goes_on_and_reads_its_results(file_stack: TrainStack, tmp_path: Path) -> None:
    folder = write_files(tmp_path / "code", {"cells.py": CELLS, "steps.py": STEPS})
    with mc.connect(train=file_stack.service.address) as millrace:
        bundle = millrace.train.push_code(folder)
        placement = res.Placement(gpus_per_worker=0)
        spec = mc.program_spec(bundle, "cells.py", config={"scale": 5}, num_workers=2, placement=placement)
        job = millrace.train.create_training_job(f"j{uuid.uuid4().hex[:12]}", spec)
        watch = file_stack.client.watch(job.name, within_s=350)
        watch.rest()
        logs = "".join(one.text for one in millrace.train.stream_logs(job.name))

    assert watch.jobs[-1].state == State.STATE_SUCCEEDED, (watch.jobs[-1].error, logs)
    assert watch.jobs[-1].failures == 0
    entries = CheckpointRegistry(file_stack.store, job.name).entries()
    assert [(one.step, one.metrics["epoch"], one.fit) for one in entries] == [(1, 0, 1), (2, 1, 1), (3, 2, 1)]
    assert watch.jobs[-1].latest_checkpoint == entries[-1].name
    assert "rank 1 of 2 begins at epoch 0" in logs
    assert "task 42" in logs
    assert f"state {json.dumps({'epoch': 0, 'scale': 5})}" in logs
    assert "same True {'loss': 2.0, 'epoch': 0} 1" in logs
    assert "further [0, 1, 2] ['01', '02', '03']" in logs
    assert "rank 0 of 2 begins at epoch 1" in logs
    assert "False []" in logs
    told = [one.text for one in watch.of("warning")]
    counts = "the job's num_workers 2 counts, and not ScalingConfig(num_workers=8)"
    assert len([text for text in told if re.fullmatch(r"cells\.py:\d+: (.*)", text)[1] == counts]) == 1, told  # type: ignore[index]
