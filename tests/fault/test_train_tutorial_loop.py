"""The tutorial's fault-tolerant training function, word for word: two ranks and the attempt are killed in turn.

Its cells are taken from the document at run time; only their configuration is the caller's. On s3:// its ranks hold
none of the store's keys.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

import millrace_client as mc
from shared.checkpoint.registry import CheckpointRegistry
from shared.dataset_version.manifest import tensor_field
from shared.settings import StoreSettings
from tests.support.code_folders import write_files
from tests.support.ray_head import ray_head
from tests.support.training import State, Watch, train_stack
from tests.support.tutorial_cells import tutorial_code
from tests.support.versions import commit_version, striped_digits

pytestmark = [pytest.mark.timeout(900), pytest.mark.chaos]

WORKER, ATTEMPT = "ray::RayTrainWorker", "ray::AttemptActor.run"
LOOP = "train_loop_ray_train_with_checkpoint_loading"
CELLS = (
    "build_resnet18",
    "load_model_ray_train",
    "print_metrics_ray_train",
    "build_data_loader_ray_train_ray_data",
    LOOP,
    "save_checkpoint_and_metrics_ray_train_with_extra_state",
)
# As the tutorial's transform leaves them: float32 (1, 28, 28) between -1 and 1.
SCHEMA = pa.schema([tensor_field("image", pa.float32(), (1, 28, 28)), pa.field("label", pa.int64())])
VERSION, ROWS, EPOCHS = "datasets/tutorial/versions/v1", 513, 6


def test_each_epoch_is_trained_once_over_three_kills(store_settings: StoreSettings, tmp_path: Path) -> None:
    code = write_files(tmp_path / "code", {"train.py": tutorial_code(*CELLS)})
    images, labels = striped_digits(ROWS)
    with (
        ray_head(num_cpus=4) as head,
        train_stack(store_settings, head.address, tmp_path) as stack,
        mc.connect(train=stack.service.address) as millrace,
    ):
        prepared = (images[:, None].astype(np.float32) / 255 - 0.5) / 0.5
        commit_version(stack.store, VERSION, {"train": (prepared, labels)}, SCHEMA)
        spec = mc.program_spec(
            millrace.train.push_code(code),
            f"train:{LOOP}",
            config={"num_epochs": EPOCHS, "global_batch_size": 64},
            dataset_version=VERSION,
            num_workers=2,
        )
        job = millrace.train.create_training_job("tutorial", spec)
        watch = stack.client.watch(job.name, timeout_s=800)
        strikes = [(WORKER, min), (WORKER, max), (ATTEMPT, max)]
        for number, (kind, choose) in enumerate(strikes, start=1):
            _committed(watch, number)
            os.kill(choose(head.processes(kind)), signal.SIGKILL)
            _started(watch, number + 1)
        watch.rest()

        assert watch.jobs[-1].state == State.STATE_SUCCEEDED, watch.jobs[-1]
        entries = CheckpointRegistry(stack.store, job.name).entries()
        assert [int(one.metrics["epoch"]) for one in entries] == list(range(EPOCHS))
        assert [one.step for one in entries] == list(range(1, EPOCHS + 1))
        for epoch in range(EPOCHS):
            found = millrace.train.get_coverage(job.name, epoch)
            assert (found.seen_once, found.repeated, found.missing) == (ROWS - 1, 0, 1)


def _committed(watch: Watch, attempt: int) -> None:
    """Wait for a checkpoint of this attempt."""
    watch.until("checkpoint_committed", lambda event: event.attempt == attempt)


def _started(watch: Watch, attempt: int) -> None:
    watch.until("attempt_started", lambda event: event.attempt == attempt)
