"""Runs of the training loop for the GPU check, on generated images in one process, and a bare PyTorch loop.

S = side of an image in pixels.
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor, nn

from shared.dataset_version.manifest import tensor_field
from shared.jobs import JobRecord, Jobs
from shared.jobs.transitions import begin_attempt
from shared.model_spec import ModelSpec
from shared.models import build_model
from shared.settings import store_settings
from shared.storage import ObjectStore, open_store
from shared.transforms import RowKeys
from tests.support.versions import columns_of, commit_version
from train_service.domain.spec import (
    BFLOAT16,
    BY_DEVICE,
    FASTEST,
    FLOAT32,
    TF32,
    Acceleration,
    OptimizerSpec,
    TrainingSpec,
)
from train_service.jobs.run_records import RunRecords
from train_service.learning.learner import AUTOCAST
from train_service.learning.optimizers import build_optimizer
from train_service.learning.ranks import DeviceTransform, Ranks, laid_out, set_up_device
from train_service.loading.preprocessing import Preprocessing
from train_service.records.event_log import TRAIN_KIND
from train_service.worker.loop import LoopConfig, Run

VERSION = "datasets/stripes/versions/v1"
TRANSFORM: dict[str, Any] = {
    "steps": [
        {"randomFlip": {"horizontalProbability": 0.5}},
        {"toFloat": {}},
        {"normalize": {"mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]}},
    ]
}
# The steps of a bare loop before the clock starts, and the timed steps.
WARM_UP_STEPS, TIMED_STEPS = 8, 40
# About the period of NVML's utilisation.
SAMPLE_EVERY_S = 0.1


@dataclass(frozen=True)
class Size:
    """The size of one check: the number and side of its images, and the batch size."""

    rows: int
    side: int
    batch: int
    epochs: int
    builder: str = "torchvision.resnet18"
    # Steps between checkpoints, besides that of each epoch's end.
    checkpoint_every: int = 0


def stripes(rows: int, side: int, seed: int = 0) -> tuple[Any, Any]:
    """Return noisy images uint8 (rows, S, S, 3) whose label 0..9 is the position of a bright stripe."""
    generator = np.random.default_rng(seed)
    labels = generator.integers(0, 10, rows)
    images = generator.integers(0, 120, (rows, side, side, 3), np.uint8)
    width = side // 10
    for row, label in enumerate(labels.tolist()):
        images[row, :, width * label : width * (label + 1)] += 100
    return images, labels.astype(np.int64)


def new_store(folder: Path, size: Size) -> ObjectStore:
    """Create a store with a version of stripes, and a validation split of one batch."""
    store = open_store(store_settings({"MILLRACE_STORE": folder.resolve().as_uri()}))
    schema = pa.schema([tensor_field("image", pa.uint8(), (size.side, size.side, 3)), pa.field("label", pa.int64())])
    splits = {"train": stripes(size.rows, size.side), "validation": stripes(size.batch, size.side, 1)}
    commit_version(store, VERSION, splits, schema)
    return store


def spec_of(size: Size, **changes: Any) -> TrainingSpec:
    spec = TrainingSpec(
        dataset_version=VERSION,
        validation_split="validation",
        transform=TRANSFORM,
        model=ModelSpec(builder=size.builder, in_channels=3, num_classes=10),
        optimizer=OptimizerSpec(name="AdamW", learning_rate=0.001),
        epochs=size.epochs,
        global_batch_size=size.batch,
        checkpoint_every_steps=size.checkpoint_every,
        acceleration=Acceleration(transform_device=BY_DEVICE),
    )
    return replace(spec, **changes)


def accelerated(spec: TrainingSpec, **changes: Any) -> TrainingSpec:
    return replace(spec, acceleration=replace(spec.acceleration, **changes))


def settings_compared(spec: TrainingSpec) -> dict[str, TrainingSpec]:
    """Return the compared settings, by their names in the report."""
    loader = replace(spec, acceleration=replace(spec.acceleration, transform_device="CPU"))
    last = {"channels_last": True}
    half = replace(spec, precision=BFLOAT16)
    return {
        "fp32": replace(spec, precision=FLOAT32),
        "tf32": replace(spec, precision=TF32),
        "tf32, channels last": accelerated(replace(spec, precision=TF32), **last),
        "bf16": half,
        "bf16, channels last": accelerated(half, **last),
        "bf16, channels last, transform by the loader": accelerated(replace(loader, precision=BFLOAT16), **last),
        "tf32, fastest": accelerated(replace(spec, precision=TF32), algorithms=FASTEST),
        "bf16, channels last, fastest": accelerated(half, **last, algorithms=FASTEST),
    }


def set_up(device: torch.device, spec: TrainingSpec) -> None:
    """Set up the device as in a new worker process, though this one has computed before."""
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.deterministic = torch.backends.cudnn.benchmark = False
    set_up_device(device, spec)


@dataclass(frozen=True)
class Measured:
    images_per_s: float
    # The share between the first step and the last, 0..1; None without NVML.
    busy: float | None = None
    # The share of the steps' time spent waiting for rows.
    waited: float = 0.0
    # The share of the time by which the steps after an epoch's end come later: validation, checkpoint, new rows.
    ends: float = 0.0


def run_ours(store: ObjectStore, spec: TrainingSpec, device: torch.device) -> Measured:
    """Run the loop once: reading, preparing, copying, learning, and a checkpoint with each epoch.

    A step's time is the median: only a few steps are followed by an epoch's end, or used by cuDNN to try kernels.
    """
    set_up(device, spec)
    name = f"trainingJobs/g{uuid.uuid4().hex}"
    jobs, now = Jobs(store, TRAIN_KIND), time.time()
    jobs.create(name, JobRecord(uid=uuid.uuid4().hex, name=name, spec={}, create_time=now, update_time=now))
    jobs.transition(name, lambda job: begin_attempt(job, now), attempt=1)
    run = Run(LoopConfig(store=store.settings, job_name=name, attempt=1, spec=spec), Ranks(0, 1, device))
    with sampled(device) as samples:
        run.run()
    points, _ = RunRecords(store).metrics(name, 0, 10_000, "")
    steps = [point for point in points if "loss" in point.values]
    moments = [point.time for point in steps]
    lengths = [end - begin for begin, end in itertools.pairwise(moments)]
    median_s = statistics.median(lengths)
    ends_s = sum(
        length - median_s
        for length, (before, after) in zip(lengths, itertools.pairwise(steps), strict=True)
        if before.epoch != after.epoch
    )
    half = moments[len(moments) // 4]
    busy = [share for moment, share in samples if half <= moment <= moments[-1]]
    waited = sum(point.values["data_wait_s"] for point in steps[1:]) / max(moments[-1] - moments[0], 1e-9)
    return Measured(
        images_per_s=spec.global_batch_size / median_s,
        busy=statistics.fmean(busy) if busy else None,
        waited=waited,
        ends=max(ends_s, 0.0) / max(moments[-1] - moments[0], 1e-9),
    )


def run_bare(spec: TrainingSpec, device: torch.device, images: Any, labels: Any) -> Measured:
    """Run the same model, optimizer, precision and layout in a bare loop.

    The inputs are ready on the device, and nothing is checked, reported or stored.
    """
    set_up(device, spec)
    inputs, wanted = ready_tensors(spec, device, images, labels)
    torch.manual_seed(0)
    model: nn.Module = build_model(spec.model).to(device)
    if spec.acceleration.channels_last:
        model = model.to(memory_format=torch.channels_last)
    if spec.compile:
        model.compile()
    optimizer = build_optimizer(spec.optimizer, model)
    loss_of = nn.CrossEntropyLoss()
    batch = spec.global_batch_size
    starts = range(0, len(wanted) - batch + 1, batch)
    model.train()
    begun = 0.0
    for step in range(WARM_UP_STEPS + TIMED_STEPS):
        if step == WARM_UP_STEPS:
            finish(device)
            begun = time.perf_counter()
        begin = starts[step % len(starts)]
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device.type, AUTOCAST.get(spec.precision), enabled=spec.precision in AUTOCAST):
            loss = loss_of(model(inputs[begin : begin + batch]), wanted[begin : begin + batch])
        loss.backward()
        optimizer.step()
    finish(device)
    return Measured(TIMED_STEPS * batch / (time.perf_counter() - begun))


def ready_tensors(spec: TrainingSpec, device: torch.device, images: Any, labels: Any) -> tuple[Tensor, Tensor]:
    """Return the model's inputs for these images: float32 (rows, 3, S, S), and labels (rows,), on the device."""
    by_device = accelerated(spec, transform_device=BY_DEVICE)
    shape = images.shape[1:]
    schema = pa.schema([tensor_field("image", pa.uint8(), shape), pa.field("label", pa.int64())])
    steps = DeviceTransform(Preprocessing(by_device, columns_of(schema)).device_steps)
    parts = []
    for begin in range(0, len(labels), 1024):
        keys = RowKeys(spec.seed, 0, np.arange(begin, min(begin + 1024, len(labels))))
        moved = torch.from_numpy(images[begin : begin + 1024]).to(device)
        parts.append(laid_out(steps(moved, keys), spec))
    return laid_out(torch.cat(parts), spec), torch.from_numpy(labels).to(device)


def finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextlib.contextmanager
def sampled(device: torch.device) -> Iterator[list[tuple[float, float]]]:
    """Collect (time, GPU utilisation by NVML) within the block; none for a CPU."""
    samples: list[tuple[float, float]] = []
    if device.type != "cuda":
        yield samples
        return
    over = threading.Event()

    def poll() -> None:
        while not over.wait(SAMPLE_EVERY_S):
            samples.append((time.time(), torch.cuda.utilization(device) / 100))

    thread = threading.Thread(target=poll, daemon=True)
    thread.start()
    try:
        yield samples
    finally:
        over.set()
        thread.join()


@contextlib.contextmanager
def scratch_store(size: Size) -> Iterator[ObjectStore]:
    with tempfile.TemporaryDirectory(prefix="millrace-gpu-") as folder:
        yield new_store(Path(folder), size)


def seconds_of(work: Callable[[], object], device: torch.device) -> float:
    finish(device)
    begun = time.perf_counter()
    work()
    finish(device)
    return time.perf_counter() - begun
