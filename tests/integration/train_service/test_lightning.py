"""Lightning's Trainer in a user's own training function, on two real Ray Train workers."""

from __future__ import annotations

import io
import os
import re
import signal
import uuid
from pathlib import Path
from typing import Any

import pytest
import torch

import millrace_client as mc
from shared.checkpoint.format import load_program_checkpoint, read_program_file
from shared.checkpoint.registry import CheckpointEntry, CheckpointRegistry
from shared.storage import ObjectStore
from tests.support.code_folders import write_files
from tests.support.training import State, TrainStack

pytestmark = pytest.mark.timeout(900)

PAGE = Path(__file__).parents[3] / "docs" / "frameworks.md"
# Each report names its process, and takes so long that there is a moment to strike.
PACED = """
import os
import time

import ray.train
from lit import train_loop_per_worker

report = ray.train.report


def loop(config):
    def held_report(metrics, **how):
        print("reports epoch", metrics["epoch"])
        report({**metrics, "pid": os.getpid()}, **how)
        while metrics["epoch"] >= 1 and not os.path.exists(config["struck"]):
            time.sleep(0.05)

    ray.train.report = held_report
    train_loop_per_worker(config)
"""


def example() -> str:
    """The training function of the documents."""
    (code,) = [one for one in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL) if "Lightning" in one]
    return str(code)


def create(stack: TrainStack, folder: Path, epochs: int, struck: Path) -> str:
    """A job that goes on beyond its second epoch once `struck` exists."""
    with mc.connect(train=stack.service.address) as millrace:
        bundle = millrace.train.push_code(write_files(folder / "code", {"lit.py": example(), "paced.py": PACED}))
        spec = mc.program_spec(bundle, "paced:loop", config={"epochs": epochs, "struck": str(struck)}, num_workers=2)
        spec.program.hang_after.FromSeconds(600)  # a rank that waits for `struck` does not hang
        return millrace.train.create_training_job(f"j{uuid.uuid4().hex[:12]}", spec).name


def loaded(store: ObjectStore, entry: CheckpointEntry) -> dict[str, Any]:
    """Lightning's checkpoint; raises where a digest does not hold."""
    content = load_program_checkpoint(store, entry.folder, entry.manifest_sha256)
    (file,) = content.files
    assert file.path == "checkpoint.ckpt"
    found: dict[str, Any] = torch.load(
        io.BytesIO(b"".join(read_program_file(store, entry.folder, file))), weights_only=True
    )
    return found


def assert_each_epoch_once(store: ObjectStore, name: str, epochs: int) -> list[CheckpointEntry]:
    entries = CheckpointRegistry(store, name).entries()
    assert [one.epoch for one in entries] == list(range(epochs))
    for entry in entries:
        checkpoint = loaded(store, entry)
        assert checkpoint["epoch"] == entry.epoch
        # 64 rows in batches of 8 on two workers.
        assert checkpoint["global_step"] == entry.metrics["step"] == 4 * (entry.epoch + 1)
    return entries


def test_each_epoch_is_a_checkpoint_of_lightning(file_stack: TrainStack, tmp_path: Path) -> None:
    name = create(file_stack, tmp_path, epochs=2, struck=tmp_path)
    job = file_stack.client.finished(name)

    assert job.state == State.STATE_SUCCEEDED, job
    first, last = assert_each_epoch_once(file_stack.store, name, 2)
    assert last.metrics["loss"] < first.metrics["loss"]


@pytest.mark.chaos
def test_a_run_that_lost_a_rank_ends_with_the_weights_of_one_that_did_not(
    file_stack: TrainStack, tmp_path: Path
) -> None:
    epochs, store, client, struck = 10, file_stack.store, file_stack.client, tmp_path / "struck"
    undisturbed, killed = (create(file_stack, tmp_path, epochs, path) for path in (tmp_path, struck))
    watch = client.watch(killed, timeout_s=600)
    watch.until("checkpoint_committed", lambda event: event.checkpoint_committed.step >= 2)
    os.kill(int(client.checkpoints(killed)[0].metrics["pid"]), signal.SIGKILL)
    struck.touch()
    watch.rest()

    assert watch.jobs[-1].state == State.STATE_SUCCEEDED, watch.jobs[-1]
    assert watch.jobs[-1].failures == 1, watch.ends()
    _, resumed = watch.of("attempt_started")
    assert resumed.step == 2
    *_, last = assert_each_epoch_once(store, killed, epochs)
    said = store.get(f"{killed}/logs/a00002/r0000/00000000.txt").decode()
    assert f"reports epoch {resumed.step}\n" in said
    assert client.finished(undisturbed).state == State.STATE_SUCCEEDED
    *_, other = assert_each_epoch_once(store, undisturbed, epochs)
    weights, expected = loaded(store, last)["state_dict"], loaded(store, other)["state_dict"]
    assert all(torch.equal(weights[key], expected[key]) for key in expected)
