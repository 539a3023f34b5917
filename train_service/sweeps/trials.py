"""The trials of a sweep: training jobs whose names, uids and parameters are pure functions of the sweep and a number.

So whoever makes a trial, and however often, makes the same job; and what a sweep says of its trials is what their own
logs and checkpoints say. Only that the scheduler stopped one early is the sweep's to tell: it leaves a mark, at
`{sweep}/stopped/{number}`, before it cancels the job.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from shared.checkpoint import CheckpointEntry, CheckpointRegistry
from shared.errors import NotFound
from shared.jobs import JobRecord, Jobs, JobState
from shared.storage import ObjectStore
from train_service.domain.sweep import DIGITS, SweepSpec, trial_id
from train_service.jobs.training_jobs import COLLECTION as TRAINING_JOBS
from train_service.jobs.training_jobs import TrainingJobs
from train_service.records.reporting import TRAIN_KIND

SWEEP_KIND = "sweep"
READ_AT_ONCE = 16


@dataclass(frozen=True, kw_only=True)
class Trial:
    """`job` is None where it is still to be made, or was `deleted`. Of its checkpoints at ends of epochs, `last` is the
    newest and `best` that with the best metric. `epochs` of a program are its reports, and not known before: 0."""

    number: int
    name: str
    parameters: dict[str, Any]
    epochs: int
    job: JobRecord | None
    deleted: bool
    stopped_early: bool
    epochs_done: int
    last: CheckpointEntry | None
    best: CheckpointEntry | None

    @property
    def ended_well(self) -> bool:
        """One that was stopped before it had a checkpoint did not."""
        if self.job is None:
            return False
        return self.job.state is JobState.SUCCEEDED or (self.stopped_early and self.best is not None)


class Trials:
    """Those of one sweep. All methods block on the store."""

    def __init__(self, store: ObjectStore, sweep: JobRecord) -> None:
        self._store = store
        self._sweep = sweep
        self._jobs = Jobs(store, TRAIN_KIND)
        self._training = TrainingJobs(store)
        self.spec = SweepSpec.from_config(sweep.spec["sweep"])
        self.numbers = range(self.spec.trial_count)

    def name(self, number: int) -> str:
        return f"{TRAINING_JOBS}/{trial_id(self._sweep.name.rpartition('/')[2], number)}"

    def uid(self, number: int) -> str:
        return uuid.uuid5(uuid.UUID(self._sweep.uid), str(number)).hex

    def newest(self, number: int) -> JobRecord | None:
        """Its job, or the tombstone of it; None where it was never made. Another's of its name is not it."""
        return self._jobs.newest_of(self.name(number), self.uid(number))

    def job(self, number: int) -> JobRecord | None:
        """None as well where it was deleted."""
        job = self._jobs.find(self.name(number))
        return job if job is not None and job.uid == self.uid(number) else None

    def make(self, number: int) -> JobRecord:
        """The trial's job, made if it never was. Raises `AlreadyExists` where another job has its name."""
        if there := self.newest(number):
            return there
        parameters = self.spec.parameters_of(number)
        training = self.spec.training_of(parameters)
        now = time.time()
        job = JobRecord(
            uid=self.uid(number),
            name=self.name(number),
            spec={
                "training": training.as_config(),
                "request_id": "",
                "trial": {"sweep": self._sweep.name, "number": number, "parameters": parameters},
            },
            create_time=now,
            update_time=now,
            max_failures=training.max_failures,
            max_preemptions=training.max_preemptions,
        )
        return self._training.make(job, training)

    def is_over(self, number: int) -> bool:
        """Whether nothing more will come of it. One that was suspended by hand waits to go on."""
        job = self.newest(number)
        return job is not None and _over(job)

    def any_at_work(self) -> bool:
        """Whether something may still come of a trial that was made."""
        return any(self._each(self._is_at_work))

    def stop_early(self, number: int) -> None:
        """For the scheduler; one that is over stays as it is."""
        if self._is_at_work(number):
            # First, so that whoever sees the cancelled job sees why.
            self._store.put(self._mark(number), b"{}")
            self._cancel(number)

    def stop_marked(self) -> None:
        """Again those that were to be stopped: whoever marked them may have died before the job was told."""
        for number in self.stopped():
            self._cancel(number)

    def stopped(self) -> set[int]:
        """The numbers of those that the scheduler stopped."""
        keys = (info.key for info in self._store.list(f"{self._sweep.name}/stopped"))
        return {int(key.rpartition("/")[2]) for key in keys}

    def cancel(self) -> None:
        """All that are not over."""
        self._each(self._cancel)

    def read(self) -> list[Trial]:
        """All of them as they are now, in the order of their numbers."""
        stopped = self.stopped()
        return self._each(lambda number: self._read(number, number in stopped))

    def _cancel(self, number: int) -> None:
        if self._is_at_work(number):
            with suppress(NotFound):  # deleted just now
                self._jobs.cancel(self.name(number), self.name(number), uid=self.uid(number))

    def _is_at_work(self, number: int) -> bool:
        job = self.job(number)
        return job is not None and not _over(job)

    def _read(self, number: int, stopped: bool) -> Trial:
        parameters, job = self.spec.parameters_of(number), self.newest(number)
        deleted = job is not None and job.state is JobState.DELETED
        job = None if deleted else job
        entries = CheckpointRegistry(self._store, self.name(number)).entries() if job else []
        best_first = self.spec.ranking.best_first(entries)
        newest = max(entries, key=lambda one: one.step, default=None)
        return Trial(
            number=number,
            name=self.name(number),
            parameters=parameters,
            epochs=self.spec.training_of(parameters).epochs,
            job=job,
            deleted=deleted,
            stopped_early=stopped and job is not None and job.state in (JobState.CANCELLING, JobState.CANCELLED),
            epochs_done=0 if newest is None else newest.step if newest.code_bundle else newest.epoch,
            last=max(best_first, key=lambda one: one.step, default=None),
            best=best_first[0] if best_first else None,
        )

    def _each(self, call: Any) -> list[Any]:
        with ThreadPoolExecutor(READ_AT_ONCE) as pool:
            return list(pool.map(call, self.numbers))

    def _mark(self, number: int) -> str:
        return f"{self._sweep.name}/stopped/{number:0{DIGITS}d}"


def best_of(spec: SweepSpec, trials: Iterable[Trial]) -> Trial | None:
    """The one with the best checkpoint by the sweep's metric, of equals the first; None where none was measured."""
    ranking = spec.ranking
    sign = 1 if ranking.maximize else -1
    measured = [(trial, trial.best) for trial in trials if trial.best is not None]
    return max(measured, key=lambda one: sign * one[1].metrics[ranking.metric])[0] if measured else None


def end_trials(store: ObjectStore, sweep: JobRecord) -> None:
    """For a sweep that is final: of one that was cancelled or failed the trials end, however it came to that."""
    # One that succeeded waited for them; whoever resumes one of those by hand is not disturbed.
    if (sweep.deleted_from or sweep.state) is not JobState.SUCCEEDED:
        Trials(store, sweep).cancel()


def _over(job: JobRecord) -> bool:
    return job.state.final and job.state is not JobState.SUSPENDED
