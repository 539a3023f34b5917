"""Sweeps in the store: creating, reading, cancelling and deleting them.

A sweep can be deleted only if none of its trials' checkpoints is in use. First its trials are deleted one by one, then
the sweep. As for a training job, the sweep's log first records DELETING, and references are checked afterwards. A
reference that appears after the check keeps that trial: the sweep then stays DELETING until the reference is released.

The trials are training jobs whose names, uids and parameters are pure functions of the sweep and a number. So every
process that creates a trial creates the same job, however often. The trials' own logs and checkpoints hold their state.
Only an early stop by the scheduler is recorded by the sweep: it writes a mark at `{sweep}/stopped/{number}` before it
cancels the job.
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

from shared import names
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
from shared.jobs.index import JobIndex
from shared.jobs.registry import condemned, remove_objects, undone, while_deleting
from shared.jobs.retry_limits import SWEEP_MAX_FAILURES
from shared.jobs.transitions import confirm_delete, request_delete
from shared.resource_log import claimed, claimed_before, uid_of
from shared.storage import ObjectStore
from train_service.domain import sweep
from train_service.domain.spec import TrainingSpec, settled_base
from train_service.domain.sweep import DIGITS, MAX_SWEEP_ID, SweepSpec, trial_id
from train_service.jobs.deletion import Deletions, check_deletable, in_background, in_use, release_inputs, using_inputs
from train_service.jobs.training_jobs import COLLECTION as TRAINING_JOBS
from train_service.jobs.training_jobs import TrainingJobs
from train_service.records.event_log import TRAIN_KIND

# --- Sweeps ---

logger = logging.getLogger(__name__)

PATTERN = "sweeps/{s}"
# Each check builds a model.
MAX_CHECKED_WITH_MODEL = 100
# Each check starts a process that imports torch.
MAX_CHECKED_WITH_OWN_MODEL = 8


@dataclass(frozen=True)
class SweepView:
    """A sweep as clients see it. `trials` is None if they were not read. `best_checkpoint` is the best one so far."""

    record: JobRecord
    spec: SweepSpec
    trials: list[Trial] | None
    best_training_job: str
    best_checkpoint: str


class Sweeps:
    """Operations on sweeps in the store.

    All methods block on the store, so call them from threads. Names are `sweeps/{s}`.
    """

    def __init__(self, store: ObjectStore, training: TrainingJobs, deletions: SweepDeletions) -> None:
        self._store = store
        self._training = training
        self._deletions = deletions
        self._jobs = Jobs(store, SWEEP_KIND)
        self.index = deletions.index

    def create(
        self,
        sweep_id: str,
        spec: SweepSpec,
        request_id: str,
        digest: str,
        validate_only: bool,
        timeout_s: float = math.inf,
    ) -> SweepView:
        """Create a sweep, which is durable when this returns.

        `digest` is the digest of the request's body. Raises the errors that the RPC's comment lists, and
        `DeadlineExceeded` if the trials are not all checked within `timeout_s`, when the caller stops waiting.
        """
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
            max_failures=SWEEP_MAX_FAILURES,
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
        """Return a page of sweeps without their trials. Reading trials means reading many logs."""
        size, after = names.checked_size(page_size), names.key_of(page_token)
        if (page := self.index.page(f"{COLLECTION}/{after}", size)) is not None:
            jobs, more = page
            last = jobs[-1].record.name.rpartition("/")[2] if more else ""
            return [_alone(job.record) for job in jobs], names.token_of(last) if more else ""
        # The index is being built: read the logs.
        ids, token = names.page(self._store.folders(COLLECTION), page_size, page_token)
        found = [self._jobs.find(f"{COLLECTION}/{one}") for one in ids]
        return [_alone(record) for record in found if record], token

    def cancel(self, name: str, etag: str) -> SweepView:
        """Request the cancellation of a sweep.

        The sweep's attempt ends the trials, or the reconciler if it has none.
        """
        names.parse("name", name, PATTERN)
        return self._view(self._jobs.cancel(name, name, etag))

    def delete(self, name: str, etag: str) -> SweepView:
        """Start a deletion and return the DELETING sweep.

        The deletion finishes in the background. Raises the errors that the RPC's comment lists.
        """
        names.parse("name", name, PATTERN)
        view = self._view(self._deletions.begin(name, etag))
        self._deletions.finish_soon(name)
        return view

    def _checked(self, spec: SweepSpec, give_up_at: float) -> SweepSpec:
        """Return `spec` with its version's defaults."""
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
            # All trials share one order of rows: nothing that differs between trials changes the size of a row.
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
            # A concurrent call with the same request may have created the sweep.
            if there := self._jobs.made_by(record.spec["request_id"], record.name):
                return there
            raise
        except (NotFound, FailedPrecondition) as error:
            raise sweep.renamed(error, {}) from None

    def _check_free(self, record: JobRecord) -> None:
        """Raise `AlreadyExists` if a name is taken.

        A sweep of that name may exist, or a training job with the name of a trial.
        """
        if self._jobs.find(record.name):
            raise already_exists(record.name)
        trials = Trials(self._store, record)
        there = set(self._store.folders(TRAINING_JOBS))
        for number in trials.numbers:
            name = trials.name(number)
            if name.rpartition("/")[2] in there and self._training.exists(name):
                raise already_exists(name, "it would be a trial's; choose another sweep_id")

    def _first_answer(self, request_id: str, digest: str) -> JobRecord | None:
        """Return the sweep that an earlier call with this id created.

        Its inputs may have been deleted since, so the specification is not checked again. Raises `AlreadyExists` if the
        body was different.
        """
        name = claimed_before(self._store, SWEEP_KIND, request_id, digest)
        return self._jobs.made_by(request_id, name) if name else None

    def _view(self, record: JobRecord) -> SweepView:
        trials = Trials(self._store, record)
        read = trials.read()
        best = best_of(trials.spec, read)
        found = (best.name, best.best.name) if best and best.best else ("", "")
        return SweepView(record, trials.spec, read, *found)


