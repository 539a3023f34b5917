"""Sweeps in the store: creating, reading, cancelling and deleting them.

A sweep ends so: no checkpoint of its trials may be in use; then they go one by one, and it goes last. As with a
training job its log says DELETING first and users are looked for then. A user who begins to use a checkpoint after that
look keeps that trial: the sweep then stays DELETING until the user has let go.
"""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from shared import names, paging
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
from shared.jobs.deletion import condemned, remove_objects, undone, while_deleting
from shared.jobs.transitions import confirm_delete, request_delete
from shared.requests import claimed, claimed_before, uid_of
from shared.storage import ObjectStore
from train_service.domain import sweep
from train_service.domain.spec import TrainingSpec, settled_base
from train_service.domain.sweep import MAX_SWEEP_ID, SweepSpec
from train_service.jobs.deletion import Deletions, check_deletable, in_background, in_use
from train_service.jobs.inputs import release_inputs, using_inputs
from train_service.jobs.training_jobs import COLLECTION as TRAINING_JOBS
from train_service.jobs.training_jobs import TrainingJobs
from train_service.sweeps.trials import SWEEP_KIND, Trial, Trials, best_of

# --- Sweeps ---

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

logger = logging.getLogger(__name__)

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
