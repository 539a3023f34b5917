"""Sweeps in the store: creating, reading, cancelling and deleting them.

A sweep ends so: no checkpoint of its trials may be in use; then they go one by one, and it goes last. As with a
training job its log says DELETING first and users are looked for then. A user who begins to use a checkpoint after that
look keeps that trial: the sweep then stays DELETING until the user has let go.

The trials are training jobs whose names, uids and parameters are pure functions of the sweep and a number. So whoever
makes a trial, and however often, makes the same job; and what a sweep says of its trials is what their own logs and
checkpoints say. Only that the scheduler stopped one early is the sweep's to say: it leaves a mark, at
`{sweep}/stopped/{number}`, before it cancels the job.
"""

from __future__ import annotations

import itertools
import logging
import math
import time
import uuid
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from shared import names, paging
from shared.checkpoint import CheckpointEntry, CheckpointRegistry
from shared.checkpoint.references import references_of_job
from shared.errors import (
    STORE_OUTAGES,
    AlreadyExists,
    DeadlineExceeded,
    FailedPrecondition,
    NotFound,
    already_exists,
    invalid_field,
)
from shared.jobs import JobRecord, Jobs, JobState
from shared.jobs.registry import condemned, remove_objects, undone, while_deleting
from shared.jobs.transitions import confirm_delete, request_delete
from shared.requests import claimed, claimed_before, uid_of
from shared.storage import ObjectStore
from train_service.domain import sweep
from train_service.domain.spec import TrainingSpec, settled_base
from train_service.domain.sweep import DIGITS, MAX_SWEEP_ID, SweepSpec, trial_id
from train_service.jobs.deletion import Deletions, check_deletable, in_background, in_use, release_inputs, using_inputs
from train_service.jobs.training_jobs import COLLECTION as TRAINING_JOBS
from train_service.jobs.training_jobs import TrainingJobs
from train_service.records.reporting import TRAIN_KIND

# --- Sweeps ---

logger = logging.getLogger(__name__)

PATTERN = "sweeps/{s}"
# Each builds a model.
MAX_CHECKED_WITH_MODEL = 100
# Each starts a process that imports torch.
MAX_CHECKED_WITH_OWN_MODEL = 8
# Lost attempts of the sweep's own process, which cost its trials nothing: nodes that come and go must not end a search
# of days, and one that never gets anywhere must end.
MAX_FAILURES = 100


@dataclass(frozen=True)
class SweepView:
    """`trials` is None where they were not asked for; `best` is the best checkpoint so far."""

    record: JobRecord
    spec: SweepSpec
    trials: list[Trial] | None
    best_training_job: str
    best_checkpoint: str