def _alone(record: JobRecord) -> SweepView:
    """Return the view without trials. The best ones are those recorded when the sweep ended."""
    best = (record.result.get("best_training_job", ""), record.result.get("best_checkpoint", ""))
    return SweepView(record, SweepSpec.from_config(record.spec["sweep"]), None, *best)


# --- Deletion ---

COLLECTION = "sweeps"
# How many sweeps of all that ever were `finish_all` reads in turns.
SWEEPS_IN_TURNS = 20


class SweepDeletions:
    """Deletion of sweeps. `clock` returns seconds since the epoch."""

    def __init__(self, store: ObjectStore, deletions: Deletions, clock: Callable[[], float] = time.time) -> None:
        self._store = store
        self._jobs = Jobs(store, SWEEP_KIND)
        self._deletions = deletions
        self._clock = clock
        self.index = JobIndex(store, SWEEP_KIND, COLLECTION)

    def begin(self, name: str, etag: str = "") -> JobRecord:
        """Start a deletion.

        The sweep moves to DELETING for good. `finish` then deletes it with its trials.

        Raises `NotFound`, and `Conflict` if `etag` is given and not the present one. Raises `FailedPrecondition` while
        the sweep or a trial is at work, or while a checkpoint of a trial is in use; the sweep then keeps its state.
        """
        self._jobs.get(name, name)

        def decide(newest: JobRecord) -> JobRecord:
            check_deletable(newest, etag)
            return request_delete(newest, newest.update_time)

        return self._condemn(self._jobs.transition(name, decide))

    def finish(self, name: str) -> None:
        """Finish a deletion that was started.

        If the sweep is not DELETING, the function does nothing. Raises as `begin` does.
        """
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
        # List the keys before the log is read again: another process may have finished the deletion, and a new sweep
        # may have the name.
        keys = [info.key for info in self._store.list(f"{name}/stopped")]
        if not remove_objects(self._store, self._jobs, sweep, [*keys, f"{name}/progress.json"]):
            return
        while_deleting(self._jobs, sweep, lambda newest: confirm_delete(newest, self._clock()))
        logger.info("%s is deleted", name)

    def finish_soon(self, name: str) -> None:
        """Run `finish` in a thread. If it fails, `finish_all` finishes the deletion later."""
        in_background(self.finish, name)

    def finish_all(self) -> None:
        """Finish every deletion that was started.

        A failure with one sweep is logged and does not affect the others. Raises if the store is unavailable.
        """
        unsettled = self.index.unsettled()
        if unsettled is None:  # the index is being built
            for sweep_id in self._store.folders(COLLECTION):
                self._finish_alone(f"{COLLECTION}/{sweep_id}")
            return
        settled = []
        for job in unsettled:
            if job.record.state is JobState.DELETING:
                self._finish_alone(job.record.name)
            elif job.record.state.final:
                settled.append(job)
        self.index.settle(settled)
        for name in self.index.check(SWEEPS_IN_TURNS):
            self._finish_alone(name)

    def _finish_alone(self, name: str) -> None:
        try:
            self.finish(name)
        except STORE_OUTAGES:
            raise  # it holds for every sweep
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
        """Return the reason against a deletion, if any."""
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
    """The state of a trial.

    `job` is None if it has not been created, or was `deleted`. `last` is the newest and `best` the best of the
    checkpoints with the sweep's metric. For a program `epochs` counts reports, and is 0 because their number is unknown
    in advance.
    """

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
        """Return whether the trial succeeded. A trial that was stopped before its first checkpoint did not."""
        if self.job is None:
            return False
        return self.job.state is JobState.SUCCEEDED or (self.stopped_early and self.best is not None)


