"""A training function reads `get_dataset_shard` on two real workers: every row of an epoch, before and after a kill.

On s3:// alone, where the workers hold none of the store's keys; `test_programs.py` has the kill on file://.
"""

from __future__ import annotations

import os
import re
import signal
import uuid
from pathlib import Path

import pytest

import millrace_client as mc
from millrace.train.v1 import train_service_pb2 as pb
from millrace_client.errors import OutOfRange
from shared.checkpoint.format import verify_program_checkpoint
from shared.checkpoint.registry import CheckpointRegistry
from tests.support.code_folders import write_files
from tests.support.training import VERSION, State, TrainStack

pytestmark = pytest.mark.timeout(900)

EXTENDING = Path(__file__).parents[3] / "docs" / "extending.md"
# The loop of the documents, with a moment to strike.
PACED = """
import os
import time

import ray.train

from train import train_loop_per_worker

report = ray.train.report


def slow_report(metrics, **how):
    report({**metrics, "pid": os.getpid()}, **how)
    time.sleep(0.5)


def loop(config):
    print("every rank says something")
    ray.train.report = slow_report
    train_loop_per_worker(config)
"""


def example() -> str:
    """The training function of the documents that reads a shard."""
    blocks = re.findall(r"```python\n(.*?)```", EXTENDING.read_text(), re.DOTALL)
    (code,) = [block for block in blocks if "get_dataset_shard" in block]
    return str(code)


@pytest.mark.long
def test_rows_are_given_exactly_once_an_epoch_over_the_kill_of_a_rank(s3_stack: TrainStack, tmp_path: Path) -> None:
    stack = s3_stack
    with mc.connect(train=stack.service.address) as millrace:
        bundle = millrace.train.push_code(write_files(tmp_path / "code", {"train.py": example(), "paced.py": PACED}))
        spec = mc.program_spec(
            bundle,
            "paced:loop",
            config={"epochs": 2},
            dataset_version=VERSION,
            num_workers=2,
        )
        job = millrace.train.create_training_job(f"j{uuid.uuid4().hex[:12]}", spec)
        watch = stack.client.watch(job.name, timeout_s=600)
        watch.until("checkpoint_committed", lambda event: event.checkpoint_committed.step >= 2)
        os.kill(int(stack.client.checkpoints(job.name)[0].metrics["pid"]), signal.SIGKILL)
        watch.rest()
        assert watch.jobs[-1].state == State.STATE_SUCCEEDED, watch.jobs[-1]
        assert watch.jobs[-1].failures == 1, watch.ends()
        for epoch in range(2):
            found = millrace.train.get_coverage(job.name, epoch)
            assert (found.witness, found.shard) == (pb.Coverage.WITNESS_GIVEN, "train")
            left_out = found.row_count % 2
            assert (found.seen_once, found.repeated, found.missing) == (found.row_count - left_out, 0, left_out)
            assert found.epoch_done
        with pytest.raises(OutOfRange, match="use 0 to 1"):
            millrace.train.get_coverage(job.name, 2)
    _, resumed = watch.of("attempt_started")
    assert resumed.step >= 2
    entries = CheckpointRegistry(stack.store, job.name).entries()
    assert {one.attempt for one in entries} == {1, 2}
    for entry in entries:
        assert verify_program_checkpoint(stack.store, entry.folder, entry.manifest_sha256).files
    # The log of each rank came by signed addresses, too.
    for attempt, rank in ((1, 0), (1, 1), (2, 0), (2, 1)):
        assert stack.store.exists(f"{job.name}/logs/a{attempt:05d}/r{rank:04d}/00000000.txt")