class Sweeps:
    """All methods block on the store, so call them from threads. Names are `sweeps/{s}`."""

    def __init__(self, store: ObjectStore, training: TrainingJobs, deletions: SweepDeletions) -> None:
        self._store = store
        self._training = training
        self._deletions = deletions
        self._jobs = Jobs(store, SWEEP_KIND)

    def create(
        self,
        sweep_id: str,
        spec: SweepSpec,
        request_id: str,
        digest: str,
        validate_only: bool,
        timeout_s: float = math.inf,
    ) -> SweepView:
        """The sweep is durable when this returns. Raises what the RPC's comment says; `digest` is the body's. Nobody
        waits for the answer after `timeout_s`: `DeadlineExceeded` where its trials are not all checked by then."""
        give_up_at = time.monotonic() + timeout_s
        names.check_id("sweep_id", sweep_id)
        if len(sweep_id) > MAX_SWEEP_ID:
            remedy = f"its trials' ids add a number, and may have 63 characters; use at most {MAX_SWEEP_ID}"
            raise invalid_field("sweep_id", sweep_id, remedy)
        request_id = names.check_request_id("request_id", request_id)
        if not validate_only and (first := self._first_answer(request_id, digest)):
            return self._view(first)
        spec = self._checked(spec, give_up_at)
        now, name = time.time(), f"{COLLECTION}/{sweep_id}"
        record = JobRecord(
            uid=uid_of(request_id, name),
            name=name,
            spec={"sweep": spec.as_config(), "request_id": request_id},
            body_sha256=digest,
            create_time=now,
            update_time=now,
            max_failures=MAX_FAILURES,
        )
        if validate_only:
            self._check_free(record)
            self._check_ever_fits(spec)
            return self._view(record)
        with claimed(self._store, SWEEP_KIND, request_id, digest, record.name) as claim:
            first = self._jobs.made_by(request_id, claim.name) if claim.repeated else None
            if first is None:
                self._check_ever_fits(spec)
            return self._view(first or self._make(record, spec))

    def get(self, name: str) -> SweepView:
        names.parse("name", name, PATTERN)
        return self._view(self._jobs.get(name, name))

    def page(self, page_size: int, page_token: str) -> tuple[list[SweepView], str]:
        """Without their trials, whose logs are many."""
        ids, token = paging.page(self._store.folders(COLLECTION), page_size, page_token)
        found = [self._jobs.find(f"{COLLECTION}/{one}") for one in ids]
        return [_alone(record) for record in found if record], token

    def cancel(self, name: str, etag: str) -> SweepView:
        """The wish; its attempt, or whoever finds that it has none, ends the trials."""
        names.parse("name", name, PATTERN)
        return self._view(self._jobs.cancel(name, name, etag))

    def delete(self, name: str, etag: str) -> SweepView:
        """The sweep in DELETING; it is gone soon after. Raises what the RPC's comment says."""
        names.parse("name", name, PATTERN)
        view = self._view(self._deletions.begin(name, etag))
        self._deletions.finish_soon(name)
        return view

    def _checked(self, spec: SweepSpec, give_up_at: float) -> SweepSpec:
        """With the defaults that depend on the version."""
        sweep.check(spec)
        checked: list[TrainingSpec] = []
        most = MAX_CHECKED_WITH_OWN_MODEL if spec.base.model.is_own else MAX_CHECKED_WITH_MODEL
        for parameters in itertools.islice(sweep.probes(spec.parameters, spec.seed), most):
            if time.monotonic() > give_up_at:
                raise DeadlineExceeded(
                    f"{len(checked)} trials of the sweep were checked in time; allow more, or list fewer values",
                    reason="SWEEP_NOT_CHECKED",
                )
            checked.append(sweep.with_trial_named(self._training.checked, spec, parameters))
        base = settled_base(spec.base, checked) if spec.base.model.is_own else spec.base
        base = replace(
            base,
            validation_split=checked[0].validation_split,
            initial_checkpoint=checked[0].initial_checkpoint,
            # One order for all: nothing that differs between trials changes what a row takes.
            window_rows=checked[0].window_rows,
        )
        if not base.validation_split and base.program is None:
            remedy = "trials are compared by what validation measures, and the version has no split for it; name one"
            raise invalid_field("spec.base.validation_split", "", remedy)
        return replace(spec, base=base)

    def _check_ever_fits(self, spec: SweepSpec) -> None:
        sweep.with_trial_named(self._training.check_ever_fits, spec, {})

    def _make(self, record: JobRecord, spec: SweepSpec) -> JobRecord:
        try:
            self._check_free(record)
            with using_inputs(self._store, SWEEP_KIND, record, spec.base):
                return self._jobs.create(record.name, record)
        except AlreadyExists:
            # The same request, sent twice at once, may have made it in between.
            if there := self._jobs.made_by(record.spec["request_id"], record.name):
                return there
            raise
        except (NotFound, FailedPrecondition) as error:
            raise sweep.renamed(error, {}) from None

    def _check_free(self, record: JobRecord) -> None:
        """Raises `AlreadyExists` where there is a sweep of that name, or a training job of that of a trial."""
        if self._jobs.find(record.name):
            raise already_exists(record.name)
        trials = Trials(self._store, record)
        there = set(self._store.folders(TRAINING_JOBS))
        for number in trials.numbers:
            name = trials.name(number)
            if name.rpartition("/")[2] in there and self._training.exists(name):
                raise already_exists(name, "it would be a trial's; choose another sweep_id")

    def _first_answer(self, request_id: str, digest: str) -> JobRecord | None:
        """The sweep that an earlier call with this id made. What that was made of may be gone since, so its
        specification is not checked again. Raises `AlreadyExists` where the body was another."""
        name = claimed_before(self._store, SWEEP_KIND, request_id, digest)
        return self._jobs.made_by(request_id, name) if name else None

    def _view(self, record: JobRecord) -> SweepView:
        trials = Trials(self._store, record)
        read = trials.read()
        best = best_of(trials.spec, read)
        found = (best.name, best.best.name) if best and best.best else ("", "")
        return SweepView(record, trials.spec, read, *found)


