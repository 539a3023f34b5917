"""A job with what runs leave behind, to test what reads it."""

from __future__ import annotations

import time
from typing import Any

from shared.checkpoint import CheckpointEntry, CheckpointRegistry, CoveragePart, write_checkpoint
from shared.errors import Unavailable
from shared.jobs import JobRecord, Jobs
from shared.jobs.transitions import begin_attempt, lose_attempt, succeed
from shared.model_spec import ModelSpec
from shared.storage import ObjectStore
from tests.support.checkpoint_samples import FILES, content
from train_service.domain.spec import TrainingSpec
from train_service.records.event_log import TRAIN_KIND

JOB = "trainingJobs/j"


def make_job(store: ObjectStore, version: str, *, epochs: int = 2, batch: int = 100, **spec: Any) -> Jobs:
    """`trainingJobs/j`, PENDING."""
    training = TrainingSpec(
        dataset_version=version,
        model=ModelSpec(builder="torchvision.resnet18", in_channels=1, num_classes=10),
        epochs=epochs,
        global_batch_size=batch,
        **spec,
    )
    jobs = Jobs(store, TRAIN_KIND)
    record = JobRecord(uid="u", name=JOB, spec={"training": training.as_config()}, create_time=0, update_time=0)
    jobs.create(JOB, record)
    return jobs


def begin(jobs: Jobs) -> int:
    """Begin the next attempt; return its number."""
    attempt = jobs.get(JOB, JOB).attempt + 1
    jobs.transition(JOB, lambda job: begin_attempt(job, time.time()), attempt=attempt)
    return attempt


def lose(jobs: Jobs) -> None:
    jobs.transition(JOB, lambda job: lose_attempt(job, Unavailable("lost"), time.time()))


def finish(jobs: Jobs) -> None:
    jobs.transition(JOB, lambda job: succeed(job, {}, time.time()))


def commit(
    store: ObjectStore, step: int, coverage: tuple[CoveragePart, ...], *, attempt: int = 1, final: bool = False
) -> CheckpointEntry:
    """A checkpoint at `step` with this chain."""
    folder = f"{JOB}/checkpoints/data/step-{step}-a{attempt}"
    digest, size_bytes = write_checkpoint(store, folder, content(step=step, coverage=coverage), FILES)
    entry = CheckpointEntry(
        name=f"{JOB}/checkpoints/step-{step:08d}",
        folder=folder,
        manifest_sha256=digest,
        step=step,
        epoch=0,
        attempt=attempt,
        size_bytes=size_bytes,
        create_time=1.0,
        final=final,
    )
    CheckpointRegistry(store, JOB).commit(entry)
    return entry
