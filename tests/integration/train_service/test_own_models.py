"""Models of a user's own code on two real Ray Train workers: trained, killed, and resumed to the very same weights."""

from __future__ import annotations

import os
import signal
import uuid
from pathlib import Path

import pytest

import millrace_client as mc
from millrace.train.v1 import resources_pb2 as res
from shared.checkpoint import load_checkpoint, resolve
from shared.checkpoint.format import OPTIMIZER, WEIGHTS
from tests.support.code_folders import write_files
from tests.support.ray_head import RayHead
from tests.support.training import VERSION, State, TrainStack

pytestmark = pytest.mark.timeout(900)

NET = """
import torch
from torch import nn


class Cells(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, width, 5, stride=2), nn.BatchNorm2d(width), nn.ReLU(), nn.Flatten(), nn.Dropout(0.2),
            nn.Linear(width * 12 * 12, 10),
        )

    def forward(self, images):
        return self.body(images)

    def loss(self, outputs, labels):
        return nn.functional.cross_entropy(outputs, labels, label_smoothing=0.05, reduction="none")

    def metrics(self, outputs, labels):
        return {"certainty": outputs.softmax(1).max(1).values}


def build(config):
    return Cells(config["width"])
"""


def digits_of_own_model(bundle: str) -> res.TrainingSpec:
    """The model above on two workers; what follows from the version and the code is left out."""
    return mc.training_spec(
        VERSION,
        model=mc.own_model(bundle, "net:build", config={"width": 6}),
        transform=[mc.to_float()],
        epochs=4,
        global_batch_size=30,
        num_workers=2,
        checkpoint_every_steps=7,
        seed=3,
    )


def weights(stack: TrainStack, job: str, bundle: str) -> bytes:
    """Of the run's last step."""
    entry = resolve(stack.store, "checkpoint", f"{job}/checkpoints/final")
    assert (entry.code_bundle, entry.step) == (bundle, 80)
    return load_checkpoint(stack.store, entry.folder, entry.manifest_sha256).read(WEIGHTS)


def assert_learnt(stack: TrainStack, job: str, bundle: str) -> None:
    last = stack.client.checkpoints(job)[-1]
    assert last.code_bundle == bundle
    assert last.metrics["validation_accuracy"] > 0.8
    assert 0 < last.metrics["validation_certainty"] <= 1


def test_a_model_of_a_users_own_trains_on_two_workers(file_stack: TrainStack, tmp_path: Path) -> None:
    with mc.connect(train=file_stack.service.address) as millrace:
        bundle = millrace.train.push_code(write_files(tmp_path / "code", {"net.py": NET})).name
        created = millrace.train.create_training_job(f"j{uuid.uuid4().hex[:12]}", digits_of_own_model(bundle))
    assert (created.spec.model.in_channels, created.spec.model.num_classes) == (1, 10)

    job = file_stack.client.finished(created.name)

    assert (job.state, job.failures) == (State.STATE_SUCCEEDED, 0), job.error
    assert weights(file_stack, job.name, bundle)
    assert_learnt(file_stack, job.name, bundle)


# Three attempts of two workers each. In `make test` a rank of test_programs.py is killed, and
# tests/unit/train_service/worker and learning/test_own_step.py resume bit for bit.
@pytest.mark.long
def test_a_model_of_a_users_own_outlives_the_kill_of_a_rank_bit_for_bit(
    file_stack: TrainStack, train_ray: RayHead, tmp_path: Path
) -> None:
    stack = file_stack
    with mc.connect(train=stack.service.address) as millrace:
        bundle = millrace.train.push_code(write_files(tmp_path / "code", {"net.py": NET})).name
        struck = millrace.train.create_training_job(f"j{uuid.uuid4().hex[:12]}", digits_of_own_model(bundle))
        watch = stack.client.watch(struck.name, timeout_s=600)
        watch.until("checkpoint_committed", lambda event: event.checkpoint_committed.step >= 7)
        os.kill(max(train_ray.processes("ray::RayTrainWorker")), signal.SIGKILL)
        watch.rest()
        # As it was given back: with all that followed from the version and the code.
        whole = millrace.train.create_training_job(f"j{uuid.uuid4().hex[:12]}", struck.spec)
        whole = stack.client.finished(whole.name)
    struck = stack.client.get(struck.name)

    assert (struck.state, struck.failures) == (State.STATE_SUCCEEDED, 1), struck.error
    assert (whole.state, whole.failures) == (State.STATE_SUCCEEDED, 0), whole.error
    assert whole.spec == struck.spec
    assert weights(stack, struck.name, bundle) == weights(stack, whole.name, bundle)
    assert_learnt(stack, struck.name, bundle)