def _alone(record: JobRecord) -> SweepView:
    """With the best as it was when the sweep ended."""
    best = (record.result.get("best_training_job", ""), record.result.get("best_checkpoint", ""))
    return SweepView(record, SweepSpec.from_config(record.spec["sweep"]), None, *best)


# --- Deletion ---

COLLECTION = "sweeps"


class SweepDeletions:
    """`clock` gives seconds since the epoch."""

    def __init__(self, store: ObjectStore, deletions: Deletions, clock: Callable[[], float] = time.time) -> None:
        self._store = store
        self._jobs = Jobs(store, SWEEP_KIND)
        self._deletions = deletions
        self._clock = clock

    def begin(self, name: str, etag: str = "") -> JobRecord:
        """The sweep, DELETING for good; `finish` takes it away with its trials.

        Raises `NotFound`, `Conflict` when `etag` is given and not the present one, and `FailedPrecondition` while it or
        a trial is at work, or somebody uses a checkpoint of one: then it is what it was before.
        """
        self._jobs.get(name, name)

        def decide(newest: JobRecord) -> JobRecord:
            check_deletable(newest, etag)
            return request_delete(newest, newest.update_time)

        return self._condemn(self._jobs.transition(name, decide))

    def finish(self, name: str) -> None:
        """Takes on a deletion that was begun. Nothing to do for a sweep that is not DELETING. Raises as `begin`."""
        sweep = self._jobs.find(name)
        if sweep is None or sweep.state is not JobState.DELETING:
            return
        sweep = self._condemn(sweep)
        trials = Trials(self._store, sweep)
        for number in trials.numbers:
            if (trial := trials.job(number)) is not None:
                self._deletions.begin(trial.name, uid=trial.uid)
                self._deletions.finish(trial.name)
        release_inputs(self._store, SWEEP_KIND, sweep.uid, sweep.spec["sweep"]["base"])
        # Listed before the log is read again: another may have finished this, and a new sweep may have the name.
        keys = [info.key for info in self._store.list(f"{name}/stopped")]
        if not remove_objects(self._store, self._jobs, sweep, [*keys, f"{name}/progress.json"]):
            return
        while_deleting(self._jobs, sweep, lambda newest: confirm_delete(newest, self._clock()))
        logger.info("%s is deleted", name)

    def finish_soon(self, name: str) -> None:
        """As `finish`, in a thread; what stops it is left to `finish_all`."""
        in_background(self.finish, name)

    def finish_all(self) -> None:
        """Every deletion that was begun. What goes wrong with one sweep is logged and leaves the others be; raises
        where the store does not answer."""
        for sweep_id in self._store.folders(COLLECTION):
            name = f"{COLLECTION}/{sweep_id}"
            try:
                self.finish(name)
            except STORE_OUTAGES:
                raise  # which holds for every sweep
            except FailedPrecondition as error:
                logger.info("%s stays: %s", name, error.message)
            except Exception:
                logger.exception("%s cannot be taken away; the others go on", name)

    def _condemn(self, sweep: JobRecord) -> JobRecord:
        if sweep.deleted_from is None:
            return sweep
        refusal = self._refusal(sweep)
        sweep = while_deleting(self._jobs, sweep, undone if refusal else condemned)
        if sweep.state not in (JobState.DELETING, JobState.DELETED):
            raise refusal or in_use(sweep, {})
        return sweep

    def _refusal(self, sweep: JobRecord) -> FailedPrecondition | None:
        """What is against it."""
        trials = Trials(self._store, sweep)
        references: dict[str, list[str]] = {}
        for number in trials.numbers:
            job = trials.job(number)
            if job is None:
                continue
            try:
                check_deletable(job, "")
            except FailedPrecondition as error:
                return error
            references |= references_of_job(self._store, job.name, self._clock())
        return in_use(sweep, references) if references else None


# --- Trials ---

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
