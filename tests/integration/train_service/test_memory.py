"""Training code that leaks ends by its own limit, and the node keeps its memory."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest

import millrace_client as mc
from millrace.train.v1 import resources_pb2 as res
from tests.support.code_folders import write_files
from tests.support.training import VERSION, State, TrainStack

pytestmark = [pytest.mark.timeout(400), pytest.mark.chaos]

LIMIT = 2**31
# Rank 1 leaks; the other only waits for it in the report. It stops by itself well before the node would be full.
LEAKING = """import ray.train

KEPT = []


def loop(config):
    print("a line before the leak")
    while ray.train.get_context().get_world_rank() == 1 and len(KEPT) < 256:
        KEPT.append(bytearray(b"x" * (32 * 2**20)))
    ray.train.report({"kept": len(KEPT)})
"""


def test_a_leak_ends_its_own_rank_by_the_jobs_limit_and_names_the_line(file_stack: TrainStack, tmp_path: Path) -> None:
    with mc.connect(train=file_stack.service.address) as millrace:
        bundle = millrace.train.push_code(write_files(tmp_path / "code", {"train.py": LEAKING}))
        placement = res.Placement(gpus_per_worker=0, resources_per_worker={"memory": LIMIT})
        spec = mc.program_spec(bundle, "train:loop", num_workers=2, max_failures=0, placement=placement)
        job = millrace.train.create_training_job(f"j{uuid.uuid4().hex[:12]}", spec)
        watch = file_stack.client.watch(job.name, timeout_s=350)
        watch.rest()
        logs = "".join(one.text for one in millrace.train.stream_logs(job.name))

    job = watch.jobs[-1]
    assert job.state == State.STATE_FAILED
    assert "rank 1 has 2" in job.error.message, job.error.message
    assert "at train.py:9, more than the limit of 2 GiB that" in job.error.message, job.error.message
    assert job.error.code == 8  # RESOURCE_EXHAUSTED
    # What it printed, and why it ended, are in its log.
    assert logs.count("a line before the leak") == 2
    assert "more than the limit of 2 GiB" in logs


# The other rank waits for it in the sum of the gradients.
LEAKING_MODEL = """import torch

KEPT = []


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(784, 10)

    def forward(self, images):
        while self.training and torch.distributed.is_initialized() and torch.distributed.get_rank() == 1:
            KEPT.append(bytearray(b"x" * (32 * 2**20)))
            assert len(KEPT) < 256
        return self.linear(images.flatten(1))
"""


def test_a_leaking_model_in_millraces_own_loop_names_its_line(file_stack: TrainStack, tmp_path: Path) -> None:
    with mc.connect(train=file_stack.service.address) as millrace:
        bundle = millrace.train.push_code(write_files(tmp_path / "code", {"net.py": LEAKING_MODEL}))
        placement = res.Placement(gpus_per_worker=0, resources_per_worker={"memory": LIMIT})
        spec = mc.training_spec(
            VERSION,
            model=mc.own_model(bundle, "net:Net"),
            transform=[mc.to_float()],
            epochs=1,
            global_batch_size=30,
            num_workers=2,
            placement=placement,
            max_failures=0,
        )
        job = millrace.train.create_training_job(f"j{uuid.uuid4().hex[:12]}", spec)
        job = file_stack.client.finished(job.name)
    assert job.state == State.STATE_FAILED
    assert "rank 1 has 2" in job.error.message, job.error.message
    assert "at net.py:13, more than the limit of 2 GiB that" in job.error.message, job.error.message
    assert job.error.code == 8  # RESOURCE_EXHAUSTED