STEP = """
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn


class Pair(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.automatic_optimization = False
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(784, width), nn.ReLU(), nn.Dropout(0.1))
        self.head = nn.Linear(width, 10)
        self.average = AveragedModel(nn.Sequential(self.body, self.head), multi_avg_fn=get_ema_multi_avg_fn(0.95))

    def forward(self, images):
        return self.head(self.body(images)) if self.training else self.average(images)

    def configure_optimizers(self):
        both = [torch.optim.Adam(self.body.parameters(), lr=0.003), torch.optim.SGD(self.head.parameters(), lr=0.05)]
        return both, [torch.optim.lr_scheduler.ExponentialLR(one, 0.99) for one in both]

    def training_step(self, batch, batch_idx):
        images, labels = batch
        loss = nn.functional.cross_entropy(self(images), labels)
        for one in self.optimizers():
            one.zero_grad()
        self.manual_backward(loss)
        for one in self.optimizers():
            one.step()
        for one in self.lr_schedulers():
            one.step()
        self.average.update_parameters(nn.Sequential(self.body, self.head))
        return loss

    def validation_step(self, batch, batch_idx):
        images, labels = batch
        self.log("val_accuracy", (self(images).argmax(1) == labels).float().mean())
"""


@pytest.mark.long
def test_a_step_with_two_optimizers_outlives_the_kill_of_a_rank_bit_for_bit(
    file_stack: TrainStack, train_ray: RayHead, tmp_path: Path
) -> None:
    stack = file_stack
    with mc.connect(train=stack.service.address) as millrace:
        bundle = millrace.train.push_code(write_files(tmp_path / "code", {"net.py": STEP}))
        spec = mc.training_spec(
            VERSION,
            model=mc.own_model(bundle, "net:Pair"),
            transform=[mc.to_float()],
            epochs=4,
            global_batch_size=30,
            num_workers=2,
            checkpoint_every_steps=7,
        )
        spec.checkpoints.best_metric = "val_accuracy"
        struck = millrace.train.create_training_job(f"j{uuid.uuid4().hex[:12]}", spec)
        watch = stack.client.watch(struck.name, timeout_s=600)
        watch.until("checkpoint_committed", lambda event: event.checkpoint_committed.step >= 7)
        os.kill(max(train_ray.processes("ray::RayTrainWorker")), signal.SIGKILL)
        watch.rest()
        whole = millrace.train.create_training_job(f"j{uuid.uuid4().hex[:12]}", struck.spec)
        whole = stack.client.finished(whole.name)
    struck = stack.client.get(struck.name)
    assert (struck.state, struck.failures, whole.state) == (State.STATE_SUCCEEDED, 1, State.STATE_SUCCEEDED)

    files = []
    for job in (struck.name, whole.name):
        entry = resolve(stack.store, "checkpoint", f"{job}/checkpoints/final")
        checkpoint = load_checkpoint(stack.store, entry.folder, entry.manifest_sha256)
        files.append((checkpoint.read(WEIGHTS), checkpoint.read(OPTIMIZER)))
    assert files[0] == files[1]
    assert stack.client.checkpoints(struck.name)[-1].metrics["val_accuracy"] > 0.8
