"""A user's own training function on two real Ray Train workers: reported, killed, resumed, SUCCEEDED."""

from __future__ import annotations

import os
import re
import signal
import uuid
from pathlib import Path

import pytest

import millrace_client as mc
from shared.checkpoint.format import verify_program_checkpoint
from shared.checkpoint.registry import CheckpointRegistry
from tests.support.code_folders import write_files
from tests.support.training import State, TrainStack

pytestmark = pytest.mark.timeout(900)

EXTENDING = Path(__file__).parents[3] / "docs" / "extending.md"
# After its second report each rank waits until the file `struck` is there: the blow comes in time, however busy the
# machine is. And what goes around Python to a descriptor.
PACED = """
import os
import time

import ray.train

from train import train_loop_per_worker

report = ray.train.report


def loop(config):
    def paced_report(metrics, **how):
        report({**metrics, "pid": os.getpid()}, **how)
        while metrics["epoch"] >= 1 and not os.path.exists(config["struck"]):
            time.sleep(0.05)

    ray.train.report = paced_report
    os.write(1, b"from a descriptor\\n")
    train_loop_per_worker(config)
"""


def example() -> str:
    """The training function of the documents."""
    (code,) = [
        one for one in re.findall(r"```python\n(.*?)```", EXTENDING.read_text(), re.DOTALL) if "torch.randn" in one
    ]
    return str(code)


def test_a_training_function_outlives_the_kill_of_a_rank(file_stack: TrainStack, tmp_path: Path) -> None:
    stack = file_stack
    epochs = 8
    with mc.connect(train=stack.service.address) as millrace:
        bundle = millrace.train.push_code(write_files(tmp_path / "code", {"train.py": example(), "paced.py": PACED}))
        config = {"lr": 0.05, "epochs": epochs, "struck": str(tmp_path / "struck")}
        spec = mc.program_spec(bundle, "paced:loop", config=config, num_workers=2)
        job = millrace.train.create_training_job(f"j{uuid.uuid4().hex[:12]}", spec)
    watch = stack.client.watch(job.name, timeout_s=600)
    second = watch.until("checkpoint_committed", lambda event: event.checkpoint_committed.step >= 2)
    pid = int(stack.client.checkpoints(job.name)[0].metrics["pid"])
    os.kill(pid, signal.SIGKILL)
    (tmp_path / "struck").touch()
    watch.rest()

    assert watch.jobs[-1].state == State.STATE_SUCCEEDED, watch.jobs[-1]
    assert watch.jobs[-1].failures == 1, watch.ends()
    assert second.checkpoint_committed.code_bundle == bundle.name
    _, resumed = watch.of("attempt_started")
    assert resumed.step == 2
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
    assert said.count(f"begins at epoch {resumed.step}\n") == 1
    assert "from a descriptor" in said


ENDINGS = """
import os
import signal
import sys

import ray.train


def loop(config):
    ray.train.report({"loss": 1.0})
    if ray.train.get_context().get_world_rank() == 1:
        exec(config["end"])
        return
    ray.train.report({"loss": 0.5})
"""


@pytest.mark.chaos
@pytest.mark.parametrize(
    ("end", "text"),
    [
        ("os._exit(0)", "os._exit(0) on rank 1"),
        ("sys.exit(0)", "sys.exit(0) on rank 1 at train.py:12"),
        ("1 / 0", "ZeroDivisionError on rank 1 at train.py:12 after report 1"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "the process of rank 1 "),
        ("pass", "missing are the ranks [1]: they have returned"),
        ("pass", "equally often (rank 0 at train.py:14)"),
    ],
)
def test_each_wrong_end_of_a_rank_is_a_failure_of_its_own_kind(
    file_stack: TrainStack, tmp_path: Path, end: str, text: str
) -> None:
    with mc.connect(train=file_stack.service.address) as millrace:
        bundle = millrace.train.push_code(write_files(tmp_path / "code", {"train.py": ENDINGS}))
        spec = mc.program_spec(bundle, "train:loop", config={"end": end}, num_workers=2, max_failures=0)
        job = millrace.train.create_training_job(f"j{uuid.uuid4().hex[:12]}", spec)
    watch = file_stack.client.watch(job.name, timeout_s=600)
    watch.rest()

    assert watch.jobs[-1].state == State.STATE_FAILED
    (ended,) = watch.of("attempt_ended")
    assert text in ended.text
    assert list(ended.ranks) == [1]
