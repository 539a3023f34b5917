"""A store with a small version, and sweeps of two trials on it that no attempt works at."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from shared.checkpoint import CheckpointEntry, CheckpointRegistry
from shared.jobs import JobRecord, Jobs, JobState
from shared.jobs.transitions import begin_attempt
from shared.model_spec import ModelSpec
from shared.storage import ObjectStore
from tests.support.versions import commit_version, striped_digits
from tests.unit.train_service.conftest import VERSION
from train_service.domain.spec import TrainingSpec
from train_service.domain.sweep import GRID, Domain, SweepSpec
from train_service.jobs.deletion import Deletions
from train_service.jobs.training_jobs import TrainingJobs
from train_service.records.event_log import TRAIN_KIND
from train_service.sweeps.sweeps import SWEEP_KIND, SweepDeletions, Sweeps, SweepView, Trials

RATE = "optimizer.learning_rate"
NAME = "sweeps/s"
BASE = TrainingSpec(
    dataset_version=VERSION,
    transform={"steps": [{"toFloat": {}}]},
    model=ModelSpec(builder="torchvision.shufflenet_v2_x0_5", in_channels=1, num_classes=10),
    epochs=3,
    global_batch_size=20,
)
SPEC = SweepSpec(base=BASE, parameters={RATE: Domain(kind=GRID, values=(0.1, 0.2))})


@dataclass(frozen=True)
class Place:
    store: ObjectStore
    sweeps: Sweeps
    deletions: SweepDeletions

    @property
    def jobs(self) -> Jobs:
        return Jobs(self.store, SWEEP_KIND)

    def create(self, spec: SweepSpec = SPEC, sweep_id: str = "s", request_id: str = "", **fields: Any) -> SweepView:
        return self.sweeps.create(sweep_id, spec, request_id, "digest", fields.get("validate_only", False))

    def trials(self) -> Trials:
        return Trials(self.store, self.jobs.get(NAME, NAME))

    def put_in(self, state: JobState, name: str = NAME) -> JobRecord:
        """Whatever it is now: the sweep itself, or the job of a trial."""
        jobs = self.jobs if name == NAME else Jobs(self.store, TRAIN_KIND)
        return jobs.transition(name, lambda job: replace(job, state=state))

    def measure(self, number: int, *accuracies: float, steps_of_epoch: int = 1, **fields: Any) -> None:
        """As an attempt at the trial does, with a checkpoint for each epoch. `fields` are of each entry."""
        trials = self.trials()
        job, name = trials.make(number), trials.name(number)
        attempt = job.attempt + 1
        Jobs(self.store, TRAIN_KIND).transition(name, lambda newest: begin_attempt(newest, 1.0), attempt=attempt)
        registry = CheckpointRegistry(self.store, name)
        registry.fence(attempt, trials.spec.ranking)
        for epoch, accuracy in enumerate(accuracies, 1):
            step = epoch * steps_of_epoch
            entry = CheckpointEntry(
                name=f"{name}/checkpoints/step-{step:08d}",
                folder=f"{registry.data_folder}/step-{step:08d}-a{attempt}-x",
                manifest_sha256="0" * 64,
                step=step,
                epoch=epoch,
                attempt=attempt,
                size_bytes=1,
                create_time=float(epoch),
                **{"metrics": {"validation_accuracy": accuracy}, **fields},
            )
            self.store.put(f"{entry.folder}/x", b"x")
            registry.commit(entry)


def replace_by_hand(place: Place, job_id: str) -> None:
    """Delete the job and make another of its id."""
    place.put_in(JobState.FAILED, f"trainingJobs/{job_id}")
    deletions = Deletions(place.store)
    deletions.begin(f"trainingJobs/{job_id}")
    deletions.finish(f"trainingJobs/{job_id}")
    TrainingJobs(place.store).create(job_id, BASE, "", "digest", validate_only=False)


@pytest.fixture
def place(store: ObjectStore) -> Place:
    commit_version(store, VERSION, {"train": striped_digits(40), "validation": striped_digits(20, 1)})
    deletions = Deletions(store)
    sweep_deletions = SweepDeletions(store, deletions)
    return Place(store, Sweeps(store, TrainingJobs(store, deletions), sweep_deletions), sweep_deletions)


@pytest.fixture
def new_id() -> Callable[[], str]:
    return lambda: str(uuid.uuid4())