class Trials:
    """The trials of one sweep. All methods block on the store."""

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
        """Return the trial's job or its tombstone.

        The result is None if the job was never created. A job of another owner with the same name does not count.
        """
        return self._jobs.newest_of(self.name(number), self.uid(number))

    def job(self, number: int) -> JobRecord | None:
        """Return the trial's job. The result is None if it was deleted or never created."""
        job = self._jobs.find(self.name(number))
        return job if job is not None and job.uid == self.uid(number) else None

    def make(self, number: int) -> JobRecord:
        """Return the trial's job, created if it never was. Raises `AlreadyExists` if another job has its name."""
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
        """Return whether the trial is over. A trial that a client suspended is not."""
        job = self.newest(number)
        return job is not None and _over(job)

    def any_at_work(self) -> bool:
        """Return whether any created trial is not over."""
        return any(self._each(self._is_at_work))

    def stop_early(self, number: int) -> None:
        """Stop a trial for the scheduler. A trial that is over stays unchanged."""
        if self._is_at_work(number):
            # Write the mark first, so that a reader of the cancelled job sees the cause.
            self._store.put(self._mark(number), b"{}")
            self._cancel(number)

    def stop_marked(self) -> None:
        """Cancel the marked trials again. The process that wrote a mark may have died before it cancelled the job."""
        for number in self.stopped():
            self._cancel(number)

    def stopped(self) -> set[int]:
        """Return the numbers of the trials stopped early."""
        keys = (info.key for info in self._store.list(f"{self._sweep.name}/stopped"))
        return {int(key.rpartition("/")[2]) for key in keys}

    def cancel(self) -> None:
        """Cancel all trials that are not over."""
        self._each(self._cancel)

    def read(self) -> list[Trial]:
        """Return the present state of all trials. They are in the order of their numbers."""
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
            epochs_done=0 if newest is None else newest.step if newest.is_of_program else newest.epoch,
            last=max(best_first, key=lambda one: one.step, default=None),
            best=best_first[0] if best_first else None,
        )

    def _each(self, call: Any) -> list[Any]:
        with ThreadPoolExecutor(READ_AT_ONCE) as pool:
            return list(pool.map(call, self.numbers))

    def _mark(self, number: int) -> str:
        return f"{self._sweep.name}/stopped/{number:0{DIGITS}d}"


def best_of(spec: SweepSpec, trials: Iterable[Trial]) -> Trial | None:
    """Return the trial with the best checkpoint.

    The sweep's metric decides. The result is None if no trial was measured. Among equals the first wins.
    """
    ranking = spec.ranking
    sign = 1 if ranking.maximize else -1
    measured = [(trial, trial.best) for trial in trials if trial.best is not None]
    return max(measured, key=lambda one: sign * one[1].metrics[ranking.metric])[0] if measured else None


def end_trials(store: ObjectStore, sweep: JobRecord) -> None:
    """End the trials of a cancelled or failed sweep."""
    # A sweep that succeeded waited for its trials. Do not cancel a trial that a client resumes later.
    if (sweep.deleted_from or sweep.state) is not JobState.SUCCEEDED:
        Trials(store, sweep).cancel()


def _over(job: JobRecord) -> bool:
    return job.state.final and job.state is not JobState.SUSPENDED
